"""The exchange with a function server: plain values, compared by type; a run without a sandbox is refused."""

import asyncio
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.rl.environments import code_exchange
from perilune.rl.environments.code_exchange import NOTHING, ServerLimits, ask_function, remove, same, value_of
from perilune.swarm.sandbox import SandboxUnavailable

LIMITS = ServerLimits(input_seconds=30, total_seconds=60)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(VALUES)
def test_a_value_is_the_same_after_the_journey(value):
    assert same(value, value_of(json.dumps(value).encode()))
    assert same(value, value_of(json.dumps(value).encode()), exact=False)


@given(VALUES, VALUES)
def test_values_that_are_the_same_are_written_the_same(one, other):
    if same(one, other):  # but for zeros with and without a sign
        assert json.dumps(one, sort_keys=True).replace("-0.0", "0.0") == json.dumps(other, sort_keys=True).replace(
            "-0.0", "0.0"
        )
    assert same(one, other) == same(other, one)


@pytest.mark.parametrize(
    "expected,given,exact,close",
    [
        (1, True, False, False),
        (0, False, False, False),
        (1, 1.0, False, True),
        ([1], [1.0], False, True),
        ({"a": [1, 2]}, {"a": [1, True]}, False, False),
        (0.1 + 0.2, 0.3, False, True),
        (1.0, 1.001, False, False),
        (None, 0, False, False),
        ("1", 1, False, False),
        ([], {}, False, False),
        ([1, 2], [1, 2, 3], False, False),
        ({"a": 1}, {"a": 1, "b": 2}, False, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True, True),
        (10**400, 1.5, False, False),
        (10**400, 10**400, True, True),
        (5, math.inf, False, False),
        (5, NOTHING, False, False),
        (None, NOTHING, False, False),
    ],
)
def test_types_count_unless_the_task_says_otherwise(expected, given, exact, close):
    assert same(expected, given) == exact
    assert same(expected, given, exact=False) == close


@given(st.binary(max_size=60) | st.text(max_size=30).map(str.encode))
def test_reading_a_line_never_raises(line):
    value_of(line)


@pytest.mark.parametrize(
    "line", [b"", b"nan", b"NaN", b"[Infinity]", b"1" * 5000, b"[" * 200_000, b"\xff", b"{'a': 1}", b"1 2"]
)
def test_what_is_no_json_value_is_nothing(line):
    assert value_of(line) is NOTHING


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("working_sandbox")
def test_one_process_answers_all_inputs_in_turn():
    source = "import os\nseen = []\ndef f(x, y):\n    seen.append(x)\n    return [os.getpid(), len(seen), x + y]"
    answers = ask_function(source, "f", [[number, 1] for number in range(100)], LIMITS)
    assert answers.complete and not answers.ended
    (process,) = {process for process, _, _ in answers.values}
    assert [value[1:] for value in answers.values] == [[number + 1, number + 1] for number in range(100)]


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("working_sandbox")
def test_long_inputs_and_answers_pass_and_longer_ones_end_it():
    long = "ä" * 100_000
    answers = ask_function("def f(x):\n    return x[::-1]", "f", [[long], ["ab"]], ServerLimits(answer_bytes=1 << 20))
    assert answers.values == (long, "ba")
    answers = ask_function("def f(x):\n    return x", "f", [["ab"], [long], ["ab"]], ServerLimits(answer_bytes=4096))
    assert answers.values == ("ab", NOTHING, NOTHING) and "longer than 4096" in answers.ended


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("working_sandbox")
def test_hashes_and_their_order_are_those_of_the_last_time():
    source = "def f(x):\n    return [hash(x), list({'a', 'b', 'c', 'd', 'e', 'f'})]"
    first, second = (ask_function(source, "f", [["seed"]], LIMITS).values for _ in range(2))
    assert first == second != (NOTHING,)


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("working_sandbox")
def test_it_can_be_asked_from_a_running_loop_and_from_threads():
    async def within() -> tuple:
        return ask_function("def f(x):\n    return x", "f", [[1]], LIMITS).values

    assert asyncio.run(within()) == (1,)
    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(ask_function, "def f(x):\n    return -x", "f", [[n]], LIMITS) for n in range(3)]
        assert [each.result().values for each in found] == [(0,), (-1,), (-2,)]


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("landlock")
def test_neither_packages_nor_other_files_are_readable_inside():
    """The expected outputs of generated tasks follow from this package's source."""
    packages = os.path.dirname(os.path.dirname(pytest.__file__))
    source = f"""
import glob, os
def f(x):
    places = glob.glob('/opt/*/lib/python3*/*-packages/*/__init__.py') + glob.glob({packages!r} + '/*/__init__.py')
    found = []
    for place in [*places, '/proc/self/cmdline', '/etc/passwd', '/workspace/ask']:
        try:
            with open(place, 'rb') as file:
                found.append(place)
        except OSError:
            pass
    return found
"""
    assert ask_function(source, "f", [[0]], LIMITS).values == ([],)


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("working_sandbox")
@pytest.mark.parametrize("server", ["import sys\nsys.exit('no room')", "print('up')"])
def test_a_server_that_does_not_start_is_no_fault_of_the_solution(monkeypatch, server):
    monkeypatch.setattr(code_exchange, "_server", lambda: server)
    with pytest.raises(SandboxUnavailable, match="the function server did not start: no (room|word)"):
        ask_function("def f(x):\n    return x", "f", [[1]], LIMITS)


def test_a_sandbox_that_does_not_start_is_told(monkeypatch):
    def refuse(folder):
        raise SandboxUnavailable("no bwrap on PATH")

    monkeypatch.setattr(code_exchange, "open_sandbox", refuse)
    with pytest.raises(SandboxUnavailable, match="no bwrap"):
        ask_function("def f(x):\n    return x", "f", [[1]], LIMITS)


def test_what_is_hard_to_remove_is_removed(tmp_path: Path):
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "closed").mkdir()
    (folder / "closed" / "file").touch()
    (folder / "closed").chmod(0)
    before, depth = os.open(".", os.O_RDONLY), 1500
    os.chdir(folder)
    for _ in range(depth):
        os.mkdir("d")
        os.chdir("d")
    os.fchdir(before)
    os.close(before)
    remove(folder)
    assert not folder.exists()


@pytest.mark.parametrize("wrong", [{"input_seconds": 0}, {"memory_bytes": -1}, {"total_seconds": math.inf}])
def test_wrong_limits_are_named(wrong):
    with pytest.raises(ValueError, match=f"limits.{next(iter(wrong))}"):
        ServerLimits(**wrong)
