"""`python -m bench.long_contexts`: do drafts get worse or slower as the text of a session grows?

Texts that grow are the turns of a recorded agent, replayed without a model; the same turns after its earlier sessions, so that
all of them are long; and conversations of SmolLM2, whose questions are those of Spec-Bench in turns, until the context is full.
Each step counts at the length of the text before it, rounded up to a power of two. `fusion` drafts the same number of nodes in
each step, so tokens per step depend on no clock; the microseconds of a step's drafting do.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track

from bench import report
from bench.live.questions import read_tasks
from bench.options import StreamTokenizer, errors_as_sentences
from bench.recordings import Line, load_encoder, load_stream
from bench.replay import Tally, replay
from outrider.drafters.options import Options
from outrider.drafters.registry import Resources, make, warm
from outrider.models import smollm2
from outrider.server.settings import load_settings
from outrider.server.worker.runtime import Runtime, load
from outrider.verify.decode import step
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.tokenizer import load_tokenizer
from outrider.verify.verifier import Verifier

SHORTEST, LONGEST = 256, 1 << 15
ANSWER_TOKENS = 128


@dataclass
class Lengths:
    """What steps emitted and took, by the length of the text before them."""

    tallies: dict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def add(self, length: int, tokens: int, seconds: float) -> None:
        """Adds a step that emitted `tokens` tokens after `length` others, and took `seconds` to draft."""
        tally = self.tallies[max(SHORTEST, 1 << (length - 1).bit_length())]
        tally.tokens += tokens
        tally.steps += 1
        tally.seconds.append(seconds)

    def rows(self, text: str) -> list[dict[str, Any]]:
        """One row for each length."""
        return [{"text": text, "length": length, **self.tallies[length].figures()} for length in sorted(self.tallies)]


def main(
    stream: Annotated[Path, typer.Option(help="The recorded agent: a .jsonl file with `prompt` and `response`.")],
    tokenizer: StreamTokenizer,
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's question.jsonl.")],
    conversations: Annotated[int, typer.Option(min=1, help="Conversations of SmolLM2 at each temperature.")] = 3,
    temperature: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0,0.8",
    nodes: Annotated[int, typer.Option(min=1, help="Draft nodes of a step of the recorded agent.")] = 64,
    live_nodes: Annotated[int, typer.Option(min=1, help="Draft nodes of a step of SmolLM2.")] = 8,
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "long-contexts.json",
) -> None:
    """Measure tokens per step, and the time of drafting, by the length of the text."""
    with errors_as_sentences():
        lines = load_stream(stream, load_encoder(tokenizer), None)[0]
    sessions = [json.loads(line)["session"] for line in stream.read_text().splitlines()]
    vocabulary = 1 + max(int(each.max()) for line in lines for each in (line.prompt, line.answer))
    rows = replayed(lines, vocabulary, nodes).rows(f"{stream.stem}, {nodes} nodes")
    rows += replayed(after_earlier(lines, sessions), vocabulary, nodes).rows(f"the same after earlier sessions, {nodes} nodes")
    runtime = load(load_settings(None, {"model.path": smollm2.NAME}))
    for each in map(float, temperature.split(",")):
        lengths = Lengths()
        for number in track(range(conversations), f"temperature {each:g}"):
            converse(runtime, prompts, number, each, live_nodes, lengths)
        rows += lengths.rows(f"SmolLM2, temperature {each:g}, {live_nodes} nodes")
        report.save(out, {"stream": stream.name, "conversations": conversations, "rows": rows})
    columns = {"text": "text", "tokens before\nthe step, at most": "length", "steps": "steps"}
    figures = {"tokens\nper step": "tokens_per_step:.2f", "us p50": "us_p50", "us p99": "us_p99"}
    report.print_figures("`fusion` by the length of the text", {**columns, **figures}, rows)


def after_earlier(lines: Sequence[Line], sessions: Sequence[str]) -> list[Line]:
    """The lines after as much of the text of earlier sessions as makes LONGEST tokens with the answer."""
    found: list[Line] = []
    earlier = np.empty(0, np.int32)
    for line, session, following in zip(lines, sessions, [*sessions[1:], ""], strict=True):
        room = max(0, LONGEST - len(line.prompt) - len(line.answer))
        found.append(replace(line, prompt=np.concatenate([earlier[max(0, len(earlier) - room) :], line.prompt])))
        if following != session:
            earlier = np.concatenate([earlier, line.prompt, line.answer])[-LONGEST:]
    return found


def replayed(lines: Sequence[Line], vocabulary: int, nodes: int) -> Lengths:
    """The recorded answers, each in a session of its own."""
    resources = Resources(Options(), vocabulary=vocabulary)
    warm(resources)
    lengths = Lengths()
    for line in track(lines, "replay"):
        tally = Tally()
        replay(make("fusion", resources), line, nodes, tally)
        length = len(line.prompt) + 1  # the first token of an answer is a step without a draft
        for tokens, seconds in zip(tally.emitted, tally.seconds, strict=True):
            lengths.add(length, tokens, seconds)
            length += tokens
    return lengths


def converse(runtime: Runtime, prompts: Path, number: int, temperature: float, nodes: int, lengths: Lengths) -> None:
    """A conversation that begins with question `number` of each task, in one session, until the context is full."""
    tokenizer = load_tokenizer(str(smollm2.locate()))
    verifier, drafter = Verifier(runtime.runner, runtime.runner.new_cache()), make("fusion", runtime.resources)
    messages: list[dict[str, str]] = []
    for question in questions(read_tasks(prompts), number):
        messages.append({"role": "user", "content": question})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        if len(ids) + ANSWER_TOKENS > runtime.runner.context_tokens:
            return
        params = SamplingParams(temperature=temperature, seed=number)
        options = DecodeOptions(params, ANSWER_TOKENS, runtime.stop_ids, nodes)
        answer = answered(Stream(verifier, drafter, np.array(ids, np.int32), options), lengths)
        messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})


def questions(tasks: Mapping[str, list[str]], number: int) -> Iterator[str]:
    """The questions of all tasks in turns, from `number` on."""
    in_turns = chain.from_iterable(zip_longest(*(texts[number:] for texts in tasks.values())))
    return (text for text in in_turns if text is not None)


def answered(stream: Stream, lengths: Lengths) -> list[int]:
    """The tokens of an answer, whose steps are added to `lengths`."""
    tokens: list[int] = []
    try:
        while True:
            length = stream.context
            taken = step(stream)
            tokens += taken.tokens
            if taken.tree is not None and len(tokens) > len(taken.tokens):  # not an answer's first step, as in replay
                lengths.add(length, len(taken.tokens), taken.draft_seconds)
            if taken.finish is not None:
                return tokens
    finally:
        stream.close()


if __name__ == "__main__":
    typer.run(main)
