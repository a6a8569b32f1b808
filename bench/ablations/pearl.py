"""PEARL's tables and figures (arXiv 2408.11850) on the embedded pair, and its loop over models that only sleep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.ablations.material import Material
from bench.ablations.simulation import closed_form, simulate
from bench.ablations.size import Row
from bench.ablations.study import Ablation, Case

WINDOW = 4  # about the speed ratio of the embedded pair
LONG_CHAIN = {"gamma": 16, "theta_prob": 0.0, "only_if_worth": False}  # longer than nearly every run of accepted tokens
TOKEN_SECONDS = 0.004  # of a simulated draft token


def switched(name: str, published: float | None, **options: Any) -> Case:
    """PEARL's speed relative to plain decoding with changed options."""
    return Case(
        {"method": name},
        lambda material: material.speed("pearl", pearl={"only_if_worth": False, **options}),
        {"paper": published},
    )


def accepted(method: str, published: float) -> Case:
    """Draft tokens that are accepted between two rejections."""

    def measure(material: Material) -> Row:
        if method == "PEARL":
            decoding = material.decode("pearl", pearl={"only_if_worth": False, "window": WINDOW, "ahead": 0})
            return {"accepted": decoding.right / max(1, decoding.rejections)}
        decoding = material.decode("draft", draft={**LONG_CHAIN, "gamma": WINDOW})
        return {"accepted": decoding.accepted / len(decoding.steps)}

    return Case({"method": method}, measure, {"paper": published})


def windows(values: Sequence[int], columns: dict[str, tuple[int, float]], published: dict[int, str]) -> list[Case]:
    """Simulated tokens per second for each window; `columns` holds speed ratios c and acceptance rates."""

    def case(window: int) -> Case:
        def measure(material: Material) -> Row:
            row: dict[str, float] = {}
            for name, (ratio, rate) in columns.items():
                row[name] = simulate(ratio, rate, material.size.simulated_tokens, TOKEN_SECONDS, window)
                row[f"{name}, if both wait"] = closed_form(ratio, rate, TOKEN_SECONDS, window)
            return row

        return Case({"window": window}, measure, {"paper": published[window]})

    return [case(window) for window in values]


ABLATIONS = (
    Ablation(
        "pearl-table-3",
        "Table 3: speed-up without its strategies",
        "CodeLlama 7B and 34B on HumanEval: post-verify brings more than pre-verify.",
        [
            switched("without pre-verify", 2.21, pre_verify=False),
            switched("without post-verify", 1.64, post_verify=False),
            switched("PEARL", 2.35),
        ],
        wide=True,
    ),
    Ablation(
        "pearl-table-4",
        "Table 4: accepted tokens between two rejections",
        "DeepSeek 1.3B and 33B: 7.23 tokens with speculative decoding, whose window ends a run, and 29.65 with PEARL.",
        [accepted("SD", 7.23), accepted("PEARL", 29.65)],
        wide=True,
    ),
    Ablation(
        "pearl-table-5",
        "Table 5: the window, by the speed ratio c",
        "Tokens per second are highest for a window of c tokens (c is 3 for CodeLlama 7B and 34B, 5 for 7B and 70B).",
        windows(
            (2, 3, 4, 5, 6),
            {"c = 3": (3, 0.85), "c = 5": (5, 0.85)},
            {2: "48.67, 25.07", 3: "65.59, 38.57", 4: "63.25, 49.07", 5: "57.26, 58.10", 6: "58.64, 57.05"},
        ),
        wide=True,
    ),
)
