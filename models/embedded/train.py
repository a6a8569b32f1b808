"""Makes the embedded models: `make train`, or `python -m outrider.models.embedded.train`.

Target and draft model learn from the same batches in one run, in bfloat16 autocast, on a GPU if there is one. At
the end, it writes the models, their tokenizer and the base table.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.drafters.tables import base_table
from outrider.models import BASE_TABLE, DRAFT, TARGET
from outrider.models.embedded.documents import SOURCES, documents
from outrider.verify.tokenizer import fingerprint

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
# The number of tokens, special tokens included.
VOCABULARY = 4096
# A line break and the indentation after it form one piece: together they carry most of Python's structure.
PIECES = r"(?:\r?\n)+[ \t]*|[ _.]?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]+(?=\S)|\s+"


def train_tokenizer(texts: Iterable[str], folder: Path, context_tokens: int) -> PreTrainedTokenizerFast:
    """Learns the merges from `texts`, and writes the tokenizer with its chat template to `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[0],
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        clean_up_tokenization_spaces=False,
        model_max_length=context_tokens,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


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
    """One model with its optimizers: Muon for the matrices of layers, AdamW for all other parameters."""

    def __init__(self, shape: dict[str, int], device: str, compiled: bool) -> None:
        self.model = build_model(shape).to(device)
        self.device = device
        matrices = [parameter for parameter in self.model.model.layers.parameters() if parameter.ndim == 2]
        chosen = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in self.model.parameters() if id(parameter) not in chosen]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=0.006, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self._base_rates = [group["lr"] for group in self._groups]
        self.loss = torch.compile(self._loss, dynamic=False) if compiled else self._loss

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:  # int64 [B, T+1]
        with torch.autocast(self.device, torch.bfloat16):
            hidden = self.model.model(input_ids=tokens[:, :-1]).last_hidden_state
            logits = self.model.lm_head(hidden)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def step(self, tokens: torch.Tensor, rate: float) -> float:
        """One update at `rate` times the base learning rates; returns the loss in nats per token."""
        for group, base in zip(self._groups, self._base_rates, strict=True):
            group["lr"] = base * rate
        loss: torch.Tensor = self.loss(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
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


def batch(ids: np.ndarray, done: int, window: int) -> torch.Tensor:
    """The next BATCH_TOKENS tokens in reading order, after the `done` first ones, int64 [B, window+1]."""
    starts = (done + np.arange(BATCH_TOKENS // window) * window) % (len(ids) - window - 1)
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
    minutes: float = typer.Option(60.0, help="Training time in minutes."),
    folder: Path = typer.Option(Path("build/train"), help="The tokenized text."),
    compiled: bool = typer.Option(True, help="Use torch.compile."),
) -> None:
    """Train the embedded models and write them to models/embedded/."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = prepare(folder)
    learners = (Learner(TARGET_SHAPE, device, compiled), Learner(DRAFT_SHAPE, device, compiled))
    tokens = train(learners, data.train, 60 * minutes)
    export(learners, data, tokens, minutes)


def train(learners: tuple[Learner, Learner], ids: np.ndarray, seconds: float) -> int:
    """Trains for this time; returns the number of tokens that were read."""
    started, tokens = time.monotonic(), 0
    while (share := (time.monotonic() - started) / seconds) < 1:
        window = SHORT_WINDOW_TOKENS if share < 1 - LONG_WINDOW_SHARE else CONTEXT_TOKENS
        rows = batch(ids, tokens, window).to(learners[0].device)
        target, draft = (learner.step(rows, rate_at(share)) for learner in learners)
        tokens += BATCH_TOKENS
        if tokens % (50 * BATCH_TOKENS) == 0:
            print(f"{share:.0%}: {tokens} tokens, target {target:.3f}, draft {draft:.3f}", flush=True)
    return tokens


def export(learners: tuple[Learner, Learner], data: Data, tokens: int, minutes: float) -> None:
    """Writes the models, the tokenizer, the base table and a report to models/embedded/."""
    device = learners[0].device
    report = {
        "sources": [asdict(source) for source in SOURCES],
        "device": device,
        "train_tokens_seen": tokens,
        "train_tokens_available": len(data.train),
        "minutes": minutes,
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


if __name__ == "__main__":
    typer.run(main)
