"""The answers that a benchmark decodes, from command-line values. Imports no torch, to report user errors at once."""

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.drafters.options import NAMES, NEED_A_MODEL, DrafterName
from outrider.server.settings import Settings

# Completions of Python code, for the embedded model.
PROMPTS = Path(__file__).parent / "prompts.jsonl"


class BenchError(ValueError):
    """The benchmark cannot run; the message is one sentence for the user."""


@dataclass(frozen=True)
class Plan:
    """Answers to decode: every prompt with every drafter at every temperature, `repeats` times."""

    drafters: Sequence[DrafterName]
    prompts: Sequence[str]
    temperatures: Sequence[float]
    max_tokens: int  # per answer
    repeats: int
    seed: int = 0


def make_plan(
    settings: Settings, drafters: str, prompts: Path, limit: int | None, temperatures: str, max_tokens: int, repeats: int
) -> Plan:
    """The plan given by command-line values; lists are comma-separated. Raises BenchError."""
    names = parse_drafters(drafters)
    if settings.draft_model.path is None and (missing := [name for name in names if name in NEED_A_MODEL]):
        raise BenchError(f"The drafter {missing[0]!r} needs a draft model; set one with --draft_model.path.")
    return Plan(
        drafters=names,
        prompts=read_prompts(prompts, limit),
        temperatures=parse_numbers("--temperature", temperatures),
        max_tokens=max_tokens,
        repeats=repeats,
    )


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """The field `prompt` (or the first of `turns`) of each line of a .jsonl or .jsonl.gz file. Raises BenchError."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        records = [json.loads(line) for line in data.splitlines()]
        prompts = [str(record.get("prompt") or record["turns"][0]) for record in records]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BenchError(f"Cannot read prompts from {path} ({error}); give .jsonl lines with a `prompt` field.") from None
    return prompts[:limit]


def parse_drafters(text: str) -> list[DrafterName]:
    """Comma-separated drafter names, in the order of the documentation. Raises BenchError."""
    names = text.split(",")
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise BenchError(f"There is no drafter {', '.join(unknown)}; choose from {', '.join(NAMES)}.")
    return [name for name in NAMES if name in names]


def parse_numbers(flag: str, text: str, *, positive: bool = False) -> list[float]:
    """Comma-separated numbers, above 0 if `positive`. Raises BenchError."""
    try:
        numbers = [float(item) for item in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(number > 0 if positive else math.isfinite(number) for number in numbers):
        kind = "numbers above 0" if positive else "numbers"
        raise BenchError(f"{flag} takes {kind}, separated by commas, not {text!r}.")
    return numbers


def parse_named(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Values by name, from texts NAME=VALUE. Raises BenchError."""
    named = dict(text.partition("=")[::2] for text in texts)
    if not all(name and value for name, value in named.items()):
        raise BenchError(f"{flag} takes NAME=VALUE, not {', '.join(texts)!r}.")
    return named


def parse_counts(flag: str, text: str) -> list[int]:
    """Comma-separated whole numbers above 0. Raises BenchError."""
    items = text.split(",")
    if not all(item.isdecimal() and int(item) > 0 for item in items):
        raise BenchError(f"{flag} takes whole numbers above 0, separated by commas, not {text!r}.")
    return [int(item) for item in items]
