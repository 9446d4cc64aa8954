"""A whole ladder on a CPU: three rungs, two arms, two seeds, a prediction, the held-out rung, the report."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from perilune.cli import main


def test_a_ladder_is_run_predicted_checked_and_reported(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = ["--set", "trainer.eval_rows=16"]
    folder = tmp_path / "ladders" / "tiny"
    main(["ladder", "run", "tiny", "--quiet", "--commit", "1234abc", *own])
    with pytest.raises(SystemExit):
        main(["ladder", "run", "tiny", "--held-out", *own])
    assert "nothing was predicted" in capsys.readouterr().err
    main(["ladder", "predict", "tiny", "--commit", "1234abc"])
    before = (folder / "prediction.json").read_bytes()
    main(["ladder", "run", "tiny", "--held-out", "--seeds", "0", "--quiet", *own])
    with pytest.raises(SystemExit):
        main(["ladder", "predict", "tiny"])
    assert "has results already" in capsys.readouterr().err
    assert (folder / "prediction.json").read_bytes() == before

    main(["ladder", "report", "tiny", "--png", "--json"])
    files = {Path(path).name for path in json.loads(capsys.readouterr().out)["files"]}
    assert files == {
        "report.html", "report.md", "loss_half.png", "loss_full.png", "multipliers.png", "time.png", "trend.png",
    }  # fmt: skip
    page = (folder / "report.html").read_text()
    start = page.index("<body>")
    ElementTree.fromstring(page[start : page.index("</html>")].replace("&nbsp;", " "))  # well-formed
    assert "http:" not in page.replace("http://www.w3.org", "") and "<script" not in page
    text = (folder / "report.md").read_text()
    assert "## Multipliers" in text and "| muonclip | " in text
    assert "1234abc" in text and "w40 | half | muonclip" in text and "not run yet" not in text
    assert text.count("| w16 | half |") == 4 + 1  # every cell, and the row of means
    results = list((folder / "results").glob("*.json"))
    assert len(results) == 2 * (12 + 2)
    assert max(path.stat().st_size for path in results) < 10_000  # they travel
