"""Pages: self-contained, escaped, accessible, and free of torch."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import perilune.report
from perilune.report import (
    Headline,
    Notes,
    Page,
    Plot,
    Plots,
    Sample,
    Samples,
    Series,
    Table,
    Threshold,
    render_page,
    write_page,
)

HOSTILE = "</pre><script>alert('x')</script><img src=https://example.org/x.png onerror=alert(1)>{{ 7*7 }}"


class Tags(HTMLParser):
    """All tags with their attributes, and whether they nest."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "path", "use", "rect", "defs"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def full_page(text: str) -> Page:
    plot = Plot(
        title=text,
        x_label=text,
        y_label=text,
        caption=text,
        series=[Series(name=text, x=[0, 1], y=[1, 2])],
        thresholds=[Threshold(value=1.5, name=text)],
    )
    return Page(
        title=text,
        subtitle=text,
        headlines=[Headline(label=text, value=text, note=text)],
        facts={text: text},
        sections=[
            Notes(title=text, notes=[text]),
            Plots(title=text, plots=[plot], text=text),
            Table(title=text, columns=[text, "n"], rows=[[text, 1], ["b", "2.5"]], text=text),
            Table(title=text, columns=[text], rows=[[text]], folded=True),
            Samples(title=text, samples=[Sample(heading=text, prompt=text, text=text)]),
        ],
    )


def parse(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert tags.open == []
    return tags


def test_hostile_text_is_shown_and_never_becomes_markup() -> None:
    html = render_page(full_page(HOSTILE))
    tags = parse(html)
    assert not {"script", "img", "iframe", "link", "object"} & {tag for tag, _ in tags.tags}
    assert not [name for _, attributes in tags.tags for name in attributes if name.startswith("on")]
    assert "{{ 7*7 }}" in tags.text and "49" not in tags.text
    assert tags.text.count(HOSTILE) >= 15
    assert [tag for tag, _ in tags.tags] == [tag for tag, _ in parse(render_page(full_page("plain"))).tags]


def test_page_needs_nothing_from_outside() -> None:
    html = render_page(full_page("text"))
    tags = parse(html)
    for tag, attributes in tags.tags:
        for name in ("src", "href", "xlink:href", "data", "action"):
            target = attributes.get(name)
            assert target is None or target.startswith("#"), (tag, name, target)
    assert not re.search(r"url\((?!#)", html.replace("url('#", "url(#")) and "@import" not in html
    policy = [a["content"] for tag, a in tags.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy and "default-src 'none'" in str(policy[0])


def test_page_is_for_light_dark_and_paper() -> None:
    html = render_page(Page(title="t"))
    assert "prefers-color-scheme: dark" in html and "@media print" in html
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", html))
    defined = set(re.findall(r"--([a-z0-9-]+):", html))
    assert used <= defined


def test_tables_have_scopes_and_numbers_stand_right() -> None:
    html = render_page(Page(title="t", sections=[Table(title="T", columns=["a", "b"], rows=[["x", 1], ["y", "-2.5"]])]))
    tags = parse(html).tags
    assert [a.get("scope") for tag, a in tags if tag == "th"] == ["col", "col", "row", "row"]
    assert [a.get("class") for tag, a in tags if tag == "td"] == ["number", "number"]


def test_only_words_too_long_for_a_column_are_broken_within() -> None:
    cells = ["1.578\u00a0[1.283,\u00a01.940] undecided", "a/path/" + 5 * "of_many_parts/", "x"]
    rows = [["row", cell] for cell in cells]
    tags = parse(render_page(Page(title="t", sections=[Table(title="T", columns=["a", "b"], rows=rows)]))).tags
    assert [a.get("class") for tag, a in tags if tag == "td"] == [None, "long", None]


def test_figures_have_a_name_for_those_who_cannot_see_them() -> None:
    plot = Plot(title="Loss", x_label="step", y_label="nats", series=[Series(name="a", x=[0, 1], y=[1, 2])])
    tags = parse(render_page(Page(title="t", sections=[Plots(title="P", plots=[plot])]))).tags
    assert "Loss: nats over step" in [attributes.get("aria-label") for _, attributes in tags]


def test_empty_plots_are_left_out() -> None:
    plot = Plot(title="Gone", x_label="step", y_label="nats", series=[Series(name="a", x=[], y=[])])
    assert "Gone" not in render_page(Page(title="t", sections=[Plots(title="P", plots=[plot])]))


def test_samples_keep_their_white_space() -> None:
    sample = Sample(heading="h", prompt="def f():\n", text="    return 1\n\n\tx")
    html = render_page(Page(title="t", sections=[Samples(title="S", samples=[sample])]))
    assert '<pre tabindex="0"><b>def f():\n</b>    return 1\n\n\tx</pre>' in html


def test_file_appears_whole_and_survives_half_characters(tmp_path: Path) -> None:
    path = write_page(Page(title="half \ud83d a moon"), tmp_path / "deeper" / "report.html")
    assert "half ? a moon" in path.read_text(encoding="utf-8")
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_page(Page(title="first"), tmp_path / "report.html")

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_page(Page(title="second"), path)
    assert "first" in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_report_imports_no_torch_and_nothing_else_of_the_package() -> None:
    source = str(Path(perilune.report.__file__).parents[2])
    script = (
        "import sys, perilune.report\n"
        "own = {m for m in sys.modules if m.startswith('perilune.') and not m.startswith('perilune.report')}\n"
        "print('torch' in sys.modules, 'matplotlib.pyplot' in sys.modules, sorted(own))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": source, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "False False []"
