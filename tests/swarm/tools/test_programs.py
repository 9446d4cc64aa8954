"""shell and python: in the sandbox or not at all."""

import asyncio
from pathlib import Path

import pytest

from perilune.swarm.sandbox import open_sandbox
from perilune.swarm.sandbox.contract import Completed, Limits, SandboxUnavailable
from perilune.swarm.tools.programs import python, report, shell
from perilune.swarm.tools.shown import OUTPUT_LIMIT
from perilune.swarm.tools.tool import Tool, ToolError
from tests.swarm.tools.calling import FakeSandbox, call, context_in

BOTH = pytest.mark.parametrize("tool, argument", [(shell, "command"), (python, "code")])


@BOTH
def test_without_a_sandbox_a_call_is_refused_with_the_reason(
    tool: Tool, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("something ran outside of a sandbox")

    monkeypatch.setattr("subprocess.Popen", started)
    monkeypatch.setattr("asyncio.create_subprocess_exec", started)
    place = context_in(tmp_path, sandbox_missing="bubblewrap is not installed (apt install bubblewrap)")
    with pytest.raises(ToolError, match="nothing runs outside of one: bubblewrap is not installed"):
        asyncio.run(call(tool, place, **{argument: "touch harm"}))


@BOTH
def test_a_sandbox_that_cannot_start_is_a_refusal(tool: Tool, argument: str, tmp_path: Path) -> None:
    class Broken(FakeSandbox):
        async def run(self, *_: object, **__: object) -> Completed:
            raise SandboxUnavailable("user namespaces are off")

    with pytest.raises(ToolError, match="nothing runs outside of one: user namespaces are off"):
        asyncio.run(call(tool, context_in(tmp_path, sandbox=Broken()), **{argument: "x"}))


@BOTH
def test_no_secret_of_the_environment_and_no_network_are_handed_over(
    tool: Tool, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary-secret")
    sandbox = FakeSandbox()
    asyncio.run(call(tool, context_in(tmp_path, sandbox=sandbox), **{argument: "x"}, seconds=7))
    asked = sandbox.asked[0]
    assert "canary-secret" not in repr(asked) and asked["network"] is False
    assert asked["limits"] == Limits(wall_seconds=7)


def test_output_keeps_head_and_tail_and_says_how_it_ended() -> None:
    out = b"first\n" + b"x" * 500_000 + b"\nlast"
    text = report(Completed(exit_code=None, stdout=out, stderr=b"oops\n", truncated=True, stopped="wall time"))
    assert text.startswith("[stopped: wall time; output was cut]\nfirst\n")
    assert "last\n[stderr]\noops" in text and "500011 characters in all" in text
    assert len(text) <= OUTPUT_LIMIT
    assert report(Completed(exit_code=3, stdout=b"", stderr=b"", truncated=False, stopped=None)) == "[exit code 3]"


@pytest.mark.parametrize("seconds", [0, -1, 601, "soon"])
def test_time_has_bounds(seconds: object) -> None:
    assert shell.validate is not None
    with pytest.raises(ToolError, match="seconds"):
        shell.validate({"command": "ls", "seconds": seconds})


@pytest.mark.needs_tool("bwrap")
def test_programs_share_the_workspace_and_see_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary-secret")
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (tmp_path / "outside.txt").write_text("SECRET")
    place = context_in(workspace, sandbox=open_sandbox(workspace))

    async def scene() -> None:
        await call(shell, place, command="echo 'print(6 * 7)' > job.py")
        assert (await call(python, place, code="exec(open('job.py').read())")).text == "[exit code 0]\n42"
        failed = await call(shell, place, command=f"env; cat {tmp_path}/outside.txt")
        assert failed.is_error and "SECRET" not in failed.text and "canary" not in failed.text
        assert (await call(python, place, code="import sys; sys.exit('bad')")).text == "[exit code 1]\n[stderr]\nbad"

    asyncio.run(scene())


def test_programs_change_the_workspace_alone_and_what_they_print_taints() -> None:
    for tool in (shell, python):
        assert tool.effects == "workspace" and tool.untrusted
