"""The report of a run, from whole, young, odd and broken run folders."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from perilune.report import ReportError, write_training_report
from perilune.report.training import read_run, training_page

CONFIG = {
    "name": "tiny",
    "optimizer": {"lr": 0.02, "qk_clip_tau": 30.0},
    "trainer": {"steps": 40},
    "data": {"corpus": {"source": "<b>stdlib</b>"}},
}


def train_record(step: int, layers: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "loss": 5.0 / step,
        "bits_per_byte": 2.0 / step,
        "lr": 0.01,
        "grad_norm": 1.0 + 1.0 / step,
        "tokens": 1024 * step,
        "tokens_per_s": 900.0,
        "max_logit": [float(step + layer) for layer in range(layers)],
        "clipped_heads": step % 2,
        "skipped": 0,
    } | changes


def write_run(folder: Path, records: list[Any], *, config: Any = CONFIG, tail: bytes = b"") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    (folder / "metrics.jsonl").write_bytes(lines + tail)
    return folder


def whole_run(layers: int = 2) -> list[Any]:
    records: list[Any] = [train_record(step, layers) for step in range(1, 41)]
    records += [{"kind": "valid", "step": step, "loss": 5.5 / step, "bits_per_byte": 2.2 / step} for step in (20, 40)]
    return [*records, {"kind": "sample", "step": 40, "prompt": "def f", "text": "(x):\n    return '</pre><script>'"}]


def titles(folder: Path) -> list[str]:
    return [section.title for section in training_page(read_run(folder)).sections]


def plot_titles(folder: Path) -> list[str]:
    sections = training_page(read_run(folder)).sections
    return [plot.title for section in sections for plot in getattr(section, "plots", ())]


def test_report_of_a_whole_run_has_every_part(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "tiny", whole_run())
    path = write_training_report(folder)
    assert path == folder / "report.html"
    html = path.read_text(encoding="utf-8")
    wanted = ["Loss", "Bits per byte", "Learning rate", "Gradient norm", "Max attention logit", "Clipped heads"]
    assert plot_titles(folder) == [*wanted, "Tokens per second"]
    for title in wanted:
        assert f"<h3>{title}</h3>" in html
    for text in ("limit 30", "layer 1", "layer 2", "40 of 40 steps", "optimizer.qk_clip_tau"):
        assert text in html
    assert "<script" not in html and "<b>stdlib" not in html
    assert "Worth knowing" not in titles(folder)


def test_headlines_are_the_last_validation(tmp_path: Path) -> None:
    page = training_page(read_run(write_run(tmp_path / "tiny", whole_run())))
    shown = {headline.label: headline.value for headline in page.headlines}
    assert shown["validation bits per byte"] == "0.0550"
    assert shown["validation loss"] == "0.1375"
    assert shown["tokens"] == "41k"
    assert shown["highest attention logit"] == "41.0"


@pytest.mark.parametrize(
    ("bounds", "headline"),
    [([True, True], "at most 41.0"), ([False, True], "at most 41.0"), ([True, False], "41.0"), ("broken", "41.0")],
)
def test_upper_bounds_of_logits_are_marked(tmp_path: Path, bounds: Any, headline: str) -> None:
    records = [train_record(step, max_logit_is_bound=bounds) for step in range(1, 41)]
    page = training_page(read_run(write_run(tmp_path / "tiny", records)))
    assert {each.label: each.value for each in page.headlines}["highest attention logit"] == headline
    captions = [plot.caption for section in page.sections for plot in getattr(section, "plots", ())]
    assert any("Below the limit some values are upper bounds" in caption for caption in captions)


@pytest.mark.parametrize("tail", [b"", b'{"kind": "tra', b"\xff\xfe", b"null", b"[]"])
def test_unfinished_last_line_is_ignored(tmp_path: Path, tail: bytes) -> None:
    folder = write_run(tmp_path / "tiny", whole_run(), tail=tail)
    records = read_run(folder)
    assert len(records.train) == 40 and records.num_unreadable == 0
    write_training_report(folder)


def test_damage_inside_is_counted_and_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "tiny", ["no record", {"step": 3}, {"kind": "train"}, *whole_run()])
    assert read_run(folder).num_unreadable == 3
    assert "3 lines of metrics.jsonl could not be read" in write_training_report(folder).read_text()


@pytest.mark.parametrize("missing", [*train_record(1)])
def test_a_field_a_run_does_not_have_is_left_out(tmp_path: Path, missing: str) -> None:
    records = [{k: v for k, v in record.items() if k != missing} for record in whole_run() if record["kind"] == "train"]
    write_training_report(write_run(tmp_path / "tiny", records))


@pytest.mark.parametrize("odd", [None, "text", math.nan, math.inf, -math.inf, [], {}, [None, math.nan], True, 1e308])
@pytest.mark.parametrize("name", ["loss", "max_logit", "grad_norm", "tokens_per_s", "skipped"])
def test_odd_values_do_not_stop_the_report(tmp_path: Path, name: str, odd: Any) -> None:
    records = [train_record(step, **({name: odd} if step == 2 else {})) for step in range(1, 4)]
    training_page(read_run(write_run(tmp_path / "tiny", records)))


def test_skipped_and_unfinished_runs_say_so(tmp_path: Path) -> None:
    records = [train_record(step, skipped=int(step >= 7)) for step in range(1, 12)]
    records[6] |= {"loss": None, "bits_per_byte": None}
    html = write_training_report(write_run(tmp_path / "tiny", records)).read_text()
    assert "1 step (at 7) was skipped" in html
    assert "step 11 of 40" in html
    assert "Skipped steps" in html


def test_steps_written_again_after_a_resume_count_once(tmp_path: Path) -> None:
    repeated = [train_record(step, loss=1.0) for step in range(30, 41)]
    records = read_run(write_run(tmp_path / "tiny", [*whole_run(), *repeated]))
    assert [record["step"] for record in records.train] == list(range(1, 41))
    assert records.train[-1]["loss"] == 1.0


def test_many_layers_show_the_highest_by_name(tmp_path: Path) -> None:
    html = write_training_report(write_run(tmp_path / "tiny", whole_run(layers=20))).read_text()
    assert "highest</text>" in html and "layer 20</text>" not in html


def test_expert_imbalance_has_its_plot_when_recorded(tmp_path: Path) -> None:
    records = [train_record(step, moe_imbalance=0.1 * step) for step in range(1, 9)]
    assert "Expert load imbalance" in plot_titles(write_run(tmp_path / "tiny", records))


def test_clip_that_is_off_has_no_limit_line(tmp_path: Path) -> None:
    config = CONFIG | {"optimizer": {"qk_clip_tau": None}}
    records = [*whole_run(), train_record(41, max_logit_is_bound=[True, True])]
    html = write_training_report(write_run(tmp_path / "tiny", records, config=config)).read_text()
    assert "QK-Clip off" in html and "limit 30" not in html
    assert "Some values are upper bounds" in html and "the limit" not in html


def test_environment_is_in_the_header(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "tiny", whole_run())
    (folder / "environment.json").write_text(json.dumps({"commit": "abc123", "machine": {"cores": 2}}))
    html = write_training_report(folder).read_text()
    assert "<dt>commit</dt><dd>abc123</dd>" in html and "<dt>machine.cores</dt><dd>2</dd>" in html


@pytest.mark.parametrize("config", [None, [], "text"])
def test_run_without_a_usable_config_still_has_a_report(tmp_path: Path, config: Any) -> None:
    write_training_report(write_run(tmp_path / "tiny", whole_run(), config=config))


def test_young_run_has_a_report(tmp_path: Path) -> None:
    html = write_training_report(write_run(tmp_path / "tiny", [])).read_text()
    assert "no metrics yet" in html
    write_training_report(write_run(tmp_path / "one", [train_record(1)]))


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"has no readable metrics\.jsonl"):
        write_training_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_pngs_are_written_on_request(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "tiny", whole_run())
    write_training_report(folder, png=True)
    names = sorted(path.name for path in (folder / "plots").iterdir())
    assert "loss.png" in names and "max_attention_logit.png" in names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (folder / "plots").iterdir())


def test_long_run_gives_a_page_of_bounded_size(tmp_path: Path) -> None:
    records = [train_record(step, layers=8) for step in range(1, 6001)]
    path = write_training_report(write_run(tmp_path / "tiny", records))
    # 20 lines of at most 800 points at less than 40 bytes each, and 200 kB for everything else
    assert path.stat().st_size < 20 * 800 * 40 + 200_000
