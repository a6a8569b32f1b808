"""The `outrider` command. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bench import cli as bench
from bench.plan import PROMPTS
from server.command import EXTRA_FLAGS, fail

app = typer.Typer(
    help="Low-latency LLM server: training-free drafts, exact verification.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
datastore = typer.Typer(help="Build and inspect the tables that drafters read.", no_args_is_help=True)
app.add_typer(datastore, name="datastore")
app.add_typer(bench.app, name="bench")


@app.command(context_settings=EXTRA_FLAGS)
def serve(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file; configs/ has examples.")] = None,
    model: Annotated[str | None, typer.Option(help="Local folder or Hugging Face id.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="A smaller model of the same family, to draft with.")] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="fusion, trigram, retrieval, lookup, lookahead, prediction or none; with a draft model also draft, "
            "draft-tree, draft-graph and pearl."
        ),
    ] = None,
    host: Annotated[str | None, typer.Option()] = None,
    port: Annotated[int | None, typer.Option()] = None,
) -> None:
    """Serve a model. Any setting also works as a flag: --section.name VALUE."""
    from server.settings import SettingsError, load_settings, parse_flags

    named: dict[str, Any] = {
        "model.path": model,
        "draft_model.path": draft_model,
        "speculation.drafter": drafter,
        "server.host": host,
        "server.port": port,
    }
    try:
        flags = parse_flags(context.args) | {name: value for name, value in named.items() if value is not None}
        settings = load_settings(config, flags)
    except SettingsError as error:
        raise fail(str(error)) from None
    from server.serve import run  # takes seconds, which a wrong flag need not wait for

    raise typer.Exit(run(settings))


@app.command("verify-lossless", context_settings=EXTRA_FLAGS)
def verify_lossless(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file; configs/ has examples.")] = None,
    model: Annotated[str | None, typer.Option(help="Local folder or Hugging Face id.")] = None,
    drafter: Annotated[str, typer.Option(help="Names, separated by commas.")] = "fusion",
    prompts: Annotated[Path, typer.Option(help="A .jsonl or .jsonl.gz file with a field `prompt`.")] = PROMPTS,
    temperature: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0,0.8",
    limit: Annotated[int | None, typer.Option(min=1, help="Use only so many prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
) -> None:
    """Compare drafted answers with plain decoding's. Exit code 1 where one differs. Settings also work as flags."""
    from bench.lossless import run
    from bench.plan import BenchError, make_plan
    from drafters.tables.array_file import ArrayFileError
    from server.settings import SettingsError, load_settings, parse_flags
    from verify.errors import ModelError

    try:
        settings = load_settings(config, parse_flags(context.args) | ({"model.path": model} if model else {}))
        plan = make_plan(drafter, prompts, limit, temperature, max_tokens, 1)
        found = run(settings, plan)
    except (SettingsError, BenchError, ModelError, ArrayFileError) as error:
        raise fail(str(error)) from None
    raise typer.Exit(1 if found else 0)


@datastore.command("build")
def datastore_build(
    paths: Annotated[list[Path], typer.Argument(help="Text (.txt, .py, .md ...), .jsonl (field `text`), or folders of them.")],
    out: Annotated[Path, typer.Option(help="The file (ngram) or folder (suffix) to write.")],
    tokenizer: Annotated[str, typer.Option(help="Folder or Hugging Face id; default: the embedded model's.")] = "",
    kind: Annotated[str, typer.Option(help="ngram: base table of `trigram`; suffix: index of `retrieval`.")] = "ngram",
    successors: Annotated[int, typer.Option(min=1, max=64, help="ngram: kept per context (the paper's t).")] = 12,
    max_megabytes: Annotated[float | None, typer.Option(help="ngram: leave out rare contexts until the file fits.")] = None,
    order: Annotated[int, typer.Option(min=2, max=4, help="ngram: 3 = tri-grams.")] = 3,
    append: Annotated[bool, typer.Option(help="suffix: add to an existing datastore.")] = False,
) -> None:
    """Build a table from a corpus. An interrupted suffix build goes on where it was when the command is given again."""
    import models
    from server.datastore import DatastoreError, build_ngram, build_suffix

    tokenizer = tokenizer or str(models.TARGET)
    try:
        if kind == "ngram":
            contexts = build_ngram(paths, out, tokenizer, successors, max_megabytes, order)
            print(f"{out}: {contexts} contexts, {out.stat().st_size / 1e6:.1f} MB")
        elif kind == "suffix":
            made = build_suffix(paths, out, tokenizer, append)
            print(f"{out}: {made.documents} documents, {made.tokens} tokens, {made.bytes / 1e6:.1f} MB")
        else:
            raise DatastoreError(f"There is no datastore kind {kind!r}; use ngram or suffix.")
    except DatastoreError as error:
        raise fail(str(error)) from None


@datastore.command("merge")
def datastore_merge(
    folders: Annotated[list[Path], typer.Argument(help="Suffix datastores built with one tokenizer.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
) -> None:
    """Make one datastore of several."""
    from server.datastore import DatastoreError, merge

    try:
        made = merge(out, folders)
    except DatastoreError as error:
        raise fail(str(error)) from None
    print(f"{out}: {made.documents} documents, {made.tokens} tokens, {made.bytes / 1e6:.1f} MB")


@datastore.command("info")
def datastore_info(path: Annotated[Path, typer.Argument(help="A datastore folder or an n-gram table.")]) -> None:
    """Print what a table holds."""
    from server.datastore import DatastoreError, describe

    try:
        for name, value in describe(path).items():
            print(f"{name}: {value}")
    except DatastoreError as error:
        raise fail(str(error)) from None


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
