"""The benchmark framework: its rows, its refusal of wrong results, its command."""

import json
import math
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from perilune.bench import AREAS, Bench, BenchError, NotApplicable, Row, attention, read_rows, run_area, write_rows
from perilune.bench.kda import Case, make_inputs
from perilune.bench.peers import attempt, optional
from perilune.bench.rows import ratio_of, shown
from perilune.cli import main

ROW_FIELDS = [
    "case", "metric", "unit", "ours", "peer", "peer_name", "ratio", "floor", "device", "versions", "commit", "date",
]  # fmt: skip


def quiet(path: Path | None = None, pattern: str = "") -> Bench:
    return Bench("cpu", pattern=pattern, path=path, commit="abc", emit=lambda _: None)


def test_a_row_has_the_agreed_fields_in_order() -> None:
    assert [field.name for field in fields(Row)] == ROW_FIELDS


def test_each_peer_with_a_number_makes_a_row() -> None:
    bench = quiet()
    bench.add("case", "forward", "ms", 2.0, peers={"fla": 4.0, "absent": None, "cudnn": 1.0}, floor=0.5)
    assert [(row.peer_name, row.peer, row.ratio) for row in bench.rows] == [("fla", 4.0, 2.0), ("cudnn", 1.0, 0.5)]
    bench.add("case", "forward", "ms", 2.0, peers={"absent": None})
    assert bench.rows[-1].peer_name is None and bench.rows[-1].ratio is None


@pytest.mark.parametrize("lower_is_better, ratio", [(True, 0.5), (False, 2.0)])
def test_a_ratio_above_one_means_that_we_are_better(lower_is_better: bool, ratio: float) -> None:
    assert ratio_of(10.0, 5.0, lower_is_better=lower_is_better) == ratio


def test_a_ratio_needs_a_peer_and_no_zero() -> None:
    assert ratio_of(1.0, None, lower_is_better=True) is None
    assert ratio_of(0.0, 1.0, lower_is_better=True) is None


def test_rows_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.json"
    bench = quiet(path)
    bench.add("käse", "forward", "ms", 0.123456789, peers={"fla": 1 / 3}, floor=1e-9)
    assert read_rows(path) == bench.rows  # written by the bench after each row
    assert list(json.loads(path.read_text())[0]) == ROW_FIELDS
    write_rows([], path)
    assert read_rows(path) == []
    assert [file.name for file in path.parent.iterdir()] == ["rows.json"]


@pytest.mark.parametrize("text", ["{}", '[{"case": "x"}]', "[1]"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match="not a list of benchmark rows"):
        read_rows(tmp_path / "rows.json")


def test_rows_say_what_they_were_made_with() -> None:
    bench = quiet()
    bench.add("case", "forward", "ms", 1.0)
    row = bench.rows[0]
    assert row.versions["torch"] == str(torch.__version__)
    assert row.commit == "abc" and row.device.startswith("cpu") and row.date[:2] == "20"


def test_check_passes_what_is_close_and_records_how_close() -> None:
    bench = quiet()
    want = torch.randn(1000, dtype=torch.float64)
    error = bench.check("case", want * (1 + 1e-3), want, 2e-3, "dq", peers={"fla": want * 0.5})
    assert error == pytest.approx(1e-3)
    (row,) = bench.rows
    assert row.metric == "relative error dq" and row.ours == pytest.approx(1e-3)
    assert row.peer == pytest.approx(0.5) and row.ratio == pytest.approx(500)


@pytest.mark.parametrize(
    "got, message",
    [
        (torch.full((4,), 1.1), "differs from the reference by 0.1"),
        (torch.tensor([1, 1, 1, math.nan]), "nan"),
        (torch.tensor([1, 1, 1, math.inf]), "inf"),
        (torch.ones(1), "shape"),
    ],
)
def test_check_raises_on_what_is_wrong(got: torch.Tensor, message: str) -> None:
    bench = quiet()
    with pytest.raises(BenchError, match=f"case: dv .*{message}"):
        bench.check("case", got, torch.ones(4), 0.05, "dv")
    assert not bench.rows


def test_check_against_zero_compares_absolutely() -> None:
    bench = quiet()
    bench.check("case", torch.zeros(3), torch.zeros(3), 0.0)
    with pytest.raises(BenchError):
        bench.check("case", torch.ones(3), torch.zeros(3), 0.5)


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(BenchError, match="forward is nan"):
        quiet().add("case", "forward", "ms", math.nan)
    with pytest.raises(BenchError, match="forward is inf"):
        quiet().add("case", "forward", "ms", 1.0, peers={"fla": math.inf})


def test_a_filter_takes_parts_of_names() -> None:
    assert quiet().wants("anything") and not quiet().is_filtered
    bench = quiet(pattern="T8192, weak")
    assert bench.is_filtered
    assert bench.wants("T8192 strong") and bench.wants("T32768 weak") and not bench.wants("T32768 strong")


def test_what_tunes_for_minutes_runs_only_when_it_is_named() -> None:
    assert quiet(pattern="step, fla step B8").names("fla")
    assert not quiet(pattern="step").names("fla") and not quiet().names("fla")


def test_times_are_positive_and_gradients_are_dropped_between_calls() -> None:
    bench = quiet()
    x = torch.ones(10, requires_grad=True)
    seen = []

    def call() -> None:
        seen.append(x.grad)
        (x * 2).sum().backward()

    assert bench.time(call, grad_to_none=[x]) > 0
    assert len(seen) > 2 and all(gradient is None for gradient in seen)
    assert bench.time_graph(lambda: x.detach() * 2) > 0


def test_calls_in_a_row_count_the_time_of_the_host() -> None:
    milliseconds = 3.0
    assert quiet().time_in_a_row(lambda: time.sleep(milliseconds * 1e-3)) >= milliseconds


def test_packed_documents_of_the_attention_benchmark_are_what_flash_attention_takes() -> None:
    case = attention.Case(num_tokens=100, num_heads=2, num_kv_heads=2, num_documents=5)
    inputs = attention.make_inputs(case, torch.device("cpu"))
    assert inputs.cu_seqlens is not None and inputs.cu_seqlens.dtype == torch.int32
    assert inputs.longest == int(inputs.cu_seqlens.diff().max()) < 100


def test_peak_memory_counts_what_was_alive_at_once() -> None:
    def call() -> None:
        first = torch.empty(1 << 20, dtype=torch.int8)
        del first
        second, third = torch.empty(2 << 20, dtype=torch.int8), torch.empty(1 << 20, dtype=torch.int8)
        del second, third

    # The allocator may round up, and the profiler may see its own small tensors.
    assert 3 << 20 <= quiet().peak_memory(call) < 4 << 20


def test_ceilings_are_measured_once() -> None:
    bench = quiet()
    assert bench.copy_bandwidth > 1e8 and bench.copy_bandwidth == bench.copy_bandwidth
    assert bench.matmul_rate > 1e8


def test_a_missing_peer_leaves_one_note() -> None:
    bench = quiet()
    assert optional("no_such_package.ops", bench) is None
    assert optional("no_such_package.ops", bench) is None
    assert bench.notes == ["no_such_package.ops: not installed"]
    assert optional("torch.nn", bench) is torch.nn


def test_a_failing_peer_leaves_a_note() -> None:
    bench = quiet()
    assert attempt(bench, "peer", lambda: 1 / 0) is None
    assert attempt(bench, "peer", lambda: 3) == 3
    assert bench.notes == ["peer failed: ZeroDivisionError: division by zero"]


def test_an_area_that_cannot_run_here_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Bench) -> None:
        raise NotApplicable("needs CUDA")

    monkeypatch.setattr("perilune.bench.kda.run", refuse)
    assert run_area("kda", quiet()) == "kda: needs CUDA"
    assert run_area("tea", quiet()) == "tea: there is no benchmark of this area yet"


def test_every_digit_that_matters_is_shown() -> None:
    values = [None, 0.0, 3.7e-5, 0.0123456, 15.4249, 4321.9, 4.3e12]
    assert [shown(value) for value in values] == ["-", "0", "3.7e-05", "0.01235", "15.42", "4322", "4.3e+12"]


# The command ---------------------------------------------------------------------------------------------------------


def test_bench_writes_rows_of_the_cases_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kda.json"
    main(["bench", "kda", "--device", "cpu", "--filter", "strong", "--json", str(path)])
    rows = read_rows(path)
    assert rows and all("strong" in row.case for row in rows)
    assert {"forward", "forward + backward", "extra memory", "relative error dg"} <= {row.metric for row in rows}
    assert str(path) in capsys.readouterr().out


def test_bench_prints_only_json_when_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("perilune.bench.kda.run", lambda bench: bench.add("a", "b", "ms", 1.0))
    main(["bench", "kda", "--device", "cpu", "--json", "-", "--commit", "c0ffee"])
    assert json.loads(capsys.readouterr().out)[0]["commit"] == "c0ffee"


def test_bench_saves_beside_other_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("perilune.bench.kda.run", lambda bench: bench.add("a", "b", "ms", 1.0))
    main(["bench", "kda", "--device", "cpu"])
    assert not any(tmp_path.iterdir())
    main(["bench", "kda", "--device", "cpu", "--save"])
    assert len(read_rows(tmp_path / "benchmarks/results/bench_kda.json")) == 1


def test_a_wrong_result_ends_with_code_1_and_keeps_the_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(bench: Bench) -> None:
        bench.add("a", "b", "ms", 1.0)
        bench.check("a", torch.zeros(2), torch.ones(2), 0.1)

    monkeypatch.setattr("perilune.bench.kda.run", run)
    with pytest.raises(SystemExit) as left:
        main(["bench", "kda", "--device", "cpu", "--json", str(tmp_path / "rows.json")])
    assert left.value.code == 1
    assert "a: o differs from the reference" in capsys.readouterr().err
    assert len(read_rows(tmp_path / "rows.json")) == 1


def test_one_broken_area_leaves_the_others_their_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(area: str, bench: Bench) -> str | None:
        if area == "kda":
            raise ZeroDivisionError("by nothing")
        bench.add(area, "b", "ms", 1.0)
        return None

    monkeypatch.setattr("perilune.bench.run_area", run)
    with pytest.raises(SystemExit) as left:
        main(["bench", "all", "--device", "cpu", "--json", str(tmp_path / "rows.json")])
    assert left.value.code == 1
    assert "kda: ZeroDivisionError: by nothing" in capsys.readouterr().err
    cases = [row.case for row in read_rows(tmp_path / "rows.json")]
    assert cases == [f"{area}: {area}" for area in AREAS if area != "kda"]


@pytest.mark.parametrize(
    "gate, low, high, mean", [("strong", -5, -0.01, -2.5), ("weak", -0.006, -0.001, -0.003), ("softplus", -50, 0, -0.2)]
)
def test_the_gates_of_the_kda_benchmark_are_what_they_are_called(
    gate: str, low: float, high: float, mean: float
) -> None:
    inputs = make_inputs(Case(num_tokens=256, num_heads=4, gate=gate, head_dim=32), torch.device("cpu"), torch.bfloat16)
    decay = inputs.gate.log_decay(inputs.g.float()).detach()
    assert decay.min() >= low and decay.max() <= high
    assert decay.mean() == pytest.approx(mean, rel=0.6)


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["kdb"], 2, "did you mean 'kda'"),
        ([], 2, "AREA is missing"),
        (["kda", "--device", "cpu", "--filter", "no such case"], 1, "no case of 'kda' has 'no such case'"),
        (["kda", "--save", "--json", "x.json"], 1, "give one of them"),
    ],
)
def test_bench_explains_what_it_cannot_do(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", *arguments])
    assert left.value.code == code
    assert message in capsys.readouterr().err


def test_bench_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "kda", "--help"])
    assert left.value.code == 0
    assert "example: perilune bench kda" in capsys.readouterr().out


def test_the_command_knows_every_area(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench"])
    listed = capsys.readouterr().err
    assert all(area in listed for area in (*AREAS, "all"))
