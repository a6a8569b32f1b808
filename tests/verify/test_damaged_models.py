"""A model with a damaged file loads, or is refused with one sentence: no other error, no crash, and no end that does not come.

Each mutant is loaded by what the front end and the worker load with, in a process of its own whose memory is bounded.
"""

import asyncio
import json
import random
import re
import resource
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from outrider.server.chat.prompt import PromptEncoder
from outrider.server.chat.vocabulary import Vocabulary
from outrider.verify.errors import ModelError, loading
from outrider.verify.model import backend
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.tokenizer import load_tokenizer, stop_ids
from tests.gguf_folders import write_folder
from tests.tokenizers import write_model

# The last character of a sentence may follow a quotation.
SENTENCE = re.compile(r"[A-Z'\"/].{20,1000}\.")
MEMORY_BYTES = 16 << 30
PIECES: list[Any] = [None, True, "x", "", -1, 0, 1, 7, 64.5, 1e300, 10**6, 2**63, [], [1], ["a"], {}, {"a": 1}]
PIECES.append(json.loads("[" * 500 + "]" * 500))


def load(path: str) -> str:
    """Loads a model as a server does; returns why it is refused, or nothing."""
    try:
        with loading(f"The model at {path!r}"):
            tokenizer = load_tokenizer(path)
            asyncio.run(PromptEncoder(tokenizer).prepare())
            Vocabulary(tokenizer)
            runner = backend.load(LoadOptions(path, device="cpu", backend="auto" if path.endswith(".gguf") else "torch"))
            backend.start(runner, path, min(64, runner.model_tokens), tokenizer=tokenizer)
            stop_ids(runner.stop_tokens, tokenizer)
    except ModelError as error:
        return str(error)
    return ""


def changed(value: Any, chance: random.Random) -> Any:
    """A JSON value in which one part, at any depth, is another one, is not there, or has another's name."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.02:
        return chance.choice(PIECES)
    found = value.copy()
    key = chance.choice([*found] if isinstance(found, dict) else range(len(found)))
    kind = chance.random()
    if kind < 0.15:
        del found[key]
    elif kind < 0.3 and isinstance(found, dict):
        other = chance.choice([*found])
        found[key], found[other] = found[other], found[key]
    else:
        found[key] = changed(found[key], chance)
    return found


def scrambled(content: bytes, chance: random.Random, end: int) -> bytes:
    """Bytes of which some before `end` are others, are not there, or are there twice."""
    found, start = bytearray(content), chance.randrange(end)
    size = chance.choice([1, 2, 8, 64])
    kind = chance.random()
    if kind < 0.6:
        found[start : start + size] = chance.choice([b"\xff", b"\x00", b"\x01", chance.randbytes(1)]) * size
    elif kind < 0.75:
        del found[start : start + size]
    elif kind < 0.9:
        found[start:start] = found[start : start + size]
    else:
        del found[start:]
    return bytes(found)


def damage_json(name: str) -> Callable[[Path, random.Random], Path]:
    def damage(folder: Path, chance: random.Random) -> Path:
        file = folder / name
        if chance.random() < 0.1:
            file.write_bytes(scrambled(file.read_bytes(), chance, file.stat().st_size))
        else:
            file.write_text(json.dumps(changed(json.loads(file.read_text()), chance)))
        return folder

    return damage


def damage_weights(folder: Path, chance: random.Random) -> Path:
    """Another header of a safetensors file: another shape, type or place of a tensor, or other bytes."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = 8 + struct.unpack("<Q", content[:8])[0]
    if chance.random() < 0.4:
        file.write_bytes(scrambled(content, chance, size))
    else:
        header = json.dumps(changed(json.loads(content[8:size]), chance)).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header + content[size:])
    return folder


def damage_gguf(folder: Path, chance: random.Random) -> Path:
    file = folder / "model.gguf"
    content = file.read_bytes()
    head = content.rfind(b"output_norm.weight") + 64
    file.write_bytes(scrambled(content, chance, head))
    return file


# The numbers of mutants.
COUNTS = {"model.gguf": 300, "config.json": 250, "tokenizer.json": 150, "tokenizer_config.json": 100}
COUNTS |= {"generation_config.json": 50, "model.safetensors": 150}


def limit() -> None:
    """Bounds this process's memory, and makes torch compute with one thread."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    sys.setrecursionlimit(1000)


@pytest.fixture(scope="module")
def loader() -> Iterator[Callable[[str], str]]:
    """`load` in another process: a crash there fails the test that caused it."""
    with ProcessPoolExecutor(1, get_context("spawn"), limit) as pool:
        yield lambda path: pool.submit(load, path).result()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, "qwen")
    write_folder(folder, folder / "model.gguf", GGMLQuantizationType.Q8_0)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_a_damaged_file_is_one_sentence(model: Path, tmp_path: Path, loader: Callable[[str], str], name: str) -> None:
    refused = []
    for seed in range(COUNTS[name]):
        shutil.copytree(model, tmp_path, dirs_exist_ok=True)
        damage = {"model.gguf": damage_gguf, "model.safetensors": damage_weights}.get(name) or damage_json(name)
        refused.append(loader(str(damage(tmp_path, random.Random(f"{name} {seed}")))))
        assert not refused[-1] or SENTENCE.fullmatch(refused[-1]), (seed, refused[-1])
    assert any(refused)


def write(folder: Path, name: str, content: str | dict[str, Any]) -> None:
    known = json.loads((folder / name).read_text())
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(known | content))


DAMAGES: list[Any] = [{"num_attention_heads": 0}, {"num_key_value_heads": 7}, {"hidden_size": 64.5}, {"vocab_size": 5}]
DAMAGES += [{"rope_scaling": {"rope_type": "none"}}, {"hidden_act": None}, {"eos_token_id": "x"}, "null", "[" * 10**5]


@pytest.mark.parametrize(
    ("name", "content"),
    [*(("config.json", each) for each in DAMAGES), ("tokenizer.json", "null"), ("generation_config.json", "[1]")],
)
def test_known_damages_are_one_sentence(model: Path, tmp_path: Path, name: str, content: str | dict[str, Any]) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    write(tmp_path, name, content)
    found = load(str(tmp_path))
    assert not found or SENTENCE.fullmatch(found), found


def test_more_layers_than_tensors_are_refused_before_they_are_built(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    write(tmp_path, "config.json", {"num_hidden_layers": 10**6})
    assert "says that it has 1000000 layers, but its tensors are those of 2;" in load(str(tmp_path))
    file = tmp_path / "model.gguf"
    content = file.read_bytes()
    at = content.index(b"llama.block_count") + len(b"llama.block_count") + 4
    file.write_bytes(content[:at] + struct.pack("<I", 10**6) + content[at + 4 :])
    assert "says that it has 1000000 layers, but its tensors are those of 2)" in load(str(file))
