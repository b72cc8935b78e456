"""What a config says of rotary embedding: nested by kind of layer, or flat as older configs have it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from darkbloom_gemma4._fields import Fields

SLIDING, FULL = "sliding_attention", "full_attention"
"""The kinds of layers, in the words of ``layer_types``."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding of one kind of layer.

    ``fraction`` of a head's pairs turn (the fastest ones; the exponent's denominator stays
    the whole head), and frequencies are divided by ``factor``.
    """

    theta: float
    fraction: float = 1.0
    factor: float = 1.0


def read_rotary(text: Fields) -> tuple[Rotary, Rotary]:
    """Rotary embedding of sliding and of full layers, from whichever fields the layout has."""
    scaling = text.table("rope_scaling")
    nested = text.table("rope_parameters")
    if nested is None and scaling is not None and {SLIDING, FULL} & scaling.values.keys():
        nested, scaling = scaling, None
    theta, local_theta = text.optional_number("rope_theta"), text.optional_number("rope_local_base_freq")
    fraction = text.optional_number("partial_rotary_factor")
    if nested is None:
        full = Rotary(theta or 1_000_000.0, 0.25 if fraction is None else fraction)
        if scaling is not None:
            full = _one_rotary(scaling, full.theta, None if fraction is None else fraction)
        return Rotary(local_theta or 10_000.0), full
    for unknown in nested.values.keys() - {SLIDING, FULL}:
        nested.refuse(unknown, "is neither sliding_attention nor full_attention")
    sliding_fields, full_fields = nested.table(SLIDING), nested.table(FULL)
    sliding = Rotary(10_000.0) if sliding_fields is None else _one_rotary(sliding_fields)
    full = Rotary(1_000_000.0, 0.25) if full_fields is None else _one_rotary(full_fields)
    for name, value, known in (
        ("rope_theta", theta, (full.theta,)),
        ("rope_local_base_freq", local_theta, (sliding.theta,)),
        ("partial_rotary_factor", fraction, (full.fraction, sliding.fraction)),
    ):
        if value is not None and value not in known:
            text.refuse(name, f"contradicts {nested.place.removesuffix('.')}")
    if scaling is not None and scaling.values != nested.values:
        text.refuse("rope_scaling", "contradicts rope_parameters")
    return sliding, full


def _one_rotary(fields: Fields, theta: float | None = None, fraction: float | None = None) -> Rotary:
    kind = fields.get("rope_type") or fields.get("type") or "default"
    theta = fields.number("rope_theta", theta) if theta else fields.number("rope_theta")
    fraction = fields.number("partial_rotary_factor", fraction or 1.0)
    factor = fields.number("factor", 1.0)
    if kind not in ("default", "proportional"):
        fields.refuse("rope_type", f"is {kind!r}: only 'default' and 'proportional' are known")
    if fraction > 1:
        fields.refuse("partial_rotary_factor", f"must be at most 1, not {fraction}")
    if kind == "default" and (fraction != 1 or factor != 1):
        fields.refuse("rope_type", "is 'default', which turns all of a head, yet there is a factor")
    for unknown in fields.not_asked():
        if unknown not in ("rope_type", "type") and fields.get(unknown) is not None:
            fields.refuse(unknown, "is a rotary parameter that this plugin does not know")
    return Rotary(theta, fraction, factor)
