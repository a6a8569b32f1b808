"""Command-line values become a plan, or one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.plan import PROMPTS, BenchError, make_plan, parse_counts, parse_drafters, parse_numbers, read_prompts


def test_a_plan_from_command_line_values() -> None:
    plan = make_plan("fusion,none", PROMPTS, 2, "0,0.8", 16, 3)
    assert plan.drafters == ["none", "fusion"]
    assert plan.temperatures == [0.0, 0.8]
    assert (len(plan.prompts), plan.max_tokens, plan.repeats) == (2, 16, 3)


@pytest.mark.parametrize("content", ["{}\n", "nothing", "[1]\n"])
def test_invalid_prompts_are_reported(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(BenchError, match=r"Cannot read prompts from .*p\.jsonl"):
        read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "1,,2"])
def test_wrong_numbers_name_the_flag(text: str) -> None:
    with pytest.raises(BenchError, match="--rate takes numbers above 0"):
        parse_numbers("--rate", text, positive=True)
    with pytest.raises(BenchError, match="--nodes takes whole numbers above 0"):
        parse_counts("--nodes", text)


def test_an_unknown_drafter_is_named() -> None:
    with pytest.raises(BenchError, match="no drafter magic; choose from none, trigram"):
        parse_drafters("none,magic")
