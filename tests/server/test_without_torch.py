"""Known families are served, and draft, without torch and transformers; what needs them says how to install them."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import models
from outrider.verify.model.cpu.native.library import compiled_library
from tests.tokenizers import write_llama, write_qwen

pytestmark = pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
PROGRAM = """
import json
from outrider.server.settings import load_settings
from outrider.verify.errors import ModelError
import outrider.server.serve, outrider.server.front_end
from outrider.server.app import create_app
from outrider.server.chat.template.trial import load_tried_tokenizer
from outrider.server.worker.runtime import load

for flags in json.loads(sys.argv[1]):
    settings = load_settings(None, flags)
    try:
        create_app(settings, load_tried_tokenizer(settings))
        print(load(settings).runner.kernels)
    except ModelError as error:
        print(error)
"""


def checkpoint(folder: Path, write_tokenizer: Callable[[Path], None], **config: Any) -> str:
    """The path of a model without weights."""
    folder.mkdir()
    write_tokenizer(folder)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


INSTALL = "needs torch; install it with pip install 'outrider[torch]'."


def test_what_needs_them_says_so(tmp_path: Path) -> None:
    """What the modules of both processes say about models where neither package is installed."""
    target = str(models.TARGET)
    other = checkpoint(tmp_path / "other", write_qwen, model_type="gpt2", hidden_size=64)
    pictures = checkpoint(tmp_path / "pictures", write_qwen, model_type="gemma3", hidden_size=64)
    untyped = checkpoint(tmp_path / "untyped", write_qwen)
    head = checkpoint(tmp_path / "head", write_qwen, model_type="llama", architectures=["LlamaForCausalLMEagle3"])
    split = checkpoint(tmp_path / "split", write_llama, model_type="llama")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model.path": target}, "compiled library for "),
        ({"model.path": target, "model.device": "cuda"}, f"model.device is 'cuda', which {INSTALL}"),
        ({"model.path": target, "model.backend": "torch"}, f"model.backend is torch, which {INSTALL}"),
        ({"model.path": target, "draft_model.path": str(models.DRAFT)}, "compiled library for "),
        ({"model.path": target, "draft_model.path": head}, f"A draft head {INSTALL}"),
        (
            {"model.path": other},
            f"The model at '{other}', whose family or format the compiled library does not compute, {INSTALL}",
        ),
        ({"model.path": pictures}, f"The model at '{pictures}' reads pictures, for which it {INSTALL}"),
        ({"model.path": untyped}, f"No model at '{untyped}': it has no config.json that names a model_type; name another one."),
        (
            {"model.path": split},
            f"The tokenizer of '{split}', which is not in a tokenizer.json, needs transformers; install it with pip install"
            " 'outrider[torch]'.",
        ),
    ]
    arguments = [sys.executable, "-c", ABSENT + PROGRAM, json.dumps([flags for flags, _ in cases])]
    said = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == len(cases)
    for found, (_, words) in zip(said, cases, strict=True):
        assert found.startswith(words) if words.endswith(" ") else found == words
