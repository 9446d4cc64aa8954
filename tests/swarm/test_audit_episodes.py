"""Episodes of reinforcement learning are audited as runs are, from what is kept with their trajectories."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from perilune.cli import main
from perilune.rl.environments.wide_search import WideSearch
from perilune.rl.environments.wide_search_corpus import CorpusConfig
from perilune.rl.environments.wide_search_play import played
from perilune.rl.environments.wide_search_policies import delegating, serial
from perilune.rl.trajectory import Branch, Trajectory, load_trajectories, save_trajectories
from perilune.swarm.audit_episodes import summarize_episodes

SMALL = WideSearch(corpus=CorpusConfig(pages=1500), kinds=("wide",), two_hops=0.0)


def say(text: str) -> dict:
    return {"role": "assistant", "content": text}


def call(name: str, /, **arguments) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "x:0", "type": "function", "function": function}]}


def events(policy, workers=None) -> list:
    """What a real episode notes whose policy, and perhaps whose workers, are scripts."""
    more = () if workers is None else (workers,)
    return asyncio.run(played(SMALL, SMALL.task(0, "test"), policy, *more)).talk.events


def flagged(noted: list) -> dict:
    return summarize_episodes([("e", noted)])["flag_counts"]


def in_order(*replies):
    """A policy that says these, one after the other, and then nothing."""

    def policy(messages):
        said = sum(message["role"] == "assistant" for message in messages)
        return replies[said] if said < len(replies) else say("done")

    return policy


def leading(*prompts):
    return in_order(
        call("create_subagent", name="w", system_prompt="You look up facts."),
        *(call("assign_task", agent="w", prompt=prompt) for prompt in prompts),
        call("answer", table=[]),
    )


@pytest.mark.parametrize("policy", [serial, delegating])
def test_honest_episodes_raise_no_flag(policy):
    assert flagged(events(policy)) == {}


def test_a_worker_that_spawns_is_flagged():
    noted = events(leading("find"), in_order(call("create_subagent", name="x", system_prompt="y"), say("a: b")))
    assert flagged(noted) == {"spawn_by_subagent": 1}


def test_empty_and_repeated_tasks_are_flagged():
    assert flagged(events(leading("find it", "find it", " "), in_order(say("a: b")))) == {
        "duplicate_task": 1,
        "empty_task": 1,
    }


def test_a_claim_is_held_against_the_calls_of_those_who_were_asked():
    claims = in_order(*[leading("find")([])], call("assign_task", agent="w", prompt="find"), say("I searched for it."))
    searching = in_order(call("search", query="x"), say("a: b"))
    assert flagged(events(claims, searching)) == {}
    assert flagged(events(claims, in_order(say("a: b")))) == {"claim_without_call": 1}


def test_what_is_said_beside_the_call_of_answer_is_an_answer():
    claim = call("answer", table=[]) | {"content": "I searched the library."}
    assert flagged(events(in_order(claim))) == {"claim_without_call": 1}
    assert flagged(events(in_order(call("search", query="x"), claim))) == {}


def test_no_event_about_a_sub_agent_makes_it_the_root():
    spawns = {"chain": "main/w-1.0", "kind": "reply", "body": {"step": 0, "message": call("create_subagent", name="x")}}
    told = {"chain": "main/w-1.0", "kind": "started", "body": {"depth": 0, "task": "find"}}
    for noted in ([spawns], [told, spawns]):
        assert flagged(noted)["spawn_by_subagent"] == 1


def test_files_and_writes_are_seen_in_the_arguments_of_any_tool():
    counts = flagged(events(in_order(call("write_file", path="/srv/reward.py", content="x"), call("answer", table=[]))))
    assert counts == {"write_outside": 1, "protected_access": 1}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Of reinforcement learning, with two episodes; in the second a sub-agent spawns."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "parl"
    empty = Branch(
        tokens=np.zeros(2, np.int32), mask=np.array([False, True]), logprobs=np.zeros(2, np.float32),
        versions=np.array([-1, 0], np.int32),
    )  # fmt: skip
    spawning = events(leading("find"), in_order(call("create_subagent", name="x", system_prompt="y"), say("a: b")))
    made = [
        Trajectory(
            environment="wide_search", task=f"task {number}", task_data={}, weights={}, sample=0, seed=0, iteration=0,
            branches=(empty,), messages=(), facets={}, reward=0.0, finish="stop", events=tuple(noted),
        )
        for number, noted in enumerate((events(serial), spawning))
    ]  # fmt: skip
    save_trajectories(run / "trajectories" / "000000.jsonl", made)
    (run / "rl.json").write_text("{}")
    return run


def test_the_command_reads_the_trajectories_of_a_run(run, capsys):
    main(["swarm", "audit", "parl"])
    page = capsys.readouterr().out
    assert (
        "episodes  intact (by checksums): 2" in page and "spawn_by_subagent (1)" in page and "000000 task 1/0" in page
    )
    with pytest.raises(SystemExit) as end:
        main(["swarm", "audit", "parl", "--json", "--fail-on", "serious"])
    assert end.value.code == 3
    verification, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert verification == {"record": "verification", "files": 1, "episodes": 2, "intact": True, "problems": []}
    assert summary["flags"][0]["episode"].endswith("task 1/0")


def test_events_that_are_none_and_files_that_are_gone_are_told(run, capsys):
    path = run / "trajectories" / "000000.jsonl"
    first, second = load_trajectories(path)
    save_trajectories(path, [first, replace(second, events=({"chain": "main", "kind": "reply", "body": [1]},))])
    (run / "records.jsonl").write_text('{"iteration": 1}\n{"iteration": 2}\n{"iter')
    with pytest.raises(SystemExit) as end:
        main(["swarm", "audit", "parl", "--json"])
    captured = capsys.readouterr()
    assert end.value.code == 1 and "task 1/0: its events are not those of an episode" in captured.err
    assert json.loads(captured.out.splitlines()[0])["missing"] == ["trajectories/000001.jsonl"]
    assert "1 files of episodes are not there" in captured.err
    path.unlink()
    with pytest.raises(SystemExit):
        main(["swarm", "audit", "parl"])
    assert "kept no episodes" in capsys.readouterr().err


def test_a_flag_that_is_none_is_a_wrong_argument(run, capsys):
    for wrong in (("--fail-on", "sirious"), ("--protect", "reward")):
        with pytest.raises(SystemExit) as end:
            main(["swarm", "audit", "parl", *wrong])
        assert end.value.code == 2 and wrong[1] in capsys.readouterr().err


def _changed_byte(content: bytes) -> bytes:
    at = content.index(b"task 1") + 5
    return content[:at] + b"7" + content[at + 1 :]


@pytest.mark.parametrize(
    ("harm", "said", "left"),
    [
        (_changed_byte, "line 2 is damaged", 1),
        (lambda content: content.replace(b"task 0", b"task\xff0", 1), "line 1 is not a trajectory", 1),
        (lambda content: b"".join(content.splitlines(keepends=True)[1:]), "lines are gone", 1),
        (lambda content: b"".join(content.splitlines(keepends=True)[:-1]), "breaks off", 2),
        (lambda content: content + content.splitlines(keepends=True)[0], "behind the end", 2),
        (lambda content: b"", "breaks off", 0),
    ],
)
def test_a_file_of_episodes_that_was_changed_is_not_intact_and_the_rest_is_audited(run, capsys, harm, said, left):
    path = run / "trajectories" / "000000.jsonl"
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(SystemExit) as end:
        main(["swarm", "audit", "parl", "--json"])
    assert end.value.code == 1
    captured = capsys.readouterr()
    verification, summary = map(json.loads, captured.out.splitlines())
    assert verification["intact"] is False and verification["episodes"] == summary["episodes"] == left
    assert said in verification["problems"][0] and said in captured.err
    with pytest.raises(SystemExit) as end:
        main(["swarm", "audit", "parl"])
    assert end.value.code == 1 and "NOT INTACT" in capsys.readouterr().out
