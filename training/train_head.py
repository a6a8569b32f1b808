"""Trains the EAGLE head of the embedded target: `python -m training.train_head`, after `training.train`.

The head learns the target's distribution of the next token from the target's hidden states, on the text that both embedded
models were trained on. The second pass reads the head's own states, as drafts do. An interrupted run resumes from its last
checkpoint. When the time budget is spent, the run writes models/embedded/eagle/.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import typer
from rich.progress import track
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.models import HEAD, TARGET
from outrider.verify.heads.networks import EagleHead
from training.corpus import documents
from training.optimization import Optimization
from training.train import SHORT_WINDOW_TOKENS, RunState, batch, rate_at, resume, save

BATCH_TOKENS = 4096
# The passes read the same tokens. The first reads the target's states, and each other one those of the pass before it.
PASSES = 2
# The weight of the states' distance in the loss, beside the cross-entropy.
STATE_WEIGHT = 0.1


class HeadLearner:
    """The head with its optimization, and the target that it learns from."""

    def __init__(self, target: LlamaForCausalLM, config: LlamaConfig) -> None:
        self.target = target.eval().requires_grad_(False)
        self.config = config
        self.model = EagleHead(config)
        self.optimization = Optimization(self.model, [p for p in self.model.parameters() if p.ndim == 2])

    def losses(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """The loss of each pass over `tokens`, int64 [B, T]."""
        head = self.target.lm_head
        positions = torch.arange(1, tokens.shape[1])[None]
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                hidden = self.target.model(input_ids=tokens).last_hidden_state
                expected = head(hidden).float().softmax(-1)
            embedded = self.target.model.embed_tokens(tokens)[:, 1:]
            states, found = hidden[:, :-1], []
            for number in range(PASSES):
                own = self.model.advance(embedded[:, number:], states, positions[:, number:])
                logits = head(own).float()
                entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), expected[:, number + 1 :].flatten(0, 1))
                distance = torch.nn.functional.smooth_l1_loss(own.float(), hidden[:, number + 1 :].float())
                found.append(entropy + STATE_WEIGHT * distance)
                states = own[:, :-1]
        return found

    def step(self, tokens: torch.Tensor, rate: float) -> list[float]:
        """One update at `rate` times the base learning rates; returns the loss of each pass in nats per token."""
        losses = self.losses(tokens)
        self.optimization.step(torch.stack(losses).mean(), rate)
        return [float(loss.detach()) for loss in losses]


def head_config(target: LlamaConfig) -> LlamaConfig:
    """A layer like the target's."""
    config = LlamaConfig(**{**target.to_dict(), "num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]})
    config._attn_implementation = "sdpa"
    return config


def training_text(folder: Path) -> np.ndarray:
    """The training text in the embedded target's tokens, uint16 [N]; `folder` caches it."""
    ready = folder / "head_text.npy"
    if not ready.exists():
        folder.mkdir(parents=True, exist_ok=True)
        encode = PreTrainedTokenizerFast.from_pretrained(TARGET).backend_tokenizer.encode
        texts = [each.text for each in documents() if not each.held_out]
        ids = [np.array(encode(text, add_special_tokens=False).ids, np.uint16) for text in track(texts, "tokenizing")]
        np.save(ready, np.concatenate(ids))
    return np.array(np.load(ready))


def train(learner: HeadLearner, ids: np.ndarray, minutes: float, checkpoint: Path) -> RunState:
    """Trains until `minutes` are spent, and writes a checkpoint every 50 steps and at the end."""
    done = resume(checkpoint, (learner,))
    while done.seconds < minutes * 60:
        started = time.monotonic()
        tokens = batch(ids, done, SHORT_WINDOW_TOKENS, BATCH_TOKENS)
        losses = learner.step(tokens, rate_at(done.seconds / (minutes * 60)))
        done.step += 1
        done.tokens += BATCH_TOKENS
        done.seconds += time.monotonic() - started
        if done.step % 10 == 0:
            done.losses.append((done.tokens, losses[0], losses[-1]))
            print(f"step {done.step} tokens {done.tokens} losses {' '.join(f'{loss:.3f}' for loss in losses)}", flush=True)
        if done.step % 50 == 0:
            save(checkpoint, (learner,), done)
    save(checkpoint, (learner,), done)
    return done


def export(learner: HeadLearner, place: Path, done: RunState) -> None:
    """Writes the head in EAGLE's layout, in bfloat16, and a report."""
    learner.config.save_pretrained(place)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in learner.model.state_dict().items()}
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    report = asdict(done) | {"parameters": sum(p.numel() for p in learner.model.parameters())}
    (place / "training.json").write_text(json.dumps(report | {"losses": done.losses[-1:]}, indent=1) + "\n")


def main(
    minutes: float = typer.Option(20.0, help="Training time in minutes, including that of earlier runs that this one resumes."),
    folder: Path = typer.Option(Path("build/train"), help="Checkpoints and tokenized text."),
) -> None:
    """Train the embedded target's EAGLE head and write it to models/embedded/eagle/."""
    torch.manual_seed(0)
    target = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32, attn_implementation="sdpa")
    learner = HeadLearner(target, head_config(target.config))
    export(learner, HEAD, train(learner, training_text(folder), minutes, folder / "head.pt"))


if __name__ == "__main__":
    typer.run(main)
