"""The command line with pictures: look at one, write its source, a page of samples, and what can go wrong."""

import base64
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perilune.cli import main
from perilune.cli_view import _drawing
from perilune.data.hostile import RendererMissing
from perilune.data.raster import decode_png, rasterize, rasterize_png
from perilune.data.scenes import header

TINY = [
    "--data.corpus.source", "generated", "--data.corpus.num-documents", "40", "--data.vocab-size", "640",
    "--trainer.steps", "3", "--trainer.global-batch-rows", "4", "--trainer.eval-rows", "2",
    "--trainer.no-tensorboard", "--trainer.sample-tokens", "4", "--data.vision.samples", "2",
    "--data.vision.sample-tokens", "6", "--data.vision.dialect-texts", "60", "--data.vision.workers", "0",
    "--data.vision.fusion.share", "0.5", "--model.num-hidden-layers", "2",
]  # fmt: skip
WORDS = [
    "--trainer.steps", "1", "--data.corpus.num-documents", "40", "--trainer.no-tensorboard",
    "--trainer.eval-rows", "1", "--trainer.global-batch-rows", "1",
]  # fmt: skip
DRAWING = header(56, 56) + '<circle cx="20" cy="20" r="10" fill="red"/></svg>'
# The guard lets it pass; dashes of a tenth of a pixel on a line of sixty thousand take the renderer seconds.
SLOW_CIRCLE = (
    '<circle cx="5" cy="5" r="9999" fill="none" stroke="red" stroke-width="999" stroke-linecap="round" '
    'stroke-dasharray="0.1"/>'
)
SLOW_DRAWING = header(56, 56) + SLOW_CIRCLE * 400 + "</svg>"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run nano, text run words, a picture and a video."""
    folder = tmp_path_factory.mktemp("workplace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["train", "nano", "--quiet", *TINY])
        main(["train", "micro", "--name", "words", "--quiet", *WORDS])
    (folder / "ball.png").write_bytes(rasterize_png(DRAWING, 56, 56))
    (folder / "frames").mkdir()
    for number in range(5):
        (folder / "frames" / f"{number}.png").write_bytes((folder / "ball.png").read_bytes())
    Image.fromarray(np.zeros((300, 200, 3), dtype=np.uint8)).save(folder / "large.png")
    (folder / "broken.png").write_bytes((folder / "ball.png").read_bytes()[:60])
    return folder


@pytest.fixture
def inside(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    return workplace


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 1
    error = capsys.readouterr().err
    lines = error.splitlines()
    assert lines and all(line.startswith("perilune: ") for line in lines), error
    return lines[-1]


def test_the_report_shows_what_was_seen_written_and_drawn(inside: Path) -> None:
    records = [json.loads(line) for line in (inside / "runs/nano/metrics.jsonl").read_text().splitlines()]
    (means,) = [record for record in records if record["kind"] == "pictures"]
    assert means["count"] == 2 and {"reward", "shuffled_reward", "parses"} <= means.keys()
    page = (inside / "runs/nano/report.html").read_text()
    assert "Held-out pictures" in page and "Vision loss" in page and page.count("data:image/png") >= 2


def test_a_picture_is_answered_about_and_json_holds_the_same_text(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "nano", "--image", "ball.png", "--prompt", "What is it?", "--max-new-tokens", "5"]
    main([*arguments, "--seed", "3"])
    streamed = capsys.readouterr().out
    main([*arguments, "--seed", "3", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert streamed == found["text"] + "\n" and len(found["tokens"]) <= 5
    assert found["prompt"] == "What is it?"
    main(["generate", "nano", "--image", "ball.png", "--image", "ball.png", "--prompt", "<image> or <image>?"])
    main(["generate", "nano", "--video", "frames", "--max-new-tokens", "2"])
    main(["generate", "nano", "--prompt", "def ", "--max-new-tokens", "2"])  # text goes on as before
    assert "def " in capsys.readouterr().out


@pytest.mark.parametrize(
    "to,name", [("svg", "ball.svg"), ("html", "ball.html"), ("out/new/drawn.svg", "out/new/drawn.svg")]
)
def test_a_source_that_passes_the_guard_is_written(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, to: str, name: str
) -> None:
    monkeypatch.setattr("perilune.cli_generate._stream", lambda *_: iter([(1, DRAWING)]))
    main(["generate", "nano", "--image", "ball.png", "--to", to])
    assert capsys.readouterr().out == f"{name}: 1 tokens\n"
    content = (inside / name).read_text()
    if to == "html":
        assert content.startswith("<!doctype")
        (picture,) = re.findall(r'<img src="data:image/png;base64,([^"]+)"', content)
        pixels = decode_png(base64.b64decode(picture))
        assert np.array_equal(pixels, rasterize(DRAWING, 56, 56))
        assert "&lt;circle" in content and "<svg" not in content and "<circle" not in content
    else:
        assert "<circle" in content and content.startswith("<svg")


def test_the_page_of_a_video_shows_its_first_frames_and_no_live_source(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = DRAWING.replace("/></svg>", '><animate attributeName="cx" to="30" dur="60s"/></circle></svg>')
    monkeypatch.setattr("perilune.cli_generate._stream", lambda *_: iter([(1, moving)]))
    main(["generate", "nano", "--video", "frames", "--to", "moving.html"])
    content = (inside / "moving.html").read_text()
    assert content.count("data:image/png") == 16 and "&lt;animate" in content and "<animate" not in content


@pytest.mark.needs_tool("chromium")
def test_the_page_of_a_page_shows_its_picture_and_its_source_as_text(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perilune.cli_generate._stream", lambda *_: iter([(1, "<div>fish &amp; chips</div>")]))
    main(["generate", "nano", "--image", "ball.png", "--to", "page.html"])
    content = (inside / "page.html").read_text()
    assert content.count("data:image/png") == 1
    assert "&lt;div&gt;fish &amp;amp; chips&lt;/div&gt;" in content and "<div" not in content


def test_a_page_that_no_browser_can_draw_is_shown_as_text_with_the_reason(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise RendererMissing("drawing HTML needs the program chromium")

    monkeypatch.setattr("perilune.data.pictures.draw_html", missing)
    monkeypatch.setattr("perilune.cli_generate._stream", lambda *_: iter([(1, "<div>fish</div>")]))
    main(["generate", "nano", "--image", "ball.png", "--to", "undrawn.html"])
    content = (inside / "undrawn.html").read_text()
    assert "needs the program chromium" in content and "&lt;div&gt;" in content and "<div" not in content
    assert "needs the program chromium" in capsys.readouterr().err


@pytest.mark.parametrize("text,reason", [
    (DRAWING.replace("<circle", "<script>alert(1)</script><circle"), "script"),
    ("nothing like a picture", "no SVG"),
    (DRAWING[:-6], "not written"),
    (SLOW_DRAWING, "not written to 'bad.svg': the picture takes more than 1 s to draw"),
])  # fmt: skip
def test_a_source_that_does_not_is_not_written(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    monkeypatch.setattr("perilune.cli_generate._stream", lambda *_: iter([(1, text)]))
    assert reason in fails(capsys, "generate", "nano", "--image", "ball.png", "--to", "bad.svg")
    assert not list(inside.glob("*bad.svg*"))


def test_a_page_of_a_source_that_takes_too_long_is_not_written(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perilune.cli_generate._stream", lambda *_: iter([(1, SLOW_DRAWING)]))
    error = fails(capsys, "generate", "nano", "--image", "ball.png", "--to", "bad.html")
    assert "more than 1 s to draw" in error and not list(inside.glob("*bad.html*"))


def test_a_file_that_nobody_named_is_never_replaced(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perilune.cli_generate._stream", lambda *_: iter([(1, DRAWING)]))
    (inside / "large.svg").write_text("drawn by hand")
    assert "already there" in fails(capsys, "generate", "nano", "--image", "large.png", "--to", "svg")
    assert (inside / "large.svg").read_text() == "drawn by hand"
    main(["generate", "nano", "--image", "large.png", "--to", "large.svg"])
    assert "<circle" in (inside / "large.svg").read_text()


def test_a_video_for_a_run_that_saw_none_comes_with_a_warning(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "nano", "--video", "frames", "--max-new-tokens", "1"])
    assert "no videos in training" in capsys.readouterr().err


def test_a_picture_of_another_size_is_looked_at_with_a_warning(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["generate", "nano", "--image", "large.png", "--max-new-tokens", "2"])
    error = capsys.readouterr().err
    assert "200 x 300" in error and "56 x 56" in error and "scaled down" in error


@pytest.mark.parametrize("arguments,reason", [
    (["words", "--image", "ball.png"], "no vision tower"),
    (["nano", "--image", "nowhere.png"], "nowhere.png"),
    (["nano", "--image", "broken.png"], "broken.png"),
    (["nano", "--image", "runs/nano/config.json"], "config.json"),
    (["nano", "--video", "out-of-sight"], "out-of-sight"),
    (["nano", "--video", ""], "--video is ''"),
    (["nano", "--to", "svg"], "--image or --video"),
    (["nano", "--image", "ball.png", "--to", "pdf"], "--to is 'pdf'"),
    (["nano", "--image", "ball.png", "--video", "frames"], "one of them"),
    (["nano", "--image", "ball.png", "--image", "ball.png", "--to", "svg"], "one picture"),
    (["nano", "--image", "ball.png", "--prompt", "<image> <image>"], "<image>"),
])  # fmt: skip
def test_wrong_input_is_one_clear_line(
    inside: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert reason in fails(capsys, "generate", *arguments)


def test_view_writes_a_page_of_pictures_and_texts(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["view", "nano", "--count", "3", "--json"])
    found = json.loads(capsys.readouterr().out)
    page = Path(found["page"]).read_text()
    assert found["svg"]["count"] == 3 and "Pictures as svg" in page and page.count("data:image/png") >= 3
    main(["view", "words", "--out", "words.html"])
    assert "Texts" in (inside / "words.html").read_text()
    capsys.readouterr()
    assert "--count is 0" in fails(capsys, "view", "nano", "--count", "0")
    assert "is a folder" in fails(capsys, "view", "nano", "--out", "frames")


def test_view_guards_a_video_before_it_is_parsed_and_draws_its_first_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawing(text: str) -> Any:
        return SimpleNamespace(exercise=SimpleNamespace(sample=SimpleNamespace(size=(56, 56)), task="video"), text=text)

    moving = DRAWING.replace("/></svg>", '><animate attributeName="cx" to="30" dur="60s"/></circle></svg>')
    drawn, problem = _drawing(drawing(moving))
    assert len(drawn) == 16 and not problem and drawn[0] != drawn[-1]
    monkeypatch.setattr("perilune.data.pictures.parse_animation", None)  # it must not be called
    drawn, problem = _drawing(drawing(moving.replace("<circle", "<script/><circle")))
    assert drawn is None and problem.startswith("element: ")


@pytest.mark.parametrize("arguments", [
    ["train", "nano", "--name", "unguarded", "--quiet", *TINY],
    ["generate", "nano", "--image", "ball.png", "--to", "unguarded.svg"],
])  # fmt: skip
def test_without_the_parser_of_generated_sources_a_verb_names_the_extra_and_writes_nothing(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("perilune.cli_generate._stream", lambda *_: iter([(1, DRAWING)]))
    for name in ("defusedxml", "defusedxml.ElementTree"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "defusedxml: pip install 'perilune[train]'" in fails(capsys, *arguments)
    assert not (inside / "unguarded.svg").exists() and not (inside / "runs/unguarded/metrics.jsonl").exists()


def test_patches_of_another_size_are_refused_before_anything_is_read(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = fails(capsys, "train", "nano", "--name", "coarse", *TINY, "--model.vision.patch-size", "16")
    assert "model.vision.patch_size is 16, expected 14" in error
