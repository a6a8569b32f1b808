"""Requests whose answers are known."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from bench.decode import answer, encode
from bench.plan import PROMPTS, Plan, read_prompts
from outrider.server.settings import Settings
from outrider.server.worker.runtime import load


@dataclass(frozen=True)
class Question:
    """A request and its expected answer."""

    fields: dict[str, Any]
    tokens: list[int]  # ids


def make_questions(settings: Settings, count: int) -> list[Question]:
    """Random requests, with the tokens of plain decoding."""
    rng = random.Random(1)
    runtime = load(settings)
    questions = []
    for number, prompt in enumerate((read_prompts(PROMPTS) * count)[:count]):
        temperature, limit = rng.choice((0.0, 0.7, 1.0)), rng.randint(8, 96)
        plan = Plan([], [], [], limit, 1, seed=number)
        tokens = answer(runtime, settings, "none", encode(runtime, prompt), temperature, plan).tokens
        questions.append(Question({"prompt": prompt, "temperature": temperature, "seed": number, "max_tokens": limit}, tokens))
    return questions
