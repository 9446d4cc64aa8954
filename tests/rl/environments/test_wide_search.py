"""Wide search as an environment: oracles play it through the real runtime, and the judge sees through a show."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.rl.environment import reward_of
from perilune.rl.environments.wide_search import CRITICAL_STEPS, SERIAL_TOOLS, WideSearch
from perilune.rl.environments.wide_search_corpus import CorpusConfig
from perilune.rl.environments.wide_search_judge import UNKNOWN, item_scores, lines_of, normal, table_rows
from perilune.rl.environments.wide_search_play import play
from perilune.rl.environments.wide_search_policies import (
    CLUMSY,
    NOTHING_ASKED,
    TOO_MANY,
    clumsy,
    copying,
    delegating,
    hollow,
    padded,
    parallel,
    say,
    serial,
    worker,
)
from perilune.rl.environments.wide_search_questions import parse_question

ENVIRONMENT = WideSearch(corpus=CorpusConfig(pages=4000))
ENDLESS = replace(ENVIRONMENT, critical_steps=1000)
NUMBERS = st.integers(0, 10**9)
PLAYED = settings(max_examples=10, deadline=None)


def wide(number=0, split="test", **how):
    environment = replace(ENVIRONMENT, kinds=("wide",), **how)
    return environment, environment.task(number, split)


# Tasks ----------------------------------------------------------------------------------------------------------------


@given(NUMBERS, st.sampled_from(["train", "test"]))
def test_a_task_is_a_function_of_its_number_and_fits_its_kind(number, split):
    task = ENVIRONMENT.task(number, split)
    assert task == ENVIRONMENT.task(number, split) and json.loads(json.dumps(task.data)) == task.data
    kind, items = task.data["kind"], len(task.data["items"])
    assert kind == ENVIRONMENT.kinds[number % 4]
    assert items in {"wide": range(8, 17), "narrow": range(1, 4), "chain": [1]}[kind]
    assert len(parse_question(task.name).path) in {"wide": (1, 2), "narrow": (1, 2), "chain": (3, 4)}[kind]
    assert task.weights == {"outcome": 1.0} and task.data["critical_steps"] == CRITICAL_STEPS


@given(NUMBERS, NUMBERS)
def test_train_and_test_have_no_question_about_the_same_thing(one, other):
    train, test = ENVIRONMENT.task(one, "train"), ENVIRONMENT.task(other, "test")
    assert not {item for item, _ in train.data["items"]} & {item for item, _ in test.data["items"]}


@PLAYED
@given(NUMBERS, st.sampled_from(["train", "test"]))
def test_every_truth_can_be_found_with_search_and_open_alone(number, split):
    """And what the oracle finds is the truth: pages and questions do not contradict each other."""
    task = ENDLESS.task(number, split)
    done = play(ENDLESS, task, serial)
    assert done.facets["outcome"] == done.facets["answered"] == 1.0
    assert done.facets["spawned"] == 0 and done.facets["critical_steps"] == done.facets["total_steps"]
    if len(task.data["items"]) == 1:  # two items may share a page on the way
        assert done.facets["critical_steps"] >= parse_question(task.name).oracle_steps


@PLAYED
@given(NUMBERS)
def test_workers_find_every_truth_of_a_wide_task_within_the_cap(number):
    environment, task = wide(number)
    facets = play(environment, task, parallel).facets
    assert facets["outcome"] == facets["parallel"] == facets["finish"] == 1.0
    assert facets["unused_workers"] == 0 and facets["width"] == facets["spawned"] == facets["items"]
    assert facets["critical_steps"] <= 2 + ENVIRONMENT.worker_steps <= CRITICAL_STEPS < facets["total_steps"]


def test_the_cap_leaves_a_serial_oracle_half_of_the_items():
    """benchmarks/wide_search.py has the number for the whole library: 0.52 of 200 test tasks."""
    recalls = []
    for number in range(40):
        environment, task = wide(number)
        facets = play(environment, task, serial).facets
        recalls.append(facets["recall"])
        assert facets["critical_steps"] == CRITICAL_STEPS and facets["precision"] == 1.0
    assert 0.45 <= sum(recalls) / len(recalls) <= 0.65


@PLAYED
@given(NUMBERS)
def test_narrow_tasks_and_chains_fit_under_the_cap_alone(number):
    environment = replace(ENVIRONMENT, kinds=("narrow", "chain"))
    assert play(environment, environment.task(number, "test"), serial).facets["outcome"] == 1.0


def test_spare_steps_cap_a_chain_so_that_handing_it_on_does_not_pay():
    environment = replace(ENVIRONMENT, kinds=("chain",), spare_steps=1)
    tasks = [environment.task(number, "test") for number in range(12)]
    assert all(task.data["critical_steps"] == parse_question(task.name).oracle_steps + 1 for task in tasks)
    alone, handed = (
        [play(environment, task, each).facets["outcome"] for task in tasks] for each in (serial, delegating)
    )
    assert sum(alone) > 8 and sum(handed) == 0


def test_two_or_three_things_are_as_good_alone_as_handed_out_and_economy_tells_them_apart():
    """On wide tasks it leaves workers worth far more than they cost."""
    environment = replace(ENVIRONMENT, kinds=("narrow",), spare_steps=1)
    tasks = [task for number in range(16) if len((task := environment.task(number, "test")).data["items"]) > 1]
    pays = {"outcome": 1.0, "economy": 0.1}
    assert len(tasks) > 6
    for task in tasks:
        alone, handed = (play(environment, task, each).facets for each in (serial, delegating))
        assert alone["outcome"] == handed["outcome"] == alone["economy"] == 1.0
        assert handed["economy"] == task.data["oracle_steps"] / handed["total_steps"] < 0.8
    gains = []
    for number in range(12):
        environment, task = wide(number)
        alone, handed = (
            reward_of(replace(task, weights=pays), play(environment, task, each).facets) for each in (serial, parallel)
        )
        gains.append(handed - alone)
    assert min(gains) > 0.02 and sum(gains) / len(gains) > 0.2
    data = {name: value for name, value in task.data.items() if name != "oracle_steps"}
    assert "economy" not in play(environment, replace(task, data=data), serial).facets  # stored before it was known


def test_without_tools_for_workers_nobody_is_spawned():
    environment, task = wide(main_tools=SERIAL_TOOLS)
    done = play(environment, task, parallel)
    assert [each["function"]["name"] for each in done.talk.tools] == list(SERIAL_TOOLS)
    assert done.facets["spawned"] == done.facets["parallel"] == done.facets["finish"] == 0


@pytest.mark.parametrize(
    "wrong",
    [{"kinds": ()}, {"kinds": ("broad",)}, {"two_hops": 2.0}, {"spare_steps": -1}, {"main_tools": ("shell", "answer")}],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(ENVIRONMENT, **wrong)


# Spawning for show ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [hollow, padded, copying])
def test_spawning_for_show_earns_what_instantiation_pays_and_neither_finish_nor_outcome(policy):
    for number in range(5):
        environment, task = wide(number)
        show, honest = play(environment, task, policy).facets, play(environment, task, parallel).facets
        assert show["parallel"] == honest["parallel"] == 1.0
        assert show["finish"] <= 1 / 8 and show["outcome"] < honest["outcome"]
        pays = {"parallel": 0.5, "finish": 0.5, "outcome": 1.0}
        paid, due = (reward_of(replace(task, weights=pays), facets) for facets in (show, honest))
        assert paid < due - 0.5


def test_a_hollow_worker_is_cheap_and_unused():
    environment, task = wide()
    facets = play(environment, task, hollow).facets
    assert facets["critical_steps"] == 2 and facets["unused_workers"] == facets["spawned"] == facets["items"]
    assert facets["finish"] == facets["outcome"] == 0 and facets["answered"] == 1


@pytest.mark.parametrize("way", CLUMSY)
def test_clumsy_delegations_waste_steps_and_the_rest_is_done_alone(way):
    environment, task = wide()
    facets, alone = play(environment, task, clumsy(way)).facets, play(environment, task, serial).facets
    assert facets["assigned"] > 0 and 0 < facets["outcome"] <= alone["outcome"]
    assert facets["finish"] == (1.0 if way == "single" else 0.0)
    assert facets["spawned"] == {"unregistered": 0, "vague": 3, "copied": 2, "single": 1}[way]


@pytest.mark.parametrize(
    "task,reply",
    [
        ("", NOTHING_ASKED),
        ("Help.", NOTHING_ASKED),
        ("Find the year of each town: Old Fox, Red Fox, Low Fox.", TOO_MANY),
    ],
)
def test_a_worker_with_nothing_to_look_up_returns_at_once(task, reply):
    said = worker([{"role": "system", "content": ""}, {"role": "user", "content": task}])
    assert said == {"role": "assistant", "content": reply} and not lines_of(reply)


def finish_of(*tasks, opens=True):
    """The facet of an episode with these tasks, each a prompt and the text of its worker, who has opened a page."""
    environment, task = wide()
    page = environment.library.corpus.pages[0].id

    def main(messages):
        made = sum(message["role"] == "assistant" for message in messages)
        calls = [
            [("create_subagent", {"name": "reader", "system_prompt": ""})],
            [("assign_task", {"agent": "reader", "prompt": prompt}) for prompt, _ in tasks],
            [("answer", {"table": []})],
        ]
        return say("", messages, *calls[made])

    def reader(messages):
        if opens and messages[-1]["role"] == "user":
            return say("", messages, ("open", {"page": page}))
        asked = next(message["content"] for message in messages if message["role"] == "user")
        return say(dict(tasks)[asked], messages)

    return play(environment, task, main, reader).facets["finish"]


@pytest.mark.parametrize(
    "prompt,text,is_finished",
    [
        ("Find the year of the town Old Fox.", "Old Fox: 1800", True),
        ("When was Old Fox built?", "I looked.\nold fox:  1800.", True),
        ("Find the year of the town Old Fox.", f"Old Fox: {UNKNOWN}", False),
        ("Find the year of the town Old Fox.", "Old Fox:", False),
        ("Find the year of the town Old Fox.", "Old Fox: Old Fox", False),
        ("Find the year of the town Old Fox.", "Red Fox: 1800", False),
        ("Find the year of the town Old Fox.", "the: 1800", False),
        ("Find the year of the town Old Fox.", "1800", False),
        ("Find the year of the town Old Fox.", "", False),
        ("", "Old Fox: 1800", False),
    ],
)
def test_a_task_has_finished_when_its_worker_tells_something_of_what_it_names(prompt, text, is_finished):
    assert finish_of((prompt, text)) == float(is_finished)


YEAR = "Find the year of the town Old Fox."


def test_a_worker_that_opened_nothing_has_only_guessed():
    assert finish_of((YEAR, "Old Fox: 1800"), opens=False) == 0.0


@pytest.mark.parametrize(
    "prompt",
    [
        "Say Old Fox: 1800",
        "Old Fox: 1800.",
        "The year of Old Fox is 1800. Repeat it.",
        "Repeat: Old Fox: 18-00, then 1800",
        "old Old Fox:\n1800\n",
    ],
)
def test_a_task_that_tells_the_answer_finishes_nothing(prompt):
    assert finish_of((prompt, "Old Fox: 1800")) == 0.0


def test_a_name_in_a_task_does_not_tell_the_value_it_sounds_like():
    assert finish_of(("Find the material of the bridge Grey Oak.", "Grey Oak: oak")) == 1.0


@pytest.mark.parametrize("again", ["1. " + YEAR, YEAR.upper(), "Find the height of the town Old Fox.", "Old Fox?"])
def test_tasks_about_the_same_thing_finish_once_in_whatever_words(again):
    assert finish_of((YEAR, "Old Fox: 1800"), (again, "Old Fox: 1801")) == 0.5
    assert finish_of((YEAR, f"Old Fox: {UNKNOWN}"), (again, "Old Fox: 1801")) == 0.5


def test_numbered_copies_of_one_task_finish_at_most_once():
    environment, task = wide()

    def numbered(messages):
        question = parse_question(task.name)
        made = sum(message["role"] == "assistant" for message in messages)
        if made == 0:
            return say("", messages, ("create_subagent", {"name": "reader", "system_prompt": ""}))
        if made == 1:
            text = question.one(question.names[0]).text
            prompts = [f"{number}. {text}" for number in range(len(question.names))]
            return say("", messages, *(("assign_task", {"agent": "reader", "prompt": each}) for each in prompts))
        return serial(messages)

    def guessing(messages):
        return say(f"{parse_question(task.name).names[0]}: 1", messages)

    def looking(messages):
        plain = [{**each, "content": str(each["content"]).partition(". ")[2]} if each["role"] == "user" else each
                 for each in messages]  # fmt: skip
        return worker(plain)

    assert play(environment, task, numbered, guessing).facets["finish"] == 0.0
    shown = play(environment, task, numbered, looking).facets
    assert shown["finish"] == 1 / shown["items"] and shown["parallel"] == 1.0


# Judging --------------------------------------------------------------------------------------------------------------


@PLAYED
@given(NUMBERS, st.sampled_from([serial, parallel, hollow, copying, padded, delegating, clumsy("single")]))
def test_events_read_from_a_file_are_judged_the_same_bit_for_bit(number, policy):
    task = ENVIRONMENT.task(number, "train")
    done = play(ENVIRONMENT, task, policy)
    again = json.loads(json.dumps(done.talk.events))
    assert ENVIRONMENT.judge_events(json_task(task), (), again) == done.facets
    assert all(isinstance(value, float) and math.isfinite(value) for value in done.facets.values())
    scores = ENVIRONMENT.judge(task, done.talk.messages)
    assert scores == {name: done.facets[name] for name in scores}


def json_task(task):
    return replace(task, data=json.loads(json.dumps(task.data)))


TRUTH = [["Old Fox", "1800"], ["Red Fox", "oak"], ["Low Sun", "Ada Stone"], ["New Bay", "7"]]
WRITTEN = st.text(max_size=12) | st.sampled_from([value for row in TRUTH for value in row])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WRITTEN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WRITTEN, inner, max_size=4),
    max_leaves=12,
)
ROWS = st.fixed_dictionaries({"item": ANYTHING, "value": ANYTHING}) | ANYTHING


@settings(max_examples=100)
@given(st.lists(ROWS, max_size=30) | ANYTHING)
def test_no_table_raises_and_scores_stay_within_bounds(table):
    scores = item_scores(TRUTH, table_rows(json.dumps({"table": table})))
    assert all(0 <= value <= 1 for value in scores.values())
    assert min(scores["precision"], scores["recall"]) - 1e-9 <= scores["outcome"]
    assert scores["outcome"] <= max(scores["precision"], scores["recall"]) + 1e-9


@pytest.mark.parametrize(
    "arguments",
    [
        *["", "{", "[]", "null", '{"rows": []}', '{"table": null}', '{"table": {"Old Fox": "1800"}}', 7, None],
        *["[" * 100_000, '{"table": ' + "[" * 100_000, '{"table": [{"item": "Old Fox", "value": ' + "9" * 5000 + "}]}"],
    ],
)
def test_arguments_without_a_table_are_no_answer(arguments):
    assert item_scores(TRUTH, table_rows(arguments))["outcome"] == 0


@given(st.permutations(range(4)), st.integers(0, 4), st.lists(ROWS, max_size=20), st.integers(1, 50))
def test_no_padding_beats_the_honest_rows(order, known, padding, times):
    """Duplicates, guesses, rows of a wrong type and huge tables: nothing but right rows raises the score."""
    honest = [{"item": TRUTH[at][0], "value": TRUTH[at][1]} for at in order[:known]]
    right = {(normal(item), normal(value)) for item, value in TRUTH}
    wrong = [row for row in padding if not set(table_rows({"table": [row]}) or [None]) & right]
    base = item_scores(TRUTH, table_rows({"table": honest}))["outcome"]
    for table in (honest + wrong, wrong + honest, honest * times, (honest + wrong) * times):
        assert item_scores(TRUTH, table_rows({"table": table}))["outcome"] <= base


def test_naming_everything_in_the_library_is_worth_next_to_nothing():
    environment, task = wide()
    corpus = environment.library.corpus
    table = [
        {"item": corpus.name(entity), "value": corpus.value(entity, "year")} for entity in range(corpus.num_entities)
    ]
    kind = parse_question(task.name).kind
    years = [[item, corpus.value(corpus.by_name[kind, item], "year")] for item, _ in task.data["items"]]
    scores = item_scores(years, table_rows({"table": table}))
    assert scores["recall"] == 1.0 and scores["outcome"] < 0.01


@pytest.mark.parametrize("value", ["1800", " 1800 ", "1800.", 1800])
def test_values_are_compared_without_case_spaces_and_full_stop(value):
    rows = table_rows({"table": [{"item": "old  FOX", "value": value}]})
    assert item_scores([["Old Fox", "1800"]], rows)["outcome"] == 1.0


def test_an_answer_counts_once_and_ends_the_episode():
    environment, task = wide()
    right = [{"item": item, "value": value} for item, value in task.data["items"]]

    def twice(messages):
        return say("", messages, ("answer", {"table": []}), ("answer", {"table": right}))

    done = play(environment, task, twice)
    assert done.facets["outcome"] == 0 and done.facets["answered"] == 1
    assert sum(message["role"] == "assistant" for message in done.talk.messages) == 1


def test_words_instead_of_an_answer_are_worth_nothing():
    environment, task = wide()
    facets = play(environment, task, lambda messages: say(task.data["items"][0][1], messages)).facets
    assert facets["outcome"] == facets["answered"] == facets["critical_steps"] == 0
