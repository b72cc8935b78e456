"""Prefix reuse: names of blocks, what to reuse, where parts are kept. Knows no array library and no engine."""

from darkbloom_core.prefix._hashing import (
    BLOCK_TOKENS,
    NO_SALT,
    Numerics,
    PictureSpan,
    block_hashes,
    chain_root,
    numerics_id,
)
from darkbloom_core.prefix._keeping import TailPolicy, saved_milliseconds
from darkbloom_core.prefix._layout import PART_NAMES, PartLayout, PartName, Piece
from darkbloom_core.prefix._plan import Costs, PlannedFetch, Reason, ReusePlan, Where, plan_reuse
from darkbloom_core.prefix._ram import Pins, RamTier

__all__ = [
    "BLOCK_TOKENS",
    "NO_SALT",
    "PART_NAMES",
    "Costs",
    "Numerics",
    "PartLayout",
    "PartName",
    "PictureSpan",
    "Piece",
    "Pins",
    "PlannedFetch",
    "RamTier",
    "Reason",
    "ReusePlan",
    "TailPolicy",
    "Where",
    "block_hashes",
    "chain_root",
    "numerics_id",
    "plan_reuse",
    "saved_milliseconds",
]
