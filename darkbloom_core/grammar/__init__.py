"""Structured output: from what an output may be to which tokens may come next. Uses llguidance."""

from darkbloom_core.grammar._compiler import CompiledGrammar, GrammarCompiler

__all__ = ["CompiledGrammar", "GrammarCompiler"]
