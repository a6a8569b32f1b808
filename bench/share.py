"""The picture of `outrider bench gpu --share`: the main figures of a run on a GPU, beside what docs/roofline.md predicts."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.plan import BenchError
from bench.roofline import RESULT, figures_of_gpu

SIZE = (1200, 700)
MARGIN, TITLE, LINE = 36, 20, 25  # pixels
INK, FAINT, MEASURED, PREDICTED, WRONG = "#1c2230", "#697086", "#2f6fde", "#b9c3d6", "#c8321e"
SHARE, RATIO = "single_token_step_share_of_bandwidth", "nodes_over_single"
PREDICTED_NODES = "63"


class Bar(NamedTuple):
    """One figure of a chart."""

    label: str
    value: float
    is_predicted: bool = False


def check_pillow() -> None:
    """Raises BenchError without pillow."""
    if importlib.util.find_spec("PIL") is None:
        raise BenchError("--share draws with pillow; install it with: .venv/bin/pip install -e './bench[share]'")


def share(result: Path) -> Path:
    """Draws the figures of a saved run of `bench.gpu` beside its file; returns the picture's path."""
    path = result.with_suffix(".png")
    picture(json.loads(result.read_text()), json.loads(RESULT.read_text())).save(path, optimize=True)
    return path


def charts(figures: Mapping[str, Any], roofline: Mapping[str, Any]) -> dict[str, list[Bar]]:
    """The bars of each chart; none for a part that did not run or failed."""
    steps, streams = (part if "error" not in (part := figures.get(name, {})) else {} for name in ("steps", "streams"))
    predicted = {}
    if read := steps.get("measured_read_gb_per_second"):
        predicted = figures_of_gpu(roofline, 1e9 * read)
    share = [Bar("measured", steps[SHARE])] if SHARE in steps else []
    ratios = [Bar(counted(nodes, "node"), ratio) for nodes, ratio in steps.get(RATIO, {}).items() if nodes != "0"]
    if predicted:
        share.append(Bar("predicted", predicted[SHARE], is_predicted=True))
        after = 1 + [bar.label for bar in ratios].index(f"{PREDICTED_NODES} nodes")
        ratios.insert(after, Bar("predicted", predicted[RATIO], is_predicted=True))
    tokens = streams.get("tokens_over_one_stream", {})
    return {
        "One token: share of the memory's read bandwidth": share,
        "Steps: time with draft nodes, over one token's": ratios,
        "Streams: tokens of several, over one stream's": [Bar(counted(n, "stream"), ratio) for n, ratio in tokens.items()],
    }


def counted(number: str, noun: str) -> str:
    """The number and the noun, which takes an s unless the number is 1."""
    return f"{number} {noun}{'s' * (number != '1')}"


def speed(figures: Mapping[str, Any]) -> str:
    """The time of a step of one token, and the speed of the memory; empty if they were not measured."""
    steps = figures.get("steps", {})
    if "single_token_step_ms" not in steps:
        return ""
    milliseconds, read = steps["single_token_step_ms"], steps["measured_read_gb_per_second"]
    return f"One token takes {milliseconds} ms; the memory reads {read:,.0f} GB/s."


def equality(figures: Mapping[str, Any]) -> str:
    """How many drafted answers are those of plain decoding."""
    found = figures.get("lossless", {})
    if "divergences" not in found:
        return "not measured"
    return (
        f"{found['answers'] - found['divergences']} of {found['answers']} drafted answers are plain decoding's, token by token"
    )


def picture(figures: Mapping[str, Any], roofline: Mapping[str, Any]) -> Any:
    """The picture, a `PIL.Image.Image`, of the figures that `bench.gpu` saved and those of roofline.json."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", SIZE, "white")
    canvas = ImageDraw.Draw(image)
    width, middle = SIZE[0] - 2 * MARGIN, SIZE[0] // 2
    _write(canvas, (MARGIN, 24), f"Outrider on {figures['machine']}", 28)
    versions = f"commit {figures['commit']}, {figures['date']}, torch {figures['torch']}"
    _write(canvas, (MARGIN, 64), f"outrider bench gpu: shape of Llama-2-7B, random weights, bfloat16; {versions}", 15, FAINT)
    share, ratios, tokens = charts(figures, roofline).items()
    column = width // 2 - MARGIN
    below = _chart(canvas, (MARGIN, 104), column, *share, limit=1.0)
    below = _chart(canvas, (MARGIN, below + 24), column, *ratios)
    _write(canvas, (MARGIN, below + 20), speed(figures), 15)
    below = _chart(canvas, (middle + MARGIN // 2, 104), column, *tokens)
    below = _heading(canvas, (middle + MARGIN // 2, below + 24), "Equality")
    _write(canvas, (middle + MARGIN // 2, below), equality(figures), 15)
    _claims(canvas, (middle + MARGIN // 2, below + LINE + 24), figures.get("claims", {}))
    _write(canvas, (MARGIN, SIZE[1] - 32), "predicted: docs/roofline.md, for the bandwidth that was measured", 14, FAINT)
    return image


def _write(canvas: Any, at: tuple[int, int], text: str, size: int, colour: str = INK, anchor: str = "la") -> None:
    from PIL import ImageFont

    canvas.text(at, text, colour, ImageFont.load_default(size), anchor)


def _heading(canvas: Any, at: tuple[int, int], text: str) -> int:
    """Writes a heading; returns where its contents begin."""
    _write(canvas, at, text, 18)
    return at[1] + TITLE + 12


def _chart(canvas: Any, at: tuple[int, int], width: int, title: str, bars: Sequence[Bar], limit: float = 0.0) -> int:
    """Draws horizontal bars, of which `limit` or the longest has the full width; returns where the chart ends."""
    left, top = at[0], _heading(canvas, at, title)
    if not bars:
        _write(canvas, (left, top), "not measured", 15, FAINT)
        return top + LINE
    start, room = left + 100, width - 160
    full = max(limit, *(bar.value for bar in bars))
    for number, bar in enumerate(bars):
        y = top + number * LINE
        colour = PREDICTED if bar.is_predicted else MEASURED
        end = start + max(2, round(room * bar.value / full))
        _write(canvas, (left, y + 1), bar.label, 15, FAINT if bar.is_predicted else INK)
        canvas.rectangle((start, y + 2, end, y + 17), fill=colour)
        _write(canvas, (end + 8, y + 1), f"{bar.value:.2f}", 15)
    return top + len(bars) * LINE


def _claims(canvas: Any, at: tuple[int, int], claims: Mapping[str, bool]) -> None:
    """Lists the claims, those that do not hold in red."""
    left, top = at[0], _heading(canvas, at, f"Claims: {sum(claims.values())} of {len(claims)} hold")
    for number, (claim, holds) in enumerate(claims.items()):
        y = top + number * (LINE - 4)
        _write(canvas, (left, y), "yes" if holds else "NO", 14, FAINT if holds else WRONG)
        _write(canvas, (left + 36, y), claim, 14, INK if holds else WRONG)
