"""The embedded model keeps its quality in 8 and 4 bits, and the comparison is exact about what it compares."""

from pathlib import Path

import pytest

from bench import quality
from bench.plan import BenchError
from bench.quality import Place, by_text, compare, measure, places, read_windows, scores
from outrider.server.settings import Settings
from outrider.verify.model.cpu.native.library import compiled_library
from tests.servers import Served

TEXT = Path(quality.__file__)  # code, which the embedded model knows
vnni = pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")


def quantized(settings: Settings, quantize: str) -> Settings:
    return settings.model_copy(update={"model": settings.model.model_copy(update={"quantize": quantize})})


@vnni
def test_the_embedded_model_loses_little(exact: Settings) -> None:
    windows = read_windows(TEXT, exact, window=256, tokens=768)
    full = scores(exact, windows)
    assert len(full.nats) == 768 - 3 and full.weight_bits == 32
    eight, four = (compare(full, scores(quantized(exact, name), windows, full.likeliest)) for name in ("int8", "int4"))
    assert 0 < eight["error_of_logarithms"] < four["error_of_logarithms"] < 0.5
    assert abs(eight["more_nats"]) < 0.005 and eight["same_greedy_tokens"] > 0.97
    assert abs(four["more_nats"]) < 0.04 and four["same_greedy_tokens"] > 0.85
    assert eight["weights_mb"][1] < eight["weights_mb"][0] / 3 and four["weights_mb"][1] < eight["weights_mb"][1]


def test_the_embedded_model_loses_little_to_a_cache_in_8_bits(exact: Settings) -> None:
    full, coded = (
        exact.model_copy(update={"model": exact.model.model_copy(update={"kv_dtype": kv_dtype})})
        for kv_dtype in ("auto", "int8")
    )
    windows = read_windows(TEXT, exact, window=256, tokens=256)
    reference = scores(full, windows)
    found = compare(reference, scores(coded, windows, reference.likeliest))
    assert 0 < abs(found["more_nats"]) < 0.005
    assert found["kv_bytes_per_token"][1] < 0.3 * found["kv_bytes_per_token"][0]  # of float32


def test_a_server_of_the_same_weights_is_exact_and_what_it_says_is_what_is_compared(exact: Settings, served: Served) -> None:
    windows = read_windows(TEXT, exact, window=64, tokens=128)
    known = list(places(windows, scores(exact, windows), exact))
    found = measure(served.url, known)
    assert found["places"] == len(known) == 8 and found["compared"] > 60 and found["largest"] < 1e-3
    wrong = [each._replace(logs={text: value - 0.5 for text, value in each.logs.items()}) for each in known]
    assert measure(served.url, wrong)["error"] == pytest.approx(0.5, abs=1e-3)


def test_both_forms_of_log_probabilities_are_read() -> None:
    of_llama = {"content": [{"token": " a", "top_logprobs": [{"id": 7, "token": " a", "logprob": -0.5}]}]}
    assert by_text(of_llama) == by_text({"tokens": [" a"], "top_logprobs": [{" a": -0.5}]}) == {" a": -0.5}
    assert by_text(None) == {}


def test_servers_that_cannot_be_asked_are_reported(served: Served) -> None:
    for url, error in (("http://127.0.0.1:9", "does not answer as a server"), (served.url, "no log-probabilities")):
        with pytest.raises(BenchError, match=error):
            measure(url, [Place([1], {"no text of a token": -1.0})])


def test_a_text_that_cannot_be_read_is_reported(exact: Settings, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "empty").write_text("")
    for name, error in (("missing", "is not a text"), ("binary", "is not a text"), ("empty", "fewer than two tokens")):
        with pytest.raises(BenchError, match=error):
            read_windows(tmp_path / name, exact, 16, 32)
