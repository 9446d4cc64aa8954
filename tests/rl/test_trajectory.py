"""Turns joined into rows of tokens, and files that give back every bit or say what is wrong."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.data.media import Media
from perilune.rl.trajectory import (
    NOT_SAMPLED,
    Recording,
    Trajectory,
    TrajectoryError,
    load_trajectories,
    save_trajectories,
)

TOKENS = st.lists(st.integers(0, 9), max_size=4)
TURNS = st.lists(st.tuples(TOKENS, TOKENS, st.integers(0, 3), st.booleans()), min_size=1, max_size=5)


def trajectory(recording: Recording, **more) -> Trajectory:
    given = {
        "environment": "copy", "task": "t1", "task_data": {"text": "ab"}, "sample": 2, "seed": 5, "iteration": 7,
        "branches": tuple(recording.branches), "messages": ({"role": "user", "content": "é\n\u2028\ud800"},),
        "weights": {"outcome": 1.0}, "facets": {"outcome": 0.1}, "reward": 0.1, "finish": "stop", **more,
    }  # fmt: skip
    return Trajectory(**given)


@given(TURNS)
def test_turns_that_continue_form_one_row_with_exactly_the_sampled_tokens_trained(turns):
    recording, row, trained, versions = Recording(), [], [], []
    for added, sampled, version, is_trained in turns:
        row += added
        trained += [False] * len(added)
        versions += [NOT_SAMPLED] * len(added)
        recording.add(row, sampled, [-0.5] * len(sampled), version, trained=is_trained)
        row = row + sampled
        trained += [is_trained] * len(sampled)
        versions += [version if is_trained else NOT_SAMPLED] * len(sampled)
    (branch,) = recording.branches
    assert branch.tokens.tolist() == row
    assert branch.mask.tolist() == trained and branch.versions.tolist() == versions
    assert branch.logprobs.tolist() == [-0.5 if each else 0.0 for each in trained]


def test_a_prompt_that_does_not_continue_begins_a_branch():
    recording = Recording()
    recording.add([1, 2], [3], [-1.0], 0)
    recording.add([1, 9, 3, 4], [5], [-2.0], 1)
    recording.add([1, 9, 3, 4, 5, 6], [7], [-3.0], 1)
    assert [branch.tokens.tolist() for branch in recording.branches] == [[1, 2, 3], [1, 9, 3, 4, 5, 6, 7]]
    assert trajectory(recording).num_trained == 3 and trajectory(recording).oldest_version == 0


def test_what_older_weights_sampled_can_become_context():
    recording = Recording()
    recording.add([1], [2, 3, 4], [-1.0, -2.0, -3.0], [4, 4, 5])
    newest = recording.branches[0].since(5)
    assert newest.mask.tolist() == [False, False, False, True]
    assert newest.logprobs.tolist() == [0.0, 0.0, 0.0, -3.0]


@given(TURNS, st.lists(st.floats(-50, 0, width=32), min_size=20, max_size=20))
def test_a_file_gives_back_every_bit(tmp_path_factory, turns, logprobs):
    recording, row = Recording(), []
    for added, sampled, version, is_trained in turns:
        row = row + added
        recording.add(row, sampled, logprobs[: len(sampled)], version, trained=is_trained)
        row = row + sampled
    path = tmp_path_factory.mktemp("saved") / "a.jsonl"
    saved = [trajectory(recording, sample=number) for number in range(2)]
    save_trajectories(path, saved)
    for before, after in zip(saved, load_trajectories(path), strict=True):
        for first, second in zip(before.branches, after.branches, strict=True):
            for name in ("tokens", "mask", "logprobs", "versions"):
                np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
                assert getattr(first, name).dtype == getattr(second, name).dtype
        names = (
            "environment",
            "task",
            "task_data",
            "weights",
            "sample",
            "seed",
            "iteration",
            "messages",
            "facets",
            "reward",
        )
        assert all(getattr(before, name) == getattr(after, name) for name in names)


def test_pictures_come_back_bit_by_bit(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, size=(4, 3, 14, 14), dtype=np.uint8)
    recording = Recording()
    recording.add([1, 9, 2], [3], [-1.0], 0, media=[Media(pixels=pixels, grid=(1, 2, 2))], starts=[1])
    recording.add([1, 9, 2, 3, 4], [5], [-1.0], 0, media=[Media(pixels=pixels, grid=(1, 2, 2))], starts=[1])
    save_trajectories(tmp_path / "a.jsonl", [trajectory(recording)])
    (branch,) = load_trajectories(tmp_path / "a.jsonl")[0].branches
    assert branch.starts == (1,) and branch.media[0].grid == (1, 2, 2) and len(branch.tokens) == 6
    np.testing.assert_array_equal(branch.media[0].pixels, pixels)


def test_a_file_that_is_damaged_or_cut_is_not_believed(tmp_path):
    recording = Recording()
    recording.add([1], [2], [-1.0], 0)
    path = tmp_path / "a.jsonl"
    save_trajectories(path, [trajectory(recording)] * 3)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for content, message in (
        (b"".join(lines[:2]), "breaks off after 2"),
        (whole[:-30], "breaks off|damaged"),
        (whole.replace(b'"reward": 0.1', b'"reward": 0.9', 1), "line 1 is damaged"),
        (b"".join([*lines[:1], *lines[2:]]), "holds 2 trajectories but says 3"),
        (b"", "breaks off after 0"),
        (lines[0] + b"\xff\xfe" + lines[1], "line 2 is damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(TrajectoryError, match=message):
            load_trajectories(path)


def test_a_failed_write_leaves_the_file_before(tmp_path):
    recording = Recording()
    recording.add([1], [2], [-1.0], 0)
    path = tmp_path / "a.jsonl"
    save_trajectories(path, [trajectory(recording)])
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save_trajectories(path, [trajectory(recording), trajectory(recording, task_data={"x": object()})])
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]


def test_lines_are_plain_json_for_other_programs(tmp_path):
    recording = Recording()
    recording.add([1], [2], [-1.0], 3)
    save_trajectories(tmp_path / "a.jsonl", [trajectory(recording)])
    first = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])["content"]
    assert first["branches"] == [{"tokens": [1, 2], "mask": [[1, 2]], "logprobs": [-1.0], "versions": [3]}]


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Recording().add([1], [2], [], 0), "1 tokens but 0 log-probs"),
        (lambda: Recording().add([1], [2], [-1.0], [0, 1]), "1 tokens but 2 versions"),
        (lambda: Recording().add([1], [2], [float("nan")], 0), "not finite"),
        (lambda: Recording().add([1], [2], [0.5], 0), "above 0"),
        (lambda: trajectory(Recording(), reward=float("nan")), "expected finite numbers"),
        (lambda: trajectory(Recording(), facets={"a": float("inf")}), "expected finite numbers"),
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises(TrajectoryError, match=message):
        make()
