"""A disk that gets full while DCP writes to it."""

import errno
import os
from contextlib import contextmanager
from typing import Any, BinaryIO

from torch.distributed.checkpoint.filesystem import FileSystem


class FullFile:
    """Takes so many bytes and no more, as a file on a full disk."""

    def __init__(self, file: BinaryIO, room: int) -> None:
        self._file = file
        self._room = room

    def write(self, data: bytes) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def fill_up(folder_with: str, room: int) -> None:
    """From now on files in folders of that name are full after `room` bytes, in this process."""
    real = FileSystem.create_stream

    @contextmanager
    def create_stream(self, path, mode):
        with real(self, path, mode) as file:
            yield FullFile(file, room) if "w" in mode and folder_with in str(path) else file

    FileSystem.create_stream = create_stream
