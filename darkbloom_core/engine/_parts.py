"""A row's KV as packed parts, and packed parts as a row's KV: the prefix room's tables, with arrays.

Always true: what is packed and unpacked again has the same bits; adoption holds no more
than ``GROUP_BYTES`` of copies of full parts at a time, or one, and then those of a prompt's
windows and states together. On CUDA a large part is put together of pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import mlx.core as mx

from darkbloom_core.contracts import ELEMENT_BYTES, Dtype, LayerKind
from darkbloom_core.engine._host import array_of
from darkbloom_core.engine._kv import MLX_DTYPES, CapturedLayers, KvStore, Row
from darkbloom_core.prefix import PartLayout, PartName, Piece, PromptParts, StagedPart

GROUP_BYTES = 32 * 1024**2


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A packed part of a block: ``array`` is flat. ``comes_from_below`` RAM, or was in RAM already."""

    block: int
    part: PartName
    array: mx.array
    comes_from_below: bool = False


def packed(
    parts: PromptParts, captured: CapturedLayers, block: int, part: PartName, end: int
) -> mx.array | None:
    """The part of ``block``, lazily, out of what ``KvStore.capture`` gave of tokens that end at ``end``.

    None if the row did not keep some of its tokens.
    """
    dtype, pieces = parts.layout.dtype(part), []
    for piece in parts.pieces(block, part):
        array = captured[piece.layer][_index(piece)]
        if part != "state":
            first = parts.blocks[block].start + piece.first_token - (end - array.shape[2])
            if first < 0:
                return None
            array = array[:, :, first : first + piece.tokens]
        flat = array.flatten()
        pieces.append(flat if dtype is not None else flat.view(mx.uint8))
    return mx.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def part_array(layout: PartLayout, staged: StagedPart) -> mx.array:
    """The packed array of a staged part: the one that RAM held, or a new one made of bytes."""
    if staged.data is None:
        return cast(mx.array, staged.item)
    dtype = layout.dtype(staged.part)
    array = array_of(staged.data)
    return array if dtype is None else array.view(MLX_DTYPES[dtype])


def adopt(
    parts: PromptParts, store: KvStore, row: Row, staged: Sequence[StagedPart], tokens: int
) -> Iterator[list[HeldPart]]:
    """Write parts into ``row``, which then holds ``tokens`` tokens, some at a time.

    After each step what was written is evaluated, and its parts are given: full parts in
    the order of blocks, then the others. Before these are written together, each that
    comes from below is copied in a step of its own that gives nothing.
    """
    store.make_room(row, tokens)
    full = [one for one in staged if one.part == "full"]
    for group in _groups(parts, full):
        held = _held(parts.layout, group)
        store.restore(row, _full_layers(parts, store.layers, held), parts.blocks[held[-1].block].end)
        mx.eval(store.arrays_of(row))
        yield held
    held = []
    for one in staged:
        if one.part != "full":
            held += _held(parts.layout, [one])
            if one.data is not None:
                mx.eval(held[-1].array)
                yield []
    if held:
        store.restore(row, _tail_layers(parts, store.layers, held, tokens), tokens)
        mx.eval(store.arrays_of(row))
        yield held


def _groups(parts: PromptParts, staged: Sequence[StagedPart]) -> Iterator[Sequence[StagedPart]]:
    """Full parts of blocks that follow each other, cut so that each group is small."""
    group: list[StagedPart] = []
    size_bytes = 0
    for one in staged:
        size_bytes += parts.part_bytes(one.block, one.part)
        if group and size_bytes > GROUP_BYTES:
            yield group
            group, size_bytes = [], parts.part_bytes(one.block, one.part)
        group.append(one)
    if group:
        yield group


def _held(layout: PartLayout, staged: Sequence[StagedPart]) -> list[HeldPart]:
    return [HeldPart(one.block, one.part, part_array(layout, one), one.data is not None) for one in staged]


def _full_layers(parts: PromptParts, layers: Sequence[LayerKind], held: Sequence[HeldPart]) -> CapturedLayers:
    """K and V ``[1, kv_heads, tokens, dim]`` of every full layer; nothing of the others."""
    found: list[dict[int, list[mx.array]]] = [{} for _ in layers]
    for _, equal in groupby(held, lambda one: one.array.size):  # blocks of one length are cut together
        blocks = list(equal)
        stacked = mx.stack([one.array for one in blocks])
        for piece in parts.pieces(blocks[0].block, "full"):
            heads, tokens, dim = piece.shape
            together = _cut(stacked, piece).reshape(len(blocks), heads, tokens, dim).swapaxes(0, 1)
            array = together.reshape(1, heads, len(blocks) * tokens, dim)
            found[piece.layer].setdefault(_index(piece), []).append(array)
    return _by_layer(found)


def _tail_layers(
    parts: PromptParts, layers: Sequence[LayerKind], held: Sequence[HeldPart], tokens: int
) -> CapturedLayers:
    """K and V of every window layer up to ``tokens``, and the states; nothing of the others."""
    found: list[dict[int, list[mx.array]]] = [{} for _ in layers]
    for one in held:
        for piece in parts.pieces(one.block, one.part):
            window = layers[piece.layer].window
            if window is not None and parts.blocks[one.block].end <= tokens - window:
                continue  # it is there for a layer with a longer window
            array = _cut(one.array, piece).reshape(1, *piece.shape)
            found[piece.layer].setdefault(_index(piece), []).append(array)
    return _by_layer(found)


def _by_layer(found: Sequence[dict[int, list[mx.array]]]) -> CapturedLayers:
    return tuple(tuple(_joined(arrays[index]) for index in sorted(arrays)) for arrays in found)


def _joined(arrays: list[mx.array]) -> mx.array:
    return mx.concatenate(arrays, axis=2) if len(arrays) > 1 else arrays[0]


def _cut(packed: mx.array, piece: Piece) -> mx.array:
    """The piece's elements out of one packed part, or of several ``[n, ...]``, in its own dtype."""
    size = packed.itemsize
    cut = packed[..., piece.offset_bytes // size : (piece.offset_bytes + piece.size_bytes) // size]
    return cut if size == ELEMENT_BYTES[piece.dtype] else cut.view(_dtype(piece.dtype))


def _index(piece: Piece) -> int:
    """Where the piece stands among what is captured of its layer."""
    return "kv".index(piece.name) if piece.name in ("k", "v") else int(piece.name.removeprefix("state"))


def _dtype(name: Dtype) -> Any:
    return MLX_DTYPES[name]
