"""The front end imports neither torch nor transformers nor the worker's modules."""

import subprocess
import sys

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
