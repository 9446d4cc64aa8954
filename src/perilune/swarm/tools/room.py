"""How far tools that write files may fill a workspace: as far as the programs in its sandbox, and no further.

A workspace is measured when something is first written to it, and again when what was written since could have filled
what was left. So many small writes cost few looks at all files.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from perilune.swarm.sandbox import files
from perilune.swarm.sandbox.accounting import INODE_BYTES, folder_bytes
from perilune.swarm.sandbox.contract import Limits

ROOM = Limits().disk_bytes
REMEMBERED = 1000
"""Workspaces; one that was forgotten is measured again."""


@dataclass
class _Filled:
    most: int
    """Bytes that the workspace may hold."""
    measured: int
    since: int = 0
    """Written since it was measured; what was replaced or removed is not taken off."""


_FILLED: OrderedDict[tuple[int, int], _Filled] = OrderedDict()
_LOCK = threading.Lock()


def write_within(workspace: Path, path: str, data: bytes, *, room: int = ROOM) -> int:
    """`files.write_file`, or OSError when the workspace would grow by more than `room` from where it began."""
    status = os.stat(workspace)
    key, size = (status.st_dev, status.st_ino), len(data) + INODE_BYTES
    with _LOCK:
        filled = _FILLED.get(key)
        if filled is None:
            before = folder_bytes(workspace)
            filled = _FILLED[key] = _Filled(before + room, before)
            if len(_FILLED) > REMEMBERED:
                _FILLED.popitem(last=False)
        # Programs may have filled half of what was left meanwhile.
        if filled.measured + 2 * (filled.since + size) > filled.most:
            filled.measured, filled.since = folder_bytes(workspace), 0
        if filled.measured + filled.since + size > filled.most:
            raise OSError(
                errno.EDQUOT, f"the workspace is full ({room} bytes); remove something first, with shell or python"
            )
        filled.since += size
    return files.write_file(workspace, path, data)
