"""Makes the embedded models: `make train`, or `python -m outrider.models.embedded.train`.

The text is Python sources that are installed in the project's environment: the same versions give the same documents in the
same order. Target and draft model learn from the same batches in one run, in bfloat16 autocast, on a GPU if there is one. An
interrupted run resumes from its last checkpoint. At the end, it writes the models, their tokenizer and the base table.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import math
import random
import sysconfig
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.drafters.tables import base_table
from outrider.models import BASE_TABLE, DRAFT, TARGET
from outrider.verify.tokenizer import fingerprint

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
# The share of files, chosen by the hash of their text.
HELD_OUT_SHARE = 1 / 64
MAX_FILE_BYTES = 200_000
SKIPPED_FOLDERS = {
    *("test", "tests", "testing", "_vendor", "site-packages", "idlelib", "lib2to3", "encodings", "pydoc_data"),
    *("turtledemo", "models", "conformance", "_internal_testing", "ensurepip"),
}


@dataclass(frozen=True)
class Source:
    """One importable package."""

    package: str
    licence: str
    folders: tuple[str, ...] = ("",)  # folders of the package to read; "" reads all


STANDARD_LIBRARY = Source("", "PSF-2.0")
SOURCES = (
    STANDARD_LIBRARY,
    Source("networkx", "BSD-3-Clause"),
    Source("numpy", "BSD-3-Clause"),
    Source("sympy", "BSD-3-Clause", ("core", "utilities", "ntheory", "combinatorics", "functions", "sets", "logic")),
    Source("mpmath", "BSD-3-Clause"),
    Source("torch", "BSD-3-Clause", ("nn", "optim", "utils", "distributions", "fx", "autograd", "ao")),
    Source("transformers", "Apache-2.0", ("utils", "generation", "data", "pipelines")),
    Source("huggingface_hub", "Apache-2.0"),
    Source("fsspec", "BSD-3-Clause"),
    Source("jinja2", "BSD-3-Clause"),
    Source("pygments", "BSD-2-Clause", ("formatters", "filters", "styles")),
    Source("rich", "MIT"),
    Source("click", "BSD-3-Clause"),
    Source("fastapi", "MIT"),
    Source("starlette", "BSD-3-Clause"),
    Source("pydantic", "MIT"),
    Source("httpx", "BSD-3-Clause"),
    Source("anyio", "MIT"),
    Source("uvicorn", "BSD-3-Clause"),
    Source("packaging", "BSD-2-Clause"),
    Source("_pytest", "MIT"),
    Source("setuptools", "MIT"),
    Source("mypy", "MIT"),
    Source("numba", "BSD-2-Clause", ("core", "np", "misc", "cpython", "typed")),
)


@dataclass(frozen=True)
class Document:
    """One training document."""

    text: str  # ends with <|end|>
    held_out: bool


def documents(seed: int = 0) -> list[Document]:
    """All documents, shuffled by `seed`: whole files, and functions as chats (docstring as question, code as answer)."""
    result: list[Document] = []
    for text in _files():
        held_out = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) < HELD_OUT_SHARE * 2**32
        result.append(Document(text + "<|end|>", held_out))
        result.extend(Document(chat, held_out) for chat in _chats(text))
    random.Random(seed).shuffle(result)
    return result


def _files() -> Iterator[str]:
    seen: set[str] = set()
    for source in SOURCES:
        for path in _paths(source):
            text = _read(path)
            if text and text not in seen:
                seen.add(text)
                yield text


def _paths(source: Source) -> Iterator[Path]:
    if source is STANDARD_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
    else:
        spec = importlib.util.find_spec(source.package)
        if spec is None or not spec.submodule_search_locations:
            return
        root = Path(spec.submodule_search_locations[0])
    for folder in source.folders:
        for path in sorted((root / folder).rglob("*.py")):
            if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1]):
                yield path


def _read(path: Path) -> str:
    """The file's text, or "" if it is too large, not UTF-8, or data rather than code."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return ""
    digits = sum(character.isdigit() or ord(character) > 127 for character in text)
    if len(text) > MAX_FILE_BYTES or digits > 0.15 * len(text):
        return ""
    return text.strip() + "\n"


def _chats(text: str) -> Iterator[str]:
    """The functions of a source file as chats."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            question = _question(node)
            answer = _answer(node, lines)
            if question and answer:
                yield f"<|user|>\n{question}<|end|>\n<|assistant|>\n```python\n{answer}\n```<|end|>"


def _question(node: ast.FunctionDef) -> str:
    """A request for the function, made from its docstring; "" if the summary is missing, very short or very long."""
    docstring = ast.get_docstring(node)
    if not docstring:
        return ""
    summary = " ".join(docstring.split("\n\n")[0].split())
    if not 20 <= len(summary) <= 400:
        return ""
    # The name determines the wording, so that a function always has the same question.
    wording = hashlib.sha256(node.name.encode()).digest()[0] % 4
    arguments = ", ".join(argument.arg for argument in node.args.args if argument.arg not in ("self", "cls"))
    return (
        summary,
        f"Write a Python function {node.name}({arguments}). {summary}",
        f"Write a Python function: {summary}",
        f"Implement `{node.name}({arguments})` in Python. {summary}",
    )[wording]


def _answer(node: ast.FunctionDef, lines: list[str]) -> str:
    """The function's code without decorators and docstring; "" if it is very short or very long."""
    body = node.body[1:]
    if not body or node.end_lineno is None:
        return ""
    code = lines[node.lineno - 1 : node.body[0].lineno - 1] + lines[body[0].lineno - 1 : node.end_lineno]
    if not 2 <= len(code) <= 40:
        return ""
    return textwrap.dedent("\n".join(code)).strip()


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


@dataclass
class RunState:
    """The progress of a run, stored in its checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float, float]] = field(default_factory=list)  # tokens so far, loss of target and draft


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


class Optimization:
    """Muon for the matrices of layers, AdamW for all other parameters."""

    def __init__(self, model: torch.nn.Module, matrices: list[torch.nn.Parameter]) -> None:
        self._model = model
        chosen = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=0.006, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._base_rates = [group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups]

    def step(self, loss: torch.Tensor, rate: float) -> None:
        """One update at `rate` times the base learning rates."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group, base in zip(groups, self._base_rates, strict=True):
            group["lr"] = base * rate
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """The state that `load` restores."""
        return {"model": self._model.state_dict(), "optimizers": [each.state_dict() for each in self._optimizers]}

    def load(self, state: dict[str, Any]) -> None:
        """Restores the model and the optimizers."""
        self._model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


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


def save(path: Path, learners: Sequence[Learner], done: RunState) -> None:
    """Writes the checkpoint and renames it, so that an interruption leaves no partial file."""
    temporary = path.with_suffix(".partial")
    torch.save({"learners": [learner.optimization.state() for learner in learners], "done": asdict(done)}, temporary)
    temporary.rename(path)


def resume(path: Path, learners: Sequence[Learner]) -> RunState:
    """Loads the checkpoint at `path` into `learners`, if it exists."""
    if not path.exists():
        return RunState()
    saved = torch.load(path, weights_only=True)
    for learner, state in zip(learners, saved["learners"], strict=True):
        learner.optimization.load(state)
    return RunState(**saved["done"])


if __name__ == "__main__":
    typer.run(main)
