"""`outrider bench`: the commands. Heavy imports happen inside them, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from server.command import EXTRA_FLAGS, fail

app = typer.Typer(help="Measure.", no_args_is_help=True)
BENCH_PROMPTS = Path(__file__).parent / "prompts.jsonl"

Prompts = Annotated[Path, typer.Option(help="A .jsonl or .jsonl.gz file with a field `prompt`.")]
Temperatures = Annotated[str, typer.Option(help="Temperatures, separated by commas.")]
Limit = Annotated[int | None, typer.Option(help="Use only so many prompts.")]
MaxTokens = Annotated[int, typer.Option(min=1)]
Repeats = Annotated[int, typer.Option(min=1)]
Config = Annotated[Path | None, typer.Option(help="A settings file.")]
Out = Annotated[Path | None, typer.Option(help="Save the figures as JSON.")]


@contextmanager
def one_sentence() -> Iterator[None]:
    """An error that says what is wrong ends the command with that sentence."""
    from bench.decode import BenchError
    from drafters.tables.array_file import ArrayFileError
    from server.settings import SettingsError
    from verify.errors import ModelError

    try:
        yield
    except (SettingsError, BenchError, ModelError, ArrayFileError) as error:
        raise fail(str(error)) from None


@app.command("decode", context_settings=EXTRA_FLAGS)
def bench_decode(
    context: typer.Context,
    prompts: Prompts = BENCH_PROMPTS,
    drafter: Annotated[str, typer.Option(help="Names, separated by commas; taken in turn.")] = "none,trigram,fusion",
    temperature: Temperatures = "0,0.8",
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    repeats: Repeats = 5,
    config: Config = None,
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
    from bench.model.steps import run_forced, run_steps
    from server.settings import load_settings, parse_flags

    with one_sentence():
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


@app.command("api")
def bench_api(out: Out = None) -> None:
    """What the front end's own work costs, per request and per chunk; no model."""
    from bench.http.api import run

    run(out)


@app.command("replay", context_settings=EXTRA_FLAGS)
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
    from server.settings import load_settings, parse_flags

    with one_sentence():
        options = load_settings(None, parse_flags(context.args)).speculation.options
        budgets = [int(value) for value in nodes.split(",") if value.isdigit()]
        if len(budgets) != len(nodes.split(",")):
            raise BenchError(f"--nodes takes whole numbers separated by commas, not {nodes!r}.")
        run(stream, tokenizer, parse_names(drafter), corpus or [], budgets, limit, options, json, plot)


@app.command("pearl", context_settings=EXTRA_FLAGS)
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
    config: Config = None,
    out: Out = None,
) -> None:
    """A draft model's sequences, trees, graphs and PEARL, in one run; settings also work as flags."""
    from bench.decode import BenchError, make_plan
    from bench.model.draft_models import run, run_shapes
    from bench.pearl_simulation import run_simulation
    from server.settings import load_settings, parse_flags

    with one_sentence():
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


@app.command("serve", context_settings=EXTRA_FLAGS)
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
    config: Config = None,
    out: Out = None,
    plot: Annotated[Path | None, typer.Option(help="Of a load: save a plot as PNG.")] = None,
) -> None:
    """What a client sees: first token, tokens per second, /health meanwhile; with --rate or --concurrency, under load."""
    from bench.decode import make_plan
    from bench.http.load import Load
    from bench.http.load import run as run_load
    from bench.http.serve import run, server
    from server.settings import load_settings, parse_flags

    with one_sentence():
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


@app.command("datastore")
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

    with one_sentence():
        run(paths, tokenizer or str(models.TARGET), prompts, limit, out)
