"""Contracts of any run: sound records, the critical path of a graph library, the same chains whoever is faster."""

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.swarm import compose, orchestrator
from perilune.swarm.budget import Limits
from perilune.swarm.critical_path import critical_path
from tests.swarm.core_runs import TOOLS, check, drawn, live, longest_path


def one_run(seed: int, latencies: int, **changes) -> Counter[str]:
    """Which tools and statuses it used."""
    with tempfile.TemporaryDirectory() as folder:
        result, journal, _, written = live(drawn(seed, racy=True), Path(folder), seed=latencies, **changes)
    check(journal.all, result)
    assert len(written) == len(set(written))
    path = critical_path(journal.all)
    assert path.critical_steps == longest_path(journal.all)
    bodies = [(event.kind, event.read()) for event in journal.all]
    used = Counter(body["tool"] for kind, body in bodies if kind == "outcome")
    used.update(body["how"] for kind, body in bodies if kind == "compacted")
    used.update(body["status"] for kind, body in bodies if kind in ("outcome", "finished"))
    used.update(kind for kind, _ in bodies)
    return used


EVERYTHING = {
    *orchestrator.TOOLS,
    *compose.TOOLS,
    *(each.name for each in TOOLS),
    *("hidden", "summary", "ok", "error", "denied", "done", "failed", "cancelled", "budget", "message", "result"),
}


def test_runs_with_every_tool_have_the_critical_path_of_networkx():
    used: Counter[str] = Counter()
    for seed in range(60):
        used += one_run(seed, seed)
    assert set(used) >= EVERYTHING, EVERYTHING - set(used)


@pytest.mark.long
def test_1000_runs_with_every_tool_have_the_critical_path_of_networkx():
    for seed in range(1000, 2000):
        one_run(seed, seed)


SHAPES = {
    "max_active": st.integers(1, 5),
    "context_tokens": st.integers(1500, 8000),
    "turn_share": st.floats(0.05, 0.5),
    "limits": st.builds(Limits, steps=st.integers(3, 90), calls=st.integers(3, 90), agents=st.integers(0, 30)),
}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), latencies=st.integers(0, 10**6), shape=st.fixed_dictionaries(SHAPES))
def test_any_run_ends_with_sound_records_and_within_its_budget(seed, latencies, shape):
    """Also with one place for all agents, and with contexts that are nearly too small to work in."""
    one_run(seed, latencies, **shape)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    latencies=st.integers(0, 10**6),
    place=st.floats(0, 1, exclude_max=True),
    shape=st.fixed_dictionaries(SHAPES),
)
def test_any_run_that_is_killed_goes_on_with_sound_records_and_within_its_budget(seed, latencies, place, shape):
    with tempfile.TemporaryDirectory() as folder:
        _, journal, _, _ = live(drawn(seed, racy=True), Path(folder), seed=latencies, **shape)
        keep = 1 + int(place * (len(journal.all) - 1))
        result, second, _, written = live(
            drawn(seed, racy=True), Path(folder), seed=latencies + 1, past=journal, keep=keep, **shape
        )
    check(second.all, result)
    assert len(written) == len(set(written))
    assert critical_path(second.all).critical_steps == longest_path(second.all)


def test_every_chain_is_the_same_50_of_50_times_with_maps_nesting_and_compaction(tmp_path):
    heads = []
    for latencies in range(50):
        _, journal, _, _ = live(drawn(3, racy=False), tmp_path, seed=latencies)
        heads.append(
            {event.chain: event.hash for event in journal.all if event.chain != "run"}
        )  # approvals as they come
    assert len(heads[0]) > 50
    assert all(each == heads[0] for each in heads[1:])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_every_chain_is_the_same_whatever_is_drawn(seed, tmp_path):
    heads = []
    for latencies in range(10):
        _, journal, _, _ = live(drawn(seed, racy=False), tmp_path, seed=latencies)
        heads.append(
            {event.chain: event.hash for event in journal.all if event.chain != "run"}
        )  # approvals as they come
    assert all(each == heads[0] for each in heads[1:])
