"""The command `outrider launch`. Heavy imports happen inside it, to keep --help fast."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from outrider.server.command import EXTRA_FLAGS, ConfigOption, fail
from outrider.server.terminal.command import INTERRUPTED, URL, end, own_key, start

if TYPE_CHECKING:
    from outrider.server.launch.programs import Program, Server

REST = "outrider.launch.rest"
# Other names could end a quoted text in a program's configuration.
MODEL_NAME = re.compile(r"[\w.:/@+ -]+")
# The context of a model that is one of several and not loaded yet.
UNLOADED_CONTEXT_TOKENS = 32_768


class LaunchCommand(TyperCommand):
    """A command that keeps what follows `--` for the program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[REST] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


def register(outrider: typer.Typer) -> None:
    """Adds the command to the `outrider` application."""
    outrider.command("launch", cls=LaunchCommand, context_settings=EXTRA_FLAGS)(launch)


def launch(
    context: typer.Context,
    program: Annotated[str | None, typer.Argument(help="Name of the program; without one, all are listed.")] = None,
    url: Annotated[str | None, typer.Option(help=f"Address of a running server; default: {URL}.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model, in the forms of model.path: started for the program unless the server has it.")
    ] = None,
    config: ConfigOption = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key of the server; default: OPENAI_API_KEY, for a server that --url names.")
    ] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print what would be run, to be pasted into a shell.")] = False,
) -> None:
    """Start an agent or a chat program with a running server, or with one started for it: `outrider launch pi -- -p "Hello"`.

    What follows -- belongs to the program. With --model, all settings of `outrider serve` also work as flags.
    """
    from outrider.server.launch.programs import read_programs
    from outrider.server.terminal.client import ChatError

    programs = read_programs()
    if program is None:
        return list_programs(programs.values())
    if program not in programs:
        raise fail(f"There is no program {program!r}; choose one of {', '.join(programs)}.")
    chosen = programs[program]
    if model is None and (config or context.args):
        raise fail(f"{program}'s own arguments follow --, and settings need a --model: outrider launch {program} -- ...")
    if not (only_print or shutil.which(chosen.command[0])):
        raise fail(f"{program} is not installed; install it with: {chosen.install}")
    for ending in (signal.SIGTERM, signal.SIGHUP):  # else they would end this process without its server
        signal.signal(ending, end)
    try:
        with ExitStack() as stack:
            server = None if context.args or config else running(url, api_key, model, program)
            if server is None and only_print:
                raise fail(f"No server has the model {model}; start one first: outrider serve --model {model}")
            server = server or started(stack, str(model), config, context.args)
            raise typer.Exit(run(stack, chosen, server, context.meta[REST], only_print))
    except ChatError as error:
        raise (fail(str(error)) if str(error) else typer.Exit(2)) from None  # the server has said why it cannot start
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def list_programs(programs: Iterable[Program]) -> None:
    """Prints the programs, and how those are installed that are missing."""
    from rich.console import Console
    from rich.table import Table

    table = Table("program", "installed", box=None)
    for each in programs:
        table.add_row(each.name, shutil.which(each.command[0]) or f"no; install it with: {each.install}")
    Console().print(table)


def running(url: str | None, api_key: str | None, model: str | None, program: str) -> Server | None:
    """The server that runs. None if it has not this model, or does not run, and --url does not name it. Raises ChatError."""
    from outrider.server.terminal.client import ChatError, Client, NoServer

    key = api_key or own_key(url)
    client = Client(url or URL, key)
    if client.url.startswith("unix:"):
        raise ChatError(f"{program} cannot use a UNIX socket; give --url the HTTP address of a proxy in front of it.")
    try:
        cards = client.cards()
    except ChatError as error:
        if model is not None and url is None:
            return None
        if not isinstance(error, NoServer):
            raise
        raise ChatError(
            f"No server answers at {client.url}; start one with `outrider serve`, or name a model that launch starts: "
            f"outrider launch {program} --model MODEL"
        ) from None
    names = [str(card["id"]) for card in cards]
    wanted = names[0] if model is None else model if model in names else Path(model).name.removesuffix(".gguf")
    if wanted in names:
        return described(client.url, cards[names.index(wanted)], key)
    if url is None:
        return None
    raise ChatError(f"The server at {client.url} has no model {model}, but {', '.join(names)}.")


def started(stack: ExitStack, model: str, config: Path | None, arguments: list[str]) -> Server:
    """A server of the program's own, which ends with `stack`. Raises ChatError."""
    own = stack.enter_context(closing(start(model, config, arguments)))
    client = own.wait_until_ready()
    return described(client.url, client.cards()[0], own.key)


def described(url: str, card: Mapping[str, Any], key: str | None) -> Server:
    """A server by the entry of /v1/models. Raises ChatError for a name that would end the quotes around it."""
    from outrider.server.launch.programs import Server
    from outrider.server.terminal.client import ChatError

    if not MODEL_NAME.fullmatch(str(card["id"])):
        raise ChatError(f"The model's name {card['id']!r} has characters that programs may misread; set model.name.")
    told = card.get("max_model_len")
    return Server(url, str(card["id"]), told if isinstance(told, int) and told > 0 else UNLOADED_CONTEXT_TOKENS, key or "none")


def run(stack: ExitStack, program: Program, server: Server, arguments: list[str], only_print: bool) -> int:
    """Runs the program, or prints what would be run; returns the exit code. The files stay only if they are printed."""
    from outrider.server.launch.programs import prepare

    prefix = f"outrider-{program.name}-"
    if only_print:
        folder = tempfile.mkdtemp(prefix=prefix) if program.files else ""
        print(prepare(program, server, Path(folder), arguments).shell())
        return 0
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True))
    prepared = prepare(program, server, Path(folder), arguments)
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the program's, which gets it, too
    process = subprocess.Popen(prepared.command, env=os.environ | prepared.environment)
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    return code if code >= 0 else 128 - code
