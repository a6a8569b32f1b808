"""The commands `outrider bench ...`, `outrider verify-lossless` and `outrider verify-quality`.

Heavy imports happen inside them, to keep --help fast.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from bench.plan import PROMPTS
from outrider.server.command import EXTRA_FLAGS, fail

app = typer.Typer(help="Measure speed, cost and load.", no_args_is_help=True)
# Options that several benchmarks share.
Config = Annotated[Path | None, typer.Option(help="YAML file of settings; configs/ has examples.")]
Prompts = Annotated[Path, typer.Option(help="A .jsonl or .jsonl.gz file; every line has a `prompt` field.")]
Drafters = Annotated[str, typer.Option(help="Drafter names, separated by commas.")]
Temperatures = Annotated[str, typer.Option(help="Temperatures, separated by commas.")]
Limit = Annotated[int | None, typer.Option(help="Use only the first LIMIT prompts.", min=1)]
MaxTokens = Annotated[int, typer.Option(help="Tokens per answer.", min=1)]
Repeats = Annotated[int, typer.Option(help="Measured rounds; one more warms up.", min=1)]
Out = Annotated[Path | None, typer.Option(help="Save the figures as JSON.")]


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Ends the command with exit code 2 and one sentence if a benchmark cannot run; on SIGTERM, like on Ctrl-C, in order."""
    from bench.plan import BenchError
    from outrider.drafters.tables.array_file import ArrayFileError
    from outrider.server.settings import SettingsError
    from outrider.verify.errors import ModelError

    # So that servers that it started end, too.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except (SettingsError, BenchError, ModelError, ArrayFileError) as error:
        raise fail(str(error)) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


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
        plan = make_plan(settings, drafter, prompts, limit, temperature, max_tokens, repeats=1)
        divergences = run(settings, plan)
    raise typer.Exit(1 if divergences else 0)


def verify_quality(
    context: typer.Context,
    text: Annotated[Path, typer.Option(help="A text in UTF-8.")],
    config: Config = None,
    model: Annotated[str | None, typer.Option(help="Local folder, Hugging Face id or GGUF file.")] = None,
    window: Annotated[int, typer.Option(help="Number of tokens that are read together.", min=2)] = 512,
    tokens: Annotated[int, typer.Option(help="Number of the text's tokens that are read.", min=2)] = 8192,
    out: Out = None,
) -> None:
    """Compare a model as it is served with the same weights in float32, on a text.

    --model.quantize int8 or int4 chooses another format. Settings also work as flags.
    """
    from bench.quality import run
    from outrider.server.settings import load_settings, parse_flags

    with errors_as_sentences():
        settings = load_settings(config, parse_flags(context.args) | ({"model.path": model} if model else {}))
        run(settings, text, window, tokens, out)


@app.command("live", context_settings=EXTRA_FLAGS)
def bench_live(
    context: typer.Context,
    prompts: Annotated[list[Path], typer.Option(help="Spec-Bench's question.jsonl, HumanEval or GSM8K; repeatable.")],
    questions: Annotated[int, typer.Option(help="Questions of each task.", min=1)] = 10,
    drafter: Drafters = "none,fusion",
    temperature: Temperatures = "0,0.8",
    max_tokens: MaxTokens = 128,
    only: Annotated[str, typer.Option(help="Tasks, separated by commas; default: all.")] = "",
    url: Annotated[
        str | None, typer.Option(help="A running server, with --sessions.automatic off; default: start one.")
    ] = None,
    beside: Annotated[list[str] | None, typer.Option(help="NAME=URL of a server that runs already; repeatable.")] = None,
    config: Config = None,
    out: Out = None,
) -> None:
    """Measure the drafters of a served model, and other servers, on the tasks of Spec-Bench.

    A run that was stopped goes on if it is given the same --out. Settings also work as flags.
    """
    from bench.live import Choice, run
    from bench.plan import parse_drafters, parse_named, parse_numbers

    with errors_as_sentences():
        drafters, temperatures = parse_drafters(drafter), parse_numbers("--temperature", temperature)
        others = parse_named("--beside", beside or [])
        choice = Choice(prompts, questions, drafters, temperatures, max_tokens, only, others, url)
        run(config, context.args, choice, out)


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
    out: Out = None,
) -> None:
    """Measure tokens per second and per step, in process. Settings also work as flags."""
    from bench.plan import make_plan
    from outrider.server.settings import load_settings, parse_flags

    with errors_as_sentences():
        settings = load_settings(config, parse_flags(context.args))
        plan = make_plan(settings, drafter, prompts, limit, temperature, max_tokens, repeats)
        from bench.decode import run  # imports torch, unlike what reports errors

        run(settings, plan, out)


@app.command("replay", context_settings=EXTRA_FLAGS)
def bench_replay(
    context: typer.Context,
    stream: Annotated[list[Path], typer.Option(help="A .jsonl file with `prompt` and `response`; repeatable.")],
    tokenizer: Annotated[str, typer.Option(help="Folder, Hugging Face id, or a sentencepiece .model file.")],
    drafter: Drafters = "none,trigram,retrieval,lookup,fusion",
    corpus: Annotated[list[Path] | None, typer.Option(help="Texts to index before the replay; repeatable.")] = None,
    nodes: Annotated[str, typer.Option(help="Node budgets, separated by commas.")] = "16,64",
    limit: Limit = None,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn", help="Replay the second half of each stream twice: before and after the first half has been learned."
        ),
    ] = False,
    json: Out = None,
) -> None:
    """Replay recorded answers: tokens per step of drafters, without a model. Settings of speculation also work as flags."""
    from bench.plan import parse_counts, parse_drafters
    from bench.replay import run
    from outrider.server.settings import load_settings, parse_flags

    with errors_as_sentences():
        options = load_settings(None, parse_flags(context.args)).speculation.options
        names, budgets = parse_drafters(drafter), parse_counts("--nodes", nodes)
        run(stream, tokenizer, corpus or [], limit, names, budgets, options, json, learn)


@app.command("serve", context_settings=EXTRA_FLAGS)
def bench_serve(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="A running server; default: start one.")] = None,
    rate: Annotated[str, typer.Option(help="Open loop: requests per second, separated by commas.")] = "",
    concurrency: Annotated[str, typer.Option(help="Closed loop: numbers of clients; without --rate, 1.")] = "",
    seconds: Annotated[float, typer.Option(help="Duration of each rate and concurrency.", min=0.1)] = 30.0,
    target_ms: Annotated[
        float, typer.Option(help="Maximum time to the first token of a request that counts as goodput.")
    ] = 200.0,
    key: Annotated[str | None, typer.Option(help="The server's API key.", envvar="OPENAI_API_KEY")] = None,
    prompts: Prompts = PROMPTS,
    temperature: Annotated[float, typer.Option(help="Temperature of the requests.", min=0)] = 0.8,
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    drafter: Annotated[str, typer.Option(help="Drafter name.")] = "fusion",
    config: Config = None,
    out: Out = None,
) -> None:
    """Measure a server under load from its clients. Settings also work as flags."""
    from bench.http import load
    from bench.http.process import start_server
    from bench.plan import parse_counts, parse_drafters, parse_numbers, read_prompts
    from outrider.server.settings import load_settings, parse_flags

    with errors_as_sentences():
        (name,) = parse_drafters(drafter)
        rates = parse_numbers("--rate", rate, positive=True) if rate else []
        clients = parse_counts("--concurrency", concurrency or "1") if concurrency or not rates else []
        requests = load.Load(read_prompts(prompts, limit), seconds, max_tokens, temperature, name, target_ms, key)
        if url:
            load.run(url, requests, rates, clients, out)
            return
        load_settings(config, parse_flags(context.args))  # for its errors
        with start_server([*([] if config is None else ["--config", str(config)]), *context.args]) as server:
            load.run(server.url, requests, rates, clients, out)


@app.command("pair")
def bench_pair(
    urls: Annotated[list[str], typer.Argument(help="Servers that speak OpenAI's API; the others are compared with the first.")],
    task: Annotated[
        str, typer.Option(help="Tasks, separated by commas; edit writes a file again, rag is a question about two files.")
    ] = "chat,code,edit,rag,agent",
    context: Annotated[str, typer.Option(help="Tokens of other files before each question, separated by commas.")] = "0",
    temperature: Temperatures = "0,0.8",
    questions: Annotated[int, typer.Option(help="Questions of each task.", min=1, max=4)] = 4,
    max_tokens: MaxTokens = 128,
    key: Annotated[str | None, typer.Option(help="The servers' API key.", envvar="OPENAI_API_KEY")] = None,
    force: Annotated[bool, typer.Option("--force", help="Compare models with different names, too.")] = False,
    out: Out = None,
) -> None:
    """Compare running servers on the same prompts, in turns: Outrider, llama-server, vLLM, SGLang, LM Studio, Ollama's /v1."""
    from bench.pair.run import Choice, run
    from bench.plan import parse_numbers

    with errors_as_sentences():
        contexts = [int(each) for each in parse_numbers("--context", context)]
        choice = Choice(task.split(","), contexts, parse_numbers("--temperature", temperature), questions, max_tokens)
        run(urls, choice, key, force, out)


@app.command("guard", context_settings=EXTRA_FLAGS)
def bench_guard(
    context: typer.Context,
    against: Annotated[str, typer.Option(help="A commit or a wheel; default: the last release.")] = "",
    model: Annotated[str, typer.Option(help="A GGUF file, or another model.")] = "SmolLM2-135M-Instruct",
    minutes: Annotated[float, typer.Option(help="Time of the measurement.", min=0)] = 10,
    out: Out = None,
) -> None:
    """Compare this checkout with an earlier one. Exit code 1 if something became slower. Settings also work as flags."""
    from bench.guard import run

    with errors_as_sentences():
        slower = run(against, model, minutes, context.args, out)
    raise typer.Exit(1 if slower else 0)


@app.command("block-head")
def bench_block_head(
    model: Annotated[str, typer.Option(help="Local folder, Hugging Face id or GGUF file.")],
    prompts: Annotated[list[Path], typer.Option(help="A .jsonl or .jsonl.gz file of prompts; may be given several times.")],
    out: Annotated[Path, typer.Option(help="The head's folder; a run that was stopped goes on in it.")],
    every: Annotated[int, typer.Option(help="Each prompt whose number this divides is held out.", min=2)] = 40,
    max_tokens: MaxTokens = 128,
    epochs: Annotated[int, typer.Option(help="Times that each answer is learned.", min=1)] = 4,
    block: Annotated[int, typer.Option(help="Tokens of a draft.", min=2, max=32)] = 4,
    threads: Annotated[int, typer.Option(help="Threads of the training.", min=1)] = os.cpu_count() or 1,
) -> None:
    """Train a small block head on a model's own answers, on a CPU."""
    from outrider.verify.packages import TORCH, TRANSFORMERS, require

    with errors_as_sentences():
        require("A draft head", TORCH, TRANSFORMERS)
        from bench.block_head import Recipe, run

        run(Recipe(model, prompts, out, every, max_tokens, epochs, block, threads))


@app.command("gpu")
def bench_gpu(
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = Path("outrider-gpu.json"),
    only: Annotated[str, typer.Option(help="Parts to measure, separated by commas; all by default.")] = "",
) -> None:
    """Check and measure everything that needs a GPU, in minutes. Exit code 2 without one."""
    from bench.gpu_first import chosen_parts, run

    with errors_as_sentences():
        run(chosen_parts(only), out)
