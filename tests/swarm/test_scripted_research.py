"""The demonstration's script: researchers, fact checkers and a writer over local documents, without a runtime."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from perilune.swarm.scripted import Turn
from perilune.swarm.scripted.research import research
from perilune.swarm.scripted.wire import make_answer
from perilune.swarm.tools.documents import build_index, document_tools, fts5_missing
from perilune.swarm.tools.tool import Tool, ToolContext, ToolError

pytestmark = pytest.mark.skipif(fts5_missing() is not None, reason="SQLite without FTS5")

DOCUMENTS = {
    "orbits.md": "# Orbits\n\nThe perilune is the point of a lunar orbit that is closest to the Moon. It has an "
    "opposite, the apolune. Orbits of\nspacecraft around the Moon are unstable because of mass concentrations.\n",
    "moon.txt": "The Moon is the only natural satellite of the Earth! Its orbit takes 27.3 days. "
    "Cheese is not found there.",
    "bread.txt": "Bread is baked from flour and water, and nothing in this file is of any other interest.",
}
TASK = "What is known about the orbit of the Moon?\nCite everything."


class Stage:
    """Plays the runtime: sub-agents run the same script, one after the other."""

    def __init__(self, tools: list[Tool], workspace: Path, *, garble: int = 0) -> None:
        self.script = research()
        self.tools = {tool.name: tool for tool in tools}
        self.workspace = workspace
        self.roles: dict[str, str] = {}
        self.waves: list[list[str]] = []
        self.garble = garble
        """Which call of the orchestrator goes out with broken arguments; 0: none."""

    async def play(self, system: str, task: str, *, is_main: bool = False) -> str:
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": task}]
        names = [*self.tools, *(("create_subagent", "assign_task") if is_main else ())]
        declared = [{"type": "function", "function": {"name": name}} for name in names]
        for _ in range(12):
            turn = Turn(messages, declared)
            reply = self.script(turn)
            assert self.script(Turn(orjson.loads(orjson.dumps(messages)), declared)) == reply  # a pure function
            if not reply.calls:
                return reply.content or ""
            answer = make_answer(turn, reply, id="x", request_bytes=0, max_tokens=None)
            messages.append(orjson.loads(orjson.dumps(answer.message)))
            if is_main:
                self.waves.append([call.name for call in reply.calls])
            for call in messages[-1]["tool_calls"]:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": await self.call(call, is_main)})
        raise AssertionError("the script does not end")

    async def call(self, call: dict[str, Any], is_main: bool) -> str:
        self.garble -= is_main
        if self.garble == 0 and is_main:
            call["function"]["arguments"] = call["function"]["arguments"][:-1]
            return "Error: arguments are not JSON"
        name, arguments = call["function"]["name"], orjson.loads(call["function"]["arguments"])
        if name == "create_subagent":
            self.roles[arguments["name"]] = arguments["system_prompt"]
            return "ready"
        if name == "assign_task":
            return await self.play(self.roles[arguments["agent"]], arguments["prompt"])
        tool = self.tools[name]
        try:
            checked = tool.validate(arguments) if tool.validate else arguments
            context = ToolContext(agent="a", step=0, index=0, workspace=self.workspace)
            result = await tool.call(context, checked)
        except ToolError as error:
            return f"Error: {error}"
        return result if isinstance(result, str) else result.text


def run(tmp_path: Path, task: str = TASK, **options: Any) -> tuple[str, Stage]:
    folder = tmp_path / "documents"
    folder.mkdir(exist_ok=True)
    for name, text in DOCUMENTS.items():
        (folder / name).write_text(text)

    async def scenario() -> tuple[str, Stage]:
        index = await build_index(folder, tmp_path / "index.db")
        stage = Stage(document_tools(index), tmp_path, **options)
        return await stage.play("You orchestrate.", task, is_main=True), stage

    return asyncio.run(scenario())


def test_the_answer_quotes_what_the_documents_say_and_cites_it(tmp_path: Path) -> None:
    answer, stage = run(tmp_path)
    assert answer.startswith("# What is known about the orbit of the Moon?")
    assert "- The perilune is the point of a lunar orbit that is closest to the Moon. [doc:" in answer
    assert "Orbits of spacecraft around the Moon are unstable because of mass concentrations. [doc:" in answer
    assert "Its orbit takes 27.3 days. [doc:" not in answer  # too short to stand alone
    assert "Bread" not in answer and "claims were confirmed at their source, in 2 documents" in answer
    # Search and roles, then one researcher per document at once, then one fact checker each, then the writer.
    assert stage.waves == [
        ["search_documents"] + ["create_subagent"] * 3,
        ["assign_task"] * 2,
        ["assign_task"] * 2,
        ["assign_task"],
    ]


def test_every_citation_is_where_the_sentence_stands(tmp_path: Path) -> None:
    answer, stage = run(tmp_path)
    lines = [line for line in answer.splitlines() if line.startswith("- ")]
    assert len(lines) >= 3
    for line in lines:
        said, _, address = line[2:].rpartition(" [")
        call = {"function": {"name": "read_document", "arguments": orjson.dumps({"id": address[:-1]}).decode()}}
        read = asyncio.run(stage.call(call, False))
        assert " ".join(read.splitlines()[-1].split()).endswith(said.split()[-1])
        assert said in " ".join(read.split())


@pytest.mark.parametrize("garbled", range(1, 10))
def test_a_garbled_call_is_made_again_and_changes_nothing(tmp_path: Path, garbled: int) -> None:
    assert run(tmp_path, garble=garbled)[0] == run(tmp_path)[0]


def test_a_question_without_an_answer_is_not_answered(tmp_path: Path) -> None:
    answer, _ = run(tmp_path, "Which zeppelins crossed Antarctica?")
    assert answer.startswith("No document says anything about this")
