"""Shared by all commands: settings as flags, and errors as one sentence."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

EXTRA_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}

ConfigOption = Annotated[Path | None, typer.Option(help="YAML file of settings; configs/ has examples.")]
ModelOption = Annotated[str | None, typer.Option(help="Local folder, Hugging Face id or GGUF file. Short for --model.path.")]


class SettingsCommand(TyperCommand):
    """A command that takes every setting as a flag: its help lists them, and the shell completes them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from rich.console import Console

        from outrider.server.settings.printing import print_reference

        print_reference(Console())

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)
        return [*parameters, *_completed_options()] if ctx.resilient_parsing else parameters


def fail(message: str) -> typer.Exit:
    """Prints `message` to stderr and returns the exception to raise: exit code 2."""
    print(f"outrider: {message}", file=sys.stderr)
    return typer.Exit(2)


@contextmanager
def failing(*errors: type[Exception]) -> Iterator[None]:
    """Ends the command with the sentence of one of these errors."""
    try:
        yield
    except errors as error:
        raise fail(str(error)) from None


def _completed_options() -> list[Any]:
    """The settings as options, with their choices. Only shell completion uses them: flags are parsed by `parse_flags`."""
    from outrider.server.settings.reference import Setting, sections

    def choices(setting: Setting) -> Callable[[str], list[str]]:
        return lambda incomplete: [choice for choice in setting.choices if choice.startswith(incomplete)]

    def command() -> None: ...

    settings = [setting for section in sections() for setting in section.settings]
    annotations = {
        setting.name.replace(".", "_"): Annotated[
            str, typer.Option(f"--{setting.name}", help=setting.description, autocompletion=choices(setting))
        ]
        for setting in settings
    }
    command.__annotations__ = annotations
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default="", annotation=annotation)
            for name, annotation in annotations.items()
        ]
    )
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return [parameter for parameter in typer.main.get_command(app).params if parameter.name != "help"]
