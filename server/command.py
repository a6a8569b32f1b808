"""What all commands share: how a mistake is told, and settings as flags."""

from __future__ import annotations

import sys

import typer

EXTRA_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}  # any setting works as a flag


def fail(message: str) -> typer.Exit:
    """Prints one sentence to stderr; raise the result."""
    print(f"outrider: {message}", file=sys.stderr)
    return typer.Exit(2)
