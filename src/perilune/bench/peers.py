"""Other people's packages: compared with when they are there, named when they are not."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from perilune.bench.session import Bench

Result = TypeVar("Result")

# Import name -> distribution, where they differ.
DISTRIBUTIONS = {"fla": "fla-core", "cudnn": "nvidia-cudnn-frontend"}


def optional(name: str, bench: Bench | None = None) -> ModuleType | None:
    """The module, or None with a note in `bench` that says why; its version goes into the rows that follow."""
    package = name.partition(".")[0]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        reason = "not installed" if missing.partition(".")[0] == package else f"needs {missing!r}, not installed"
        _note(bench, f"{name}: {reason}")
        return None
    except Exception as error:  # a foreign package may break at import in any way; the rest of the benchmark goes on
        first_line = str(error).partition("\n")[0]
        _note(bench, f"{name}: does not import here: {type(error).__name__}: {first_line}")
        return None
    if bench is not None and (version := version_of(package)):
        bench.versions[package] = version
    return module


def version_of(package: str) -> str | None:
    try:
        return metadata.version(DISTRIBUTIONS.get(package, package))
    except metadata.PackageNotFoundError:
        return None


def _note(bench: Bench | None, text: str) -> None:
    if bench is not None:
        bench.note(text)


@contextmanager
def parallel_tuning() -> Iterator[None]:
    """Within it, Triton's autotuner compiles the candidates of a kernel on all cores before it times them.

    A package with hundreds of candidates (fla) otherwise compiles for minutes on one core. The candidates are the same;
    each is timed for 20 ms instead of 100.
    """
    try:
        from triton import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
        from triton.testing import do_bench
    except ImportError:
        yield
        return
    run = Autotuner.run
    tuned: set[tuple[Any, ...]] = set()

    def compile_then_run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(tuner.arg_names, args)) | kwargs
        case = (id(tuner), *(str(named.get(name)) for name in tuner.keys))
        if len(tuner.configs) > 1 and case not in tuned:
            tuned.add(case)
            vars(tuner)["do_bench"] = partial(do_bench, warmup=5, rep=20)  # in the place of a cached property
            with ThreadPoolExecutor(os.cpu_count()) as threads, AsyncCompileMode(threads, ignore_errors=True):
                tuner.warmup(*args, **{name: value for name, value in kwargs.items() if name != "warmup"})
        return run(tuner, *args, **kwargs)

    Autotuner.run = compile_then_run
    try:
        yield
    finally:
        Autotuner.run = run


def attempt(bench: Bench, name: str, measure: Callable[[], Result]) -> Result | None:
    """What a peer gives, or None with a note: another package's failure must not end our benchmark."""
    try:
        return measure()
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        bench.note(f"{name} failed: {type(error).__name__}: {first_line}")
        return None
