"""Encoders beside a model that writes text, in a real server: their numbers are those of sentence-transformers."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from outrider import models
from tests.hub import MODEL, serving_hub
from tests.server.encoders.encoders import DIMENSIONS, save_all
from tests.servers import Served, serving

pytestmark = pytest.mark.slow  # each encoder's process imports sentence-transformers

TEXTS = ["hello world", "a", "what is 42", "some words that are a good deal longer than the others are here", "b c"] * 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    save_all(folder)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    paths = [str(models.TARGET), *(str(folder / name) for name in ("embedder", "reranker", "classifier")), MODEL]
    with serving_hub({"main": folder / "static"}) as (url, _), pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_ENDPOINT", url)
        environment.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        with serving("--models.paths", json.dumps(paths)) as served:
            yield served


def embed(served: Served, **fields: Any) -> Any:
    response = served.http.post("/v1/embeddings", json={"model": "embedder", **fields})
    return response.json(), response


def vectors(body: Any) -> Any:
    assert [each["index"] for each in body["data"]] == list(range(len(body["data"])))
    return np.array([each["embedding"] for each in body["data"]], np.float32)


def test_embeddings(served: Served, folder: Path) -> None:
    from sentence_transformers import SentenceTransformer  # takes seconds

    expected = SentenceTransformer(str(folder / "embedder"), device="cpu")
    body, _ = embed(served, input=TEXTS, stream=True)  # as without it, also while the model is loaded
    assert np.allclose(vectors(body), expected.encode(TEXTS), atol=1e-5)
    assert body["model"] == "embedder" and body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > len(TEXTS)
    for kind, encode in {"query": expected.encode_query, "document": expected.encode_document}.items():
        assert np.allclose(vectors(embed(served, input=TEXTS, input_type=kind)[0]), encode(TEXTS), atol=1e-5)
    cut = expected.encode(TEXTS, truncate_dim=8, normalize_embeddings=True)
    assert np.allclose(vectors(embed(served, input=TEXTS, dimensions=8)[0]), cut, atol=1e-5)


def test_openais_client_asks_for_base64(served: Served) -> None:
    client = OpenAI(base_url=f"{served.http.base_url}/v1", api_key="none")
    found = client.embeddings.create(model="embedder", input=TEXTS)
    assert np.allclose([each.embedding for each in found.data], vectors(embed(served, input=TEXTS)[0]), atol=1e-6)
    raw = embed(served, input="a", encoding_format="base64")[0]["data"][0]["embedding"]
    assert len(np.frombuffer(base64.b64decode(raw), "<f4")) == DIMENSIONS


def test_reranking(served: Served, folder: Path) -> None:
    from sentence_transformers import CrossEncoder  # takes seconds

    expected = CrossEncoder(str(folder / "reranker"), device="cpu").predict([("hello", text) for text in TEXTS[:5]])
    body = {"model": "reranker", "query": "hello", "documents": [*TEXTS[:4], {"text": TEXTS[4]}]}
    found = served.http.post("/v1/rerank", json=body).json()["results"]
    assert [each["index"] for each in found] == sorted(range(5), key=lambda index: -expected[index])
    assert np.allclose([each["relevance_score"] for each in found], sorted(expected, reverse=True), atol=1e-5)
    best = served.http.post("/v2/rerank", json=body | {"top_n": 1, "return_documents": True}).json()["results"]
    assert len(best) == 1 and best[0]["document"]["text"] == TEXTS[found[0]["index"]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": ""}, "at least 1 character"),
        ({"input": ["a"] * 2049}, "at most 2048 items"),
        ({"input": [[1, 2]]}, "token ids are not accepted"),
        ({"input": "a", "dimensions": DIMENSIONS + 1}, f"embedder has {DIMENSIONS}"),
        ({"input": "a", "model": "classifier"}, "classifier ranks documents; its only endpoint is /v1/rerank"),
        ({"input": "a", "model": models.NAME}, "writes text; name one that makes embeddings"),
    ],
)
def test_bad_requests(served: Served, fields: dict[str, Any], message: str) -> None:
    body, response = embed(served, **fields)
    assert response.status_code == 400 and message in body["error"]["message"]


def test_other_paths_of_an_encoder(served: Served) -> None:
    chat = {"model": "embedder", "messages": [{"role": "user", "content": "hi"}]}
    for streamed in (False, True):
        response = served.http.post("/v1/chat/completions", json={**chat, "stream": streamed})
        assert response.status_code == 400 and "its only endpoint is /v1/embeddings" in response.json()["error"]["message"]
    ranked = served.http.post("/v1/rerank", json={"model": "classifier", "query": "a", "documents": ["b"]})
    assert ranked.status_code == 503 and "it has 3 labels, and a reranker has one" in ranked.json()["error"]["message"]
