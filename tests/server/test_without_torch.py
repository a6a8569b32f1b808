"""A checkpoint of a known family is served without torch and transformers; what needs them says how to install them."""

import json
import os
import subprocess
import sys
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

settings = load_settings(None, json.loads(sys.argv[1]))
try:
    create_app(settings, load_tried_tokenizer(settings))
    runtime = load(settings)
    print(runtime.runner.kernels)
except ModelError as error:
    print(error)
"""


def answer(path: Path, **settings: Any) -> str:
    """What the modules of both processes say about a model where neither package is installed."""
    flags = {"model.path": str(path), **{name.replace("__", "."): value for name, value in settings.items()}}
    arguments = [sys.executable, "-c", ABSENT + PROGRAM, json.dumps(flags)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=os.environ)
    return done.stdout.strip()


def test_a_checkpoint_is_served_without_them() -> None:
    assert answer(models.TARGET).startswith("compiled library for ")


def checkpoint(folder: Path, model: str) -> Path:
    write_qwen(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model, "hidden_size": 64}))
    return folder


INSTALL = r"needs torch; install it with pip install 'outrider[torch]'."


def test_what_needs_them_says_so(tmp_path: Path) -> None:
    assert answer(models.TARGET, model__device="cuda") == f"model.device is 'cuda', which {INSTALL}"
    assert answer(models.TARGET, model__backend="torch") == f"model.backend is torch, which {INSTALL}"
    assert answer(models.TARGET, draft_model__path=str(models.DRAFT)) == f"A draft model {INSTALL}"
    other = checkpoint(tmp_path, "gpt2")
    assert answer(other) == f"The model at '{other}', whose family or format the compiled library does not compute, {INSTALL}"
    pictures = checkpoint(tmp_path, "gemma3")
    assert answer(pictures) == f"The model at '{pictures}' reads pictures, for which it {INSTALL}"


def test_a_folder_without_a_type_of_model(tmp_path: Path) -> None:
    write_qwen(tmp_path)
    assert answer(tmp_path) == f"No model at '{tmp_path}': it has no config.json that names a model_type; name another one."


def test_a_tokenizer_that_only_transformers_reads(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert answer(tmp_path) == (
        f"The tokenizer of '{tmp_path}', which is not in a tokenizer.json, needs transformers; install it with pip install"
        " 'outrider[torch]'."
    )
