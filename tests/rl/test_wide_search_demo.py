"""A question about the library, answered over an endpoint: the table and what was right of it, whoever found it."""

import asyncio
import json
from dataclasses import replace

import pytest

from perilune.rl.environments.wide_search import WideSearch
from perilune.rl.environments.wide_search_corpus import CorpusConfig
from perilune.rl.environments.wide_search_demo import EndpointTalk, LibraryClient, demo_task
from perilune.rl.environments.wide_search_play import ScriptedClient
from perilune.rl.environments.wide_search_policies import delegating, serial
from perilune.rl.environments.wide_search_tools import tools
from perilune.swarm.audit import summarize
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.settings import SwarmConfig
from perilune.swarm.swarm import JOURNAL, Swarm

SMALL = WideSearch(corpus=CorpusConfig(pages=1500), kinds=("wide",), two_hops=0.0)


def answered(folder, policy, environment=SMALL, number=0):
    """A run with a journal on disk whose model is a script."""
    task = environment.task(number, "test")
    client = LibraryClient(EndpointTalk(ScriptedClient(policy), "scripted"), environment, task)
    config = SwarmConfig(
        model="scripted", system_prompt=environment.settings(task).system_prompt, main_steps=None, subagent_steps=None
    )

    async def play():
        swarm = Swarm(config, client=client, tools=tools(environment.library))
        async with swarm.start(task.data["question"], folder=folder) as live:
            client.prepare(live)
            return await live.finish()

    return asyncio.run(asyncio.wait_for(play(), 60)), client, task


def test_a_swarm_that_shares_out_the_work_has_every_item_and_an_answer_with_the_table(tmp_path):
    result, client, task = answered(tmp_path, delegating)
    items = task.data["items"]
    assert client.right() == len(items) and result.agents == len(items) + 1
    for item, value in items:
        assert f"| {item} | {value.lower()} |" in result.answer.replace(value, value.lower())
    with SQLiteReader(tmp_path / JOURNAL) as reader:
        assert summarize(reader)["flag_counts"] == {}


def test_alone_under_the_cap_only_a_part_is_right(tmp_path):
    capped = replace(SMALL, critical_steps=7)
    result, client, task = answered(tmp_path, serial, capped)
    assert 0 < client.right() < len(task.data["items"]) and result.agents == 1


def test_a_question_of_ones_own_has_its_truth_from_the_library():
    names = [name for name, _ in SMALL.task(0, "test").data["items"]]
    text = SMALL.task(0, "test").data["question"]
    assert demo_task(SMALL, text).data["items"] == SMALL.task(0, "test").data["items"]
    assert json.dumps(demo_task(SMALL).data) and demo_task(SMALL).data["kind"] == "wide"
    with pytest.raises(ValueError, match="no question about the library"):
        demo_task(SMALL, "Who are you?")
    with pytest.raises(ValueError, match="no page about"):
        demo_task(SMALL, text.replace(names[0], "Silly Nonsense"))
