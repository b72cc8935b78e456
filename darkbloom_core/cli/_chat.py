"""`darkbloom chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from darkbloom_core.cli._context import CommandContext
from darkbloom_core.cli._embedded import running_server
from darkbloom_core.errors import SetupError

if TYPE_CHECKING:
    from darkbloom_core.cli._client import ChatClient

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("chat")(_chat)


def _chat(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="As for `serve`, or a name that the server at --url serves.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", help="Talk to this server instead of starting one, with the key in DARKBLOOM_API_KEY."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", help="A picture to talk about, again for more.", exists=True, dir_okay=False),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file.", show_default=False, dir_okay=False)
    ] = None,
) -> None:
    """Chat with a model. Ctrl-C stops an answer, Ctrl-D leaves; a pipe is answered line by line."""
    from darkbloom_core.cli._client import ChatError

    failed = False
    with _server(context.obj, model, url, config) as (client, name):
        conversation = Conversation(client, name, sys.stdout, system=system, images=image or ())
        for text in _turns(sys.stdin, name):
            try:
                conversation.say(text)
            except ChatError as error:
                failed = True
                typer.echo(f"darkbloom: {error}", err=True)
    if failed and not sys.stdin.isatty():
        raise typer.Exit(1)


class Conversation:
    """Asks ``model`` turn by turn and writes each answer to ``out`` as it comes.

    A turn that the server refuses is not remembered; one that Ctrl-C stops is, as far as it came.
    ``images`` are files of pictures, which the first turn shows.
    """

    def __init__(
        self,
        client: ChatClient,
        model: str,
        out: TextIO,
        *,
        system: str | None = None,
        images: Sequence[Path] = (),
    ) -> None:
        self._client = client
        self._model = model
        self._out = out
        self._colours = out.isatty()
        self._pictures = [_picture(file) for file in images]
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> None:
        """Ask ``text`` and write the answer. Raises ``ChatError``."""
        content = [*self._pictures, {"type": "text", "text": text}] if self._pictures else text
        asked = [*self.messages, {"role": "user", "content": content}]
        answer: list[str] = []
        thinking = False
        stopped = False
        pieces = self._client.stream(self._model, asked)
        try:
            for piece in pieces:
                if piece.kind == "content":
                    answer.append(piece.text)
                elif not self._colours:
                    continue
                if thinking != (piece.kind == "reasoning"):
                    thinking = not thinking
                    self._write(_DIM if thinking else f"{_PLAIN}\n")
                self._write(piece.text)
        except KeyboardInterrupt:
            stopped = True
        finally:
            pieces.close()
            if thinking:
                self._write(_PLAIN)
        self._write(" (stopped)\n" if stopped else "\n")
        self.messages = [*asked, {"role": "assistant", "content": "".join(answer)}]
        self._pictures = []

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _picture(file: Path) -> dict[str, Any]:
    """A part of a message; what kind of file it is is the server's to find out."""
    data = base64.b64encode(file.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:application/octet-stream;base64,{data}"}}


@contextmanager
def _server(
    command: CommandContext, model: str | None, url: str | None, config: Path | None
) -> Iterator[tuple[ChatClient, str]]:
    """A client of the server at ``url``, or of one that runs while the block does, and the model's name there."""
    from darkbloom_core.cli._client import KEY_VARIABLE, ChatClient

    if url is not None:
        client = ChatClient(url, os.environ.get(KEY_VARIABLE))
        yield client, model or _only_model(client, url)
        return
    with running_server(command, [model] if model else [], demo=model is None, config=config) as server:
        yield ChatClient(server.url, server.key), server.slots[0].name


def _only_model(client: ChatClient, url: str) -> str:
    models = client.models()
    if not models:
        raise SetupError(f"the server at {url} serves no model")
    return models[0]


def _turns(stdin: TextIO, model: str) -> Iterator[str]:
    """What the person says, turn by turn, until the end of input; empty lines are skipped."""
    if not stdin.isatty():
        yield from filter(None, map(str.strip, stdin))
        return
    import readline  # noqa: F401  # importing it gives input() a line editor

    typer.echo(f"{model}: Ctrl-C stops an answer, Ctrl-D leaves.")
    while True:
        try:
            text = input("> ").strip()
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt):
                typer.echo()
            continue
        except EOFError:
            typer.echo()
            return
        if text:
            yield text
