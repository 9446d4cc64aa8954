"""Scripts of benchmarks/ as modules; they import one another as neighbours."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load_script(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module(name)
    assert module.__file__ == str(FOLDER / f"{name}.py")
    return module
