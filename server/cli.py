"""The `outrider` command. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Low-latency LLM server: training-free drafts, exact verification.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
datastore = typer.Typer(help="Build and inspect the tables that drafters read.", no_args_is_help=True)
bench = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(datastore, name="datastore")
app.add_typer(bench, name="bench")

BENCH_PROMPTS = Path(__file__).parent.parent / "bench" / "prompts.jsonl"
EXTRA_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def fail(message: str) -> typer.Exit:
    """Prints one sentence to stderr; raise the result."""
    print(f"outrider: {message}", file=sys.stderr)
    return typer.Exit(2)


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
    prompts: Annotated[Path, typer.Option(help="A .jsonl or .jsonl.gz file with a field `prompt`.")] = BENCH_PROMPTS,
    temperature: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0,0.8",
    limit: Annotated[int | None, typer.Option(min=1, help="Use only so many prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
) -> None:
    """Compare drafted answers with plain decoding's. Exit code 1 where one differs. Settings also work as flags."""
    from bench.decode import BenchError, make_plan
    from bench.lossless import run
    from drafters.array_file import ArrayFileError
    from server.settings import SettingsError, load_settings, parse_flags
    from verify.model import ModelError

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


Prompts = Annotated[Path, typer.Option(help="A .jsonl or .jsonl.gz file with a field `prompt`.")]
Temperatures = Annotated[str, typer.Option(help="Temperatures, separated by commas.")]
Limit = Annotated[int | None, typer.Option(help="Use only so many prompts.")]
MaxTokens = Annotated[int, typer.Option(min=1)]
Repeats = Annotated[int, typer.Option(min=1)]
Out = Annotated[Path | None, typer.Option(help="Save the figures as JSON.")]


@bench.command("decode", context_settings=EXTRA_FLAGS)
def bench_decode(
    context: typer.Context,
    prompts: Prompts = BENCH_PROMPTS,
    drafter: Annotated[str, typer.Option(help="Names, separated by commas; taken in turn.")] = "none,trigram,fusion",
    temperature: Temperatures = "0,0.8",
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    repeats: Repeats = 5,
    config: Annotated[Path | None, typer.Option()] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also transformers' generate: plain, prompt lookup, assistant.")
    ] = False,
    draft_model: Annotated[str | None, typer.Option(help="The assistant of --peers; default: the embedded one's.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Random weights of a known shape, such as llama-2-7b: what steps cost.")
    ] = None,
    forced: Annotated[Path | None, typer.Option(help="With --shape: a recorded stream whose answers are emitted.")] = None,
    tokenizer: Annotated[str, typer.Option(help="Of --forced: a folder, a hub id, or a sentencepiece .model file.")] = "",
    corpus: Annotated[list[Path] | None, typer.Option(help="Of --forced: texts to index first.")] = None,
    out: Out = None,
) -> None:
    """Tokens per second and per step, in process; settings also work as flags."""
    from bench.decode import BenchError, make_plan, parse_names, run
    from bench.steps import run_forced, run_steps
    from drafters.array_file import ArrayFileError
    from server.settings import SettingsError, load_settings, parse_flags
    from verify.model import ModelError

    try:
        settings = load_settings(config, parse_flags(context.args))
        if forced and not (shape and tokenizer):
            raise BenchError("--forced needs --shape and --tokenizer.")
        if shape and forced:
            run_forced(shape, settings, forced, tokenizer, corpus or [], parse_names(drafter), limit, repeats, out)
        elif shape:
            run_steps(shape, settings, out)
        else:
            plan = make_plan(drafter, prompts, limit, temperature, max_tokens, repeats)
            run(settings, plan, out, peers, draft_model)
    except (SettingsError, BenchError, ModelError, ArrayFileError) as error:
        raise fail(str(error)) from None


@bench.command("api")
def bench_api(out: Out = None) -> None:
    """What the front end's own work costs, per request and per chunk; no model."""
    from bench.api import run

    run(out)


@bench.command("replay", context_settings=EXTRA_FLAGS)
def bench_replay(
    context: typer.Context,
    stream: Annotated[list[Path], typer.Option(help="A .jsonl file with `prompt` and `response`; may be given again.")],
    tokenizer: Annotated[str, typer.Option(help="A folder, a hub id, or a sentencepiece .model file.")],
    drafter: Annotated[str, typer.Option(help="Names, separated by commas.")] = "none,trigram,retrieval,lookup,fusion",
    corpus: Annotated[list[Path] | None, typer.Option(help="Texts to index first; may be given again.")] = None,
    nodes: Annotated[str, typer.Option(help="Node budgets, separated by commas.")] = "16,64",
    limit: Limit = None,
    json: Annotated[Path | None, typer.Option(help="Save the figures as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Save a plot as PNG.")] = None,
) -> None:
    """Drafters against recorded answers: tokens per step, with no model. Settings also work as flags."""
    from bench.decode import BenchError, parse_names
    from bench.replay import run
    from server.settings import SettingsError, load_settings, parse_flags

    try:
        options = load_settings(None, parse_flags(context.args)).speculation.options
        budgets = [int(value) for value in nodes.split(",") if value.isdigit()]
        if len(budgets) != len(nodes.split(",")):
            raise BenchError(f"--nodes takes whole numbers separated by commas, not {nodes!r}.")
        run(stream, tokenizer, parse_names(drafter), corpus or [], budgets, limit, options, json, plot)
    except (SettingsError, BenchError) as error:
        raise fail(str(error)) from None


@bench.command("pearl", context_settings=EXTRA_FLAGS)
def bench_pearl(
    context: typer.Context,
    simulate: Annotated[bool, typer.Option("--simulate", help="Models that only sleep, against theory.")] = False,
    tokens: Annotated[int, typer.Option(help="With --simulate: tokens of each run.", min=10)] = 800,
    token_ms: Annotated[float, typer.Option(help="With --simulate: the draft model's time for a token.", min=0.01)] = 10.0,
    draft_model: Annotated[str | None, typer.Option(help="Folder or Hugging Face id.")] = None,
    shape: Annotated[str | None, typer.Option(help="Random weights of a known shape as the target.")] = None,
    draft_shape: Annotated[str | None, typer.Option(help="And as the draft model.")] = None,
    acceptance: Annotated[float, typer.Option(help="With --shape: how often the draft model is right.", min=0, max=1)] = 0.8,
    prompts: Prompts = BENCH_PROMPTS,
    temperature: Temperatures = "0,0.8",
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    repeats: Repeats = 5,
    config: Annotated[Path | None, typer.Option()] = None,
    out: Out = None,
) -> None:
    """A draft model's sequences, trees, graphs and PEARL, in one run; settings also work as flags."""
    from bench.decode import BenchError, make_plan
    from bench.drafting import run, run_shapes
    from bench.pearl import run_simulation
    from drafters.array_file import ArrayFileError
    from server.settings import SettingsError, load_settings, parse_flags
    from verify.model import ModelError

    try:
        if simulate:
            run_simulation(tokens, token_ms, out)
            return
        named = {} if draft_model is None else {"draft_model.path": draft_model}
        settings = load_settings(config, parse_flags(context.args) | named)
        plan = make_plan("none", prompts, limit, temperature, max_tokens, repeats)
        if shape or draft_shape:
            if not (shape and draft_shape):
                raise BenchError("--shape and --draft-shape go together.")
            run_shapes(settings, plan, (shape, draft_shape), acceptance, out)
        else:
            run(settings, plan, out)
    except (SettingsError, BenchError, ModelError, ArrayFileError) as error:
        raise fail(str(error)) from None


@bench.command("serve", context_settings=EXTRA_FLAGS)
def bench_serve(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Option(help="A running server; default: one of our own, compared with in-process.")
    ] = None,
    rate: Annotated[str, typer.Option(help="Open loop: requests a second, separated by commas.")] = "",
    concurrency: Annotated[str, typer.Option(help="Closed loop: clients, separated by commas.")] = "",
    seconds: Annotated[float, typer.Option(help="Of each rate and concurrency.", min=0.1)] = 30.0,
    sessions: Annotated[float, typer.Option(help="Share of the load that belongs to sessions.", min=0, max=1)] = 0.0,
    target_ms: Annotated[float, typer.Option(help="Goodput counts answers whose first token came within this.")] = 200.0,
    key: Annotated[str | None, typer.Option(help="The server's API key.", envvar="OPENAI_API_KEY")] = None,
    prompts: Prompts = BENCH_PROMPTS,
    drafter: Annotated[str, typer.Option()] = "fusion",
    temperature: Temperatures = "0,0.8",
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    repeats: Repeats = 5,
    config: Annotated[Path | None, typer.Option()] = None,
    out: Out = None,
    plot: Annotated[Path | None, typer.Option(help="Of a load: save a plot as PNG.")] = None,
) -> None:
    """What a client sees: first token, tokens per second, /health meanwhile; with --rate or --concurrency, under load."""
    from bench.decode import BenchError, make_plan
    from bench.load import Load
    from bench.load import run as run_load
    from bench.serve import run, server
    from server.settings import SettingsError, load_settings, parse_flags

    try:
        plan = make_plan(drafter, prompts, limit, temperature, max_tokens, repeats)
        flags = [*([] if config is None else ["--config", str(config)]), *context.args]
        settings = load_settings(config, parse_flags(context.args))
        if not (rate or concurrency):
            run(settings, flags, plan, url, out)
            return
        load = Load(plan.prompts, seconds, max_tokens, plan.temperatures[-1], drafter, sessions, target_ms, key)
        rates, clients = numbers("--rate", rate), [int(count) for count in numbers("--concurrency", concurrency)]
        if url:
            run_load(url, load, rates, clients, out, plot)
        else:
            with server(flags) as own:
                run_load(own.url, load, rates, clients, out, plot)
    except (SettingsError, BenchError) as error:
        raise fail(str(error)) from None


def numbers(flag: str, given: str) -> list[float]:
    """Numbers above 0, separated by commas. Raises BenchError."""
    from bench.decode import BenchError

    try:
        found = [float(value) for value in given.split(",")] if given else []
    except ValueError:
        found = [0.0]
    if any(not value > 0 for value in found):
        raise BenchError(f"{flag} takes numbers above 0, separated by commas, not {given!r}.")
    return found


@bench.command("datastore")
def bench_datastore(
    paths: Annotated[list[Path], typer.Argument(help="Texts to index.")],
    tokenizer: Annotated[str, typer.Option(help="Folder or Hugging Face id; default: the embedded model's.")] = "",
    prompts: Prompts = BENCH_PROMPTS,
    limit: Limit = None,
    out: Out = None,
) -> None:
    """What a datastore takes: memory and time to build, to open, to answer."""
    import models
    from bench.datastore import run
    from bench.decode import BenchError
    from verify.model import ModelError

    try:
        run(paths, tokenizer or str(models.TARGET), prompts, limit, out)
    except (BenchError, ModelError) as error:
        raise fail(str(error)) from None


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
