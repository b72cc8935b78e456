"""Prefix reuse: names of blocks, what to reuse, where parts are kept. Knows no array library and no engine."""

from darkbloom_core.prefix._hashing import (
    BLOCK_TOKENS,
    NO_SALT,
    Block,
    Numerics,
    PictureSpan,
    block_hashes,
    chain_root,
    numerics_id,
    prompt_blocks,
)
from darkbloom_core.prefix._keeping import TailPolicy, saved_milliseconds
from darkbloom_core.prefix._layout import PART_NAMES, PartLayout, PartName, Piece, PromptParts
from darkbloom_core.prefix._plan import Costs, PlannedFetch, Reason, ReusePlan, Where, plan_reuse
from darkbloom_core.prefix._ram import Pins, RamTier
from darkbloom_core.prefix._rates import Rates
from darkbloom_core.prefix._scopes import scope_salt
from darkbloom_core.prefix._sharing import PrefillSharing
from darkbloom_core.prefix._stack import RAM, CacheStack, StagedPart, Staging

__all__ = [
    "BLOCK_TOKENS",
    "NO_SALT",
    "PART_NAMES",
    "RAM",
    "Block",
    "CacheStack",
    "Costs",
    "Numerics",
    "PartLayout",
    "PartName",
    "PictureSpan",
    "Piece",
    "Pins",
    "PlannedFetch",
    "PrefillSharing",
    "PromptParts",
    "RamTier",
    "Rates",
    "Reason",
    "ReusePlan",
    "StagedPart",
    "Staging",
    "TailPolicy",
    "Where",
    "block_hashes",
    "chain_root",
    "numerics_id",
    "plan_reuse",
    "prompt_blocks",
    "saved_milliseconds",
    "scope_salt",
]
