"""The embedded default: a small target, a smaller draft model and a base tri-gram table, with the recipe that made them."""

from pathlib import Path

EMBEDDED = Path(__file__).parent / "embedded"
NAME = "outrider-embedded"
TARGET = EMBEDDED / "target"
DRAFT = EMBEDDED / "draft"
BASE_TABLE = EMBEDDED / "base.ngram"
