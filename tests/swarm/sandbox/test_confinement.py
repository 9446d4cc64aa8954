"""Nothing gets out, nothing takes more than its share, nothing is left: as root and as an ordinary user."""

from collections.abc import Callable
from typing import Any

import pytest

Play = Callable[[str], dict[str, Any]]
pytestmark = pytest.mark.needs_tool("bwrap")


def test_no_command_reads_writes_or_connects_outside(play: Play) -> None:
    found = play("escapes")
    assert found["detects"]
    assert found["tried"] >= 90
    assert found["escaped"] == []


def test_refused_system_calls_fail(play: Play) -> None:
    assert play("calls")["worked"] == []


def test_the_first_process_is_out_of_reach_also_without_landlock(play: Play) -> None:
    found = play("first_process")
    assert found["first"] == "13"
    assert "/bin/python" in found["own"]  # the same program sees itself


def test_a_program_sees_its_workspace_and_little_else(play: Play) -> None:
    found = play("view_from_inside")
    assert found["exit_code"] == 0, found["stderr"]
    inside = found["inside"]
    assert set(inside["uids"] + inside["gids"]) == {65534}
    assert set(inside["groups"]) <= {65534}
    assert set(inside["environment"]) == {"PATH", "HOME", "TMPDIR", "USER", "LANG", "GIVEN"}
    assert inside["processes"] == [1, 2]
    assert len(inside["descriptors"]) == 4  # the three, and the listing's own
    assert [int(word, 16) for word in inside["capabilities"]] == [0, 0, 0]
    assert inside["no_new_privileges"]
    folders = {name for name in inside["writable_mounts"] if not name.startswith("/dev/") or name == "/dev/shm"}
    assert folders == {"/workspace", "/tmp", "/dev/shm", "/proc"}
    assert inside["writes_proc"] != found["landlock"]  # the mount allows it, Landlock alone does not
    assert inside["cwd"] == "/workspace"
    assert inside["host_name"] == "sandbox"
    assert not {"home", "sys", "run", "boot", "mnt"} & set(inside["root"])
    assert not {"shadow", "hostname", "ssh", "machine-id"} & set(inside["etc"])
    assert (found["given"], found["new"]) == ("given and changed", "new")
    assert found["new_owner_is_folder_owner"]


@pytest.mark.parametrize("scenario", ["abuse", "more_abuse"])
def test_whoever_takes_too_much_is_stopped_and_the_others_finish(play: Play, scenario: str) -> None:
    found = play(scenario)
    assert {name: ending["stopped"] for name, ending in found["endings"].items()} == found["expected"]
    assert all(found["behaved"])
    for ending in found["endings"].values():
        assert ending["exit_code"] is None
        assert ending["kept"] <= 100_000
        assert ending["truncated"] == (ending["stopped"] == "output")


def test_cancelled_runs_leave_no_process(play: Play) -> None:
    found = play("cancel")
    assert found["before"] >= 20 * 4  # or the grandchildren never lived
    assert (found["cancelled"], found["left"]) == (20, 0)


def test_runs_cancelled_while_starting_leave_no_process(play: Play) -> None:
    assert play("cancel_early") == {"cancelled": 12, "left": 0}


def test_closing_ends_what_runs_as_cancelled(play: Play) -> None:
    found = play("close")
    assert found["stopped"] == ["cancelled"] * 3
    assert "closed" in found["afterwards"]
    assert found["left"] == 0


def test_a_killed_runtime_leaves_no_process(play: Play) -> None:
    found = play("kill_runtime")
    assert found["before"][0] >= 4 * 4
    assert found["left"] == [0, 0, 0]


@pytest.mark.long
def test_a_hundred_cancelled_runs_leave_no_process(play: Play) -> None:
    found = play("cancel_many")
    assert found["before"] >= 100 * 4
    assert (found["cancelled"], found["left"]) == (100, 0)


@pytest.mark.long
def test_a_runtime_killed_at_any_time_leaves_no_process(play: Play) -> None:
    assert play("kill_runtime_often")["left"] == [0] * 30


@pytest.mark.long
def test_a_hundred_sandboxes_at_once_all_answer(play: Play) -> None:
    assert play("many")["right"] == 100
