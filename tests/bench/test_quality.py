"""The embedded model keeps its quality in 8 and 4 bits, and the comparison is exact about what it compares."""

from pathlib import Path

import pytest

from bench import quality
from bench.plan import BenchError
from bench.quality import compare, read_windows, scores
from outrider.server.settings import Settings
from outrider.verify.model.cpu.native.library import compiled_library

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


def test_a_text_that_cannot_be_read_is_reported(exact: Settings, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "empty").write_text("")
    for name, error in (("missing", "is not a text"), ("binary", "is not a text"), ("empty", "fewer than two tokens")):
        with pytest.raises(BenchError, match=error):
            read_windows(tmp_path / name, exact, 16, 32)
