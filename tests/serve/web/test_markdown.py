"""The page's Markdown: what it shows, and that nothing a model writes becomes more than text in known elements."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serve.web.scripted_chat import Script, ScriptedChat, serving
from tests.serve.web.visiting import Visit
from tests.swarm.view.payloads import HACK, PAYLOADS

pytestmark = pytest.mark.needs_tool("chromium")

RENDER = """
async (texts) => {
  const { showMarkdown } = await import("/web/markdown.js");
  return texts.map((text) => {
    const box = document.createElement("div");
    document.body.append(box);
    showMarkdown(box, text);
    const seen = [...box.querySelectorAll("*")].map((e) => [
      e.tagName.toLowerCase(), Object.fromEntries([...e.attributes].map((a) => [a.name, a.value])), e.namespaceURI]);
    const found = { outline: outline(box), text: box.textContent, seen };
    box.remove();
    return found;
  });
  function outline(node) {
    if (node.nodeType === 3) return node.data;
    if (node.tagName === "BUTTON") return null;
    return [node.tagName.toLowerCase(), ...[...node.childNodes].map(outline).filter((each) => each !== null)];
  }
}
"""
MEASURE = """
async (text) => {
  const { showMarkdown } = await import("/web/markdown.js");
  const box = document.createElement("div");
  showMarkdown(box, text);
  return box.textContent.length;
}
"""
GROW = """
async (texts) => {
  const { showMarkdown } = await import("/web/markdown.js");
  for (const text of texts) {
    const grown = document.createElement("div");
    for (let end = 1; end < text.length; end += 1 + (end % 7)) showMarkdown(grown, text.slice(0, end));
    showMarkdown(grown, text);
    const whole = document.createElement("div");
    showMarkdown(whole, text);
    if (!grown.isEqualNode(whole)) return text;
  }
  return null;
}
"""

ATTRIBUTES = {
    "p": set(), "h2": set(), "h3": set(), "h4": set(), "ul": set(), "ol": {"start"}, "li": set(), "hr": set(),
    "blockquote": set(), "pre": {"tabindex", "aria-label"}, "code": set(), "strong": set(), "em": set(), "s": set(),
    "div": {"class", "tabindex"}, "button": {"type"}, "table": set(), "thead": set(), "tbody": set(), "tr": set(),
    "th": set(), "td": set(), "a": {"href", "target", "rel"}, "small": set(),
}  # fmt: skip
"""The elements that may appear, with the attributes each may have."""

FRAGMENTS = (
    *PAYLOADS, "*", "**", "***", "_", "__", "~~", "`", "``", "```", "```html\n", "~~~\n", "\n", "\n\n", "  ", "    ",
    "\t", "- ", "* ", "1. ", "7) ", "> ", ">", "# ", "###### ", "---", "|", "|---|---|\n", "| a | b |\n", "[", "](",
    ")", "]", "[x](https://example.org/a?b=c)", "[x](javascript:alert(1))", f"[x](JaVaScRiPt:{HACK})",
    "[x](data:text/html,<script>)", "[x](//evil.example)", "[x](https://user:pass@evil.example/)",
    f'[x](https://example.org/" onclick="{HACK})', "[x](https://[bad)", "[x](https://example.org\\@evil.example)",
    "![x](https://evil.example/p.png)", "<https://a.b>", "\\", "\\*", "\r", "\r\n", "\0", "\u2028", "\u202e", "\ufeff",
    "é", "猫", "🙂", "\ud800", "a", "word ", "0", "&amp;",
)  # fmt: skip


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Visit]:
    with serving(ScriptedChat().app()) as url:
        visit = Visit(browser, url).greeted()
        yield visit
        visit.context.close()


def render(page: Visit, *texts: str) -> list[dict[str, Any]]:
    return page.page.evaluate(RENDER, list(texts))


def outline(page: Visit, text: str) -> list[Any]:
    return render(page, text)[0]["outline"][1:]


def random_texts(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choice(FRAGMENTS) for _ in range(draw.randint(1, 40))) for _ in range(count)]


def test_nothing_but_known_elements_and_attributes_comes_out_of_any_text(page: Visit) -> None:
    for start in range(0, 3000, 500):
        for found in render(page, *PAYLOADS, *random_texts(start, 500)):
            for tag, attributes, space in found["seen"]:
                assert space == "http://www.w3.org/1999/xhtml"
                assert set(attributes) <= ATTRIBUTES[tag], (tag, attributes)
                if tag == "a":
                    assert attributes["href"].startswith(("http://", "https://")), attributes
                    assert attributes["rel"] == "noopener noreferrer nofollow"
                if tag == "div":
                    assert attributes["class"] in ("block", "table")
    page.check()


def test_a_text_that_grows_is_shown_as_the_whole_text_is(page: Visit) -> None:
    assert page.page.evaluate(GROW, random_texts(1, 150)) is None


def test_plain_text_is_shown_letter_for_letter(page: Visit) -> None:
    draw = random.Random(2)
    letters = "abc déf 猫 🙂 <>&\"'{}$=;:,.?!()/%@^"
    texts = ["x" + "".join(draw.choice(letters) for _ in range(80)) + "x" for _ in range(300)]
    assert [found["outline"] for found in render(page, *texts)] == [["div", ["p", text]] for text in texts]


@pytest.mark.parametrize(
    "text, shown",
    [
        ("a **b** *c*", [["p", "a ", ["strong", "b"], " ", ["em", "c"]]]),
        ("~~d~~ `e*f*`", [["p", ["s", "d"], " ", ["code", "e*f*"]]]),
        ("**a *b* c**", [["p", ["strong", "a ", ["em", "b"], " c"]]]),
        ("***a***", [["p", ["strong", ["em", "a"]]]]),
        ("snake_case_name and 2 * 3 * 4", [["p", "snake_case_name and 2 * 3 * 4"]]),
        ("_a_ __b__", [["p", ["em", "a"], " ", ["strong", "b"]]]),
        ("**open", [["p", "**open"]]),
        ("``a`b``", [["p", ["code", "a`b"]]]),
        ("\\*a\\*", [["p", "*a*"]]),
        ("one\ntwo\n\nthree", [["p", "one\ntwo"], ["p", "three"]]),
        ("# A\ntext\n### B #", [["h2", "A"], ["p", "text"], ["h4", "B"]]),
        ("---", [["hr"]]),
        ("> a\n> > b", [["blockquote", ["p", "a"], ["blockquote", ["p", "b"]]]]),
        (
            "so:\n- a\n- b\n  - c\n\n  d\n\nend",
            [["p", "so:"], ["ul", ["li", "a"], ["li", "b", ["ul", ["li", "c"]], ["p", "d"]]], ["p", "end"]],
        ),
        ("3. a\n4. b", [["ol", ["li", "a"], ["li", "b"]]]),
        ("In\n1986. it was", [["p", "In\n1986. it was"]]),
        ("- a\n\n- b\n1. c", [["ul", ["li", "a"], ["li", "b"]], ["ol", ["li", "c"]]]),
        ("1. a\n   ```\n   x\n     y\n   ```", [["ol", ["li", "a", ["div", ["pre", ["code", "x\n  y"]]]]]]),
        ("```py\na = '<b>'\n\n# b\n```\nc", [["div", ["pre", ["code", "a = '<b>'\n\n# b"]]], ["p", "c"]]),
        ("````\n```\n````", [["div", ["pre", ["code", "```"]]]]),
        ("```\nnever closed", [["div", ["pre", ["code", "never closed"]]]]),
        (
            "|a|b|\n|-|-|\n|1|**2**|\n|3|",
            [["div", ["table", ["thead", ["tr", ["th", "a"], ["th", "b"]]],
                      ["tbody", ["tr", ["td", "1"], ["td", ["strong", "2"]]], ["tr", ["td", "3"], ["td"]]]]]],
        ),
        ("[a](https://example.org/x) b", [["p", ["a", "a", ["small", " (example.org)"]], " b"]]),
        ("[a](javascript:alert(1))", [["p", "[a](javascript:alert(1))"]]),
        ("![a](https://example.org/x.png)", [["p", "!", ["a", "a", ["small", " (example.org)"]]]]),
        ("<b>a</b> &lt;", [["p", "<b>a</b> &lt;"]]),
    ],
)  # fmt: skip
def test_the_supported_part_of_markdown(page: Visit, text: str, shown: list[Any]) -> None:
    assert outline(page, text) == shown


def test_a_label_cannot_pretend_another_host(page: Visit) -> None:
    (found,) = render(page, "[https://bank.example](https://bank.example@evil.example/)")
    assert found["text"] == "https://bank.example (evil.example)"


@pytest.mark.parametrize(
    "piece",
    [
        "*",
        "**a ",
        "_a ",
        "`",
        "[",
        "[a](",
        "[a](https://x",
        "> ",
        "- ",
        "  - ",
        "1. ",
        "|",
        "|-",
        "# ",
        "\\",
        "`a``",
        "~~a ",
        "*a* ",
    ],
)
def test_time_grows_with_length_whatever_is_repeated(page: Visit, piece: str) -> None:
    # What grows with the square of the length would take minutes here and run into the limit.
    whole = piece * (800_000 // len(piece))
    lines = (piece + "\n") * (100_000 // (len(piece) + 1))
    deep = "".join("  " * n + piece + "\n" for n in range(400))
    for text in (whole, lines, deep):
        assert page.page.evaluate(MEASURE, text) <= 2 * len(text)


def test_a_whole_answer_of_payloads_stays_text(chat: ScriptedChat, url: str, visit: Callable[..., Visit]) -> None:
    everything = "\n\n".join(PAYLOADS)
    call = {"index": 0, "id": HACK, "function": {"name": PAYLOADS[6], "arguments": everything}}
    deltas = [
        {"reasoning_content": everything},
        *({"content": each + "\n\n"} for each in PAYLOADS),
        {"tool_calls": [call]},
    ]
    chat.models = (PAYLOADS[6],)
    chat.scripts.extend([Script(deltas=tuple(deltas)), Script(status=400, message=PAYLOADS[6])])
    person = visit(url).greeted()
    person.say(everything)
    person.answered()
    person.page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert PAYLOADS[6] in person.texts(".call")[0] and PAYLOADS[0] in person.texts(".thoughts")[0]
    person.say("again")
    person.expect("document.querySelector('.failure') !== null")
    assert PAYLOADS[6] in person.texts(".failure")[0]
    person.page.wait_for_timeout(200)
    person.check()
