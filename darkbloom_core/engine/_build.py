"""From a loaded model and a grant to the parts that an engine runs on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from darkbloom_core.contracts import LayerKind, LoadedModel
from darkbloom_core.engine._fixed import find_size
from darkbloom_core.engine._kv import KvStore, lane_bytes, slab_bytes
from darkbloom_core.engine._options import EngineOptions
from darkbloom_core.engine._scheduler import Scheduler
from darkbloom_core.engine._tracing import can_trace_unfused, is_on_cpu
from darkbloom_core.engine._warmup import Allowed, Choices, warm_up
from darkbloom_core.errors import CapacityExhausted, SettingsError
from darkbloom_core.memory import Share

log = logging.getLogger(__name__)

SHARED_TOKENS = (512, 1024, 2048)
"""Lengths that the shared slab of full layers may have."""

PACK_CHUNKS = 4
"""A pack of short prompts has at most as many tokens as this many chunks, padding included."""

SLABS = "slabs"
"""The key under which a store's slabs are reserved in the model's share; requests have other ids."""

LARGER_SIZES = 8
"""How many larger batch sizes deterministic mode tries if the lanes of the wanted one are not equal."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a model was given to run on."""

    store: KvStore
    scheduler: Scheduler
    choices: Choices


def build(name: str, model: LoadedModel, share: Share, options: EngineOptions) -> Parts:
    """Reserve the store's slabs in ``share``, allocate them, warm up, and choose.

    Raises ``CapacityExhausted`` if not even one row fits, and ``SettingsError`` if
    deterministic mode cannot be had on this device.
    """
    layers, grant_bytes = model.description.layers, share.limit_bytes
    rows = _rows(name, layers, grant_bytes, options.max_rows)
    fixed = _fixed_size(model, rows) if options.deterministic else None
    lanes = fixed or rows
    tokens = shared_tokens(layers, lanes, grant_bytes)
    slabs = slab_bytes(layers, lanes, tokens)
    if not share.reserve(SLABS, slabs):
        raise CapacityExhausted(f"{name} needs {slabs} bytes for its KV slabs, which are not free now")
    store = KvStore(layers, lanes, tokens)
    choices = replace(_choose(model, store, rows, options), fixed_size=fixed)
    log.info("%s warmed up: %s", name, choices)
    scheduler = Scheduler(
        max_rows=rows,
        layers=len(layers),
        grid=options.chunk_tokens,
        pack_tokens=PACK_CHUNKS * options.chunk_tokens if choices.packed else 0,
        tower_layers=0 if model.vision is None else model.vision.tower_layers,
        picture_tokens=1 if model.vision is None else model.vision.most_soft_tokens,
        on_cpu=is_on_cpu(),
    )
    return Parts(store, scheduler, choices)


def shared_tokens(layers: Sequence[LayerKind], rows: int, grant_bytes: int) -> int:
    """How long a row may be in the shared slab of full layers: the longest that takes an eighth of the grant."""
    if rows == 1:
        return 0
    lanes = slab_bytes(layers, rows, 0)
    fitting = [
        tokens
        for tokens in SHARED_TOKENS
        if slab_bytes(layers, rows, tokens) - lanes <= (grant_bytes - lanes) // 8
    ]
    return max(fitting, default=0)


def planned_slab_bytes(layers: Sequence[LayerKind], grant_bytes: int, max_rows: int) -> int | None:
    """What ``build`` would allocate at once within ``grant_bytes``; None if not even one row fits.

    Deterministic mode may take up to ``LARGER_SIZES`` lanes more.
    """
    rows = _fitting_rows(layers, grant_bytes, max_rows)
    if rows is None:
        return None
    return slab_bytes(layers, rows, shared_tokens(layers, rows, grant_bytes))


def _fitting_rows(layers: Sequence[LayerKind], grant_bytes: int, wanted: int) -> int | None:
    """As many rows as wanted, halved until their lanes take at most half the grant; None if not even one fits."""
    rows, lane = wanted, lane_bytes(layers)
    while rows > 1 and rows * lane > grant_bytes // 2:
        rows //= 2
    return rows if rows * lane <= grant_bytes else None


def _rows(name: str, layers: Sequence[LayerKind], grant_bytes: int, wanted: int) -> int:
    rows = _fitting_rows(layers, grant_bytes, wanted)
    if rows is None:
        lane = lane_bytes(layers)
        raise CapacityExhausted(
            f"{name} needs {lane} bytes of KV cache for one row; its grant is {grant_bytes}"
        )
    return rows


def _fixed_size(model: LoadedModel, rows: int) -> int:
    size = find_size(model, rows, rows + LARGER_SIZES)
    if size is None:
        raise SettingsError(
            f"deterministic mode: no batch size from {rows} to {rows + LARGER_SIZES} gives equal bits "
            "in all its lanes on this device; try another engine.max_rows"
        )
    return size


def _choose(model: LoadedModel, store: KvStore, rows: int, options: EngineOptions) -> Choices:
    on_cpu = is_on_cpu()
    unfused = on_cpu and not options.fused and can_trace_unfused()
    eager = options.deterministic or (on_cpu and options.compiled is None and not unfused)
    allowed = Allowed(
        compiled=False if eager else options.compiled,
        unfused=unfused,
        chained=options.chained,
        packed=False if options.deterministic else options.packed,
    )
    return warm_up(model, store, options.chunk_tokens, rows, allowed, on_cpu=on_cpu)
