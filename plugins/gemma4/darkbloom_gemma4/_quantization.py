"""Which modules of a checkpoint are quantised and how, as MLX conversions write it into ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from darkbloom_gemma4._fields import Fields

TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""What stands before a module of the text model in one layout or another."""

_MODE_DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to quantise a matrix, in MLX's words."""

    bits: int
    group_size: int
    mode: str = "affine"


@dataclass(frozen=True, slots=True)
class Quantization:
    """``default`` holds for every module not in ``overrides``, by the module's name without any prefix."""

    default: Scheme
    overrides: Mapping[str, Scheme | None]

    def of(self, module: str) -> Scheme | None:
        """How ``module`` (such as ``layers.0.mlp.up_proj``) is quantised if it is; None: never."""
        return self.overrides.get(module, self.default)


def read_quantization(*places: Fields) -> Quantization | None:
    """From ``quantization``, or ``quantization_config`` (the same table under transformers' name).

    Raises ``UnsupportedCheckpoint`` for quantisation that is not MLX's own.
    """
    found = [
        table
        for fields in places
        for name in ("quantization", "quantization_config")
        if (table := fields.table(name)) is not None
    ]
    if not found:
        return None
    first = found[0]
    for other in found[1:]:
        if other.values != first.values:
            other.refuse("bits", f"and its neighbours contradict {first.place.removesuffix('.')}")
    method = first.get("quant_method")
    if method is not None and method not in _MODE_DEFAULTS:
        first.refuse("quant_method", f"is {method!r}: only what MLX itself writes is known")
    overrides: dict[str, Scheme | None] = {}
    for name, value in first.values.items():
        if isinstance(value, bool):
            overrides[_module(name)] = None if value is False else _scheme(first, None)
        elif isinstance(value, Mapping):
            overrides[_module(name)] = _scheme(Fields(value, f"{first.place}{name}."), None)
    return Quantization(_scheme(first, method), overrides)


def _module(name: str) -> str:
    for prefix in TEXT_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _scheme(fields: Fields, method: Any) -> Scheme:
    mode = fields.get("mode") or method or "affine"
    if mode not in _MODE_DEFAULTS:
        fields.refuse("mode", f"is {mode!r}: only {', '.join(_MODE_DEFAULTS)} are known")
    group_size, bits = _MODE_DEFAULTS[mode]
    return Scheme(fields.integer("bits", bits), fields.integer("group_size", group_size), mode)
