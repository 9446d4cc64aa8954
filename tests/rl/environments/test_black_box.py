"""Programs as agents: started, served, judged and ended, on a real engine; what they do wrong costs only themselves."""

import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from perilune.model.routes import num_expert_layers
from perilune.recipes.rl import rl_recipe
from perilune.rl.environment import OUTCOME
from perilune.rl.environments.arithmetic import Arithmetic
from perilune.rl.environments.black_box import BlackBox, opening
from perilune.rl.environments.copying import Copying
from perilune.rl.environments.word_problems import WordProblems
from perilune.rl.rollout import Collected, Job, RolloutConfig, Rollouts, replayed
from perilune.rl.run_config import EnvironmentsConfig, RLRunError, check, plain_config, read_config
from perilune.rl.talk import TalkConfig
from perilune.rl.trajectory import load_trajectories, save_trajectories
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine, EngineConfig
from tests.serve.tiny import model, tokenizer

AGENTS = str(Path(__file__).parent / "agents.py")
CONFIG = EngineConfig(
    page_size=16, num_pages=256, max_sequences=8, token_budget=128, num_snapshots=8, snapshot_interval=64
)  # fmt: skip


def agent(kind: str, *more: str, **settings) -> BlackBox:
    settings = {"arithmetic": Arithmetic(digits=1), "seconds": 60.0} | settings
    return BlackBox(command=(sys.executable, AGENTS, kind, *more), **settings)


def jobs(environment: BlackBox, count: int = 1, *, seed: int = 1) -> list[Job]:
    return [
        Job(environment="black_box", task=environment.task(number, "train"), sample=0, seed=seed, iteration=0)
        for number in range(count)
    ]


def collect(
    environment: BlackBox, count: int = 1, *, engine: EngineConfig = CONFIG, name: str = "hybrid", **config
) -> Collected:
    async def work() -> Collected:
        async with AsyncEngine(Engine(model(name), tokenizer(), engine)) as served:
            settings = RolloutConfig(**({"talk": TalkConfig(max_tokens=64, max_turns=8)} | config))
            rollouts = Rollouts(served, tokenizer(), {"black_box": environment}, settings)
            return await rollouts.collect(jobs(environment, count), iteration=0)

    return asyncio.run(asyncio.wait_for(work(), 120))


def test_two_processes_with_the_official_client_are_recorded_as_the_model_computes(tmp_path):
    environment = agent("official")
    found = collect(environment, 2)
    assert not found.failures, found.examples
    assert len(found.trajectories) == 2
    for trajectory in found.trajectories:
        assert trajectory.num_trained == sum(branch.num_trained for branch in trajectory.branches) > 0
        for branch in trajectory.branches:
            tokens = torch.from_numpy(branch.tokens.astype(np.int64))[None]
            with torch.no_grad():
                logprobs = model("hybrid")(tokens).log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
            expected = logprobs[torch.from_numpy(branch.mask[1:])].numpy()
            np.testing.assert_allclose(branch.logprobs[branch.mask], expected, rtol=1e-6, atol=1e-6)
        roles = [message["role"] for message in trajectory.messages]
        assert roles == ["user", "assistant", "user", "assistant", "assistant"]
        said, answer = trajectory.messages[-2:]
        assert answer["content"] == (said.get("content") or "None").strip()
        assert trajectory.messages[0]["content"] == f"{trajectory.task} = ?"
        assert trajectory.facets["ended"] == 1.0 and trajectory.facets["calls"] == 2.0
    save_trajectories(tmp_path / "kept.jsonl", found.trajectories)
    for trajectory in load_trajectories(tmp_path / "kept.jsonl"):
        assert replayed(environment, trajectory) == (dict(trajectory.facets), trajectory.reward)


def test_the_same_job_gives_the_same_episode_whatever_runs_beside_it():
    environment = agent("two_turns")
    together = collect(environment, 3).trajectories
    (alone,) = collect(environment, 1).trajectories
    assert alone.messages == together[0].messages and alone.reward == together[0].reward
    for one, other in zip(alone.branches, together[0].branches, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_an_agent_is_given_the_question_and_not_the_answer():
    for environment in (Arithmetic(), WordProblems(), Copying()):
        task = environment.task(3, "train")
        given = asyncio.run(opening(environment, task))
        assert set(given) == {"prompt", "messages", "tools"} and given["messages"][0]["content"] == given["prompt"]
    task = Arithmetic(digits=3).task(0, "train")
    assert str(task.data["answer"]) not in str(asyncio.run(opening(Arithmetic(digits=3), task)))


def test_an_agent_that_makes_no_call_is_judged_and_has_nothing_to_train_on():
    (trajectory,) = collect(agent("silent")).trajectories
    assert trajectory.reward == trajectory.facets[OUTCOME] == 1.0
    assert trajectory.branches == () and trajectory.facets["calls"] == 0.0


def test_an_agent_that_passes_its_budget_is_cut_and_judged_by_what_it_wrote():
    (trajectory,) = collect(agent("greedy"), talk=TalkConfig(max_tokens=64, max_turns=3)).trajectories
    assert trajectory.finish == "length" and trajectory.facets["ended"] == 0.0 and trajectory.facets["calls"] == 3.0
    assert trajectory.num_trained > 0 and trajectory.messages[-1] == {"role": "assistant", "content": ""}


def test_an_agent_that_cannot_begin_is_a_failure_that_shows_why():
    found = collect(agent("broken"))
    assert found.failures == {"environment": 1} and "no module named everything" in found.examples[0]
    found = collect(BlackBox(command=("/no/such/program",), arithmetic=Arithmetic()))
    assert found.failures == {"environment": 1} and "cannot be started" in found.examples[0]


def test_much_output_blocks_nobody_and_the_end_of_it_counts():
    (trajectory,) = collect(agent("loud")).trajectories
    assert trajectory.facets["ended"] == 1.0 and trajectory.messages[-1]["content"].endswith("the end")
    assert len(trajectory.messages[-1]["content"]) <= 1 << 16


@pytest.mark.parametrize("kind,seconds,answer", [("leaving", 60.0, "42"), ("hanging", 4.0, "")])
def test_every_process_of_an_agent_dies_with_it(tmp_path, kind, seconds, answer):
    note = tmp_path / "pid"
    (trajectory,) = collect(agent(kind, str(note), seconds=seconds)).trajectories
    assert trajectory.messages[-1]["content"].endswith(answer)
    assert (trajectory.messages[-1]["content"] == "") is (kind == "hanging")
    assert trajectory.facets["ended"] == float(kind == "leaving")
    assert is_gone(note)


def test_an_episode_that_hangs_takes_its_processes_with_it(tmp_path):
    note = tmp_path / "pid"
    found = collect(agent("hanging", str(note)), episode_seconds=4.0)
    assert found.failures == {"hung": 1} and is_gone(note)


def is_gone(note: Path) -> bool:
    """Whether the process that a note names has ended, within a while: nobody may be there to bury it. A slow machine
    may have killed the agent before it wrote the note."""
    pid = int(note.read_text()) if note.exists() and note.read_text() else 0
    for _ in range(200):
        try:
            if not pid or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_routes_of_experts_are_recorded_for_what_an_agent_asked():
    config = replace(CONFIG, record_routes=True)
    talk = TalkConfig(max_tokens=64, max_turns=8, record_routes=True)
    (trajectory,) = collect(agent("two_turns"), engine=config, name="experts", talk=talk).trajectories
    assert trajectory.branches
    for branch in trajectory.branches:
        assert branch.routes is not None
        assert branch.routes.shape == (len(branch.tokens) - 1, num_expert_layers(model("experts").config), 2)


def test_the_agent_that_comes_with_it_copies_through_the_gateway():
    (trajectory,) = collect(BlackBox(copying=Copying(), seconds=60.0)).trajectories
    assert trajectory.messages[0] == {"role": "user", "content": "a"} and trajectory.facets["ended"] == 1.0
    assert trajectory.messages[-1]["content"] == trajectory.messages[-2]["content"].strip()


def test_a_run_keeps_its_agent_in_its_config_and_is_checked_before_it_starts(tmp_path):
    run = rl_recipe("micro_agent")
    agent = BlackBox(command=(sys.executable, "agent.py", "--fast"), copying=Copying(letters="xyz"))
    run = replace(run, environments=EnvironmentsConfig(black_box=agent))
    (tmp_path / "rl.json").write_text(json.dumps(plain_config(run)))
    assert read_config(tmp_path / "rl.json").environments.black_box == agent
    assert run.environments.letters() == "xyz"
    check(run, run.environments.chosen())
    for wrong, words in (
        ({"command": ("no-such-program",)}, "no-such-program"),
        ({"seconds": 600.0}, "black_box.seconds is 600"),
        ({"copying": None, "arithmetic": Arithmetic()}, "knows only copying"),
    ):
        environments = EnvironmentsConfig(black_box=replace(agent, **wrong))
        with pytest.raises(RLRunError, match=words):
            check(replace(run, environments=environments), environments.chosen())


@pytest.mark.parametrize(
    "settings,words",
    [
        ({}, "none"),
        ({"arithmetic": Arithmetic(), "copying": Copying()}, "copying, arithmetic"),
        ({"arithmetic": Arithmetic(), "seconds": 0.0}, "seconds is 0.0"),
        ({"arithmetic": Arithmetic(), "command": "python agent.py"}, "each a text of its own"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        BlackBox(**settings)
