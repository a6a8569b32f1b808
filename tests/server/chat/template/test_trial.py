"""Chat templates that loop or explode are refused when the model is loaded, in the processes that would render them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider import models
from outrider.server.chat.template import trial
from outrider.server.chat.template.trial import ends
from tests.tokenizers import CHATML, GEMMA, LLAMA2

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loop": LOOP,
    "text": "{{ 'a' * 10**10 }}",
    "list": "{{ ([0] * 10**10) | length }}",
    "filter": "{{ 'a' | center(10**10) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "tools only": "{% if tools %}" + LOOP + "{% endif %}{{ messages[0].content }}",
    "results only": "{% for each in messages %}{% if each.role == 'tool' %}"
    + LOOP
    + "{% endif %}{{ each.content }}{% endfor %}",
}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that may compute for a second only."""
    (tmp_path / "short_trial.py").write_text(
        f"from {trial.__name__} import main as run\nimport {trial.__name__} as trial\n"
        "def main(argument):\n    trial.CPU_SECONDS = 1.0\n    run(argument)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(trial, "__name__", "short_trial")


@pytest.mark.parametrize("name", HOSTILE)
def test_templates_that_loop_or_explode_do_not_end(name: str, short: None) -> None:
    assert not ends(json.dumps([[CHATML, HOSTILE[name]], {}]))


def test_other_templates_end_also_those_that_refuse() -> None:
    refusing = ["{{ raise_exception('no') }}", "{% for %}", "{{ messages[9].content }}", "{{ {}.x.y }}", "{{ 1 / 0 }}"]
    marked = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    assert ends(json.dumps([[CHATML, GEMMA, LLAMA2, marked, *refusing], {"bos_token": "<s>"}]))
    assert ends(json.dumps([[], {}]))


@pytest.mark.slow
def test_a_server_with_such_a_template_ends_with_one_sentence(tmp_path: Path) -> None:
    folder = shutil.copytree(models.TARGET, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(LOOP)
    command = [sys.executable, "-m", "outrider.server.cli", "serve", "--port", "0", "--model.path", str(folder)]
    done: Any = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("outrider: The chat template of") and done.stderr.count("\n") == 1
