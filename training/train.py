"""Trains the embedded target and draft model: `python -m training.train`.

Both models learn from the same batches in one run, in bfloat16 autocast, on a GPU if there is one. An interrupted run resumes
from its last checkpoint. When the time budget is spent, the run writes models/embedded/.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.drafters.tables import base_table
from outrider.models import BASE_TABLE, DRAFT, TARGET
from outrider.verify.tokenizer import fingerprint
from training.corpus import SOURCES, documents
from training.optimization import Optimization
from training.tokenizer import VOCABULARY, train_tokenizer

CONTEXT_TOKENS = 2048
# The id of <|end|>, which also separates documents.
END_ID = 0
BASE_TABLE_BYTES = 8_000_000
BATCH_TOKENS = 8192
TARGET_SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 4}
DRAFT_SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
# Most steps use short windows, which are cheaper; the last ones train the far positions.
# The share of the training time.
LONG_WINDOW_SHARE = 0.15
SHORT_WINDOW_TOKENS = 512


@dataclass
class RunState:
    """The progress of a run, stored in its checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float, float]] = field(default_factory=list)  # tokens so far, loss of target and draft


class Optimized(Protocol):
    """What a checkpoint holds the state of."""

    optimization: Optimization


def build_model(shape: dict[str, int]) -> LlamaForCausalLM:
    """A new Llama of `shape` with tied embeddings, float32."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=shape["num_attention_heads"] // 2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
        attn_implementation="sdpa",
        use_cache=False,
        **shape,
    )
    return LlamaForCausalLM(config)


class Learner:
    """One model with its optimization."""

    def __init__(self, shape: dict[str, int], device: str, compiled: bool) -> None:
        self.model = build_model(shape).to(device)
        self.device = device
        self.optimization = Optimization(self.model, [p for p in self.model.model.layers.parameters() if p.ndim == 2])
        self.loss = torch.compile(self._loss, dynamic=False) if compiled else self._loss

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:  # int64 [B, T+1]
        with torch.autocast(self.device, torch.bfloat16):
            hidden = self.model.model(input_ids=tokens[:, :-1]).last_hidden_state
            logits = self.model.lm_head(hidden)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def step(self, tokens: torch.Tensor, rate: float) -> float:
        """One update at `rate` times the base learning rates; returns the loss in nats per token."""
        loss: torch.Tensor = self.loss(tokens)
        self.optimization.step(loss, rate)
        return float(loss.detach())


@dataclass(frozen=True)
class Data:
    """The tokenized training text."""

    tokenizer: PreTrainedTokenizerFast
    train: np.ndarray  # uint16 [N]
    held_out: np.ndarray  # uint16 [M]
    held_out_bytes: int  # size of the held-out text


def prepare(folder: Path) -> Data:
    """Trains the tokenizer and tokenizes the text; `folder` caches both."""
    ready = folder / "data.npz"
    if ready.exists():
        data = np.load(ready)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
        return Data(tokenizer, data["train"], data["held_out"], int(data["held_out_bytes"]))
    folder.mkdir(parents=True, exist_ok=True)
    texts = documents()
    tokenizer = train_tokenizer((d.text for d in texts[::3]), folder / "tokenizer", CONTEXT_TOKENS)
    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for document in texts:
        ids = tokenizer.backend_tokenizer.encode(document.text, add_special_tokens=False).ids
        parts[document.held_out].append(np.array(ids, np.uint16))
    train, held_out = np.concatenate(parts[False]), np.concatenate(parts[True])
    held_out_bytes = sum(len(d.text.encode()) for d in texts if d.held_out)
    np.savez(ready, train=train, held_out=held_out, held_out_bytes=held_out_bytes)
    return Data(tokenizer, train, held_out, held_out_bytes)


def batch(ids: np.ndarray, done: RunState, window: int, tokens: int | None = None) -> torch.Tensor:
    """The next `tokens` tokens (default: BATCH_TOKENS) in reading order, int64 [B, window+1]."""
    rows = (tokens or BATCH_TOKENS) // window
    starts = (done.tokens + np.arange(rows) * window) % (len(ids) - window - 1)
    return torch.from_numpy(np.stack([ids[s : s + window + 1] for s in starts]).astype(np.int64))


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, held_out: np.ndarray, held_out_bytes: int, device: str) -> float:
    """Mean code length of the held-out text in bits per byte, in windows of the full context."""
    nats = 0.0
    for start in range(0, len(held_out) - 1, CONTEXT_TOKENS):
        ids = torch.from_numpy(held_out[start : start + CONTEXT_TOKENS + 1].astype(np.int64))[None].to(device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=ids[:, :-1]).logits[0]
        nats += float(torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="sum"))
    return nats / math.log(2) / held_out_bytes


def rate_at(share: float) -> float:
    """The learning rate factor after `share` of the run: a short warm-up, flat, then linear to zero in the second half."""
    return min(1.0, share / 0.01, (1.0 - share) / 0.5)


def main(
    minutes: float = typer.Option(60.0, help="Training time in minutes, including that of earlier runs that this one resumes."),
    folder: Path = typer.Option(Path("build/train"), help="Checkpoints and tokenized text."),
    compiled: bool = typer.Option(True, help="Use torch.compile."),
) -> None:
    """Train the embedded models and write them to models/embedded/."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = prepare(folder)
    learners = (Learner(TARGET_SHAPE, device, compiled), Learner(DRAFT_SHAPE, device, compiled))
    done = train(learners, data.train, minutes, folder / "checkpoint.pt")
    export(learners, data, done)


def train(learners: tuple[Learner, Learner], ids: np.ndarray, minutes: float, checkpoint: Path) -> RunState:
    """Trains until `minutes` are spent, and writes a checkpoint every 200 steps and at the end."""
    done = resume(checkpoint, learners)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=minutes * 60, completed=int(done.seconds))
        while done.seconds < minutes * 60:
            started = time.monotonic()
            share = done.seconds / (minutes * 60)
            window = SHORT_WINDOW_TOKENS if share < 1 - LONG_WINDOW_SHARE else CONTEXT_TOKENS
            tokens = batch(ids, done, window).to(learners[0].device)
            target, draft = (learner.step(tokens, rate_at(share)) for learner in learners)
            done.step += 1
            done.tokens += BATCH_TOKENS
            done.seconds += time.monotonic() - started
            if done.step % 50 == 0:
                done.losses.append((done.tokens, target, draft))
                bar.console.print(f"step {done.step} tokens {done.tokens} target {target:.3f} draft {draft:.3f}")
            if done.step % 200 == 0:
                save(checkpoint, learners, done)
            bar.update(task, completed=done.seconds)
    save(checkpoint, learners, done)
    return done


def export(learners: tuple[Learner, Learner], data: Data, done: RunState) -> None:
    """Writes the models, the tokenizer, the base table and a report to models/embedded/."""
    device = learners[0].device
    report = {
        "sources": [asdict(source) for source in SOURCES],
        "device": device,
        "train_tokens_seen": done.tokens,
        "train_tokens_available": len(data.train),
        "minutes": round(done.seconds / 60, 1),
        "bytes_per_token": round(data.held_out_bytes / len(data.held_out), 3),
    }
    for name, place, learner in (("target", TARGET, learners[0]), ("draft", DRAFT, learners[1])):
        report[f"{name}_parameters"] = sum(p.numel() for p in learner.model.parameters())
        report[f"{name}_bits_per_byte"] = round(bits_per_byte(learner.model, data.held_out, data.held_out_bytes, device), 4)
        learner.model.config.use_cache = learner.model.generation_config.use_cache = True
        learner.model.to("cpu", torch.bfloat16).save_pretrained(place)
        data.tokenizer.save_pretrained(place)
    contexts = base_table.build(BASE_TABLE, [data.train], fingerprint(data.tokenizer), VOCABULARY, max_bytes=BASE_TABLE_BYTES)
    report["base_table_contexts"] = contexts
    (TARGET.parent / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def save(path: Path, learners: Sequence[Optimized], done: RunState) -> None:
    """Writes the checkpoint and renames it, so that an interruption leaves no partial file."""
    temporary = path.with_suffix(".partial")
    torch.save({"learners": [learner.optimization.state() for learner in learners], "done": asdict(done)}, temporary)
    temporary.rename(path)


def resume(path: Path, learners: Sequence[Optimized]) -> RunState:
    """Loads the checkpoint at `path` into `learners`, if it exists."""
    if not path.exists():
        return RunState()
    saved = torch.load(path, weights_only=True)
    for learner, state in zip(learners, saved["learners"], strict=True):
        learner.optimization.load(state)
    return RunState(**saved["done"])


if __name__ == "__main__":
    typer.run(main)
