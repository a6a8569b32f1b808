"""The embedded models: target, draft model, EAGLE head, and a base tri-gram table."""

from pathlib import Path

EMBEDDED = Path(__file__).parent / "embedded"
NAME = "outrider-embedded"
TARGET = EMBEDDED / "target"
DRAFT = EMBEDDED / "draft"
HEAD = EMBEDDED / "eagle"
BASE_TABLE = EMBEDDED / "base.ngram"
