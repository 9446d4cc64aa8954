"""Contracts of the metrics files."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.train.metrics import JsonLines, Throughput, peak_memory_bytes


@given(before=st.integers(0, 5), after=st.integers(0, 5), again=st.integers(0, 5))
def test_cutting_back_forgets_exactly_what_came_after(before, after, again, tmp_path_factory):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    log = JsonLines(path)
    for step in range(before):
        log.append({"kind": "train", "step": step})
    position = log.position()
    for step in range(after):
        log.append({"kind": "train", "step": 100 + step})
    log.close()

    log = JsonLines(path)
    log.cut_to(position)
    for step in range(again):
        log.append({"kind": "train", "step": 200 + step})
    log.close()
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [*range(before), *range(200, 200 + again)]


def test_records_are_strict_json(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.append({"loss": float("nan"), "max_logit": [1.0, float("-inf")], "text": "ö"})
    log.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"loss": None, "max_logit": [1.0, None], "text": "ö"}


def test_throughput_is_the_rate_over_the_window():
    times = iter([0.0, 1.0, 2.0, 4.0])
    rate = Throughput(window=2, clock=lambda: next(times))
    assert [rate.mark(tokens) for tokens in (0, 100, 300, 500)] == [0.0, 100.0, 150.0, 400 / 3]


def test_pauses_do_not_lower_the_throughput():
    times = iter([0.0, 1.0, 1.0, 51.0, 52.0])
    rate = Throughput(window=8, clock=lambda: next(times))
    rate.mark(0)
    assert rate.mark(100) == 100.0
    with rate.pause():
        pass
    assert rate.mark(200) == 100.0


def test_peak_memory_is_a_plausible_number_of_bytes():
    assert 2**20 < peak_memory_bytes(torch.device("cpu")) < 2**40
