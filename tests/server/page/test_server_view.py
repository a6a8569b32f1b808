"""The look at a running server in a real browser, against a server of two models."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from outrider import models
from outrider.models import packaged
from tests.hub import installed
from tests.requests import PROMPT
from tests.server.page.chromium import said, submit, visit
from tests.servers import Served, serving

VIEW = "/page/drafts.html#server"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """SmolLM2 and the embedded model, which are loaded when they are asked for."""
    installed()
    paths = json.dumps([packaged.SMOLLM2, str(models.TARGET)])
    with serving("--models.paths", paths, "--speculation.max_nodes", "16") as server:
        yield server


def table_of(page: Any, model: str) -> Any:
    return page.locator("#server table", has=page.locator("caption", has_text=model))


def test_each_model_has_figures_of_its_own_that_are_renewed(browser: Any, server: Served) -> None:
    used, other = [card["id"] for card in server.http.get("/v1/models").json()["data"]]
    with visit(browser, server.url + VIEW) as page:
        for model in (used, other):
            table_of(page, model).get_by_role("columnheader", name="unloaded").wait_for()
        page.click("#settings summary")
        page.select_option("[name=model]", used)
        submit(page, PROMPT, max_tokens="60")
        said(page, "Done")
        table = table_of(page, used)
        table.get_by_role("columnheader", name="loaded", exact=True).wait_for()
        text = server.http.get("/metrics").text
        tokens, steps = (
            float(re.findall(rf"outrider_{name}_total{{.*}} (\S+)", text)[0]) for name in ("generated_tokens", "steps")
        )
        table.get_by_role("row", name=f"Tokens per step {tokens / steps:.2f}").wait_for()
        table.get_by_role("row", name="Running streams 0").wait_for()
        page.get_by_role("row", name=re.compile(r"^[a-z]+ [1-9]\d* \d+ \d+%$")).first.wait_for()
        assert table_of(page, other).get_by_role("row", name="Tokens per step \u2013").count() == 1


def test_a_server_of_one_model_tells_its_memory(browser: Any, served: Served) -> None:
    with visit(browser, served.url + VIEW) as page:
        table_of(page, served.model).get_by_role("row", name="Running streams 0").wait_for()
        weights = page.get_by_role("row", name=re.compile("^weights "))
        weights.wait_for()
        assert re.fullmatch(r"weights\s+[1-9]\d* MB", weights.inner_text())


def test_latencies_of_several_models_are_one_distribution(browser: Any, served: Served) -> None:
    script = """async (text) => {
        const { parse, quantile } = await import("/page/metrics.js");
        return [0.5, 0.95, 1].map((share) => quantile(parse(text), "wait", share));
    }"""
    counts = {"a": (8, 8, 8), "b": (0, 1, 2)}
    text = "\n".join(
        f'outrider_wait_bucket{{le="{bound}",model="{model}"}} {count}'
        for model, each in counts.items()
        for bound, count in zip(("0.5", "1", "+Inf"), each, strict=True)
    )
    with visit(browser, served.url + VIEW) as page:
        assert page.evaluate(script, text + "\nother_wait_bucket 9") == [0.5, math.inf, math.inf]
        assert page.evaluate(script, text.replace('"b"} 2', '"b"} 1')) == [0.5, 1, 1]
        assert page.evaluate(script, "") == [None, None, None]
