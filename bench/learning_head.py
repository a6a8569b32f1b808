"""`python -m bench.learning_head`: would a head that learns while serving draft what `fusion` misses?

The head reads the last hidden state h of the target and the embedding e of the token that was chosen from it, and predicts the
token after that one: logits W(A h + B e), with the target's own W. A and B start at zero and are trained by Adam on the answers
that were served before. SmolLM2 answers questions of Spec-Bench's six tasks, first to train the head, then with `fusion` and
with `fusion` that has the head's likeliest tokens below the root in place of its last nodes. Tokens per step depend on no
clock.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM

from bench import report
from bench.live.questions import Renderer, read_tasks
from bench.live.setup import Question
from bench.model.gguf_file import unpack
from bench.sources import answer
from outrider.drafters.interface import NOTHING, DraftTree, Ints, Sampling, Source, Verdict, arrange
from outrider.drafters.registry import Resources, make
from outrider.drafters.sequence import Sequence as Text
from outrider.drafters.state import Stateless
from outrider.models import smollm2
from outrider.server.settings import load_settings
from outrider.server.worker.runtime import Runtime, load

RATE, BATCH, STEPS = 1e-3, 128, 24  # of Adam; steps after each answer
LIKELIEST = 16


@dataclass
class Served:
    """An answer, and what the head reads and learns of it."""

    question: Question
    seed: int
    tokens: Ints  # int32 [A]
    hidden: torch.Tensor  # float32 [P + A, H]; after the last norm
    ids: torch.Tensor  # int64 [P + A]

    @property
    def first(self) -> int:
        """The position of the answer's first token."""
        return len(self.question.ids)


class Head:
    """W(A h + B e)."""

    def __init__(self, model: Any) -> None:
        self._words = model.lm_head.weight.detach()
        self._embeddings = model.get_input_embeddings().weight.detach()
        size = self._words.shape[1]
        self._mixed = torch.zeros(2 * size, size, requires_grad=True)
        self._optimizer = torch.optim.Adam([self._mixed], RATE)
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # inputs [N, 2 H] and targets [N] of each answer
        self._random = Random(0)

    def inputs(self, served: Served) -> torch.Tensor:
        """float32 [A - 1, 2 H]: of each token of the answer but the last."""
        last = len(served.ids) - 1
        before = served.hidden[served.first - 1 : last - 1]
        return torch.cat([before, self._embeddings[served.ids[served.first : last]]], 1)

    @torch.no_grad()
    def likeliest(self, served: Served) -> list[list[int]]:
        """The LIKELIEST tokens after each token of the answer but the last."""
        found: list[list[int]] = (self.inputs(served) @ self._mixed @ self._words.T).topk(LIKELIEST).indices.tolist()
        return found

    def learn(self, served: Served) -> None:
        """Some steps of Adam on all answers so far."""
        self._seen.append((self.inputs(served), served.ids[served.first + 1 :]))
        inputs, targets = (torch.cat(each) for each in zip(*self._seen, strict=True))
        for _ in range(STEPS):
            chosen = torch.tensor(self._random.choices(range(len(targets)), k=BATCH))
            loss = torch.nn.functional.cross_entropy(inputs[chosen] @ self._mixed @ self._words.T, targets[chosen])
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()


class Headed(Stateless):
    """`fusion` whose last nodes are the head's likeliest tokens below the root."""

    prunable = True

    def __init__(self, resources: Resources, likeliest: Sequence[Sequence[int]], extra: int) -> None:
        """`likeliest` are the head's tokens after each token of the answer, of which a draft has `extra`."""
        self._fusion, self._text = make("fusion", resources), Text()
        self._likeliest, self._extra = likeliest, extra
        self.feedback = self._fusion.feedback

    def begin(self, sequence: Text, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        self._text = sequence
        self._fusion.begin(sequence, prediction, sampling)

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        tree = self._fusion.propose(budget - self._extra, least)
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        known = {token for token, parent in zip(tokens, parents, strict=True) if parent < 0}
        after = self._likeliest[self._text.emitted - 1] if self._text.emitted else ()
        added = [token for token in after if token not in known][: self._extra]
        probability, source = tree.probability.tolist(), tree.source.tolist()
        more = len(added)
        return arrange(tokens + added, parents + [-1] * more, probability + [0.0] * more, source + [int(Source.OTHER)] * more)[
            0
        ]

    def observe(self, verdict: Verdict) -> None:
        self._fusion.observe(verdict)

    def end(self) -> None:
        self._fusion.end()


def main(
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's question.jsonl.")],
    questions: Annotated[int, typer.Option(min=1, help="Questions of each task.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 128,
    nodes: Annotated[int, typer.Option(min=1, help="Draft nodes of a step.")] = 8,
    extra: Annotated[str, typer.Option(help="Nodes of the head, separated by commas.")] = "1,2",
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of the answers.")] = 0.0,
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "learning-head-smollm2.json",
) -> None:
    """Serve answers, train the head on them, and count the tokens per step with and without it."""
    runtime = load(load_settings(None, {"model.path": smollm2.NAME}))
    answers, model = serve(runtime, prompts, questions, tokens, nodes, temperature), load_model()
    head, learned = Head(model), len(answers) // 2
    for served in answers[:learned]:
        head.learn(served)
    hits, steps = dict.fromkeys((1, 4, LIKELIEST), 0), {0: 0} | {int(each): 0 for each in extra.split(",")}
    for served in answers[learned:]:
        likeliest, after = head.likeliest(served), served.tokens[1:].tolist()
        for count in hits:
            hits[count] += sum(token in found[:count] for token, found in zip(after, likeliest, strict=True))
        for more in steps:
            decoded = answer(runtime, Headed(runtime.resources, likeliest, more), served.question, served.seed, nodes)
            assert decoded.tokens == served.tokens.tolist(), "drafts have changed an answer"
            steps[more] += len(decoded.steps)
        head.learn(served)
    sizes = [len(served.tokens) for served in answers]
    counted = sum(sizes[learned:])
    rows = [{"head_nodes": more, "tokens_per_step": round(counted / count, 4)} for more, count in steps.items()]
    rows = [{**row, "gain": round(row["tokens_per_step"] / rows[0]["tokens_per_step"] - 1, 4)} for row in rows]
    figures = {
        "learned_tokens": [sum(sizes[:learned]), sum(sizes)],  # before the first and after the last answer that counts
        "counted_tokens": counted,
        "recall": {str(count): round(hit / (counted - len(answers) + learned), 4) for count, hit in hits.items()},
    }
    report.save(out, {"model": smollm2.NAME, "temperature": temperature, "nodes": nodes, **figures, "rows": rows})
    print(figures)
    columns = {"nodes of\nthe head": "head_nodes", "tokens\nper step": "tokens_per_step:.3f", "gain": "gain:+.1%"}
    report.print_figures(f"`fusion` with {nodes} nodes, some of them the head's", columns, rows)


def serve(runtime: Runtime, prompts: Path, questions: int, tokens: int, nodes: int, temperature: float) -> list[Served]:
    """Answers in a random order of the tasks, with hidden states by transformers."""
    renderer = Renderer(str(smollm2.locate()), runtime.runner.context_tokens, tokens)
    asked = [each for texts in read_tasks(prompts).values() for each in renderer.first(texts, questions, temperature)]
    Random(0).shuffle(asked)
    answers = []
    model = load_model()
    for seed, question in enumerate(asked):
        decoded = answer(runtime, make("fusion", runtime.resources), question, seed, nodes)
        found = np.array(decoded.tokens, np.int32)
        ids = torch.from_numpy(np.concatenate([question.ids, found])).long()
        with torch.no_grad():
            hidden = model.model(ids[None]).last_hidden_state[0]
        answers.append(Served(question, seed, found, hidden, ids))
    return answers


def load_model() -> Any:
    """SmolLM2 by transformers, in float32."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(Path(smollm2.locate()), Path(folder), "float32")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


if __name__ == "__main__":
    typer.run(main)
