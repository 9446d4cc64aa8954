"""Critical steps, width and serial collapse, against a graph library and by hand."""

from dataclasses import replace

import networkx
import pytest

from perilune.swarm.critical_path import CriticalPath, Step, critical_path
from perilune.swarm.serial_collapse import serial_collapses
from tests.swarm.random_runs import Log, Node, Run


def longest(nodes: list[Node], edges: list[tuple[Node, Node]]) -> int:
    graph = networkx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(edges)
    return networkx.dag_longest_path_length(graph, default_weight=1) + 1 if nodes else 0


def test_critical_steps_equal_the_longest_path_of_networkx_on_1000_random_runs() -> None:
    used: set[str] = set()
    wide = 0
    for seed in range(1000):
        run = Run(seed, most_steps=40)
        path = critical_path(run.log.events)
        assert path.critical_steps == longest(run.nodes, run.edges), f"seed {seed}"
        assert path.total_steps == len(run.nodes)
        assert path.agents == len(run.actors)
        used |= run.used
        wide += path.critical_steps < path.total_steps
    tools = "assign_task start_task map_task wait read_result send cancel list_agents create_subagent look"
    assert used == set(tools.split())
    assert wide > 300, "too few of the runs had any width"


@pytest.mark.parametrize("seed", range(20))
def test_a_critical_path_is_a_path_and_every_prefix_has_its_own(seed: int) -> None:
    run = Run(seed, most_steps=40)
    path = CriticalPath()
    grown = 0
    for event in run.log.events:
        path.add(event)
        done = set(run.nodes[: path.total_steps])
        if path.total_steps > grown:
            grown = path.total_steps
            edges = [(before, after) for before, after in run.edges if after in done]
            assert path.critical_steps == longest(run.nodes[:grown], edges)
    found = path.path()
    assert len(found) == path.critical_steps == len(set(found))
    assert [path.level(step.agent, step.number) for step in found if step.kind == "reply"] == [
        at for at, step in enumerate(found, 1) if step.kind == "reply"
    ]
    assert sum(path.level_widths) == path.total_steps
    assert 0 < path.efficiency <= 1 <= path.speed_up <= path.width


@pytest.mark.parametrize(
    "stages", [[(1, [3, 5, 2])], [(1, [1]), (2, [4, 4]), (1, [])], [(1, [7]), (1, [1, 9, 2]), (3, [])]]
)
def test_staged_runs_give_main_plus_the_longest_child_summed(stages: list[tuple[int, list[int]]]) -> None:
    log = Log()
    log.start("main")
    step = -1
    for number, (main, children) in enumerate(stages):
        for _ in range(main):
            step += 1
            log.reply("main", step)
        names = [f"main/c{number}-{step}.{at}" for at in range(len(children))]
        for at, name in enumerate(names):
            log.start(name, "main", f"{step}.{at}")
        for at, (name, length) in enumerate(zip(names, children, strict=True)):
            for each in range(length):
                log.reply(name, each)
            log.finish(name)
            log.outcome("main", step, at, "assign_task", joined=(name,))
    log.reply("main", step + 1)
    path = critical_path(log.events)
    assert path.critical_steps == sum(main + max(children, default=0) for main, children in stages) + 1
    assert path.total_steps == sum(main + sum(children) for main, children in stages) + 1


def test_the_numbers_of_a_small_run() -> None:
    log = Log()
    log.start("main")
    log.reply("main", 0)
    for at in range(3):
        log.start(f"main/c-0.{at}", "main", f"0.{at}")
        log.reply(f"main/c-0.{at}", 0)
    log.reply("main/c-0.2", 1)
    for at in range(3):
        log.finish(f"main/c-0.{at}")
        log.outcome("main", 0, at, "assign_task", joined=(f"main/c-0.{at}",))
    log.reply("main", 1)
    path = critical_path(log.events)
    numbers = {"total_steps": 6, "critical_steps": 4, "agents": 4, "width": 3, "speed_up": 1.5, "efficiency": 0.5}
    assert path.plain() == numbers
    assert path.level_widths == [1, 3, 1, 1]
    names = ("main", 0), ("main/c-0.2", 0), ("main/c-0.2", 1), ("main", 1)
    assert path.path() == [Step(agent, step, "reply") for agent, step in names]


def test_an_empty_run_has_no_path() -> None:
    path = critical_path([])
    assert (path.critical_steps, path.total_steps, path.path(), path.speed_up, path.efficiency) == (0, 0, [], 1.0, 1.0)


def test_a_message_counts_from_the_step_that_sent_it_not_from_where_the_sender_is() -> None:
    log = Log()
    log.start("main")
    log.reply("main", 0)
    log.start("main/a-0.0", "main", "0.0")
    for step in range(1, 6):
        log.reply("main", step)
    log.add("main/a-0.0", "message", {"id": "1", "sender": "main", "step": 2, "text": "", "tainted": False})
    log.reply("main/a-0.0", 0)
    assert critical_path(log.events).level("main/a-0.0", 0) == 4


def test_a_result_counts_from_where_it_was_made_though_the_worker_went_on() -> None:
    log = Log()
    log.start("main")
    log.reply("main", 0)
    log.start("main/w-0.0", "main", "0.0", task=None)
    log.reply("main/w-0.0", 0)
    log.add("main/w-0.0", "result", {"number": 0, "status": "done", "result": None, "error": None, "reads": []})
    for step in range(1, 5):
        log.reply("main/w-0.0", step)
    log.outcome("main", 0, 1, "wait", joined=("main/w-0.0",))
    log.reply("main", 1)
    assert critical_path(log.events).level("main", 1) == 3


def test_what_came_after_the_end_of_an_agent_was_not_read_by_it() -> None:
    log = Log()
    log.start("main")
    log.reply("main", 0)
    log.start("main/a-0.0", "main", "0.0")
    log.reply("main/a-0.0", 0)
    log.start("main/a-0.0/b-0.0", "main/a-0.0", "0.0")
    for step in range(5):
        log.reply("main/a-0.0/b-0.0", step)
    log.finish("main/a-0.0", "cancelled")
    log.finish("main/a-0.0/b-0.0")
    log.outcome("main/a-0.0", 0, 0, "assign_task", joined=("main/a-0.0/b-0.0",))
    log.outcome("main", 0, 0, "assign_task", joined=("main/a-0.0",))
    log.reply("main", 1)
    assert critical_path(log.events).level("main", 1) == 3


def test_events_out_of_order_are_refused_by_name() -> None:
    log = Log()
    log.start("main")
    log.start("main/a-0.0", "main", "0.0")
    with pytest.raises(ValueError, match="event 1 .started on 'main/a-0.0'.: step 0 of 'main' is not there"):
        critical_path(log.events)
    log.reply("main", 0)
    with pytest.raises(ValueError, match="agent 'main' has not started; add all events in the order"):
        critical_path(log.events[2:])


# Serial collapse ------------------------------------------------------------------------------------------------------

CITIES = "Find the population of each city: Paris, Berlin, Rome and Vienna."


def one_at_a_time(prompts: list[str], results: list[str], *, task: str = CITIES, tool: str = "assign_task") -> Log:
    log = Log()
    log.start("main", task=task)
    for step, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        log.reply("main", step, (tool, {"agent": f"researcher{step}", "prompt": prompt}))
        child = f"main/researcher-{step}.0"
        if tool == "assign_task":
            log.start(child, "main", f"{step}.0", task=prompt)
            log.reply(child, 0, text=result)
            log.finish(child)
        log.outcome("main", step, 0, tool, text=result, joined=(child,) if tool == "assign_task" else ())
    log.reply("main", len(prompts), text="All of them.")
    log.finish("main")
    return log


POPULATIONS = ["About 2.1 million.", "3.9 million people.", "2.8 million inhabitants.", "2.0 million."]


@pytest.mark.parametrize("tool", ["assign_task", "web_search"])
def test_independent_work_one_at_a_time_is_a_serial_collapse(tool: str) -> None:
    prompts = [f"Find the population of {city}." for city in ("Paris", "Berlin", "Rome", "Vienna")]
    (found,) = serial_collapses(one_at_a_time(prompts, POPULATIONS, tool=tool).events)
    assert (found.agent, found.steps, found.tool) == ("main", (0, 1, 2, 3), tool)
    assert "serial collapse: main made 4" in str(found) and "(steps 0 to 3)" in str(found)


def test_work_that_uses_the_result_before_it_is_no_collapse() -> None:
    prompts = ["Who wrote Emma?", "Where was Jane Austen born?", "Which county is Steventon in?", "Describe Hampshire."]
    results = ["Jane Austen wrote it.", "In Steventon.", "Steventon lies in Hampshire.", "Green."]
    assert serial_collapses(one_at_a_time(prompts, results, task="Describe the home of Emma's author").events) == []


def test_words_that_the_agent_had_before_are_no_use_of_a_result() -> None:
    prompts = [f"Find the population of {city}." for city in ("Paris", "Berlin", "Rome")]
    results = ["The population is 2.1 million", "The population of Berlin is 3.9 million", "The population is large"]
    assert len(serial_collapses(one_at_a_time(prompts, results, task="Compare Paris, Berlin and Rome").events)) == 1
    prompts = ["Which cities?", "Look up Lisbon", "Look up Madrid", "Look up Porto"]
    results = ["Lisbon, Madrid, Porto", "Lisbon is near Madrid and Porto", "Madrid is not Porto", "none"]
    (found,) = serial_collapses(one_at_a_time(prompts, results, task="Tour").events)
    assert found.steps == (1, 2, 3), "the list came from a result, the cities on it do not need each other"


def test_the_name_of_the_agent_is_not_part_of_what_a_task_says() -> None:
    prompts = [f"Find the population of {city}." for city in ("Paris", "Berlin", "Rome")]
    log = one_at_a_time(prompts, ["As researcher1 will say", "As researcher2 will say", "none"])
    assert len(serial_collapses(log.events)) == 1


def test_a_handle_of_a_result_in_the_prompt_is_a_use() -> None:
    prompts = [f"Continue from {{{{art:{at:016x}}}}}" if at else "Begin" for at in range(4)]
    results = [f"The rest is art:{at + 1:016x}" for at in range(4)]
    assert serial_collapses(one_at_a_time(prompts, results, task="Write").events) == []


def test_chinese_is_read_by_pairs_of_signs() -> None:
    prompts = ["查询巴黎的人口", "查询柏林的人口", "查询罗马的人口"]
    task = "查询每个城市的人口：巴黎、柏林、罗马"
    assert len(serial_collapses(one_at_a_time(prompts, ["两百万", "三百万", "三百万"], task=task).events)) == 1
    prompts = ["谁写了红楼梦", "曹雪芹生于何处", "南京有何名胜"]
    assert serial_collapses(one_at_a_time(prompts, ["曹雪芹", "生于南京", "中山陵"], task="红楼梦作者").events) == []


def test_two_pieces_in_a_row_are_not_a_stretch_yet() -> None:
    prompts = ["Find the population of Paris.", "Find the population of Rome."]
    assert serial_collapses(one_at_a_time(prompts, POPULATIONS[:2]).events) == []


def test_several_tasks_in_one_turn_are_no_collapse() -> None:
    log = Log()
    log.start("main", task=CITIES)
    for step in range(4):
        tasks = [("assign_task", {"agent": "a", "prompt": f"Paris part {step}{at}"}) for at in range(2)]
        log.reply("main", step, *tasks)
    assert serial_collapses(log.events) == []


def test_creating_and_waiting_in_between_does_not_hide_a_collapse() -> None:
    log = Log()
    log.start("main", task=CITIES)
    step = 0
    for at, city in enumerate(("Paris", "Berlin", "Rome")):
        log.reply("main", step, ("create_subagent", {"name": city, "system_prompt": "Look up."}))
        log.reply("main", step + 1, ("start_task", {"agent": city, "prompt": f"Population of {city}"}))
        child = f"main/{city}-{step + 1}.0"
        log.start(child, "main", f"{step + 1}.0")
        log.reply(child, 0, text=POPULATIONS[at])
        log.finish(child)
        log.reply("main", step + 2, ("wait", {"handles": [child]}))
        log.outcome("main", step + 2, 0, "wait", text=POPULATIONS[at], joined=(child,))
        step += 3
    (found,) = serial_collapses(log.events)
    assert found.steps == (1, 4, 7)


def test_a_serial_agent_beside_others_at_work_is_no_collapse() -> None:
    log = Log()
    log.start("main", task=CITIES)
    log.reply("main", 0, ("start_task", {"agent": "other", "prompt": "something long"}))
    log.start("main/other-0.0", "main", "0.0")
    for step in range(6):
        log.reply("main/other-0.0", step)
    for step, city in enumerate(("Paris", "Berlin", "Rome"), 1):
        log.reply("main", step, ("web_search", {"query": f"population {city}"}))
        log.outcome("main", step, 0, "web_search", text="many")
    assert serial_collapses(log.events) == []


def test_a_new_item_or_message_starts_from_what_the_agent_then_knows() -> None:
    log = Log()
    log.start("main", task="Wait for orders")
    log.reply("main", 0, ("web_search", {"query": "weather"}))
    log.add("main", "message", {"id": "1", "sender": "user", "step": None, "text": "also Lisbon", "tainted": False})
    log.reply("main", 1, ("web_search", {"query": "Lisbon"}))  # learnt within the stretch: a new one begins
    log.reply("main", 2, ("web_search", {"query": "Oslo"}))
    log.add("main", "task", {"number": 1, "text": "Next"})
    log.reply("main", 3, ("web_search", {"query": "Madrid"}))
    assert serial_collapses(log.events) == []
    log.reply("main", 4, ("web_search", {"query": "Porto"}))
    log.reply("main", 5, ("web_search", {"query": "Faro", "pages": [1, "two"]}))
    (found,) = serial_collapses(log.events)
    assert found.steps == (3, 4, 5)


def test_arguments_that_are_no_json_are_read_as_they_are() -> None:
    log = one_at_a_time(["Paris", "Rome", "Berlin"], ["1", "2", "3"])
    cut = [replace(event, body=event.body.replace(b'\\"}', b"")) for event in log.events]
    assert cut != log.events
    assert len(serial_collapses(cut)) == 1
