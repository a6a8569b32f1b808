"""Chat templates: which of several counts, what each lacks, calls as text where it has none; those without end are refused."""

import copy
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from outrider import models
from outrider.server.chat.template import ChatTemplate, ChatTemplates, TemplateAbilities, trial
from outrider.server.chat.template.tool_text import calls_text
from outrider.server.chat.template.trial import ends
from outrider.server.chat.tools import FORMATS, tool_parser
from tests.server.chat.template.restricted import FULL, RESTRICTED, TOOLS
from tests.server.fakes import TOKENIZER
from tests.slow import mostly_slow
from tests.tokenizers import CHATML, GEMMA, LLAMA2

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look"}}


NAMED: list[tuple[Any, str, str]] = [("a", "a", "a"), ({"default": "a"}, "a", "a"), ({"tool_use": "b"}, "b", "b")]
NAMED += [({"default": "", "tool_use": "b"}, "b", "b"), ({"rag": "c", "tool_use": "b"}, "c", "b")]


@pytest.mark.parametrize(("named", "plain", "with_tools"), [*NAMED, ({"default": "a", "tool_use": "b", "rag": "c"}, "a", "b")])
def test_which_template_counts(named: Any, plain: str, with_tools: str) -> None:
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = named
    found = ChatTemplates(tokenizer)
    assert (found.choose(False).text, found.choose(True).text) == (plain, with_tools)
    assert set(found.text.split("\n")) == {plain, with_tools}


def test_fields_of_tools_that_a_template_reads_are_filled_in() -> None:
    reads = "{% for tool in tools or [] %}{{ tool.function.name ~ tool.function.parameters.required | join }}{% endfor %}"
    refuses = "{{ raise_exception('no parameters') if tools and tools[0].function.parameters is undefined }}"
    template = ChatTemplate(TOKENIZER, refuses + reads + FULL.removeprefix(TOOLS))
    assert template.abilities.tools and template.write([USER], [TOOL]).startswith("look<user>Hi")


LETTERS = (
    "{% macro kind(it) %}{% if it.type in ('string', 'array') %}{{ it.type }}{% elif it.type == 'object' %}"
    "{{ kind(it.additionalProperties or {'type': 'string'}) }}{% else %}{% for each in it.type %}{{ kind({'type': each}) }}"
    "{% endfor %}{% endif %}{% endmacro %}{% for tool in tools or [] %}{{ tool.function.name }}"
    "{% for name, field in (tool.function.parameters.properties or {}) | items %} {{ name ~ kind(field) }}{% endfor %}"
    "{% endfor %}"
)


NULLABLE = {"type": ["null", "array"]}
KINDS: list[tuple[Any, str]] = [({"type": ["string", "null"]}, "string"), (NULLABLE, "array"), ({"type": "null"}, "string")]
KINDS += [({"type": "file"}, "string"), ({"type": []}, ""), ({"type": "object", "additionalProperties": NULLABLE}, "array")]


@pytest.mark.parametrize(("field", "written"), KINDS)
def test_types_that_a_template_writes_without_end_are_replaced(field: dict[str, Any], written: str) -> None:
    template = ChatTemplate(TOKENIZER, LETTERS + FULL.removeprefix(TOOLS))
    function = {"name": "look", "parameters": {"type": "object", "properties": {"f": field}}}
    assert template.abilities.tools
    assert template.write([USER], [{"type": "function", "function": function}]).startswith(f"look f{written}<user>Hi")


FIELDS: list[Any] = [True, None, "string", [], {"type": {}}, {"type": [["string"]]}, {"enum": None}]
ODD: list[Any] = [{}, {"properties": []}, {"properties": None}, {"required": None}, {"type": None}]
ODD += [{"properties": {"f": field}} for field in FIELDS]


@pytest.mark.parametrize("template", [LETTERS + FULL.removeprefix(TOOLS), FULL])
@pytest.mark.parametrize("parameters", ODD, ids=str)
def test_odd_parameters_reach_the_model_in_some_form(template: str, parameters: dict[str, Any]) -> None:
    text = ChatTemplate(TOKENIZER, template).write(
        [USER], [{"type": "function", "function": {"name": "see", "parameters": parameters}}]
    )
    assert "see" in text and "<user>" in text


@pytest.mark.parametrize("name", RESTRICTED)
def test_restrictions_are_found(name: str) -> None:
    template, lacks = RESTRICTED[name]
    found, usual = asdict(ChatTemplate(TOKENIZER, template).abilities), asdict(TemplateAbilities())
    assert {ability for ability, value in found.items() if value != usual[ability]} == lacks


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}}}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("look", {"city": "São \"Paulo\"", "days": 3}),
    ("look", {"city": "5", "deep": {"a": [1, None, True], "b": {"c": "x"}}}),
    ("now", {}),
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_the_parser_reads_the_calls(name: str) -> None:
    parser = tool_parser("hermes" if name == "harmony" else name, {"look": SCHEMA, "now": {"type": "object", "properties": {}}})
    parts = [*parser.feed(calls_text(CALLS, FORMATS[name])), *parser.finish()]
    assert not [part for part in parts if part.kind == "content"]
    found = [
        (part.text, json.loads("".join(each.text for each in parts if each.kind == "arguments" and each.call == part.call)))
        for part in parts
        if part.kind == "call"
    ]
    assert found == CALLS


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


@pytest.mark.parametrize("name", mostly_slow(HOSTILE, "loop", "filter", "results only"))
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
