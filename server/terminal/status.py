"""The command `outrider status`. Heavy imports happen inside it, to keep --help fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.server.command import fail
from outrider.server.terminal.command import URL, own_key

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outrider.server.terminal.figures import ModelFigures, Reading, ServerFigures

COLUMNS = ("streams", "queue", "tokens\nper s", "tokens\nper step", "prompts\nreused", "cache\nused")
# The server's state if no worker can be started, in which /health fails.
FAILED = "failed"


def status(
    url: Annotated[str | None, typer.Argument(help=f"Address of the server, or unix:PATH; default: {URL}.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key of the server; default: OPENAI_API_KEY, for a server that is named.")
    ] = None,
    metrics_url: Annotated[str | None, typer.Option(help="Address of the server's metrics.port, if it is set.")] = None,
    metrics_key: Annotated[str | None, typer.Option(help="The server's metrics.key; default: the API key.")] = None,
    interval: Annotated[
        float, typer.Option(help="Seconds between two readings, over which tokens are counted.", min=0.05)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once, after one interval.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the state once, as JSON.")] = False,
) -> None:
    """Show a running server: its models, memory, streams, queue, tokens and reuse of caches. Ctrl-C ends it."""
    import sys

    from outrider.server.terminal.client import ChatError, Client
    from outrider.server.terminal.figures import figures, read

    try:
        key = api_key or own_key(url)
        clients = Client(url or URL, key), Client(metrics_url or url or URL, metrics_key or key)
        first = read(*clients)
        if once or as_json or not sys.stdout.isatty():
            time.sleep(interval)
            last = read(*clients)
            show(figures(clients[0].url, last, first), as_json)
            raise typer.Exit(2 if last.state == FAILED else 0)
        watch(clients[0].url, lambda: read(*clients), first, interval)
    except ChatError as error:
        raise fail(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit() from None


def show(found: ServerFigures, as_json: bool) -> None:
    if as_json:
        import msgspec

        return print(msgspec.json.format(msgspec.json.encode(found)).decode())
    from rich.console import Console

    Console().print(table(found))


def watch(url: str, read: Callable[[], Reading], first: Reading, interval: float) -> None:
    """Shows a server until Ctrl-C, also while it is restarted."""
    from rich.live import Live
    from rich.text import Text

    from outrider.server.terminal.client import ChatError
    from outrider.server.terminal.figures import figures

    before = first
    with Live(table(figures(url, first)), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval)
            try:
                now = read()
                live.update(table(figures(url, now, before)), refresh=True)
                before = now
            except ChatError as error:
                live.update(Text(str(error)), refresh=True)


def table(found: ServerFigures) -> RenderableType:
    """The figures, at least 80 columns wide."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    models = Table("model", "state", box=None, pad_edge=False)
    models.columns[0].overflow = "ellipsis"
    models.columns[0].no_wrap = True
    for name in COLUMNS:
        models.add_column(name, justify="right")
    for model in found.models:
        models.add_row(Text(model.name), Text(model.state), *cells(model))
    lines = [Text(f"Outrider {found.version} at {found.url}")]
    if found.memory is not None:
        lines.append(Text(f"Memory: {found.memory}"))
    return Group(*lines, "", models, *(Text(note) for note in found.notes))


def cells(model: ModelFigures) -> list[str]:
    """The model's values in the order of COLUMNS."""
    shown = {
        "{}": (model.running, model.waiting),
        "{:.1f}": (model.tokens_per_second,),
        "{:.2f}": (model.tokens_per_step,),
        "{:.0%}": (model.reused, model.cache_used),
    }
    return ["-" if value is None else form.format(value) for form, values in shown.items() for value in values]
