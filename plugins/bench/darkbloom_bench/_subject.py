"""What is measured: a model, from a checkpoint or of random weights, and both sides that run it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkbloom_bench._offers import ComparableModel, RandomFamily
from darkbloom_bench._sides import Side
from darkbloom_core.contracts import Device, LoadedModel, ModelDescription, Placement
from darkbloom_core.engine import Engine, EngineOptions, lane_bytes, row_bytes
from darkbloom_core.errors import CheckpointError, SettingsError, UnsupportedCheckpoint
from darkbloom_core.plugins import Plugins
from darkbloom_core.slots import ModelPlaces, resolve_model

if TYPE_CHECKING:
    from darkbloom_bench._ours import Ours


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that can be loaded: ``load`` runs on the thread that will own it."""

    name: str
    description: ModelDescription
    load: Callable[[], LoadedModel]


def shape_names() -> list[str]:
    """The shapes that come with this package."""
    return sorted(file.name.removesuffix(".json") for file in _shapes().iterdir())


def checkpoint_subject(word: str, places: ModelPlaces, plugins: Plugins, device: Device) -> Subject:
    """The checkpoint that ``word`` names, loaded by its family."""
    from darkbloom_core.checkpoint import read_config

    found = resolve_model(word, places)
    config = read_config(found.path)
    family = plugins.family_for(config)
    description = family.describe(config, device)
    return Subject(found.name, description, lambda: family.load(found.path, description, Placement(device)))


def shape_subject(name: str, plugins: Plugins, device: Device) -> Subject:
    """A model of random weights in a shape of ``shape_names``. Raises ``SettingsError`` for another name."""
    file = _shapes() / f"{name}.json"
    if not file.is_file():
        raise SettingsError(f"no shape {name!r}: there are {', '.join(shape_names())}")
    return _random_subject(name, json.loads(file.read_text()), plugins, device)


def config_subject(path: Path, plugins: Plugins, device: Device) -> Subject:
    """A model of random weights in the shape of the ``config.json`` at ``path``."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable config: {error}") from error
    return _random_subject(path.stem, config, plugins, device)


@contextmanager
def opened(
    subject: Subject, options: EngineOptions, longest_tokens: int, *, compare: bool
) -> Iterator[tuple[Ours, Side | None]]:
    """Our side, ready to serve ``options.max_rows`` rows of ``longest_tokens``; and the peer if asked for.

    The peer's weights are our own wherever the layouts agree.
    """
    from darkbloom_bench._ours import NumberCodec, Ours

    peers: list[Any] = []

    def load() -> LoadedModel:
        model = subject.load()
        if compare:
            peers.append(mlx_lm_model(model, subject))
        return model

    description = subject.description
    engine = Engine(subject.name, NumberCodec(description.vocab_size), load, options)
    try:
        engine.load_model()
        each = lane_bytes(description.layers) + row_bytes(description.layers, longest_tokens)
        engine.start(2 * options.max_rows * each)
        ours = Ours(engine)
        try:
            yield ours, _peer(peers.pop(), options.max_rows) if compare else None
        finally:
            ours.close()
    finally:
        engine.close()


def _peer(model: Any, rows: int) -> Side:
    from darkbloom_bench._mlx_lm import MlxLm

    return MlxLm(model, rows)


def mlx_lm_model(model: LoadedModel, subject: Subject) -> Any:
    """mlx-lm's module of ``model``, evaluated, since only values may go to another thread."""
    import mlx.core as mx

    if not isinstance(model, ComparableModel):
        raise UnsupportedCheckpoint(
            f"the family {subject.description.family} offers no model of mlx-lm to compare with"
        )
    module = model.mlx_lm_model()
    mx.eval(module.state)
    return module


def _random_subject(name: str, config: dict[str, Any], plugins: Plugins, device: Device) -> Subject:
    family = plugins.family_for(config)
    description = family.describe(config, device)
    if not isinstance(family, RandomFamily):
        raise UnsupportedCheckpoint(f"the family {family.name} makes no models of random weights")
    return Subject(name, description, lambda: family.load_random(description, Placement(device)))


def _shapes() -> Any:
    return resources.files("darkbloom_bench") / "shapes"


def longest(tokens: Sequence[int], description: ModelDescription) -> int:
    """The most tokens that a row will need. Raises ``SettingsError`` if that is over the model's context."""
    most = max(tokens)
    if most > description.context_tokens:
        raise SettingsError(
            f"these workloads need {most} tokens of context; the model has {description.context_tokens}"
        )
    return most
