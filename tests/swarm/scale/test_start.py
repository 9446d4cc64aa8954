"""Contracts of starting Ray that need no Ray."""

import sys

import pytest

pytest.importorskip("asyncpg", reason="needs asyncpg (pip install 'perilune[scale]')")

from perilune.swarm.budget import Budget, Limits
from perilune.swarm.scale.orders import Plan
from perilune.swarm.scale.ray_engine import EngineError, import_ray, open_ray_engine
from perilune.swarm.settings import SwarmConfig

PLAN = Plan(dsn="", run="", key=None, config=SwarmConfig(model="m"), folder="", workplace="nowhere")


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"pip install 'perilune\[scale\]'"):
        import_ray()


def test_a_pool_has_workers():
    with pytest.raises(ValueError, match="workers is 0"):
        open_ray_engine(PLAN, workers=0)


def test_a_workplace_is_named_by_module_and_function():
    with pytest.raises(ValueError, match=r"'nowhere': expected package\.module:function"):
        PLAN.open_workplace()


def test_only_a_root_with_a_limit_grows():
    root = Budget.root(Limits(calls=1, agents=1))
    root.grow(calls=2)
    assert root.left("calls") == 3
    with pytest.raises(ValueError, match="no limit"):
        root.grow(tokens=1)
    with pytest.raises(ValueError, match="only a root"):
        root.child(Limits(calls=1)).grow(calls=1)
