"""A world of gloo processes on this machine, for tests.

    results = run(3, check_something, argument)      one result per rank

The function is called as `check_something(rank, argument)` on every rank, with torch.distributed initialised through a
file. When one rank fails, the others are ended and its traceback is the error; when the world hangs, the error shows
where each rank stands. Processes come from a fork server that imported torch once, so a world starts in a blink.
"""

import faulthandler
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.train.killable_runs import forks

# Far above what any world needs, also on a slow machine; a hang is reported a little earlier.
TIMEOUT_S = 240.0


def run(world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """What `function` returned on each rank (anything torch.save can keep)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            forks.Process(target=_on_rank, args=(rank, world, folder, timeout_s, function, arguments))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        try:
            while any(process.is_alive() for process in processes):
                if _failed(folder) or any(process.exitcode for process in processes) or time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        finally:
            failures = [path.read_text() for path in _failed(folder)]
            dead = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
            # A rank that failed leaves the others waiting for it.
            hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        if failures:
            raise AssertionError("\n".join(failures))
        if dead:
            raise AssertionError(f"ranks of {world} ended by themselves, exit codes {dead}")
        if hung:
            stacks = {rank: folder / f"stack{rank}" for rank in hung}
            shown = "\n".join(f"rank {rank}:\n{path.read_text()}" for rank, path in stacks.items() if path.exists())
            raise AssertionError(f"ranks {hung} of {world} did not finish within {timeout_s:g} s\n{shown}")
        return [torch.load(folder / f"result{rank}", weights_only=False) for rank in range(world)]


def _failed(folder: Path) -> list[Path]:
    """The tracebacks of the ranks that failed, the first to fail first: the others may only have lost their peer."""
    return sorted(folder.glob("failed*"), key=lambda path: path.stat().st_mtime_ns)


def _on_rank(
    rank: int, world: int, folder: Path, timeout_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with (folder / f"stack{rank}").open("w") as stack:
        faulthandler.dump_traceback_later(timeout_s * 0.9, file=stack)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=2 * timeout_s),
            )
            torch.save(function(rank, *arguments), folder / f"result{rank}")
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            unfinished = folder / f"unfinished{rank}"
            unfinished.write_text(f"rank {rank} of {world}:\n{traceback.format_exc()}")
            unfinished.rename(folder / f"failed{rank}")
        finally:
            faulthandler.cancel_dump_traceback_later()
