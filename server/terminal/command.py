"""The command `outrider chat`. Heavy imports happen inside it, to keep --help fast."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from outrider.server.command import ConfigOption, fail, failing

if TYPE_CHECKING:
    from outrider.server.terminal.chat import Chat
    from outrider.server.terminal.own_server import OwnServer

URL = "http://127.0.0.1:8000"
# The exit code of a program that Ctrl-C has ended.
INTERRUPTED = 130


def chat(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help=f"Address of a running server; default: {URL}.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Start a server with this model for the chat: a local folder or a Hugging Face id.")
    ] = None,
    config: ConfigOption = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key of the server; default: OPENAI_API_KEY, for a server that --url names.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter; default: the server's.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed, with which answers are repeated; default: a new seed for each answer.")
    ] = None,
) -> None:
    """Chat with a model in the terminal. With --model, all settings of `outrider serve` also work as flags."""
    from outrider.server.terminal.chat import Chat
    from outrider.server.terminal.client import ChatError, Client

    if model is None and (config or context.args):
        raise fail("Settings are for a server that the chat starts; give it a --model, or leave them out.")
    for ending in (signal.SIGTERM, signal.SIGHUP):  # else they would end the chat without its server
        signal.signal(ending, end)
    try:
        with ExitStack() as stack:
            server = None if model is None else stack.enter_context(closing(start(model, config, context.args)))
            client = server.wait_until_ready() if server else Client(url or URL, api_key or own_key(url))
            conversation = Chat(client, client.model(), drafter=drafter, seed=seed)
            if server:
                conversation.check = server.check
            talk(conversation)
    except ChatError as error:
        raise (fail(str(error)) if str(error) else typer.Exit(2)) from None  # the server has said why it cannot start
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def own_key(url: str | None) -> str | None:
    """The key in the environment, for the server that the user names: anybody may listen at the default address."""
    return os.environ.get("OPENAI_API_KEY") if url else None


def start(model: str, config: Path | None, arguments: list[str]) -> OwnServer:
    """A server for the chat, with these settings as flags."""
    from outrider.server.settings import SettingsError, load_settings, parse_flags
    from outrider.server.terminal.own_server import OwnServer

    with failing(SettingsError):
        flags = parse_flags(arguments) | {"model.path": model}
        load_settings(config, flags)  # for its errors
    return OwnServer(config, flags)


def talk(chat: Chat) -> None:
    """Runs the chat on this terminal. Raises ChatError."""
    from outrider.server.terminal.chat import line_reader, show
    from outrider.server.terminal.client import one_line

    read = line_reader()
    if sys.stdin.isatty():
        show(f"{one_line(chat.model)} at {chat.client.url}; /help lists the commands, Ctrl-D ends the chat.\n")
    chat.run(read)
    if sys.stdin.isatty():
        show("\n")


def end(number: int, _: object) -> NoReturn:
    """Ends the program with the code of a program that this signal has ended, after its clean-up."""
    sys.exit(128 + number)
