"""The report of a run of reinforcement learning: readable at any time, safe whatever a policy wrote."""

import base64
import json

import pytest

from perilune.data.raster import rasterize_png
from perilune.report.rl import read_rl_run, rl_page, write_rl_report
from perilune.report.training import ReportError

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="28" height="28"><rect width="28" height="28" fill="red"/></svg>'


def iteration(number: int, **more) -> dict:
    return {
        "iteration": number, "reward": 0.1 * number, "facet.outcome": 0.1 * number, "finished": 1.0, "length": 3.0,
        "episodes": 8, "failures": {}, "examples": [], "empty": 0, "dropped": {}, "gap": 1e-7, "largest_gap": 2e-6,
        "clipped": 0.01, "grad_norm": 0.5, "skipped": 0, "seconds": 1.0, "rollout_seconds": 0.7, "learn_seconds": 0.2,
        "waiting": 0.8, "rollout_tokens_per_s": 100.0, "learn_tokens_per_s": 300.0, **more,
    }  # fmt: skip


def evaluation(number: int, mean: float, text: str, **more) -> dict:
    interval = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}
    numbers = {"count": 8, "reward": interval, "gain": interval, "finished": 1.0, "length": 3.0}
    sample = {"environment": "sums", "task": "test/1", "prompt": "[user] 1 + 1", "text": text, "reward": mean, **more}
    return {"iteration": number, "environments": {"sums": numbers}, "failures": {}, "examples": [], "samples": [sample]}


def folder(tmp_path, iterations, evaluations):
    settings = {"name": "run", "environments": {"sums": {"digits": 2}, "other": None}, "rl": {"iterations": 4}}
    (tmp_path / "rl.json").write_text(json.dumps(settings))
    (tmp_path / "environment.json").write_text(json.dumps({"commit": "abc123"}))
    for name, lines in (("records", iterations), ("evaluations", evaluations)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_before_and_after_stand_side_by_side(tmp_path):
    where = folder(
        tmp_path,
        [iteration(n) for n in (1, 2, 3, 4)],
        [evaluation(0, 0.2, "dunno"), evaluation(2, 0.4, "3"), evaluation(4, 0.9, "2")],
    )
    page = write_rl_report(where).read_text()
    assert "0.200 [0.100, 0.300]" in page and "0.900 [0.800, 1.000]" in page
    assert "dunno" in page and "sums, before: reward 0.200" in page and "sums, after 4: reward 0.900" in page
    for title in ("Reward", "Facets of the reward", "Length", "Clipped", "Gradient norm", "Shares of an iteration"):
        assert f">{title}<" in page, title
    assert "abc123" in page and "environments.sums.digits" in page and "4 iterations in sums" in page
    assert "other pictures" not in page.lower()


def test_a_run_under_way_or_cut_can_be_read(tmp_path):
    where = folder(tmp_path, [iteration(1), iteration(2), iteration(2, reward=0.7)], [evaluation(0, 0.2, "a")])
    with (where / "records.jsonl").open("a") as file:
        file.write('{"iteration": 3, "rew')
    records = read_rl_run(where)
    assert [each["reward"] for each in records.iterations] == [0.1, 0.7]
    assert rl_page(records).subtitle == "2 of 4 iterations in sums"
    for name in ("records", "evaluations"):
        (where / f"{name}.jsonl").unlink()
    assert "0 of 4 iterations" in write_rl_report(where).read_text()


@pytest.mark.parametrize("wrong", [{"kinds": {"wide": 5}}, {"kinds": 5}, {"parl": []}, {"failures": 3}, {"dropped": 1}])
def test_lines_that_are_whole_and_of_another_form_do_not_stop_the_page(tmp_path, wrong):
    lines = [iteration(1), iteration(2, **wrong)]
    where = folder(tmp_path, lines, [evaluation(0, 0.2, "a"), {"iteration": 1, **wrong}])
    assert "2 of 4 iterations" in write_rl_report(where).read_text()


def test_an_iteration_without_any_episode_is_fine(tmp_path):
    lost = iteration(1, failures={"judge": 8, "hung": 1}, examples=["[judge] a/b: no verdict", "[hung] a/c: 5 s"])
    for key in ("reward", "finished", "length", "facet.outcome"):
        del lost[key]
    page = write_rl_report(folder(tmp_path, [lost | {"episodes": 0}], [])).read_text()
    assert "Episodes lost" in page and "a/b: no verdict" in page and "a/c: 5 s" in page
    assert "Episodes lost: 9 of 9" in page


def test_what_a_policy_wrote_is_text_and_never_markup(tmp_path):
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    page = write_rl_report(folder(tmp_path, [iteration(1)], [evaluation(0, 0.5, hostile)])).read_text()
    assert "<script" not in page and "<img src=x" not in page and "&lt;script&gt;" in page


def test_drawings_are_shown_with_what_was_wanted(tmp_path):
    png = base64.b64encode(rasterize_png(SVG, 28, 28)).decode()
    lines = [
        evaluation(0, 0.0, "nothing", image=png, problem="no picture in it"),
        evaluation(4, 1.0, SVG, image=png, drawn=png),
    ]
    page = write_rl_report(folder(tmp_path, [iteration(4)], lines)).read_text()
    assert "Drawings before and after" in page and page.count(f"data:image/png;base64,{png}") == 3
    assert "no picture in it" in page and "test/1, before" in page and "test/1, after 4" in page


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ReportError, match=r"no rl\.json"):
        write_rl_report(tmp_path)
