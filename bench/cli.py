"""The commands `outrider bench ...`, `outrider verify-lossless` and `outrider verify-quality`.

Heavy imports happen inside them, to keep --help fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.live.command import bench_live
from bench.options import (
    Config,
    Corpus,
    Drafters,
    Limit,
    MaxTokens,
    Out,
    Plot,
    Prompts,
    Repeats,
    StreamTokenizer,
    Temperatures,
    TextTokenizer,
    errors_as_sentences,
)
from bench.plan import PROMPTS
from outrider.server.command import EXTRA_FLAGS

app = typer.Typer(help="Measure speed, cost and load.", no_args_is_help=True)


app.command("live", context_settings=EXTRA_FLAGS)(bench_live)


def register(outrider: typer.Typer) -> None:
    """Adds the commands of this package to the `outrider` application."""
    outrider.add_typer(app, name="bench")
    outrider.command("verify-lossless", context_settings=EXTRA_FLAGS)(verify_lossless)
    outrider.command("verify-quality", context_settings=EXTRA_FLAGS)(verify_quality)


def verify_lossless(
    context: typer.Context,
    config: Config = None,
    model: Annotated[str | None, typer.Option(help="Local folder or Hugging Face id.")] = None,
    drafter: Drafters = "fusion",
    prompts: Prompts = PROMPTS,
    temperature: Temperatures = "0,0.8",
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
) -> None:
    """Compare drafted answers with plain decoding. Exit code 1 if one differs. Settings also work as flags."""
    from bench.lossless import run
    from bench.plan import make_plan
    from outrider.server.settings import load_settings, parse_flags

    with errors_as_sentences():
        settings = load_settings(config, parse_flags(context.args) | ({"model.path": model} if model else {}))
        plan = make_plan(drafter, prompts, limit, temperature, max_tokens, repeats=1)
        divergences = run(settings, plan)
    raise typer.Exit(1 if divergences else 0)


def verify_quality(
    context: typer.Context,
    text: Annotated[Path, typer.Option(help="A text in UTF-8.")],
    config: Config = None,
    model: Annotated[str | None, typer.Option(help="Local folder, Hugging Face id or GGUF file.")] = None,
    window: Annotated[int, typer.Option(help="Tokens that are read together.", min=2)] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens of the text that are read.", min=2)] = 8192,
    out: Out = None,
) -> None:
    """Compare a model in --model.quantize int8, int4 or fp8 with its full weights, on a text. Settings also work as flags."""
    from bench.quality import run
    from outrider.server.settings import load_settings, parse_flags

    with errors_as_sentences():
        settings = load_settings(config, parse_flags(context.args) | ({"model.path": model} if model else {}))
        run(settings, text, window, tokens, out)


@app.command("decode", context_settings=EXTRA_FLAGS)
def bench_decode(
    context: typer.Context,
    prompts: Prompts = PROMPTS,
    drafter: Drafters = "none,trigram,fusion",
    temperature: Temperatures = "0,0.8",
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    repeats: Repeats = 5,
    config: Config = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also measure transformers' generate: plain, prompt lookup, assistant.")
    ] = False,
    draft_model: Annotated[str | None, typer.Option(help="Assistant of --peers; default: the embedded draft model.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Measure steps of random weights of this shape, such as llama-2-7b.")
    ] = None,
    forced: Annotated[Path | None, typer.Option(help="With --shape: emit the recorded answers of this stream.")] = None,
    streams: Annotated[
        str, typer.Option(help="With --forced: numbers of answers to decode at once, such as 1,4,8; with the first drafter.")
    ] = "",
    tokenizer: StreamTokenizer = "",
    corpus: Corpus = None,
    out: Out = None,
) -> None:
    """Measure tokens per second and per step, in process. Settings also work as flags."""
    from bench.plan import BenchError, make_plan, parse_counts, parse_drafters
    from bench.recordings import Recordings
    from outrider.server.settings import load_settings, parse_flags

    with errors_as_sentences():
        settings = load_settings(config, parse_flags(context.args))
        if forced:
            if not (shape and tokenizer):
                raise BenchError("--forced needs --shape and --tokenizer.")
            recordings = Recordings([forced], tokenizer, corpus or [], limit)
            if streams:
                from bench.model.streams import run_streams

                counts = parse_counts("--streams", streams)
                run_streams(shape, settings, recordings, parse_drafters(drafter)[0], counts, max_tokens, repeats, out)
            else:
                from bench.model.forced import run_forced

                run_forced(shape, settings, recordings, parse_drafters(drafter), repeats, out)
        elif shape:
            from bench.model.steps import run_steps

            run_steps(shape, settings, out)
        else:
            plan = make_plan(drafter, prompts, limit, temperature, max_tokens, repeats)
            from bench.decode import run

            run(settings, plan, out, peers, draft_model)


@app.command("api")
def bench_api(out: Out = None) -> None:
    """Measure the front end's own cost per request and per chunk, without a model."""
    from bench.http.api import run

    run(out)


@app.command("replay", context_settings=EXTRA_FLAGS)
def bench_replay(
    context: typer.Context,
    stream: Annotated[list[Path], typer.Option(help="A .jsonl file with `prompt` and `response`; repeatable.")],
    tokenizer: StreamTokenizer,
    drafter: Drafters = "none,trigram,retrieval,lookup,fusion",
    corpus: Corpus = None,
    nodes: Annotated[str, typer.Option(help="Node budgets, separated by commas.")] = "16,64",
    limit: Limit = None,
    json: Out = None,
    plot: Plot = None,
) -> None:
    """Replay recorded answers: tokens per step of drafters, without a model. Settings also work as flags."""
    from bench.plan import parse_counts, parse_drafters
    from bench.recordings import Recordings
    from bench.replay import run
    from outrider.server.settings import load_settings, parse_flags

    with errors_as_sentences():
        options = load_settings(None, parse_flags(context.args)).speculation.options
        recordings = Recordings(stream, tokenizer, corpus or [], limit)
        run(recordings, parse_drafters(drafter), parse_counts("--nodes", nodes), options, json, plot)


@app.command("ablations")
def bench_ablations(
    chat: Annotated[Path | None, typer.Option(help="Recorded answers of a chat model, as for `replay`.")] = None,
    code: Annotated[Path | None, typer.Option(help="Recorded answers of a code model.")] = None,
    corpus: Corpus = None,
    tokenizer: StreamTokenizer = "",
    every: Annotated[int, typer.Option(help="Use one in this many pairs of recorded answers.", min=1)] = 1,
    limit: Limit = 12,
    max_tokens: MaxTokens = 128,
    only: Annotated[str | None, typer.Option(help="Names of ablations, separated by commas.")] = None,
    timed: Annotated[bool, typer.Option(help="Also measure figures that depend on what else the machine does.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Measure as little as possible, to see that it works.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also measure what the folder has.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of ablations.json and the plots.")] = Path("bench/results"),
) -> None:
    """Repeat the tables and figures of the papers, as far as the data and models that are here allow."""
    from bench.ablations.material import Recordings
    from bench.ablations.run import choose, run
    from bench.ablations.size import QUICK, Size
    from bench.plan import BenchError

    with errors_as_sentences():
        if any((chat, code, corpus, tokenizer)) and not (chat and code and corpus and tokenizer):
            raise BenchError("Recorded answers need all of --chat, --code, --corpus and --tokenizer.")
        recordings = Recordings(chat, code, corpus, tokenizer) if chat and code and corpus else None
        chosen = choose(only, recordings is not None, timed)
        out.mkdir(parents=True, exist_ok=True)
        size = QUICK if quick else Size(every, prompts=limit or 12, max_tokens=max_tokens)
        run(size, recordings, chosen, out, again or (only is not None))


@app.command("pearl", context_settings=EXTRA_FLAGS)
def bench_pearl(
    context: typer.Context,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Compare PEARL's loop over sleeping models with theory.")
    ] = False,
    tokens: Annotated[int, typer.Option(help="With --simulate: tokens per run.", min=10)] = 800,
    token_ms: Annotated[float, typer.Option(help="With --simulate: milliseconds per draft token.", min=0.01)] = 10.0,
    draft_model: Annotated[str | None, typer.Option(help="Folder or Hugging Face id.")] = None,
    shape: Annotated[str | None, typer.Option(help="Random weights of this shape as the target.")] = None,
    draft_shape: Annotated[str | None, typer.Option(help="Random weights of this shape as the draft model.")] = None,
    acceptance: Annotated[
        float, typer.Option(help="With --shape: share of the draft model's tokens that are right.", min=0, max=1)
    ] = 0.8,
    prompts: Prompts = PROMPTS,
    temperature: Temperatures = "0,0.8",
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    repeats: Repeats = 5,
    config: Config = None,
    out: Out = None,
) -> None:
    """Compare drafting with a model: chains, trees, graphs and PEARL. Settings also work as flags."""
    from bench.plan import BenchError, make_plan
    from outrider.server.settings import load_settings, parse_flags

    with errors_as_sentences():
        if simulate:
            from bench.pearl_simulation import run_simulation

            run_simulation(tokens, token_ms, out)
            return
        named = {} if draft_model is None else {"draft_model.path": draft_model}
        settings = load_settings(config, parse_flags(context.args) | named)
        plan = make_plan("none", prompts, limit, temperature, max_tokens, repeats)
        from bench.model.draft_models import run, run_shapes

        if shape and draft_shape:
            run_shapes(settings, plan, (shape, draft_shape), acceptance, out)
        elif shape or draft_shape:
            raise BenchError("Give both --shape and --draft-shape.")
        else:
            run(settings, plan, out)


@app.command("serve", context_settings=EXTRA_FLAGS)
def bench_serve(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="A running server; default: start one and compare with in-process.")] = None,
    rate: Annotated[str, typer.Option(help="Open loop: requests per second, separated by commas.")] = "",
    concurrency: Annotated[str, typer.Option(help="Closed loop: numbers of clients, separated by commas.")] = "",
    seconds: Annotated[float, typer.Option(help="Duration of each rate and concurrency.", min=0.1)] = 30.0,
    sessions: Annotated[float, typer.Option(help="Share of requests that belong to sessions.", min=0, max=1)] = 0.0,
    target_ms: Annotated[float, typer.Option(help="Time to first token that counts as goodput.")] = 200.0,
    key: Annotated[str | None, typer.Option(help="The server's API key.", envvar="OPENAI_API_KEY")] = None,
    prompts: Prompts = PROMPTS,
    temperature: Temperatures = "0,0.8",
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    drafter: Annotated[str, typer.Option(help="Drafter name.")] = "fusion",
    repeats: Repeats = 5,
    config: Config = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """Measure a server from a client; with --rate or --concurrency, under load. Settings also work as flags."""
    from bench.http import load, serve
    from bench.http.process import start_server
    from bench.plan import make_plan, parse_counts, parse_numbers
    from outrider.server.settings import load_settings, parse_flags

    with errors_as_sentences():
        plan = make_plan(drafter, prompts, limit, temperature, max_tokens, repeats)
        flags = [*([] if config is None else ["--config", str(config)]), *context.args]
        settings = load_settings(config, parse_flags(context.args))
        rates = parse_numbers("--rate", rate, positive=True) if rate else []
        clients = parse_counts("--concurrency", concurrency) if concurrency else []
        requests = load.Load(plan.prompts, seconds, max_tokens, plan.temperatures[-1], drafter, sessions, target_ms, key)
        if not (rates or clients):
            serve.run(settings, flags, plan, url, out)
        elif url:
            load.run(url, requests, rates, clients, out, plot)
        else:
            with start_server(flags) as server:
                load.run(server.url, requests, rates, clients, out, plot)


@app.command("peers", context_settings=EXTRA_FLAGS)
def bench_peers(
    context: typer.Context,
    peer: Annotated[str, typer.Option(help="Names of peers, separated by commas; default: all.")] = "",
    bits: Annotated[str, typer.Option(help="Bits per weight, separated by commas: 32, 16, 8 or 4.")] = "16,8,4",
    drafter: Drafters = "none,fusion",
    prompts: Prompts = PROMPTS,
    temperature: Temperatures = "0",
    limit: Limit = 12,
    max_tokens: MaxTokens = 128,
    repeats: Repeats = 5,
    config: Config = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Assistant of transformers; default: the embedded draft model.")
    ] = None,
    shape: Annotated[str, typer.Option(help="Shapes of random weights to measure too, separated by commas.")] = "",
    forced: Annotated[Path | None, typer.Option(help="With --shape: emit the recorded answers of this stream.")] = None,
    answers: Annotated[int | None, typer.Option(help="With --forced: use only the first ANSWERS lines.", min=1)] = None,
    tokenizer: StreamTokenizer = "",
    corpus: Corpus = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """Compare with transformers and llama.cpp: same weights, prompts, machine and threads. Settings also work as flags."""
    from bench.plan import BenchError, make_plan

    with errors_as_sentences():
        if forced and not (shape and tokenizer):
            raise BenchError("--forced needs --shape and --tokenizer.")
        plan = make_plan(drafter, prompts, limit, temperature, max_tokens, repeats)
        from bench.peers.answers import Choice
        from bench.peers.run import make_levels, parse_bits, parse_peers, run
        from bench.peers.shapes import Shapes
        from bench.recordings import Recordings

        levels = make_levels(config, context.args)
        choice = Choice(plan, parse_bits(bits), parse_peers(peer), draft_model)
        recordings = Recordings([forced], tokenizer, corpus or [], answers) if forced else None
        names = shape.split(",") if shape else []
        shaped = Shapes(names, choice.bits, choice.peers, plan.drafters, recordings, max_tokens, repeats)
        run(levels, choice, shaped, out, plot)


@app.command("datastore")
def bench_datastore(
    paths: Annotated[list[Path], typer.Argument(help="Texts to index.")],
    tokenizer: TextTokenizer = "",
    prompts: Prompts = PROMPTS,
    limit: Limit = None,
    out: Out = None,
) -> None:
    """Measure time and memory to build, open and query a datastore."""
    from bench.datastore import run
    from outrider import models

    with errors_as_sentences():
        run(paths, tokenizer or str(models.TARGET), prompts, limit, out)
