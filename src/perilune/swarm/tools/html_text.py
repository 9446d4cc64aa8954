"""Readable text from HTML, in time linear in its length.

Scripts, styles, templates, comments and hidden elements go; headings, lists, tables, code and links stay, in a form
close to Markdown. The standard library's parser takes quadratic time on pages made for it (an unclosed comment or
attribute, repeated), and a page comes from strangers; so the tokenizer here looks at every character a bounded number
of times: whatever does not close within `TAG_LIMIT` characters is text, and the scan goes on behind it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urljoin, urlsplit

TAG_LIMIT = 16_384
DEPTH_LIMIT = 2_000

DROPPED = frozenset({"script", "style", "noscript", "template", "svg", "math", "iframe", "object", "embed", "head"})
RAW = frozenset({"script", "style", "textarea", "title", "xmp", "noembed", "noframes"})
"""Elements whose content is no markup: it ends at their own end tag."""
# fmt: off
BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "body", "dd", "details", "div", "dl", "dt", "fieldset", "figcaption",
    "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "html", "li", "main", "nav", "ol",
    "option", "p", "pre", "section", "select", "summary", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "ul",
})
EMPTY = frozenset({
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr",
})
# fmt: on
HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}

_TAG = re.compile(r"</?([a-zA-Z][^\s/>]{0,63})((?:[^\"'>]++|\"[^\"]*+\"|'[^']*+')*+)>")
_ATTRIBUTE = re.compile(r"([^\s\"'>/=]{1,64})(?:\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]+)))?")
_LONG_REFERENCE = re.compile(r"&#(?:[xX][0-9a-fA-F]{7,}|[0-9]{8,});?")
_SPACES = re.compile(r"\s+")
_HIDDEN_STYLE = re.compile(
    r"display\s*:\s*none|visibility\s*:\s*hidden|(?:^|;)\s*opacity\s*:\s*0(?:\.0*)?\s*(?:;|$)|font-size\s*:\s*0(?:\D|$)",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Tag:
    name: str
    attributes: dict[str, str]
    closing: bool


@dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    text: str


def page_text(source: str, *, base: str = "") -> Page:
    """Title and readable text of a page; links are made absolute with `base` and kept as `[words](address)`."""
    writer = _Writer(base=base)
    for token in tokens(source):
        if isinstance(token, str):
            writer.words(token)
        elif token.closing:
            writer.close(token.name)
        else:
            writer.open(token)
    return Page(title=_one_space(writer.title), text=writer.finished())


def tokens(source: str) -> Iterator[str | Tag]:
    """Tags and the text between them. Every branch moves on, so the work is linear."""
    position, end = 0, len(source)
    while position < end:
        start = source.find("<", position)
        if start < 0:
            yield _unescaped(source[position:])
            return
        if start > position:
            yield _unescaped(source[position:start])
        if source.startswith("<!--", start):
            close = source.find("-->", start + 2)
            position = end if close < 0 else close + 3
        elif source.startswith(("<!", "<?"), start):
            close = source.find(">", start, start + TAG_LIMIT)
            position = min(start + TAG_LIMIT, end) if close < 0 else close + 1
        elif match := _TAG.match(source, start, start + TAG_LIMIT):
            name, closing = match[1].lower(), source[start + 1] == "/"
            yield Tag(name, {} if closing else _attributes(match[2]), closing)
            position = match.end()
            if name in RAW and not closing:
                position, inside = _raw(source, position, name)
                yield _unescaped(inside) if name in ("title", "textarea") else inside
                yield Tag(name, {}, True)
        elif start + 1 < end and (source[start + 1].isalpha() or source[start + 1] == "/"):
            # A tag that never closes: what was scanned for it is text, and is not scanned again.
            position = min(start + TAG_LIMIT, end)
            yield _unescaped(source[start:position])
        else:
            yield "<"
            position = start + 1


def _raw(source: str, position: int, name: str) -> tuple[int, str]:
    close = re.compile(rf"</{re.escape(name)}[^>]{{0,200}}>", re.I).search(source, position)
    if close is None:
        return len(source), source[position:]
    return close.end(), source[position : close.start()]


def _attributes(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for match in _ATTRIBUTE.finditer(text):
        value = match[2] or match[3] or match[4] or ""
        found.setdefault(match[1].lower(), _unescaped(value))
    return found


def _unescaped(text: str) -> str:
    # int() refuses thousands of digits, so html.unescape would raise on a reference that long.
    return html.unescape(_LONG_REFERENCE.sub("\ufffd", text)) if "&" in text else text


def _one_space(text: str) -> str:
    return " ".join(text.split())


def _is_hidden(attributes: dict[str, str]) -> bool:
    return (
        "hidden" in attributes
        or attributes.get("aria-hidden", "").lower() == "true"
        or (attributes.get("type", "").lower() == "hidden")
        or _HIDDEN_STYLE.search(attributes.get("style", "")[:2_000]) is not None
    )


@dataclass
class _Writer:
    base: str
    title: str = ""
    pieces: list[str] = field(default_factory=list)
    stack: list[tuple[str, bool]] = field(default_factory=list)
    """Open elements, and whether each is the one that hides what is in it."""
    hidden: int = 0
    in_title: bool = False
    preformatted: int = 0
    links: list[tuple[str, int]] = field(default_factory=list)
    """Address of the open link, if any, and where its words begin."""

    def open(self, tag: Tag) -> None:
        if tag.name == "title" and not self.title:
            self.in_title = True
        if tag.name == "br":
            self._write("\n")
        if tag.name == "img" and not self.hidden and not _is_hidden(tag.attributes):
            words = _one_space(tag.attributes.get("alt", ""))
            self._write(f"[image: {words[:300]}]" if words else "")
        if tag.name in EMPTY:
            if tag.name == "hr":
                self._write("\n\n---\n\n")
            return
        if tag.name == "body" and self.stack and self.stack[-1][0] == "head":
            self.close("head")  # an unclosed head must not hide the page
        hides = tag.name in DROPPED or _is_hidden(tag.attributes)
        if len(self.stack) < DEPTH_LIMIT:
            self.stack.append((tag.name, hides))
            self.hidden += hides
        if self.hidden:
            return
        if tag.name in BLOCKS and tag.name not in ("td", "th"):
            self._write("\n" if tag.name in ("li", "tr", "dd", "option") else "\n\n")
        if tag.name == "pre":
            self.preformatted += 1
        self._write(HEADINGS.get(tag.name, ""))
        if tag.name == "li":
            self._write("- ")
        elif tag.name in ("td", "th"):
            self._write(" | ")
        elif tag.name == "a":
            if self.links:  # links do not nest: joining the words of each would take quadratic time
                self._finish_link()
            self.links.append((self._address(tag.attributes.get("href", "")), len(self.pieces)))

    def close(self, name: str) -> None:
        if name == "title":
            self.in_title = False
        was_hidden = self.hidden
        for depth in range(len(self.stack) - 1, max(-1, len(self.stack) - 64), -1):
            if self.stack[depth][0] == name:
                self.hidden -= sum(hides for _, hides in self.stack[depth:])
                del self.stack[depth:]
                break
        if was_hidden:
            return
        if name == "pre":
            self.preformatted = max(0, self.preformatted - 1)
        if name == "a" and self.links:
            self._finish_link()
        if name in BLOCKS and name not in ("td", "th"):
            self._write("\n" if name in ("li", "tr", "dd", "dt", "option") else "\n\n")

    def words(self, text: str) -> None:
        if self.in_title and len(self.title) < 500:
            self.title += text
        if not self.hidden and not self.in_title:
            self._write(text if self.preformatted else _SPACES.sub(" ", text))

    def finished(self) -> str:
        lines = [line.rstrip() for line in "".join(self.pieces).split("\n")]
        kept: list[str] = []
        for line in lines:
            line = line if line.startswith("    ") else line.strip()
            if line or (kept and kept[-1]):
                kept.append(line)
        return "\n".join(kept).strip()

    def _write(self, text: str) -> None:
        if text:
            self.pieces.append(text)

    def _address(self, href: str) -> str:
        try:
            address = urljoin(self.base, href.strip()) if href else ""
            scheme = urlsplit(address).scheme.lower()
        except ValueError:
            return ""
        return address if scheme in ("http", "https", "mailto") and len(address) <= 2_000 else ""

    def _finish_link(self) -> None:
        address, start = self.links.pop()
        words = _one_space("".join(self.pieces[start:]))
        del self.pieces[start:]
        if words and address and words != address:
            words = f"[{words}]({address.replace(')', '%29').replace(' ', '%20')})"
        self._write(words)
