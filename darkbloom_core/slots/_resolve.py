"""Turns the word by which a person names a model into a served name and a checkpoint's folder.

Nothing is read but directory entries: whether the folder holds a checkpoint, and whose, is
found out by those who open it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from darkbloom_core.errors import CheckpointError, SettingsError


@dataclass(frozen=True, slots=True)
class NamedCheckpoint:
    """A checkpoint's folder and the name under which it is served."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlaces:
    """Where models are looked for, in this order; a folder is looked for after ``offered``.

    ``aliases`` are the settings' own, each to any word that names a model. ``offered`` are
    the checkpoints that plugins bring. ``hub`` is the local cache of the Hugging Face hub.
    """

    hub: Path
    aliases: Mapping[str, str] = field(default_factory=dict)
    offered: Mapping[str, Path] = field(default_factory=dict)


def hub_folder(environment: Mapping[str, str]) -> Path:
    """The hub's cache folder, from the variables that ``huggingface_hub`` documents for it."""
    if "HF_HUB_CACHE" in environment:
        return Path(environment["HF_HUB_CACHE"]).expanduser()
    if "HF_HOME" in environment:
        return Path(environment["HF_HOME"]).expanduser() / "hub"
    cache = environment.get("XDG_CACHE_HOME", "~/.cache")
    return Path(cache).expanduser() / "huggingface" / "hub"


def hub_checkpoints(hub: Path) -> dict[str, Path]:
    """Every model in the hub's cache that has a ``config.json``: its id to its snapshot's folder, sorted."""
    found = {}
    for folder in sorted(hub.glob("models--*")):
        model_id = folder.name.removeprefix("models--").replace("--", "/")
        snapshot = _snapshot(hub, model_id)
        if snapshot is not None and (snapshot / "config.json").exists():
            found[model_id] = snapshot
    return found


def resolve_model(word: str, places: ModelPlaces) -> NamedCheckpoint:
    """Find what ``word`` names: an alias, an offered name, a folder, an id of the hub, or NAME=such.

    Raises ``CheckpointError`` saying where was looked, and ``SettingsError`` for an alias
    that leads nowhere.
    """
    name, equals, target = word.partition("=")
    if equals and not Path(word).is_dir():
        if not name or not target:
            raise CheckpointError(f"{word!r} is not NAME=MODEL: a part is empty")
        return NamedCheckpoint(name, _find(target, places).path)
    return _find(word, places)


def resolve_models(words: Sequence[str], places: ModelPlaces) -> tuple[NamedCheckpoint, ...]:
    """Resolve each of ``words``. Raises ``CheckpointError`` too if two get the same name."""
    found: dict[str, NamedCheckpoint] = {}
    for word in words:
        checkpoint = resolve_model(word, places)
        other = found.setdefault(checkpoint.name, checkpoint)
        if other != checkpoint:
            raise CheckpointError(
                f"two models are called {checkpoint.name!r} ({other.path} and {checkpoint.path}); "
                "give one another name with NAME=MODEL"
            )
    return tuple(found.values())


def _find(word: str, places: ModelPlaces) -> NamedCheckpoint:
    target = places.aliases.get(word)
    if target is None:
        return _find_unaliased(word, places)
    try:
        return NamedCheckpoint(word, _find_unaliased(target, places).path)
    except CheckpointError as error:
        raise SettingsError(f"models.{word}: {error.message}") from None


def _find_unaliased(word: str, places: ModelPlaces) -> NamedCheckpoint:
    if word in places.offered:
        return NamedCheckpoint(word, places.offered[word])
    folder = Path(word).expanduser()
    if folder.is_dir():
        return NamedCheckpoint(folder.resolve().name, folder.resolve())
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; a checkpoint is the folder that holds config.json")
    snapshot = _snapshot(places.hub, word)
    if snapshot is not None:
        return NamedCheckpoint(word, snapshot)
    raise CheckpointError(f"no model {word!r}: {_where_was_looked(word, places)}")


def _snapshot(hub: Path, model_id: str) -> Path | None:
    """The snapshot that the ref ``main`` points to, or the only one that there is."""
    if model_id.count("/") > 1 or model_id.startswith((".", "/", "~")):
        return None
    folder = hub / ("models--" + model_id.replace("/", "--"))
    main = folder / "refs" / "main"
    if main.is_file():
        snapshot = folder / "snapshots" / main.read_text().strip()
        return snapshot if snapshot.is_dir() else None
    snapshots = list((folder / "snapshots").glob("*"))
    return snapshots[0] if len(snapshots) == 1 else None


def _where_was_looked(word: str, places: ModelPlaces) -> str:
    offered = ", ".join(sorted(places.offered)) or "none"
    aliases = ", ".join(sorted(places.aliases)) or "none"
    return (
        f"no alias of the settings (there: {aliases}), not offered by a plugin (offered: {offered}), "
        f"no folder {Path(word).expanduser().absolute()}, not in the Hugging Face cache {places.hub}"
    )
