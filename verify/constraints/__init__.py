"""Constraints on an answer: grammars, and limits of reasoning."""
