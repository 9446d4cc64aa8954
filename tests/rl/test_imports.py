"""Reinforcement learning and the engine run where the packages of the server and of the swarm are missing."""

import subprocess
import sys
from pathlib import Path

import pytest

ABSENT = ("llguidance", "prometheus_client", "starlette", "uvicorn", "orjson", "aiohttp", "pydantic", "mcp", "ray")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = """
import sys
sys.path.insert(0, {benchmarks!r})
for name in {absent!r}:
    sys.modules[name] = None
import {modules}
"""


@pytest.mark.parametrize(
    "modules",
    [
        "perilune.rl.loop, perilune.rl.evaluation, perilune.rl.judge_processes, perilune.rl.environments.tool_use",
        "perilune.serve.engine, perilune.serve.async_engine, perilune.serve.sessions",
        "perilune.recipes.sft, perilune.recipes.vision, perilune.eval.spatial",
        "perilune.rl.run_config, perilune.recipes.rl, perilune.cli_rl",
        "rl_base, rl_experiments, rl_report, rl_throughput",
    ],
)
def test_no_package_of_a_server_is_needed(modules: str) -> None:
    program = PROGRAM.format(absent=ABSENT, modules=modules, benchmarks=str(BENCHMARKS))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
