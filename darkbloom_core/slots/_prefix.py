"""What engines are told about prefix reuse: who a model is, to the bit, which tiers there are, and the secret of scopes.

Always true: without tiers below RAM nothing is read or written for it, since a block ends
with its engine; a tier that cannot be opened costs the model nothing but that tier.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Protocol

from darkbloom_core.contracts import (
    CacheTier,
    CacheTierFactory,
    Emitter,
    ModelDescription,
    ModelFamily,
    TierContext,
)
from darkbloom_core.engine import PrefixOptions
from darkbloom_core.errors import DarkbloomError, SettingsError
from darkbloom_core.prefix import BLOCK_TOKENS, RAM, Numerics
from darkbloom_core.settings import Settings, state_folder, tier_folder
from darkbloom_core.slots._device import current_device
from darkbloom_core.slots._digests import Digests
from darkbloom_core.slots._numerics import machine_numerics

log = logging.getLogger(__name__)

SECRET_BYTES = 32


class Subject(Protocol):
    """A model that an engine is built for."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def description(self) -> ModelDescription: ...
    @property
    def family(self) -> ModelFamily: ...


class PrefixSetup:
    """For all models of a process. Raises ``SettingsError`` for a tier that nobody offers.

    ``hold`` makes what a key holds of the host's memory so many bytes, if it can.
    """

    def __init__(
        self,
        settings: Settings,
        factories: Sequence[CacheTierFactory],
        emitter: Emitter,
        hold: Callable[[str, int], bool],
    ) -> None:
        self._settings = settings
        self._emitter = emitter
        self._hold = hold
        self._opened = itertools.count()
        offered = {factory.name: factory for factory in factories}
        for name in settings.prefix.tiers:
            if name not in offered or name == RAM:
                known = ", ".join(sorted(offered)) or "none"
                raise SettingsError(
                    f"prefix.tiers: no installed plugin offers a tier {name!r} (there are: {known})"
                )
        self._tiers = [offered[name] for name in settings.prefix.tiers]
        self._folder = state_folder(settings)
        self._digests = Digests(self._folder / "digests.json" if self._tiers else None)
        self._secret: bytes | None = None
        if settings.prefix.reuse != "off" and not self._fits_the_grid:
            log.warning(
                "nothing is reused: engine.chunk_tokens is %d, no multiple of %d",
                settings.engine.chunk_tokens,
                BLOCK_TOKENS,
            )

    def begin(self, subject: Subject) -> Callable[[], PrefixOptions | None]:
        """Begin to find out what an engine of ``subject`` must be told; the result waits for it."""
        if self._settings.prefix.reuse == "off" or not self._fits_the_grid:
            return lambda: None
        digest = self._digests.begin(subject.path) if self._tiers else None
        return lambda: self._options(subject, digest)

    @property
    def _fits_the_grid(self) -> bool:
        return self._settings.engine.chunk_tokens % BLOCK_TOKENS == 0

    def _options(self, subject: Subject, digest: Future[str] | None) -> PrefixOptions:
        # blocks that end with this engine need no name that another could find
        weights = secrets.token_bytes(32) if digest is None else bytes.fromhex(digest.result())
        machine = machine_numerics(current_device())
        numerics = Numerics(
            weights=weights,
            family=subject.family.name,
            family_version=subject.family.version,
            mlx_version=machine.mlx_version,
            backend=machine.backend,
            device=machine.device,
            layers=subject.description.layers,
            chunk_tokens=self._settings.engine.chunk_tokens,
            kernels=machine.kernels,
        )
        return PrefixOptions(
            numerics=numerics,
            secret=self._scope_secret(),
            ram_bytes=self._settings.prefix.ram_bytes,
            relaxed=self._settings.prefix.reuse == "relaxed",
            open_tiers=lambda: self._open_tiers(subject.name),
        )

    def _open_tiers(self, model: str) -> dict[str, CacheTier]:
        opened: dict[str, CacheTier] = {}
        for factory in self._tiers:
            key = f"tier/{factory.name}/{model}#{next(self._opened)}"
            context = TierContext(
                model=model,
                directory=tier_folder(self._settings, factory.name),
                bytes_limit=self._settings.prefix.tier_bytes,
                options=self._settings.options_of(factory.name),
                reserve=partial(self._hold, key),
                emitter=self._emitter,
            )
            try:
                opened[factory.name] = factory.open(context)
            except DarkbloomError as fault:
                log.warning("%s runs without the cache tier %s: %s", model, factory.name, fault)
            except Exception:  # whatever a plugin raises: its tier is not there
                log.exception("%s runs without the cache tier %s, which failed to open", model, factory.name)
        return opened

    def _scope_secret(self) -> bytes:
        if self._secret is None:
            self._secret = _durable_secret(self._folder) if self._tiers else secrets.token_bytes(SECRET_BYTES)
        return self._secret


def _durable_secret(folder: Path) -> bytes:
    """The secret of this folder, made at first use; of this process alone if the folder cannot be used."""
    file = folder / "scopes.key"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = folder / f"scopes.{secrets.token_hex(8)}"
        with os.fdopen(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
            out.write(secrets.token_bytes(SECRET_BYTES))
        try:
            os.link(made, file)  # whole, or not at all, also if two processes begin together
        except FileExistsError:
            pass
        finally:
            made.unlink()
        found = file.read_bytes()
        if len(found) == SECRET_BYTES:
            return found
        log.warning("%s is damaged: what tiers hold is not found by this process", file)
    except OSError as fault:
        log.warning("%s cannot be used: what tiers hold is not found by this process: %s", file, fault)
    return secrets.token_bytes(SECRET_BYTES)
