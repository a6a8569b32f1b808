"""One name per setting, one order of precedence, one sentence per error; the tree of settings, its files and its reference."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.server.settings import Settings, SettingsError, load_settings, parse_flags
from outrider.server.settings.printing import print_reference
from outrider.server.settings.reference import sections
from outrider.server.settings.sources import load_effective


def test_flags_override_environment_overrides_file_overrides_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("speculation:\n  max_nodes: 1\n  drafter: none\n  retrieval: {datastores: [a]}\nserver: {port: 1}\n")
    monkeypatch.setenv("OUTRIDER_SPECULATION__MAX_NODES", "2")
    monkeypatch.setenv("OUTRIDER_SPECULATION__TRIGRAM__TABLE", "t")
    monkeypatch.setenv("OUTRIDER_SERVER__PORT", "2")
    flags = parse_flags(["--server.port", "3", "--speculation.trace=true"])
    settings = load_settings(file, flags)
    assert settings.server.port == 3
    assert settings.speculation.max_nodes == 2
    assert settings.speculation.drafter == "none"
    chosen = settings.speculation
    assert (chosen.retrieval.datastores, chosen.trace, chosen.trigram.table) == (("a",), True, "t")
    assert chosen.pearl.only_if_worth
    origins = {"drafter": "file", "max_nodes": "environment", "trace": "flag", "trigram.table": "environment"}
    expected = {f"speculation.{name}": origin for name, origin in (origins | {"retrieval.datastores": "file"}).items()}
    assert load_effective(file, flags).origins == {"server.port": "flag", **expected}


def test_null_means_not_set_wherever_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text("model: {packed_folder: null}")
    assert load_settings(tmp_path / "c.yaml").model.packed_folder is None
    assert load_settings(None, parse_flags(["--model.packed_folder", "null"])).model.packed_folder is None
    monkeypatch.setenv("OUTRIDER_MODEL__PACKED_FOLDER", "null")
    assert load_settings().model.packed_folder is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"server.prt": "1"}, "no setting 'server.prt'; did you mean server.port"),
        ({"speculation.drafter": "magic"}, "'speculation.drafter' is invalid"),
        ({"server.tls_certificate": "a.pem"}, r"server\.tls_certificate needs server\.tls_key; set both"),
        ({"server.tls_key": "a.pem"}, r"server\.tls_key needs server\.tls_certificate; set both"),
        ({"server.path_prefix": "llm"}, "'server.path_prefix' is invalid: write it with a slash before it and none behind"),
        ({"server.path_prefix": "/llm/"}, "write it with a slash before it and none behind"),
        ({"server.path_prefix": "/llm/.."}, "write it with a slash before it and none behind"),
        *(
            ({"server.path_prefix": own}, "the API has a path of this name")
            for own in ("/v1", "/v1/models", "/api", "/metrics")
        ),
        ({"server.host": "unix:a.sock,mode=9"}, "'server.host' is invalid: write unix:PATH or unix:PATH,mode=660"),
        ({"scheduling.queue_seconds": "-1"}, "greater than 0"),
        ({"model.device": "gpu"}, r"invalid: it must be auto, cpu, cuda, cuda:N, or .* \(got 'gpu'\)\.$"),
        ({"model.device": "cpu,cuda:0"}, "several GPUs such as cuda:0,cuda:1"),
        ({"model.device": "cuda:0,cuda:1+cuda:2"}, "such as cuda:0,cuda:1 or cuda:0\\+cuda:1"),
        ({"model.device": "cuda:1,cuda:1"}, "name each GPU once"),
    ],
)
def test_invalid_flags_are_named(flags: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words) as raised:
        load_settings(None, flags)
    assert "\n" not in str(raised.value)


def test_an_invalid_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings(tmp_path / "nothing.yaml")
    for content in ("a: [", "just text"):
        (tmp_path / "bad.yaml").write_text(content)
        with pytest.raises(SettingsError, match=r"bad\.yaml"):
            load_settings(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    ("flag", "suggestion"),
    [("--prot", "--port"), ("--max_node", "--speculation.max_nodes"), ("--max-waiting", "--scheduling.max_waiting")],
)
def test_an_unknown_flag_gets_a_suggestion(flag: str, suggestion: str) -> None:
    with pytest.raises(SettingsError, match=f"did you mean {suggestion}\\?"):
        parse_flags([flag, "1"], ["--port", "--drafter"])


CONFIGS = Path(__file__).parents[3] / "configs"


def test_the_example_files_load() -> None:
    files = sorted(CONFIGS.glob("*.yaml"))
    assert files
    for file in files:
        assert isinstance(load_settings(file), Settings)
    assert load_settings(CONFIGS / "default.yaml") == load_settings()


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({}, "outrider-embedded"),
        ({"model.path": "Qwen/Qwen3-8B"}, "Qwen3-8B"),
        ({"model.path": "SmolLM2-135M-Instruct.Q4_1.gguf"}, "SmolLM2-135M-Instruct"),
        ({"model.path": "./my-model", "model.name": "mine"}, "mine"),
    ],
)
def test_the_served_name_follows_the_path(flags: dict[str, str], name: str) -> None:
    assert load_settings(None, flags).model.served_name == name


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({}, True),
        ({"sessions.automatic": "off"}, False),
        ({"server.host": "0.0.0.0", "auth.open": "true"}, False),
        ({"server.host": "0.0.0.0", "auth.open": "true", "sessions.automatic": "on"}, True),
        ({"server.host": "0.0.0.0", "auth.keys": {"alice": "alices-secret"}}, True),
    ],
)
def test_sessions_are_found_by_text_unless_strangers_share_a_principal(flags: dict[str, Any], found: bool) -> None:
    assert load_settings(None, flags).finds_sessions_by_text == found
    assert load_settings(None, flags | {"sessions.learn": "key"}).learns_from_sessions == found
    assert not load_settings(None, flags).learns_from_sessions


@pytest.mark.parametrize("value", ["/data/python", '["/data/python"]'])
def test_one_text_is_a_list_of_it_wherever_it_is_written(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = parse_flags(["--speculation.retrieval.datastores", value, "--models.paths", value, "--server.cors_origins", value])
    (file := tmp_path / "settings.yaml").write_text(f"speculation: {{retrieval: {{datastores: {value}}}}}")
    found = [load_settings(None, flags), load_settings(file)]
    assert {found[0].models.paths, found[0].server.cors_origins} == {("/data/python",)}
    monkeypatch.setenv("OUTRIDER_SPECULATION__RETRIEVAL__DATASTORES", value)
    found.append(load_settings())
    assert [each.speculation.retrieval.datastores for each in found] == [("/data/python",)] * 3


def test_short_flags_are_those_of_every_command() -> None:
    given = ["--model", "a.gguf", "--draft-model=b.gguf", "--drafter", "pearl", "--port", "1", "--host", "::"]
    expected = {"model.path": "a.gguf", "draft_model.path": "b.gguf", "speculation.drafter": "pearl"}
    assert parse_flags(given) == expected | {"server.port": "1", "server.host": "::"}


@pytest.mark.parametrize("width", [80, 120])
def test_the_reference_is_printed_without_truncation(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    print_reference(console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(len(line) for line in lines) <= width
    words = " ".join(line.strip("│ ") for line in lines)
    assert "…" not in words
    for section in sections():
        assert section.description in words
        for setting in section.settings:
            assert f"--{setting.name} " in words
            assert setting.description in words


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("server: {port: 1}\nserver: {host: h}", "the key 'server' stands twice"),
        ("server:\n  port: 1\n  port: 2", "the key 'port' stands twice"),
        ("1: 2", "the key 1 is no text"),
        ("on: {}", "the key True is no text"),
        ("auth: {keys: {7: abcdefgh}}", "the key 7 is no text"),
    ],
)
def test_keys_of_yaml_are_texts_and_stand_once(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(SettingsError, match=problem):
        load_settings(tmp_path / "config.yaml")


def test_sections_of_yaml_may_be_merged(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "server: &server {port: 1, host: h}\nmodel: {path: m}\nmetrics: {<<: *server, port: 2}"
    )
    found = load_settings(tmp_path / "config.yaml")
    assert (found.server.port, found.metrics.port, found.metrics.host) == (1, 2, "h")
