"""benchmarks/vision_report.py: differences of paired seeds by hand, tables of whatever is there."""

import json

import pytest

from tests.benchmark_scripts import FOLDER, load_script

RESULTS = FOLDER / "results" / "vision.json"


@pytest.fixture
def report(monkeypatch):
    return load_script(monkeypatch, "vision_report")


def row(arm: str, seed: int, text: float, reward: float | None = None, **more) -> dict:
    own = {} if reward is None else {"own": {"reward": [reward, reward - 0.1, reward + 0.1]}}
    curve = [[1, 2 * text], [2, text]]
    return {"arm": arm, "seed": seed, "tiny": False, "text_bits_per_byte": text, "text_curve": curve, **own, **more}


def test_a_difference_is_that_of_the_seeds_both_have_with_students_interval(report):
    rows = [row("a", 0, 1.0), row("a", 1, 2.0), row("a", 2, 4.0), row("a", 3, 9.0)]
    rows += [row("b", 0, 0.9), row("b", 1, 1.8), row("b", 2, 3.7)]
    found = report.difference(rows, "a", "b", report.text)
    # Differences 0.1, 0.2, 0.3: standard error 0.1 / sqrt(3), 4.3027 of it to each side with two degrees of freedom.
    assert found.seeds == 3 and found.mean == pytest.approx(0.2)
    assert found.high - found.mean == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-5)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)


def test_one_seed_gives_no_interval(report):
    assert report.difference([row("a", 0, 1.0), row("b", 0, 2.0), row("b", 1, 2.0)], "a", "b", report.text) is None


def test_tables_hold_what_is_there_and_say_what_is_shown(report):
    rows = [row("fusion-early", seed, 0.5 + 0.001 * seed, 0.9) for seed in range(3)]
    rows += [row("text-only", seed, 0.4 + 0.002 * seed) for seed in range(3)]
    rows += [row("fusion-late", 0, 0.6, 0.8, before_entry=0.5, after_entry=0.6, dip=0.2)]
    fusion = report.fusion_table(rows)
    assert fusion[2] == "| early | 3 | 0.900 | 0.5010 | - |"
    assert fusion[3] == "| late | 1 | 0.800 | 0.6000 | 0.5000 -> 0.6000, +20.0% |"
    assert len(fusion) == 5
    (line,) = report.difference_table(rows)[2:]
    assert line.startswith("| text, early over no pictures | +0.0990 |") and line.endswith("| yes |")


def test_drawings_that_no_browser_scored_leave_their_cells_empty(report):
    (line,) = report.drawing_table([row("html", 0, 1.0, parses=0.5, steps=10)])[2:]
    assert line == "| html | 0 | 50.0% | - | - | - | - | - | 10 |"
    assert report.difference([row("a", n, 1.0) for n in (0, 1)] * 2, "a", "a", report.reward) is None


def test_the_plot_is_written_and_a_missing_file_is_named(report, tmp_path):
    rows = [row("fusion-early", 0, 0.5, 0.9), row("text-only", 0, 0.4)]
    report.plot(rows, tmp_path / "fusion.png")
    assert (tmp_path / "fusion.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"missing\.json is not there"):
        report.main(report.Settings(results=tmp_path / "missing.json"))


def test_the_committed_results_make_tables(report, capsys):
    report.main(report.Settings(results=RESULTS))
    said = capsys.readouterr().out
    rows = json.loads(RESULTS.read_text())
    assert all(f"| {row['arm']} | {row['seed']} |" in said for row in rows if row["arm"] in report.DRAWING)
