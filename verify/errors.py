"""Errors with a one-sentence message for the user."""

from __future__ import annotations


class ModelError(ValueError):
    """The model cannot be served; the message says why."""


def first_sentence(error: Exception) -> str:
    """The first line of an error's message that is not blank, with at most 300 characters."""
    return " ".join(str(error).strip().split("\n")[0].split())[:300]
