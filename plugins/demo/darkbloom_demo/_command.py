"""``darkbloom demo``: from nothing to an answer through the API, with the client that applications use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from darkbloom_core.cli import CommandContext, running_server

if TYPE_CHECKING:
    from darkbloom_core.cli import RunningServer

DEFAULT_QUESTION = "What is the capital of France?"
DEFAULT_MODEL = "demo/gpt-oss"


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("demo")(_demo)


def _demo(
    context: typer.Context,
    question: Annotated[str, typer.Argument(help="What to ask.")] = DEFAULT_QUESTION,
    model: Annotated[str, typer.Option("--model", help="Which model answers.")] = DEFAULT_MODEL,
) -> None:
    """Serve the demo checkpoints, ask one question through the OpenAI client, and stream the answer."""
    command: CommandContext = context.obj
    with running_server(command, [model], demo=True) as server:
        _show_what_was_loaded(command, server)
        name = server.slots[0].name
        typer.echo(f"\n{name} is asked: {question}")
        _ask(server, name, question)


def _show_what_was_loaded(command: CommandContext, server: RunningServer) -> None:
    for slot in server.slots:
        plugin = command.plugins.plugin_of_family(slot.description.family)
        typer.echo(
            f"{slot.name}: loaded by the plugin {plugin.name} ({plugin.distribution} {plugin.version})"
        )
    typer.echo(f"serving at {server.url}/v1")


def _ask(server: RunningServer, model: str, question: str) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key=server.key) as client:
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], temperature=0, stream=True
        )
        for chunk in stream:
            for choice in chunk.choices:
                typer.echo(choice.delta.content or "", nl=False)
    typer.echo()
