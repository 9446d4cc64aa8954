"""Dialogues to learn from: the promised shares, exactly, readable by the trainer; as tokens they are understood."""

import asyncio
import json
from collections import Counter
from dataclasses import replace

import pytest

from perilune.data.dialogues import document_of, read_dialogues
from perilune.rl.environments.wide_search import SERIAL_TOOLS, SWARM_TOOLS, WideSearch
from perilune.rl.environments.wide_search_corpus import CorpusConfig
from perilune.rl.environments.wide_search_judge import lines_of, normal
from perilune.rl.environments.wide_search_lookups import look_up, lookups
from perilune.rl.environments.wide_search_play import ScriptedClient, play
from perilune.rl.environments.wide_search_policies import hollow, in_groups, parallel, serial, worker
from perilune.rl.environments.wide_search_questions import parse_question, truth_of
from perilune.rl.environments.wide_search_tools import tools
from perilune.rl.environments.wide_search_traces import AT_ONCE, TOLD, TraceConfig, traces
from perilune.rl.rollout import Job, RolloutConfig, Rollouts, replayed
from perilune.rl.talk import TalkConfig, Workers
from perilune.rl.trajectory import load_trajectories, save_trajectories
from perilune.swarm import Swarm
from perilune.swarm.place import JOURNAL
from tests.rl.environments.taught import taught
from tests.serve.tiny import tokenizer

ENVIRONMENT = WideSearch(corpus=CorpusConfig(pages=2000))
CONFIG = TraceConfig(orchestrators=80, workers=100, environment=ENVIRONMENT)
MADE = list(traces(CONFIG))
SOURCES = Counter(trace.source for trace in MADE)


def called(trace):
    calls = [call["function"] for message in trace.talk.messages for call in message.get("tool_calls") or ()]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def test_shares_are_kept_exactly():
    workers = {name: count for name, count in SOURCES.items() if name.startswith("worker")}
    assert sum(workers.values()) == CONFIG.workers
    assert workers["worker two_hops"] == 30 and workers["worker idle"] == workers["worker pairs"] == 10
    assert SOURCES["delegated"] + SOURCES["clumsy"] == CONFIG.orchestrators * CONFIG.delegated
    assert SOURCES["delegated"] >= CONFIG.well_formed * (SOURCES["delegated"] + SOURCES["clumsy"])
    assert SOURCES["clumsy"] > 0 and SOURCES["alone"] > 0 and SOURCES["uncapped"] > 0


def test_a_dialogue_delegates_if_and_only_if_its_source_says_so():
    for trace in MADE:
        names = {name for name, _ in called(trace)}
        assert ("assign_task" in names) == (trace.source in ("delegated", "clumsy"))
        if trace.kind != "worker":
            expected = SERIAL_TOOLS if trace.source == "alone" else SWARM_TOOLS
            assert [each["function"]["name"] for each in trace.talk.tools] == list(expected)


def test_what_is_told_to_delegate_does_so_at_once_and_leaves_the_others_as_they_are():
    config = replace(CONFIG, told=6)
    with_told = list(traces(config))
    told = [trace for trace in with_told if trace.source == "told"]
    assert len(told) == 6 and len(with_told) == len(MADE) + 6
    others = [trace.line for trace in with_told if trace.source != "told"]
    assert Counter(others) == Counter(trace.line for trace in MADE)
    questions = {trace.talk.messages[1]["content"] for trace in MADE}
    for trace in told:
        system, question, created, _, handed_out = trace.talk.messages[:5]
        assert system["content"].endswith(f" {TOLD}") and question["content"] not in questions
        assert len(created["tool_calls"]) == 1
        items = question["content"].count(",") + 1
        assert len(handed_out["tool_calls"]) == items >= 8 and trace.outcome > 0.9
    assert not any(TOLD in str(trace.talk.messages[0]["content"]) for trace in MADE)


def test_calls_are_numbered_through_a_dialogue():
    for trace in MADE:
        ids = [call["id"] for message in trace.talk.messages for call in message.get("tool_calls") or ()]
        assert ids == [f"functions.{name}:{number}" for number, (name, _) in enumerate(called(trace))]


@pytest.mark.parametrize("width", [1, 2, None])
def test_a_well_formed_delegation_gives_items_to_workers_in_order_and_so_many_at_a_time(width):
    config = replace(CONFIG, orchestrators=8, workers=0, delegated=1.0, well_formed=1.0, widths={width: 1.0})
    for trace in traces(config):
        question = parse_question(trace.talk.messages[1]["content"])
        replies = [message.get("tool_calls") or () for message in trace.talk.messages]
        groups = [[json.loads(call["function"]["arguments"])["prompt"] for call in calls
                   if call["function"]["name"] == "assign_task"] for calls in replies]  # fmt: skip
        groups = [group for group in groups if group]
        tasks = [question.one(name).text for name in question.names]
        assert [task for group in groups for task in group] == tasks[: sum(map(len, groups))]
        assert all(len(group) == (width or len(tasks)) for group in groups[:-1])
        assert width is not None or groups == [tasks]


def test_widths_are_kept_but_for_rounding_and_few_hand_out_everything_at_once():
    config = replace(CONFIG, orchestrators=400, workers=0, environment=replace(ENVIRONMENT, kinds=("wide",)))
    most = Counter()
    for trace in (each for each in traces(config) if each.source == "delegated"):
        replies = [message.get("tool_calls") or () for message in trace.talk.messages]
        most[min(5, max(sum(call["function"]["name"] == "assign_task" for call in calls) for calls in replies))] += 1
    assert most == {1: 20, 2: 2, 4: 1, 5: 1}  # of 24, as WIDTHS says


def test_one_item_at_a_time_takes_longer_than_to_work_alone_and_all_at_once_is_fastest():
    tasks = [replace(ENVIRONMENT, kinds=("wide",)).task(number, "test") for number in range(12)]
    outcomes = [[play(ENVIRONMENT, task, each).facets["outcome"] for task in tasks]
                for each in (in_groups(1), serial, in_groups(None))]  # fmt: skip
    one, alone, everything = (sum(each) / len(each) for each in outcomes)
    assert one + 0.1 < alone < everything - 0.1


def test_delegation_is_as_frequent_in_every_kind_of_task():
    config = replace(CONFIG, orchestrators=80, workers=0, delegated=0.25)
    found = Counter((trace.kind, trace.source in ("delegated", "clumsy")) for trace in traces(config))
    assert [found[kind, True] for kind in ("wide", "narrow", "chain")] == [10, 5, 5]


def test_shares_of_a_kind_take_the_place_of_the_common_one():
    config = replace(CONFIG, orchestrators=80, workers=0, delegated=0.4, delegated_by_kind={"wide": 0.9, "chain": 0.0})
    found = Counter((trace.kind, trace.source in ("delegated", "clumsy")) for trace in traces(config))
    assert [found[kind, True] for kind in ("wide", "narrow", "chain")] == [36, 8, 0]
    with pytest.raises(ValueError, match="delegated_by_kind"):
        replace(CONFIG, delegated_by_kind={"broad": 0.5})


def test_what_a_worker_does_not_find_is_looked_for_by_the_orchestrator():
    at_once = {"delegated": 1.0, "well_formed": 1.0, "widths": AT_ONCE}
    config = replace(CONFIG, orchestrators=24, workers=0, lost=0.3, **at_once)
    found = [trace for trace in traces(config) if trace.kind == "narrow"]
    own = [{name for name, _ in called(trace)} & {"search", "open"} for trace in found]
    assert all(trace.outcome == 1.0 for trace in found) and any(own) and not all(own)


def test_in_the_control_arm_every_delegation_is_well_formed():
    found = Counter(trace.source for trace in traces(replace(CONFIG, orchestrators=40, workers=0, well_formed=1.0)))
    assert found["delegated"] == 4 and not found["clumsy"]


def test_the_same_config_gives_the_same_bytes_and_another_seed_others():
    small = replace(CONFIG, orchestrators=8, workers=8)
    lines = [trace.line for trace in traces(small)]
    assert lines == [trace.line for trace in traces(small)]
    assert not set(lines) & {trace.line for trace in traces(replace(small, seed=1)) if "idle" not in trace.source}


def test_dialogues_are_about_training_things_only():
    corpus = ENVIRONMENT.library.corpus
    for trace in MADE:
        question = parse_question(trace.talk.messages[1]["content"])
        for name in question.names if question is not None else ():
            assert corpus.split(corpus.by_name[question.kind, name]) == "train"


def test_workers_say_the_truth_or_that_there_is_nothing_to_say():
    corpus = ENVIRONMENT.library.corpus
    for trace in (each for each in MADE if each.kind == "worker"):
        question, said = parse_question(trace.talk.messages[1]["content"]), trace.talk.messages[-1]["content"]
        if trace.source == "worker idle":
            assert len(trace.talk.messages) == 3 and not lines_of(said)
        else:
            truth = {(normal(item), normal(value)) for item, value in truth_of(corpus, question)}
            assert set(lines_of(said)) <= truth
    assert sum(each.outcome for each in MADE if each.kind == "worker") >= 88


def test_some_workers_slip_and_recover():
    lookups_made = [each for each in MADE if each.source == "worker lookup"]
    assert any(len(called(each)) > 2 for each in lookups_made)
    assert all(each.outcome for each in lookups_made)


def test_trainers_read_them_and_only_the_assistant_is_learnt(tmp_path):
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(trace.line for trace in MADE[:40]), encoding="utf-8")
    dialogues, broken = read_dialogues([path])
    assert len(dialogues) == 40 and not broken.count
    document = document_of(dialogues[0], tokenizer())
    learnt = tokenizer().decode([token for token, is_learnt in zip(document.tokens, document.predicted) if is_learnt])
    assert 0 < document.predicted.sum() < len(document.tokens) / 2 and "Return of" not in learnt


def test_contexts_are_short_enough_for_a_small_model():
    """In bytes, which bound the tokens of any tokenizer."""
    longest = {kind: max(len(each.line) for each in MADE if each.kind == kind) for kind in ("wide", "worker")}
    assert longest["wide"] < 25_000 and longest["worker"] < 10_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"delegated": 1.5},
        {"well_formed": 1.4},
        {"widths": {1: 0.5}},
        {"widths": {1: 1.5, 2: -0.5}},
        {"workers": -1},
        {"pairs": 0.9},
        {"alone": 0.6, "uncapped": 0.6},
    ],
)
def test_shares_that_cannot_be_kept_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(CONFIG, **wrong)


# A model that says what it was taught ---------------------------------------------------------------------------------


def looked_up(monkeypatch, policy, count=12):
    engine = taught(monkeypatch, None, policy)
    workers = Workers(engine=engine, tokenizer=tokenizer(), config=TalkConfig(max_tokens=4096))
    wanted = lookups(ENVIRONMENT, count, two_hops=0.5)
    return wanted, asyncio.run(look_up(ENVIRONMENT, workers, wanted, at_once=5))


def test_a_model_that_learnt_the_dialogues_passes_as_a_worker(monkeypatch):
    wanted, found = looked_up(monkeypatch, worker)
    assert [each.lookup for each in found] == wanted
    assert all(each.is_right and each.steps <= ENVIRONMENT.worker_steps for each in found)
    assert {each.hops for each in found} == {1, 2} and all(each.steps >= 2 * each.hops for each in found)
    assert all(len(each.did) == each.steps and each.did[0].startswith('search {"query": ') for each in found)


def test_a_model_that_guesses_does_not(monkeypatch):
    def guess(messages):
        return {"role": "assistant", "content": f"{parse_question(messages[1]['content']).names[0]}: 7"}

    _, found = looked_up(monkeypatch, guess)
    assert all(each.said.endswith(": 7") and each.steps == 0 and not each.is_right for each in found)


def rolled_out(monkeypatch, environment, task, policy):
    """The episode with the policy in tokens: a trajectory as training has them."""
    engine = taught(monkeypatch, policy, worker)
    config = RolloutConfig(talk=TalkConfig(max_tokens=20_000, max_turns=100))
    workers = Workers(engine=engine, tokenizer=tokenizer(), config=TalkConfig(max_tokens=4096))

    async def collected():
        rollouts = Rollouts(engine, tokenizer(), {environment.name: environment}, config, workers=workers)
        job = Job(environment=environment.name, task=task, sample=0, seed=0, iteration=0)
        return await rollouts.collect([job], iteration=0)

    found = asyncio.run(collected())
    assert not found.failures, found.examples
    return found.trajectories[0]


@pytest.mark.parametrize("policy", [serial, parallel, hollow])
def test_rewards_and_events_of_a_rollout_are_those_of_the_script_and_of_its_replay(monkeypatch, tmp_path, policy):
    environment = replace(ENVIRONMENT, kinds=("wide",))
    task = environment.task(1, "train")
    trajectory = rolled_out(monkeypatch, environment, task, policy)
    scripted = play(environment, task, policy).facets
    counted = {"tokens", "worker_tokens"}
    assert {name: trajectory.facets[name] for name in scripted.keys() - counted} == {
        name: value for name, value in scripted.items() if name not in counted
    }
    assert trajectory.facets["tokens"] > trajectory.facets["worker_tokens"] >= 0
    save_trajectories(tmp_path / "one.jsonl", [trajectory])
    (again,) = load_trajectories(tmp_path / "one.jsonl")
    assert replayed(environment, again) == (dict(trajectory.facets), trajectory.reward)


@pytest.mark.parametrize("policy", [serial, parallel])
def test_what_is_fine_tuned_on_is_token_for_token_what_a_rollout_records(monkeypatch, tmp_path, policy):
    environment = replace(ENVIRONMENT, kinds=("wide",))
    task = environment.task(2, "train")
    (branch,) = rolled_out(monkeypatch, environment, task, policy).branches
    (tmp_path / "one.jsonl").write_text(json.dumps(play(environment, task, policy).talk.dialogue()) + "\n")
    [dialogue], _ = read_dialogues([tmp_path / "one.jsonl"])
    document = document_of(dialogue, tokenizer())
    assert branch.tokens.tolist() == document.tokens.tolist()
    assert branch.mask.tolist() == document.predicted.tolist()


def test_scripted_policies_also_lead_a_swarm_of_its_own(tmp_path):
    """With the runtime's journal on disk, which `perilune swarm view` and `audit` read."""
    environment = replace(ENVIRONMENT, kinds=("wide",))
    task = environment.task(0, "test")
    client = ScriptedClient(parallel)
    swarm = Swarm(model="scripted", client=client, tools=tools(environment.library))
    result = asyncio.run(swarm.run(task.data["question"], folder=tmp_path / "run"))
    assert result.status == "done" and set(lines_of(result.answer)) == {
        (normal(item), normal(value)) for item, value in task.data["items"]
    }
    assert result.agents == len(task.data["items"]) + 1 and result.parallelism.width == len(task.data["items"])
    assert (tmp_path / "run" / JOURNAL).exists()
