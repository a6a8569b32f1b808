"""The chat's Markdown in a real browser: its nodes, and texts that mean harm. No test needs a model's answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.page.chromium import said, visit
from tests.servers import Served

# The nodes of texts as HTML, without attributes but links' and classes'; shown at once, and in pieces of `size` characters.
RENDER = """async ([text, size]) => {
  const { Markdown } = await import("/page/markdown.js");
  const element = document.createElement("div");
  const markdown = new Markdown(element);
  for (let end = size; end < text.length; end += size) markdown.update(text.slice(0, end));
  markdown.update(text);
  for (const each of element.querySelectorAll("*")) for (const { name } of [...each.attributes])
    if (!["href", "class", "start"].includes(name)) each.removeAttribute(name);
  for (const head of element.querySelectorAll(".code-head")) head.remove();
  return element.innerHTML;
}"""


@pytest.fixture(scope="module")
def page(browser: Any, served: Served) -> Iterator[Any]:
    with visit(browser, served.url) as page:
        yield page


TABLE = '<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
CODE = '<div class="code"><pre class="scroll"><code>{}</code></pre></div>'
RENDERED = [
    (
        "a *b* **c `d` e** __f__ ~~g~~",
        "<p>a <em>b</em> <strong>c <code>d</code> e</strong> <strong>f</strong> <del>g</del></p>",
    ),
    (
        "***both*** snake_case_name 2 * 3 * 4 \\*no\\* **open",
        "<p><strong><em>both</em></strong> snake_case_name 2 * 3 * 4 *no* **open</p>",
    ),
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    ("# a\n### b *c*\n---\n#no", '<h2 class="level-1">a</h2><h2 class="level-3">b <em>c</em></h2><hr><p>#no</p>'),
    (
        "- a\n- b\n  1. c\n\n     d\n- e",
        "<ul><li><p>a</p></li><li><p>b</p><ol><li><p>c</p><p>d</p></li></ol></li><li><p>e</p></li></ul>",
    ),
    ("3. a\n4. b\n\ntext\n1984. c", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol><p>text<br>1984. c</p>'),
    ("> a\n> - b\n\nc", "<blockquote><p>a</p><ul><li><p>b</p></li></ul></blockquote><p>c</p>"),
    ("```\n<b>\n  x\n```\ny", CODE.format("&lt;b&gt;\n  x") + "<p>y</p>"),
    ("~~~~\n```\n~~~~", CODE.format("```")),
    (
        "```js\nreturn 1; // no",
        CODE.format('<span class="keyword">return</span> <span class="number">1</span>; <span class="comment">// no</span>'),
    ),
    (
        "1. a\n   ```py\n   if x:\n       pass\n   ```",
        "<ol><li><p>a</p>"
        + CODE.format('<span class="keyword">if</span> x:\n    <span class="keyword">pass</span>')
        + "</li></ol>",
    ),
    (
        "| a | b |\n|---|--:|\n| `c` | d \\| e |",
        TABLE.format(
            head='<th>a</th><th class="right">b</th>', body='<tr><td><code>c</code></td><td class="right">d | e</td></tr>'
        ),
    ),
    (
        '[a *b*](https://c.d "e") <https://f.g/h_(i)>. &lt; &#65;',
        '<p><a href="https://c.d/">a <em>b</em></a> &lt;<a href="https://f.g/h_(i)">https://f.g/h_(i)</a>&gt;. &lt; A</p>',
    ),
    ("![a](https://b.c/d.png) [m](mailto:a@b.c)", '<p><a href="https://b.c/d.png">a</a> <a href="mailto:a@b.c">m</a></p>'),
    ("- [x] a\n- [ ] b", '<ul><li class="task">\u2611 <p>a</p></li><li class="task">\u2610 <p>b</p></li></ul>'),
]


@pytest.mark.parametrize(("text", "shown"), RENDERED)
def test_markdown_becomes_nodes_at_once_and_in_pieces(page: Any, text: str, shown: str) -> None:
    assert [page.evaluate(RENDER, [text, size]) for size in (len(text), 1, 3)] == [shown] * 3


def test_a_long_answer_in_pieces_is_the_same(page: Any) -> None:
    text = "\n\n".join(text for text, _ in RENDERED if "~~~~" not in text and "no" not in text)
    assert page.evaluate(RENDER, [text, 7]) == page.evaluate(RENDER, [text, len(text)])


HOSTILE = r"""
<script>document.title = 'run'</script> <img src=x onerror="document.title='run'"> <svg onload=alert(1)>
<iframe src="//evil.example"></iframe> <style>* { display: none }</style> <a href="javascript:alert(1)">x</a>

[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](java&#115;cript:alert(1)) [d](data:text/html,x) [e](vbscript:x)
[f](//evil.example)
[g](/v1/models) [h](\x01javascript:alert(1)) [i](file:///etc/passwd) [j](blob:x) [![k](https://evil.example/k.png)](https://evil.example)
<javascript:alert(1)> [l](https://good.example" onclick="alert(1)) [m](https://good.example?"onmouseover="alert(1))

```html" onclick="alert(1)
<script>document.title = 'run'</script>
```
| <img src=x onerror=alert(1)> | b |
|---|---|
| `<script>` | [x](javascript:alert(1)) |

- [ ] <input onfocus=alert(1) autofocus>
> <form action="//evil.example"><button>x</button></form>

# <b onclick=alert(1)>x</b>
```
unclosed <script>
"""


def test_hostile_text_makes_no_markup_and_no_request(page: Any, tmp_path: Path) -> None:
    texts = {"text": HOSTILE, "reasoning": HOSTILE, "model": HOSTILE, "note": HOSTILE}
    messages = {
        "a": {"id": "a", "parent": None, "role": "user", "at": 1, "text": HOSTILE, "files": [{"name": HOSTILE, **texts}]},
        "b": {"id": "b", "parent": "a", "role": "assistant", "at": 2, **texts},
    }
    conversation = {"id": "c", "title": HOSTILE, "at": 1, "system": HOSTILE, "messages": messages, "leaf": "b"}
    file = tmp_path / "conversation.json"
    file.write_text(json.dumps({"format": "outrider-conversations", "version": 1, "conversations": [conversation]}))
    requests = list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.set_input_files("#file", file)
    said(page, "Imported")
    page.locator("article.assistant table").first.wait_for(state="attached")
    page.click("article.assistant summary")
    names = page.locator("article *").evaluate_all("all => [...new Set(all.map((each) => each.localName))]")
    allowed = (
        "a blockquote br button code details div h2 hr li ol p pre span strong em del summary table tbody td th thead tr ul"
    )
    assert set(names) <= set(allowed.split())
    attributes = page.locator("article *").evaluate_all("all => [...new Set(all.flatMap((each) => each.getAttributeNames()))]")
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "style", "srcset", "formaction")]
    links = page.locator("article a").evaluate_all("all => all.map(({ protocol, rel, target }) => [protocol, rel, target])")
    assert links and all(link == ["https:", "noopener noreferrer nofollow", "_blank"] for link in links)
    assert page.title() != "run" and not [url for url in requests if "evil" in url or "/x" in url]


N = 100_000
LARGE = {
    "stars": "*a **b " * N,
    "closing": "**a* " * N,
    "brackets": "[" * N + "](" * N,
    "destinations": "[a](b" * N,
    "backticks": " ".join("`" * length for length in range(400)),
    "quotes": ">" * N + "x",
    "lists": "- " * N + "x",
    "markers": "- a\n* b\n" * (N // 4),
    "indents": "\n".join(" " * depth + "- x" for depth in range(500)),
    "fence": "```" + " " * N + "`",
    "tildes": "~" * N + "`",
    "comments": "```js\n" + "/*" * N,
    "strings": "```js\n" + '"\\' * N,
    "table": "|" * N + "\n|-|\n" + "|" * N,
    "blank": "- a\n" + "\n" * N + "b",
    "addresses": ("https://" + ")" * 1000) * 100,
    "entities": "&#" * N,
    "underscores": "_a" * N,
    "spaces": "#" + " " * N + "x" + " " * N + "#",
}


@pytest.mark.parametrize("name", LARGE)
def test_no_text_takes_more_than_linear_time(page: Any, name: str) -> None:
    # Quadratic time would be minutes, and longer than the driver waits.
    depth = """async (text) => {
      const { Markdown } = await import("/page/markdown.js");
      const element = document.createElement("div");
      new Markdown(element).update(text);
      const depth = (each) => { let count = 0; for (; each !== element; each = each.parentNode) count += 1; return count; };
      return Math.max(...[...element.querySelectorAll("*")].slice(0, 50000).map(depth));
    }"""
    page.evaluate("text => (window.text = text)", LARGE[name])
    assert page.wait_for_function(f"() => ({depth})(window.text).then((found) => [found])").json_value()[0] < 64
