"""``darkbloom bench prefix`` and ``darkbloom bench prefix-bits``. Light: it is imported for every command."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from darkbloom_bench._choices import (
    Against,
    Config,
    JsonFile,
    ModelName,
    RandomShape,
    Shape,
    check_peer,
    choose_subject,
    say,
    settle,
)
from darkbloom_core.errors import SettingsError

if TYPE_CHECKING:
    from darkbloom_bench._subject import Subject
    from darkbloom_core.contracts import LoadedModel
    from darkbloom_core.engine import Engine, EngineOptions, PrefixOptions

PromptTokens: TypeAlias = Annotated[
    str, typer.Option("--prompt-tokens", help="Lengths of prompts, with commas between.")
]


def add_to(group: typer.Typer) -> None:
    """Add both commands to ``group``."""
    group.command("prefix")(_prefix)
    group.command("prefix-bits")(_bits)


def _prefix(
    context: typer.Context,
    model: ModelName = None,
    shape: Shape = None,
    random: RandomShape = None,
    prompt_tokens: PromptTokens = "512,2048,8192",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Counted rounds of each length.")] = 3,
    against: Against = None,
    overhead: Annotated[
        bool,
        typer.Option("--overhead/--no-overhead", help="Run cold prompts on an engine without reuse, too."),
    ] = True,
    chunk_tokens: Annotated[
        int | None, typer.Option("--chunk-tokens", min=256, help="Instead of the settings' own.")
    ] = None,
    json_file: JsonFile = None,
    config: Config = None,
) -> None:
    """Time to the first token of prompts that are new, known, and longer than what is known."""
    check_peer(against)
    lengths = _numbers("--prompt-tokens", prompt_tokens)
    from rich.console import Console

    from darkbloom_bench._first_token import (
        ANSWER_TOKENS,
        NEW_TOKENS,
        Asks,
        MlxLmPrompts,
        OurPrompts,
        measure_prompts,
    )
    from darkbloom_bench._machine import this_machine
    from darkbloom_bench._report import as_json, show
    from darkbloom_bench._subject import longest, mlx_lm_model
    from darkbloom_core.engine import EngineOptions
    from darkbloom_core.slots import current_device

    settings, subject = choose_subject(context.obj, config, model, shape, random)
    description = subject.description
    most = longest([max(lengths) + 2 * ANSWER_TOKENS + NEW_TOKENS], description)
    options = EngineOptions(
        chunk_tokens=chunk_tokens or settings.engine.chunk_tokens, max_rows=2, packed=False
    )
    console, machine = Console(), this_machine(current_device())
    console.print(f"{subject.name} on {machine}", markup=False, soft_wrap=True)
    console.print(
        f"medians of {repeats} after a warm-up, chunks of {options.chunk_tokens} tokens",
        markup=False,
        soft_wrap=True,
    )
    with ExitStack() as stack:
        loaded: list[LoadedModel] = []
        peers: list[Any] = []

        def load() -> LoadedModel:
            loaded.append(subject.load())
            if against is not None:
                peers.append(mlx_lm_model(loaded[0], subject))
            return loaded[0]

        ours = stack.enter_context(_engine(subject, load, options, most, exact_reuse(subject, options)))
        sides: dict[str, Asks] = {"ours": OurPrompts(ours)}
        if overhead:
            plain = stack.enter_context(_engine(subject, lambda: loaded[0], options, most, None))
            sides["off"] = OurPrompts(plain)
        if against is not None:
            sides["peer"] = MlxLmPrompts(peers.pop())
        cells = measure_prompts(lengths, description.vocab_size, sides, repeats, say, settle)
        loaded.clear()
    if json_file is not None:
        json_file.write_text(as_json(cells, subject.name, machine, repeats) + "\n")
    show(cells, against, console)


def _bits(
    context: typer.Context,
    model: ModelName = None,
    shape: Shape = None,
    random: RandomShape = None,
    prompt_tokens: PromptTokens = "700,1300,2900",
    json_file: JsonFile = None,
    config: Config = None,
) -> None:
    """Compare every logit of warm requests with those of cold ones; leaves with 1 if a bit differs."""
    lengths = _numbers("--prompt-tokens", prompt_tokens)
    from darkbloom_bench._bits import Bits, RecordingModel, compare_decoded, compare_exact, compare_off_grid
    from darkbloom_bench._machine import this_machine
    from darkbloom_bench._subject import longest
    from darkbloom_core.engine import EngineOptions
    from darkbloom_core.slots import current_device

    settings, subject = choose_subject(context.obj, config, model, shape, random)
    vocabulary = subject.description.vocab_size
    most = longest([max(lengths) + 1000], subject.description)
    grid = settings.engine.chunk_tokens
    options = EngineOptions(chunk_tokens=grid, max_rows=2, compiled=False, packed=False)
    typer.echo(f"{subject.name} on {this_machine(current_device())}")
    loaded: list[RecordingModel] = []

    def load() -> Any:
        loaded.append(RecordingModel(subject.load()))
        return loaded[0]

    reuse = exact_reuse(subject, options)
    with _engine(subject, load, options, most, reuse) as engine:
        found = compare_exact(Bits(engine, loaded[0]), vocabulary, lengths, say)
    coarse = replace(options, chunk_tokens=8 * grid)
    relaxed = replace(exact_reuse(subject, coarse), relaxed=True)
    with _engine(subject, lambda: loaded[0], coarse, most, relaxed) as engine:
        controls = [
            compare_off_grid(Bits(engine, loaded[0]), vocabulary, max(lengths), say),
            compare_decoded(Bits(engine, loaded[0]), vocabulary, say),
        ]
    if json_file is not None:
        text = json.dumps([asdict(each) for each in (*found, *controls)], indent=2)
        json_file.write_text(text + "\n")
    for each in (*found, *controls):
        typer.echo(
            f"{each.what}: {each.prompt_tokens} tokens, {each.cached_tokens} cached, "
            f"{each.differing_steps} of {each.steps} steps differ, {each.differing_logits} of {each.logits} logits"
        )
    if any(each.differing_steps or not each.cached_tokens for each in found):
        raise typer.Exit(1)


def exact_reuse(subject: Subject, options: EngineOptions) -> PrefixOptions:
    """Reuse for an engine of ``subject``; its blocks end with it, so nothing but its own matters in their names."""
    from darkbloom_core.engine import PrefixOptions
    from darkbloom_core.prefix import Numerics
    from darkbloom_core.slots import current_device

    numerics = Numerics(
        weights=secrets.token_bytes(32),
        family=subject.description.family,
        family_version="",
        mlx_version=version("mlx"),
        backend=current_device().kind,
        device="",
        layers=subject.description.layers,
        chunk_tokens=options.chunk_tokens,
    )
    return PrefixOptions(numerics=numerics, secret=secrets.token_bytes(32), ram_bytes=1 << 50)


@contextmanager
def _engine(
    subject: Subject, load: Any, options: EngineOptions, most_tokens: int, prefix: PrefixOptions | None
) -> Iterator[Engine]:
    """An engine with room for its rows, and for what it remembers of some prompts of ``most_tokens``."""
    from darkbloom_bench._ours import NumberCodec
    from darkbloom_core.engine import Engine, lane_bytes, row_bytes

    layers = subject.description.layers
    engine = Engine(subject.name, NumberCodec(subject.description.vocab_size), load, options)
    try:
        engine.load_model()
        row, lane = row_bytes(layers, most_tokens), lane_bytes(layers)
        remembered = 0 if prefix is None else 6 * (row + 4 * lane)
        engine.start(2 * options.max_rows * (row + lane) + remembered, prefix=prefix)
        yield engine
    finally:
        engine.close()


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise SettingsError(f"{option}: numbers with commas between, not {text!r}")
    return numbers
