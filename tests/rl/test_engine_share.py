"""How much of a GPU the engines of a run take: a share of what is free, of which other runs may have taken some."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from perilune.rl.environments.arithmetic import Arithmetic
from perilune.rl.loop import RLConfig
from perilune.rl.run import _with_memory
from perilune.rl.run_config import EnvironmentsConfig, RLRunConfig
from perilune.serve.engine import EngineConfig

ENVIRONMENTS = {"arithmetic": Arithmetic()}


def model_on(device: str) -> SimpleNamespace:
    return SimpleNamespace(embed_tokens=SimpleNamespace(weight=SimpleNamespace(device=torch.device(device))))


def memory(monkeypatch: pytest.MonkeyPatch, *, free_gib: float, share: float, engine: EngineConfig) -> float | None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * 2**30), 139 << 30))
    made = _with_memory(replace(RLConfig(), engine=engine), model_on("cuda"), ENVIRONMENTS, share)  # pyrefly: ignore
    return made.engine.memory_gib


def test_an_engine_takes_its_share_of_what_is_free_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory(monkeypatch, free_gib=130, share=0.4, engine=EngineConfig()) == pytest.approx(52)
    assert memory(monkeypatch, free_gib=130, share=0.1, engine=EngineConfig()) == pytest.approx(13)
    assert memory(monkeypatch, free_gib=130, share=0.4, engine=EngineConfig(memory_gib=8.0)) == 8.0
    assert memory(monkeypatch, free_gib=130, share=0.4, engine=EngineConfig(num_pages=64)) is None


def test_on_a_cpu_nothing_is_decided() -> None:
    made = _with_memory(RLConfig(), model_on("cpu"), ENVIRONMENTS, 0.4)  # pyrefly: ignore
    assert made.engine == EngineConfig()


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 2.0])
def test_a_share_is_between_nothing_and_all(share: float) -> None:
    with pytest.raises(ValueError, match="engine_share is .*, expected above 0 and below 1"):
        RLRunConfig(name="run", environments=EnvironmentsConfig(), engine_share=share)
