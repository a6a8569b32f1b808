"""The figures as a chart: bars of tokens per second, for light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

COLORS = ("#2f6fde", "#e08a1e", "#3a9a5b", "#a34fc4")
BAR, GAP, LABELS, WIDTH = 14, 12, 150, 420
STYLE = "text{font:12px system-ui,sans-serif;fill:#222}@media(prefers-color-scheme:dark){text{fill:#ddd}}"


def draw(figures: Mapping[str, Any]) -> str:
    rows = [row for row in figures["rows"] if "rate" in row]
    most = max([row["rate"] for row in rows] or [1.0]) or 1.0
    parts, y, before = list[str](), GAP, None
    for row in rows:
        label = f"{row['task']}, after {row['after']}, t {row['temperature']:g}"
        if label != before:
            y += GAP if before else 0
            parts.append(f'<text x="0" y="{y + BAR - 3}">{escape(label)}</text>')
            before = label
        color, width = COLORS[(ord(row["server"]) - ord("A")) % len(COLORS)], WIDTH * row["rate"] / most
        parts.append(f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{color}"/>')
        parts.append(f'<text x="{LABELS + width + 4:.1f}" y="{y + BAR - 3}">{row["rate"]:.1f}</text>')
        y += BAR
    for number, server in enumerate(figures["servers"]):
        y += BAR + 4
        title = escape(f"{server['name']}: {server['program']}, {Path(server['model']).name} (tokens/s)")
        parts.append(
            f'<rect x="0" y="{y - BAR + 4}" width="{BAR - 4}" height="{BAR - 4}" fill="{COLORS[number % len(COLORS)]}"/>'
        )
        parts.append(f'<text x="{BAR}" y="{y}">{title}</text>')
    size = f'width="{LABELS + WIDTH + 60}" height="{y + GAP}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{"".join(parts)}</svg>\n'
