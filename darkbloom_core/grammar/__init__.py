"""Structured output: from what an output may be to which tokens may come next. Uses llguidance."""

from darkbloom_core.grammar._bounds import check_bounds
from darkbloom_core.grammar._compiler import COMPILATIONS_AT_ONCE, CompiledGrammar, GrammarCompiler

__all__ = ["COMPILATIONS_AT_ONCE", "CompiledGrammar", "GrammarCompiler", "check_bounds"]
