"""Generated HTML is hostile input: this is the gate in front of the browser.

    clean = clean_html(source, width=224, height=168)       # CleanHtml, or HostileInput with the rule that was broken

Elements and attributes are on a list, CSS goes through `perilune.data.css_guard`, tags must be properly nested, and the
page is written anew from what was understood: explicit end tags, quoted attributes, escaped text. A browser can read
the result in one way only, and nothing in it can run, load, link or submit.
"""

from dataclasses import dataclass, field
from html import escape
from html.parser import HTMLParser

from perilune.data.css_guard import clean_declarations, clean_rules, is_class_name
from perilune.data.hostile import HostileInput, Rule, shown
from perilune.data.svg_guard import decode_source

MAX_BYTES = 64 * 1024
MAX_ELEMENTS = 1000
MAX_DEPTH = 32
MAX_TEXT = 20_000
MAX_SPAN = 50

FRAME = ("html", "head", "title", "style", "body")
HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
BLOCKS = (
    "div",
    "p",
    *HEADINGS,
    "header",
    "main",
    "footer",
    "section",
    "article",
    "aside",
    "nav",
)
INLINE = ("span", "b", "strong", "i", "em", "small", "label", "button")
LISTS = ("ul", "ol", "li")
TABLES = ("table", "thead", "tbody", "tr", "th", "td")
VOID = ("br", "hr", "meta")
ELEMENTS = frozenset({*FRAME, *BLOCKS, *INLINE, *LISTS, *TABLES, *VOID})
_HEAD_ONLY = frozenset({"title", "style", "meta"})
_PARENTS = {
    "head": {"html"},
    "body": {"html"},
    "title": {"head"},
    "meta": {"head"},
    "style": {"head", "body", ""},
    "li": {"ul", "ol"},
    "thead": {"table"},
    "tbody": {"table"},
    "tr": {"thead", "tbody", "table"},
    "th": {"tr"},
    "td": {"tr"},
}
_IN_PARAGRAPHS = frozenset({*INLINE, "br"})
# What may contain nothing but these; elsewhere a browser would move the content about.
_CHILDREN = {
    "html": {"head", "body"},
    "head": set(_HEAD_ONLY),
    "title": set(),
    "style": set(),
    "p": set(_IN_PARAGRAPHS),
    "button": {*INLINE, "br"} - {"button"},
    "ul": {"li"},
    "ol": {"li"},
    "table": {"thead", "tbody", "tr"},
    "thead": {"tr"},
    "tbody": {"tr"},
    "tr": {"th", "td"},
}
_NO_TEXT = frozenset({"html", "head", "ul", "ol", "table", "thead", "tbody", "tr"})
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True, kw_only=True)
class CleanHtml:
    """A page that is safe to give to a browser and, escaped, to show."""

    source: str
    width: int
    height: int
    num_elements: int


@dataclass(kw_only=True, eq=False)
class _Page:
    styles: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    body_attributes: str = ""


def clean_html(source: str | bytes, *, width: int, height: int) -> CleanHtml:
    """The page, understood and written anew, for a window of `width` x `height`, or HostileInput."""
    gate = _Gate()
    text = decode_source(source, MAX_BYTES)
    if any(ord(character) < 32 and character not in "\t\n\r" for character in text):
        raise HostileInput("characters", "control characters are not allowed")
    gate.feed(text)
    gate.close()
    gate.finish(text)
    page = gate.page
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    style = f"<style>{''.join(page.styles)}</style>" if page.styles else ""
    body = f"<body{page.body_attributes}>{''.join(page.body)}</body>"
    return CleanHtml(
        source=f"<!doctype html><html><head>{head}{style}</head>{body}</html>",
        width=width,
        height=height,
        num_elements=gate.num_elements,
    )


class _Gate(HTMLParser):
    """Refuses while reading; `page` holds what has been understood, as text that is ready to be written."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page = _Page()
        self.num_elements = 0
        self._open: list[str] = []
        self._style: list[str] = []
        self._num_characters = 0
        self._seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ELEMENTS:
            raise HostileInput("element", f"<{shown(tag)}> is not one of {', '.join(sorted(ELEMENTS))}")
        self.num_elements += 1
        if self.num_elements > MAX_ELEMENTS:
            raise HostileInput("size", f"more than {MAX_ELEMENTS:,} elements")
        if len(self._open) >= MAX_DEPTH:
            raise HostileInput("depth", f"elements nested deeper than {MAX_DEPTH}")
        self._check_place(tag)
        attributes = _clean_attributes(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "body":
            self.page.body_attributes = attributes
        elif tag not in FRAME and tag != "meta":
            self.page.body.append(f"<{tag}{attributes}>")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID and tag in ELEMENTS:
            raise HostileInput("markup", f"<{tag}/> is no HTML; write <{tag}></{tag}>")
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1] != tag:
            expected = f"</{self._open[-1]}>" if self._open else "nothing"
            raise HostileInput("nesting", f"</{shown(tag)}> where {expected} is open")
        self._open.pop()
        if tag == "style":
            self.page.styles.append(clean_rules("".join(self._style)))
            self._style.clear()
        if tag not in FRAME:
            self.page.body.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "style":
            self._style.append(data)  # a parser may hand out the text in pieces
            return
        if inside == "title":
            return  # it is not drawn
        if data.strip() and (inside in _NO_TEXT or not self._may_hold_body()):
            raise HostileInput("text", f"text {shown(data.strip())} directly inside <{inside}>")
        self._num_characters += len(data)
        if self._num_characters > MAX_TEXT:
            raise HostileInput("size", f"more than {MAX_TEXT:,} characters of text")
        if inside not in _NO_TEXT:
            self.page.body.append(escape(data))

    def handle_comment(self, data: str) -> None:
        raise HostileInput("markup", "comments are not allowed")

    def handle_decl(self, decl: str) -> None:
        if decl.strip().lower() != "doctype html" or "doctype" in self._seen or self._seen:
            raise HostileInput("doctype", f"<!{shown(decl)}>; <!doctype html> may stand at the beginning")
        self._seen.add("doctype")

    def unknown_decl(self, data: str) -> None:
        raise HostileInput("markup", f"<![{shown(data)}")

    def handle_pi(self, data: str) -> None:
        raise HostileInput("instruction", f"a processing instruction {shown(data)}")

    def finish(self, text: str) -> None:
        if self._open:
            raise HostileInput("nesting", f"<{self._open[-1]}> is never closed")
        if not self.num_elements:
            raise HostileInput("markup", f"there is no element in {shown(text)}")
        if self.rawdata:
            raise HostileInput("markup", f"an unfinished tag {shown(self.rawdata)}")

    def _may_hold_body(self) -> bool:
        """Whether this is the body: inside <body>, or anywhere in a page that leaves html, head and body out."""
        return "html" not in self._open or "body" in self._open

    def _check_place(self, tag: str) -> None:
        parent = self._open[-1] if self._open else ""
        if tag in ("html", "head", "body", "title"):
            if tag in self._seen:
                raise HostileInput("nesting", f"a second <{tag}>")
            if tag == "html" and self.num_elements > 1:
                raise HostileInput("nesting", "<html> is the outermost element")
        self._seen.add(tag)
        if parent == "" and "html" in self._seen and tag != "html":
            raise HostileInput("nesting", f"<{tag}> after </html>")
        if tag in _PARENTS and parent not in _PARENTS[tag]:
            raise HostileInput("nesting", f"<{tag}> inside {f'<{parent}>' if parent else 'nothing'}")
        if parent in _CHILDREN and tag not in _CHILDREN[parent]:
            raise HostileInput("nesting", f"<{tag}> inside <{parent}>")
        if tag == "button" and "button" in self._open:
            raise HostileInput("nesting", "<button> inside <button>")
        # However deep: a browser would end the paragraph, or the heading, before it begins these.
        if "p" in self._open and tag not in _IN_PARAGRAPHS:
            raise HostileInput("nesting", f"<{tag}> inside <p>, which holds text, <br> and {', '.join(INLINE)}")
        if tag in HEADINGS and any(heading in self._open for heading in HEADINGS):
            raise HostileInput("nesting", f"<{tag}> inside a heading")


def _clean_attributes(tag: str, attributes: list[tuple[str, str | None]]) -> str:
    written: dict[str, str] = {}
    for name, value in attributes:
        text = value or ""
        if name in written:
            raise HostileInput("attribute", f"{shown(name)} of <{tag}> is given twice")
        if tag == "meta":
            if name != "charset" or text.lower() not in ("utf-8", "utf8"):
                raise HostileInput("attribute", f'{shown(name)} of <meta>; only charset="utf-8" is allowed')
            written[name] = "utf-8"
        elif name == "style":
            written[name] = clean_declarations(text)
        elif name == "class":
            written[name] = " ".join(_clean_class(tag, word) for word in text.split())
        elif name in ("colspan", "rowspan") and tag in ("td", "th"):
            if not (text.isascii() and text.isdigit() and len(text) <= 3 and 1 <= int(text) <= MAX_SPAN):
                raise HostileInput("number", f"{name} of <{tag}> is {shown(text)}, expected 1..{MAX_SPAN}")
            written[name] = str(int(text))
        elif name == "lang" and tag == "html":
            written[name] = "en"
        else:
            rule: Rule = "url" if name in ("href", "src", "action", "srcset", "background") else "attribute"
            raise HostileInput(rule, f"{shown(name)} of <{tag}> is not allowed; style and class are")
    return "".join(f' {name}="{escape(value)}"' for name, value in written.items())


def _clean_class(tag: str, word: str) -> str:
    if not is_class_name(word):
        raise HostileInput(
            "attribute", f"class of <{tag}> holds {shown(word)}; a letter, then letters, digits and - are allowed"
        )
    return word
