"""Rotary frequencies of GPT-OSS, with YaRN as its config means it.

Built here and not by an MLX library because the model's config says ``"truncate": false``:
the correction range between extrapolated and interpolated dimensions is not rounded.
YaRN is section 3 of https://arxiv.org/abs/2309.00071.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from darkbloom_gpt_oss._refuse import refused

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_YARN_NUMBERS = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
}
_KNOWN = _YARN_NUMBERS | {"rope_type", "type", "rope_theta", "truncate", "partial_rotary_factor"}


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's parameters under their published names."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of ``dimensions`` of a head, in halves. ``attention_factor`` multiplies queries and keys."""

    dimensions: int
    theta: float
    yarn: Yarn | None
    attention_factor: float

    def inverse_frequencies(self) -> NDArray[np.float32]:
        """Radians per position for each pair of dimensions: ``[dimensions / 2]``.

        Rounded to float32 in the steps in which the reference rounds: a position multiplies
        a difference in the last bit, and after thousands of them it shows in the logits.
        """
        import numpy as np

        single = np.float32
        exponents = np.arange(0, self.dimensions, 2, dtype=single) / single(self.dimensions)
        periods = (self.theta ** exponents.astype(np.float64)).astype(single)
        extrapolated = single(1) / periods
        if self.yarn is None:
            return extrapolated
        low, high = self._correction_range(self.yarn)
        pairs = np.arange(self.dimensions // 2, dtype=single)
        kept = single(1) - np.clip((pairs - single(low)) / single(high - low), single(0), single(1))
        interpolated = single(1) / (single(self.yarn.factor) * periods)
        return np.asarray(interpolated * (single(1) - kept) + extrapolated * kept, dtype=single)

    def _correction_range(self, yarn: Yarn) -> tuple[float, float]:
        """Where, among the pairs, interpolation begins and where it is complete."""

        def pair_turning(rotations: float) -> float:
            """The pair that turns ``rotations`` times over the original context."""
            turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
            return self.dimensions * math.log(turns) / (2 * math.log(self.theta))

        low, high = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dimensions - 1)
        return (low, high + 0.001) if low == high else (low, high)


def parse_rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Read ``rope_parameters``, or ``rope_scaling`` with ``rope_theta`` beside it.

    Raises ``UnsupportedCheckpoint`` naming the field at fault.
    """
    name, values = _merged(config)
    if unknown := values.keys() - _KNOWN:
        raise refused(f"{name}.{min(unknown)}", "unknown")
    for field in ("rope_theta", *sorted(_YARN_NUMBERS)):
        value = values.get(field)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0
        ):
            raise refused(f"{name}.{field}", f"expected a positive number, found {value!r}")
    if values.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise refused(f"{name}.partial_rotary_factor", "only whole heads are rotated here")
    if values.get("rope_theta") is None:
        raise refused("rope_theta", "missing")
    theta = float(values["rope_theta"])
    kind = _same(name, values, "rope_type", "type")
    if kind == "default":
        return Rope(head_dim, theta, None, 1.0)
    if kind != "yarn":
        raise refused(f"{name}.rope_type", f"{kind!r} is not supported, only yarn and default are")
    yarn = _yarn(name, values, config)
    return Rope(head_dim, theta, yarn, _attention_factor(values, yarn.factor))


def _merged(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The rope fields from wherever this config keeps them; two places must agree."""
    merged: dict[str, Any] = {}
    where: dict[str, str] = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = config.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise refused(name, f"expected an object, found {value!r}")
        for field, each in (value or {}).items():
            if field in merged and merged[field] != each:
                raise refused(f"{name}.{field}", f"{each!r} contradicts {where[field]} {merged[field]!r}")
            merged[field] = each
            where.setdefault(field, f"{name}.{field}")
    if not merged:
        raise refused("rope_parameters", "missing, and there is no rope_scaling either")
    theta = config.get("rope_theta")
    if theta is not None and merged.setdefault("rope_theta", theta) != theta:
        raise refused("rope_theta", f"{theta!r} contradicts {where['rope_theta']} {merged['rope_theta']!r}")
    return ("rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"), merged


def _yarn(name: str, values: Mapping[str, Any], config: Mapping[str, Any]) -> Yarn:
    original = values.get("original_max_position_embeddings")
    initial = config.get("initial_context_length")
    if original is not None and initial is not None and original != initial:
        raise refused("initial_context_length", f"{initial!r} contradicts {name} {original!r}")
    original = original if original is not None else initial
    if not isinstance(original, int) or isinstance(original, bool) or original < 1:
        raise refused(
            f"{name}.original_max_position_embeddings", f"expected a whole number, found {original!r}"
        )
    if values.get("factor") is None:
        raise refused(f"{name}.factor", "missing")
    truncate = values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise refused(f"{name}.truncate", f"expected true or false, found {truncate!r}")
    return Yarn(
        factor=float(values["factor"]),
        original_max_position_embeddings=original,
        beta_fast=float(values.get("beta_fast") or 32),
        beta_slow=float(values.get("beta_slow") or 1),
        truncate=truncate,
    )


def _attention_factor(values: Mapping[str, Any], factor: float) -> float:
    """The paper's ``0.1 ln(s) + 1``, unless the config gives it, or two weights for it."""

    def weighted(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (given := values.get("attention_factor")) is not None:
        return float(given)
    if values.get("mscale") and values.get("mscale_all_dim"):
        return weighted(values["mscale"]) / weighted(values["mscale_all_dim"])
    return weighted(1.0)


def _same(name: str, values: Mapping[str, Any], first: str, second: str) -> Any:
    found = {values[field] for field in (first, second) if isinstance(values.get(field), str)}
    if len(found) > 1:
        raise refused(f"{name}.{second}", f"{values[second]!r} contradicts {first} {values[first]!r}")
    return found.pop() if found else None
