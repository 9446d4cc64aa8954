"""Scripted models for `benchmarks/swarm.py`."""

from perilune.swarm.scripted import Call, Reply, Script, Turn


def mapping(items: int = 10_000, agents: int = 100) -> Script:
    """An orchestrator that maps items over agents and merges all answers in a tree; workers that answer at once."""

    def script(turn: Turn) -> Reply:
        if turn.task.startswith("item "):
            return Reply(f"{turn.task} is done")
        if turn.task.startswith("merge "):
            handles = [piece.split("'")[0] for piece in turn.task.split("<part handle='")[1:]]
            return Reply("\n".join(f"{{{{{handle}}}}}" for handle in handles))
        merging = {"agent": "worker", "template": "merge {parts}", "handles": ["worker-1.0"], "fan_in": 40}
        steps = [
            (
                Call("create_subagent", {"name": "worker", "system_prompt": "You work."}),
                Call("list_items", {"count": items}),
            ),
            (),  # map_task, below: its items are in the result before
            (Call("wait", {}),),
            (Call("reduce_task", merging),),
            (Call("wait", {}),),
        ]  # fmt: skip
        if turn.step == 1:
            listed = turn.results("list_items")[-1][1]
            handle = f"art:{listed.rsplit('art:', 1)[1][:16]}"
            arguments = {"agent": "worker", "template": "item {item}", "items_from": handle, "agents": agents}
            return Reply(calls=(Call("map_task", arguments),))
        if turn.step < len(steps):
            return Reply(calls=steps[turn.step])
        text = turn.results("wait")[-1][1]
        return Reply(f"{{{{art:{text.rsplit('art:', 1)[1][:16]}}}}}")

    return script
