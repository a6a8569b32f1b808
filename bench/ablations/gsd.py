"""GSD's tables and figures (arXiv 2407.16207) on the embedded pair: drafts as chains, trees and graphs.

As in the paper, the levels of a draft are not limited by their measured gain (`only_if_worth`), so that no figure but the timed
ones depends on the machine. A draft has at most 64 nodes here, where the paper's trees have thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.ablations.decoding import MAX_RANK, Decoding
from bench.ablations.material import GREEDY, Material
from bench.ablations.size import Row
from bench.ablations.study import Ablation, Case
from outrider.drafters.options import DrafterName
from outrider.verify.sampling_params import SamplingParams

METHODS: dict[str, DrafterName] = {"SSD": "draft", "TSD": "draft-tree", "GSD": "draft-graph"}
REJECTION = SamplingParams(temperature=0.8, rule="rejection")
SAMPLINGS = {"greedy": GREEDY, "rejection, 0.8": REJECTION}


def run(material: Material, method: str, params: SamplingParams = GREEDY, again: bool = False, **options: Any) -> Decoding:
    """The answers of a method; `options` are those of its drafter."""
    drafter, decode = METHODS[method], material.decode_again if again else material.decode
    return decode(drafter, params, **{drafter.replace("-", "_"): {"only_if_worth": False, **options}})


def graph_figures(decoding: Decoding) -> Row:
    """The columns of Table 1."""
    return {
        "acceptance": decoding.acceptance,
        "drafted per answer": decoding.drafted / decoding.answers,
        "graph success": decoding.graph_success,
        "tokens per step": decoding.tokens_per_step,
    }


def table(params: SamplingParams, published: dict[str, Row]) -> list[Case]:
    """A case per method."""
    return [
        Case({"method": method}, lambda material, method=method: graph_figures(run(material, method, params)), row)  # type: ignore[misc]
        for method, row in published.items()
    ]


def swept(name: str, values: Sequence[Any], methods: Sequence[str] = ("TSD", "GSD")) -> list[Case]:
    """Acceptance and drafted tokens of trees and graphs for each value of an option."""

    def measure(value: Any) -> Callable[[Material], Row]:
        def measured(material: Material) -> Row:
            figures = {}
            for method in methods:
                decoding = run(material, method, GREEDY, **{name: value})
                figures[f"acceptance, {method}"] = decoding.acceptance
                figures[f"drafted, {method}"] = decoding.drafted / decoding.answers
            return figures

        return measured

    return [Case({name: value}, measure(value)) for value in values]


def pruned(method: str, greedy: str | None, sampled: str | None) -> Case:
    """Acceptance under the parameters of the paper's further models: k = 4, tau = 1, theta_prob 0.4 and theta_sib 0.1."""
    options: dict[str, Any] = {"theta_prob": 0.4} | ({} if method == "SSD" else {"children": 4, "theta_sib": 0.1})
    options |= {"tau": 1} if method == "GSD" else {}

    def measure(material: Material) -> Row:
        return {name: run(material, method, params, **options).acceptance for name, params in SAMPLINGS.items()}

    return Case({"method": method}, measure, {"paper, Tables 6 to 8": greedy, "paper, Table 9": sampled})


def rank_shares(decoding: Decoding) -> Row:
    """The share of the accepted nodes by their rank among their siblings."""
    ranks = decoding.ranks()
    names = [f"child {rank + 1}" for rank in range(MAX_RANK - 1)]
    return {name: ranks[rank] / max(1, ranks.total()) for rank, name in enumerate(names)}


def phases(method: str, published: str, **options: Any) -> Case:
    """Milliseconds of a step."""

    def measure(material: Material) -> Row:
        for _ in range(2):  # the first round warms up
            decoding = run(material, method, again=True, **options)
        return {phase: decoding.milliseconds(phase) for phase in ("draft", "verify", "commit")}

    name = method + "".join(f" ({name} {value})" for name, value in options.items())
    return Case({"method": name}, measure, {"paper": published})


def sped_up(method: str, params: SamplingParams, published: str) -> Case:
    """Speed relative to plain decoding; here a level of the draft is left out if it is not expected to pay, as by default."""
    rule = "greedy" if params.greedy else "rejection, 0.8"
    return Case(
        {"method": method, "sampling": rule}, lambda material: material.speed(METHODS[method], params), {"paper": published}
    )


ABLATIONS = (
    Ablation(
        "gsd-table-1",
        "Table 1: acceptance and drafted tokens, greedy",
        "LLaMA-2-70b with 7b, GSM8K: a graph accepts more than a tree, with a tenth of its drafted tokens.",
        table(
            GREEDY,
            {
                "SSD": {"paper": "0.795, 629.9, -"},
                "TSD": {"paper": "0.894, 8574.6, 0 %"},
                "GSD": {"paper": "0.917, 793.1, 27.7 %"},
            },
        ),
    ),
    Ablation(
        "gsd-table-2",
        "Table 2: sampling with rejection, temperature 0.8",
        "Speed-ups with non-deterministic verification on GSM8K: 1.80 (SSD), 1.81 (TSD) and 2.14 (GSD).",
        table(REJECTION, {method: {} for method in METHODS}),
    ),
    Ablation(
        "gsd-tables-1-2-speed",
        "Tables 1 and 2: speed-up",
        "On GSM8K, with a draft model that is a tenth of the target.",
        [
            sped_up(method, params, figure)
            for params, figures in ((GREEDY, (1.85, 1.81, 1.96)), (REJECTION, (1.80, 1.81, 2.14)))
            for method, figure in zip(METHODS, map(str, figures), strict=True)
        ],
        wide=True,
    ),
    Ablation(
        "gsd-table-3",
        "Table 3: milliseconds of one iteration",
        "A graph needs less time to draft than a tree.",
        [
            phases("SSD", "224.9, 133.5, 45.8"),
            phases("TSD", "257.0, 172.4, 46.9", children=2),
            phases("GSD", "225.9, 170.0, 45.5", children=2),
            phases("TSD", "323.9, 184.4, 49.8", children=4),
            phases("GSD", "209.0, 178.3, 50.2", children=4),
        ],
    ),
    Ablation(
        "gsd-tables-6-9",
        "Tables 6 to 9: acceptance with stricter pruning",
        "BLOOM-7b1, OPT-13b and LLaMA-2-7b on gsm8k: a graph accepts more than a tree, also when sampling (Table 9).",
        [
            pruned("SSD", "0.653, 0.602, 0.601", "0.540"),
            pruned("TSD", "0.741, 0.770, 0.775", None),
            pruned("GSD", "0.755, 0.793, 0.793", "0.836"),
        ],
    ),
    Ablation(
        "gsd-figure-5a",
        "Figure 5a: maximum out-degree k",
        "Acceptance rises with k; the tree's size explodes, the graph's does not.",
        swept("children", (1, 2, 3, 4, 5)),
        wide=True,
    ),
    Ablation(
        "gsd-figure-5b",
        "Figure 5b: redundant threshold tau",
        "A larger tau merges less, keeps more nodes and accepts less.",
        swept("tau", (1, 2, 3, 4), ("GSD",)),
        wide=True,
    ),
    Ablation(
        "gsd-figure-5c",
        "Figure 5c: theta_prob",
        "Pruning by probability drafts less and raises the acceptance.",
        swept("theta_prob", (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)),
        wide=True,
    ),
    Ablation(
        "gsd-figure-5d",
        "Figure 5d: theta_sib",
        "Pruning siblings drafts less and lowers the acceptance.",
        swept("theta_sib", (0.1, 0.3, 0.5, 0.7)),
        wide=True,
    ),
    Ablation(
        "gsd-figure-7",
        "Figure 7: accepted tokens by the rank of the child",
        "About half of the accepted tokens are not the likeliest child.",
        [
            Case({"method": method}, lambda material, method=method: rank_shares(run(material, method)))  # type: ignore[misc]
            for method in METHODS
        ],
    ),
)
