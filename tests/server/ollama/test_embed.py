"""/api/embed and /api/embeddings on a scripted encoder."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from outrider.server.app import new_fastapi
from outrider.server.encoders.messages import Loaded
from outrider.server.http.json_route import BodyPool
from outrider.server.ollama.embed import new_embed_router
from tests.server.fakes import fetch


async def embed(_: str, texts: list[str], __: Any, dimensions: int | None) -> tuple[bytes, list[int]]:
    vectors = [[len(text), 0.5, 0.25][:dimensions] for text in texts]
    return np.array(vectors, "<f4").tobytes(), [len(text) for text in texts]


def send(path: str, body: dict[str, Any]) -> Any:
    app = new_fastapi(BodyPool({}))
    service: Any = SimpleNamespace(
        kind="embeddings", loaded=Loaded(max_tokens=None, dimensions=3), read_characters=None, embed=embed
    )
    app.include_router(new_embed_router("m", service))
    return fetch(app, "POST", path, {"model": "m:latest", **body}).json()


def test_vectors() -> None:
    answer = send("/api/embed", {"input": ["a", "bcd"], "dimensions": 2})
    assert answer["embeddings"] == [[1, 0.5], [3, 0.5]]
    assert (answer["model"], answer["prompt_eval_count"]) == ("m:latest", 4)
    assert send("/api/embed", {"input": "a"})["embeddings"] == [[1, 0.5, 0.25]]
    assert send("/api/embeddings", {"prompt": "ab"}) == {"embedding": [2, 0.5, 0.25]}


def test_what_is_refused() -> None:
    assert send("/api/embed", {"input": ["a"], "dimensions": 4}) == {"error": "Invalid 'dimensions': m has 3."}
    assert "Invalid 'prompt'" in send("/api/embeddings", {"prompt": ""})["error"]
