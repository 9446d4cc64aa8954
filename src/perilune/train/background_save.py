"""Saves that go on behind the training: the loop waits for a copy of the tensors, not for the disk.

    loop      [ step ][ stage ][ step ][ step ][ step ][ wait ][ stage ][ step ]
    thread                     [ write, hash, fsync, rename, move latest ]      [ write ...

Staging copies every tensor of this rank to host memory (pinned, from a GPU); a thread then runs checkpoint.save on the
copies, and talks to the threads of the other ranks by a gloo group of its own, beside the collectives of training. At
most one save is under way: the next one waits for it, and so does the end of the run.

A save that fails is remembered. `failed` says so without waiting, so that the loop can ask every step and all ranks can
agree to stop; `wait` raises what went wrong, once. Until `latest` moves, the checkpoint before is the one that counts:
a kill during the write loses what a kill before it would have lost.
"""

import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from perilune.train import checkpoint, ranks

THREAD = "checkpoint"
"""Name of the thread that writes; the watchdog looks for it when the loop waits for a save."""

AT_ONCE_S = 1.0


class Saves:
    """Context manager; leaving it waits for the save under way, whose error is dropped if another is on its way out.

    `in_background` False writes within `begin`. All ranks have to make one together, and to begin saves alike.
    """

    def __init__(self, *, in_background: bool = True, timeout_s: float = 1800.0) -> None:
        self._in_background = in_background
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._group: Any = None
        if in_background and ranks.distributed():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(timeout_s, 1800.0)))

    def __enter__(self) -> "Saves":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:
            # Whoever presses Ctrl-C twice does not wait for a disk; what is half-written is removed at the next start.
            self._thread.join(AT_ONCE_S if kind is KeyboardInterrupt else self._timeout_s)

    def begin(self, root: Path, *, tensors: Mapping[str, torch.Tensor], last: bool = False, **how: Any) -> None:
        """Start a save with the arguments of checkpoint.save, after the one before; the tensors may change afterwards.

        Raises what went wrong with the one before. The last one of a run is written here and now: it would be waited
        for anyway, and a thread that ends while Python does can take the process down with it (torch's own thread-local
        objects ask for the interpreter's lock then).
        """
        self.wait()
        if last or not self._in_background:
            checkpoint.save(root, tensors=tensors, group=self._group, **how)
            return
        copies = staged(tensors)
        # A new thread begins on the first GPU; what touches CUDA in it would open a second context there.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._write, args=(device, root, copies, how), name=THREAD, daemon=True)
        self._thread.start()

    def under_way(self) -> bool:
        """Whether a thread is writing now."""
        return self._thread is not None and self._thread.is_alive()

    def failed(self) -> bool:
        """Whether a save has failed that nobody has heard of yet."""
        return self._error is not None

    def wait(self) -> None:
        """Until no save is under way; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, device: int | None, root: Path, copies: dict[str, torch.Tensor], how: dict[str, Any]) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            checkpoint.save(root, tensors=copies, group=self._group, **how)
        except BaseException as error:
            self._error = error


@torch.no_grad()
def staged(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in host memory. Of a DTensor the own shard is copied, and it stays a shard of the same whole."""
    # From a GPU, non_blocking copies go to pinned memory, all of them at once.
    copies = {name: tensor.detach().to("cpu", non_blocking=True, copy=True) for name, tensor in tensors.items()}
    if any(tensor.device.type == "cuda" for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies
