"""The front end imports neither torch nor transformers nor the worker's modules."""

from __future__ import annotations

import gc
import subprocess
import sys

from outrider.server.imports import frozen, hide_torch

ABSENT = ("scipy", "sklearn", "pandas", "transformers", "outrider.server.worker")
PROGRAM = f"""
import sys
import outrider.server.cli, outrider.server.serve
from outrider.server.imports import hide_torch
hide_torch()
from outrider import models
from outrider.verify.tokenizer import load_tokenizer
tokenizer = load_tokenizer(str(models.TARGET))
assert tokenizer.apply_chat_template([{{"role": "user", "content": "x"}}], tokenize=False)
assert sys.modules["torch"] is None
print([name for name in sys.modules if name.startswith({ABSENT!r}) or name.startswith("torch.")])
"""


def test_the_front_end_works_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_an_imported_torch_is_not_hidden() -> None:
    import torch

    hide_torch()
    assert sys.modules["torch"] is torch


def test_imported_objects_are_frozen() -> None:
    before = gc.get_freeze_count()
    try:
        with frozen():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
