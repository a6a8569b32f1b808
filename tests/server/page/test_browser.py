"""The view of drafts and the look at a running server in a real browser; and both pages by axe, from the npm registry."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.requests import PROMPT
from tests.server.page.chromium import DESKTOP, PHONE, ask, chatting, said, shown_tokens, submit, visit
from tests.servers import ALICE, Served

DRAFTS = "/page/drafts.html"
MARKUP = "<img src=x onerror=\"document.title = 'run'\"><script>document.title = 'run'</script>"


def traces_of(response: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text().splitlines() if line.startswith("data: {")]
    return [choice["trace"] for line in lines for choice in json.loads(line)["choices"] if "trace" in choice]


def tokens_of(trace: dict[str, Any]) -> list[list[str]]:
    """The text and the source of each token of a step."""
    draft, bonus = trace["draft"], trace["bonus"]
    tokens = [[draft["texts"][row], draft["sources"][row]] for row in trace["accepted"]]
    return tokens + ([] if bonus is None else [[bonus["text"], ""]])


def test_tokens_have_the_colours_of_the_apis_sources(browser: Any, served: Served) -> None:
    with visit(browser, served.url + DRAFTS) as page:
        with page.expect_response("**/v1/completions") as found:
            submit(page, PROMPT, max_tokens="60")
            said(page, "Done")
        traces = traces_of(found.value)
        assert shown_tokens(page) == [token for trace in traces for token in tokens_of(trace)]
        drafted, sources = len(traces[0]["draft"]["sources"]), {source for _, source in shown_tokens(page)}
        assert drafted and len(sources) > 1
        for source in sources - {""}:
            counts = [
                sum(trace["draft"]["sources"].count(source) for trace in traces),
                sum(s == source for _, s in shown_tokens(page)),
            ]
            assert f"{counts[1]} of {counts[0]} accepted" in page.inner_text(f"#legend .source-{source} >> nth=0")
        page.locator("#chart canvas").wait_for()


def test_an_expected_answer_is_drafted(browser: Any, served: Served) -> None:
    with visit(browser, served.url + DRAFTS) as page:
        submit(page, PROMPT, max_tokens="60")
        said(page, "Done")
        plain = "".join(text for text, _ in shown_tokens(page))
        submit(page, PROMPT, max_tokens="60", prediction=plain)
        page.locator("#transcript .source-prediction").first.wait_for()
        said(page, "Done")
        assert "".join(text for text, _ in shown_tokens(page)) == plain


def test_both_racers_end_with_the_same_text(browser: Any, served: Served) -> None:
    with visit(browser, served.url + DRAFTS) as page:
        page.fill("[name=prompt]", PROMPT)
        page.fill("[name=temperature]", "0.8")
        page.click("#start-race")
        page.locator("#race .verdict", has_text="Equal texts.").wait_for()
        drafted, plain = (page.locator("#race .answer").nth(lane).text_content() for lane in (0, 1))
        assert drafted == plain != ""
        assert [page.locator("#race .lane").nth(lane).locator(".drafted").count() > 0 for lane in (0, 1)] == [True, False]
        page.click("#race .again")
        page.locator("#race[aria-busy=false]").wait_for()
        assert page.locator("#race .answer").nth(1).text_content() == plain


def test_markup_stays_text(browser: Any, served: Served, tmp_path: Path) -> None:
    with visit(browser, served.url + DRAFTS) as page:
        submit(page, MARKUP, max_tokens="5")
        said(page, "Done")
        assert page.inner_text("#transcript .prompt") == MARKUP
        trace: dict[str, Any] = {
            "draft": {"tokens": [1], "texts": [MARKUP], "parents": [-1], "probabilities": [1], "sources": [MARKUP]}
        }
        trace |= {"accepted": [0], "bonus": None, "draft_ms": 0, "verify_ms": 0, "commit_ms": 0}
        run = {"format": "outrider-run", "version": 1, "events": [{"at": 1, "text": MARKUP, "trace": trace}], "error": MARKUP}
        (tmp_path / "run.json").write_text(json.dumps(run))
        page.set_input_files("#file", tmp_path / "run.json")
        page.locator("#transcript .token", has_text=MARKUP).click()
        assert page.locator("#tree .node").count() == 2
        assert page.locator("img, body script").count() == 0 and page.title() == "Outrider drafts"


def test_a_run_is_exported_and_loaded(browser: Any, served: Served, tmp_path: Path) -> None:
    with visit(browser, served.url + DRAFTS) as page:
        submit(page, PROMPT, max_tokens="20")
        said(page, "Done")
        tokens, figures = shown_tokens(page), page.inner_text("#stats")
        with page.expect_download() as download:
            page.click("#export")
        download.value.save_as(tmp_path / "run.json")
        page.click("#new")
        assert not shown_tokens(page)
        page.set_input_files("#file", tmp_path / "run.json")
        said(page, "Loaded")
        page.locator("#stats dd").nth(4).wait_for()
        assert (shown_tokens(page), page.inner_text("#stats")) == (tokens, figures)
        (tmp_path / "run.json").write_text('{"format": "outrider-run", "version": 1, "events": [{"at": "x"}]}')
        page.set_input_files("#file", tmp_path / "run.json")
        said(page, "This file is not a run of this page")


def test_keys_are_entered_and_kept_in_memory(browser: Any, guarded: Served) -> None:
    with visit(browser, guarded.url + DRAFTS) as page:
        said(page, "This server needs an API key")
        page.fill("[name=key]", "not-the-key")
        page.press("[name=key]", "Tab")
        said(page, "The API key is wrong")
        page.fill("[name=key]", ALICE)
        page.press("[name=key]", "Tab")
        page.locator("[name=model] option", has_text=guarded.model).wait_for(state="attached")
        submit(page, PROMPT, max_tokens="5")
        said(page, "Done")
        with page.expect_download() as download:
            page.click("#export")
        assert ALICE not in Path(download.value.path()).read_text()
        page.click("#server summary")
        page.get_by_text("does not show its metrics").wait_for()
        assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        page.reload()
        said(page, "This server needs an API key")


def test_a_phone_shows_everything_without_scrolling_sideways(browser: Any, served: Served) -> None:
    with visit(browser, served.url + DRAFTS, PHONE) as page:
        submit(page, PROMPT, max_tokens="60")
        said(page, "Done")
        page.locator("#chart canvas").wait_for()
        page.locator("#transcript .token.drafted").nth(2).click()
        page.locator("#tree svg").wait_for()
        page.click("#server summary")
        page.get_by_role("row", name="Cache used").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        page.click("#start-race")
        page.locator("#race .verdict", has_text="Equal texts.").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


@pytest.mark.parametrize(
    ("tokens", "pieces", "shown"),
    [
        (["a", "b"], ["ab"], ["a", "b"]),
        (["\ufffd", "\ufffd", "b"], ["\u00e9b"], ["\u00e9", "b"]),  # two tokens make one character
        (["abc", "d"], ["a", "bcd"], ["abc", "d"]),  # a part of a token is held back
        (["a"], ["a", "!"], ["a!"]),  # more text than tokens
    ],
)
def test_the_text_is_divided_among_the_tokens(
    browser: Any, served: Served, tokens: list[str], pieces: list[str], shown: list[str]
) -> None:
    script = """async ([tokens, pieces]) => {
        const { Run } = await import("/page/run.js");
        const run = new Run({});
        const draft = { tokens, texts: tokens, sources: tokens.map(() => "trigram") };
        run.addStep({ draft, accepted: tokens.map((_, row) => row), bonus: null }, 0);
        for (const piece of pieces) run.addText(piece, false);
        return [run.tokens.map((token) => token.text), run.text];
    }"""
    with visit(browser, served.url + DRAFTS) as page:
        assert page.evaluate(script, [tokens, pieces]) == [shown, "".join(pieces)]


AXE = "axe-core@4.14.1"
VIOLATIONS = (
    """async () => (await axe.run()).violations.flatMap(({ id, nodes }) => nodes.map((node) => `${id}: ${node.html}`))"""
)


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its script."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
    if npm is None:
        pytest.skip("npm is not installed")
    command = [npm, "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", AXE]
    if subprocess.run(command, capture_output=True, timeout=60).returncode:
        pytest.skip("the npm registry does not give axe-core")
    return Path(folder / "node_modules" / "axe-core" / "axe.js").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_chat_is_accessible(browser: Any, served: Served, axe: str, scheme: str, viewport: dict[str, int]) -> None:
    with chatting(browser, served.url, 24, viewport, color_scheme=scheme) as page:
        page.evaluate(axe)
        assert page.evaluate(VIOLATIONS) == []
        page.click("#overlay")
        ask(page, "```python\nprint(1)\n```")
        page.click("text=Regenerate")
        page.locator("article.assistant >> text='2 of 2'").wait_for()
        assert page.evaluate(VIOLATIONS) == []
        page.click("text=Edit")
        assert page.evaluate(VIOLATIONS) == []
        page.click("#open-settings")
        assert page.evaluate(VIOLATIONS) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_view_of_drafts_is_accessible(browser: Any, served: Served, axe: str, scheme: str) -> None:
    with visit(browser, served.url + DRAFTS, color_scheme=scheme) as page:
        submit(page, PROMPT, max_tokens="20")
        said(page, "Done")
        page.locator("#transcript .token.drafted").first.click()
        page.click("#server summary")
        page.get_by_role("row", name="Cache used").wait_for()
        page.evaluate(axe)
        assert page.evaluate(VIOLATIONS) == []


VIEW = "/page/drafts.html#server"


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
