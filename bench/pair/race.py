"""A race as an animated picture: servers' answers to one question side by side, each text as it arrived."""

from collections.abc import Iterator, Sequence
from html import escape

from bench.http.chat import Answer

COLORS = ("#2f6fde", "#e08a1e", "#3a9a5b", "#a34fc4")
STYLE = "text{font:12px system-ui,sans-serif;fill:#222}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
LANE, LINE, ROWS, COLUMNS, HEAD = 430, 15, 16, 58, 50
PAUSE_SECONDS = 3.0  # after the last answer, before the picture begins again
FONT = "text.code{font:11px ui-monospace,SFMono-Regular,Menlo,monospace;white-space:pre}"


def draw(titles: Sequence[str], answers: Sequence[Answer]) -> str:
    """The picture in real time, again and again, for light and dark pages; long texts are cut."""
    total = max(answer.seconds for answer in answers) + PAUSE_SECONDS
    lanes = (lane(number, *each, total) for number, each in enumerate(zip(titles, answers, strict=True)))
    size = f'viewBox="0 0 {LANE * len(answers)} {HEAD + LINE * ROWS}"'
    style = f"<style>{STYLE}{FONT}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{"".join(part for each in lanes for part in each)}</svg>\n'


def lane(number: int, title: str, answer: Answer, total: float) -> Iterator[str]:
    """The title, a bar that ends with the answer, its time, and the text."""
    left, color = LANE * number, COLORS[number % len(COLORS)]
    share, width = answer.seconds / total, LANE - 20
    first = (answer.first_token_seconds or 0.0) / total
    yield f'<text x="{left}" y="12" style="font-weight:bold">{escape(title)}</text>'
    times = f'keyTimes="0;{first:.4f};{share:.4f};1" dur="{total:.2f}s" repeatCount="indefinite"'
    bar = f'<animate attributeName="width" values="0;0;{width};{width}" {times}/>'
    yield f'<rect x="{left}" y="20" width="{width}" height="4" rx="2" fill="{color}">{bar}</rect>'
    done = f"{answer.tokens} tokens in {answer.seconds:.1f} s, {answer.rate:.0f} tokens/s after the first"
    yield f'<text x="{left}" y="38">{escape(done)}{shown("opacity", answer.seconds, total)}</text>'
    for row, pieces in enumerate(lines(answer)[:ROWS]):
        spans = "".join(f"<tspan>{escape(text)}{shown('fill-opacity', at, total)}</tspan>" for at, text in pieces)
        yield f'<text class="code" xml:space="preserve" x="{left}" y="{HEAD + 10 + LINE * row}">{spans}</text>'


def lines(answer: Answer) -> list[list[tuple[float, str]]]:
    """Pieces of each line, with the seconds at which they arrived."""
    rows, before, room = [list[tuple[float, str]]()], 0, COLUMNS
    for at, end in answer.arrivals:
        for number, text in enumerate((answer.text or "")[before:end].split("\n")):
            if number:
                rows.append([])
                room = COLUMNS
            if text[:room]:
                rows[-1].append((at, text[:room]))
            room = max(0, room - len(text))
        before = end
    return rows


def shown(attribute: str, at: float, total: float) -> str:
    """An animation that shows its element from then on."""
    times = f'keyTimes="0;{at / total:.4f}" dur="{total:.2f}s" repeatCount="indefinite"'
    return f'<animate attributeName="{attribute}" calcMode="discrete" values="0;1" {times}/>'
