"""The seal of a run: a keyed chain over every row of a journal, with the key and the last link kept outside.

Each row has a tag and each commit one seal over the tags of its rows:

    tag(row)  = BLAKE2b-128(row key, index, seq, time, chain, kind, body, note, hash)
    seal(n)   = HMAC-SHA256(key, seal(n-1) + counts + tags of the commit's rows + (sha256, size) of its artefacts)
    seal(-1)  = HMAC-SHA256(key, journal's identity)

Who has the journal but not the key can change nothing unseen, except to cut commits off the end. That is why the last
seal is also written to a head file beside the key, after the commit: it may lag behind the journal after a crash, it
is never ahead of it. A journal that ends before its head was cut.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import orjson

from perilune.swarm.journal.event import JournalError

KEY_BYTES = 32
TAG_BYTES = 16
HEAD_SECONDS = 0.3
"""A head file is written at most this often, and at the end."""

_ROW = struct.Struct("<qqdIIII")
_COUNTS = struct.Struct("<qq")
_ARTEFACT = struct.Struct("<32sq")


class Seal:
    """Tags rows and continues the chain of seals of one journal. Without a key, tags only find accidents."""

    def __init__(self, key: bytes | None, identity: str, *, last: bytes | None = None) -> None:
        self.keyed = key is not None
        self._key = key or b""
        self._row_key = hmac.digest(self._key, b"perilune rows\0" + identity.encode(), "sha256") if key else b""
        self.first = hmac.digest(self._key, b"perilune journal\0" + identity.encode(), "sha256")
        self.last = last if last is not None else self.first

    def key_check(self, identity: str) -> bytes:
        """Tells a wrong key from a changed journal; says nothing about the key."""
        return hmac.digest(self._key, b"perilune key check\0" + identity.encode(), "sha256")[:TAG_BYTES]

    def check_key(self, journal: str, identity: str, key_check: bytes | None) -> None:
        """Raises `JournalError` unless the journal with this check was begun with this key, or both have none."""
        if key_check is None and self.keyed:
            raise JournalError(f"journal {journal} was begun without a seal: continue it with key=None")
        if key_check is not None and not self.keyed:
            raise JournalError(f"journal {journal} is sealed: continue it with the key it was begun with")
        if key_check is not None and key_check != self.key_check(identity):
            raise JournalError(f"journal {journal} is sealed with another key: continue it with that one")

    def tag(
        self, index: int, chain: bytes, seq: int, kind: bytes, body: bytes, note: bytes, time: float, link: bytes
    ) -> bytes:
        sizes = _ROW.pack(index, seq, time, len(chain), len(kind), len(body), len(note))
        row = b"".join((sizes, chain, kind, body, note, link))
        return hashlib.blake2b(row, digest_size=TAG_BYTES, key=self._row_key).digest()

    def commit(self, events: int, artefacts: int, tags: Iterable[bytes], stored: Iterable[tuple[bytes, int]]) -> bytes:
        """The seal of one commit; `events` and `artefacts` count all rows of the journal after it."""
        parts = [self.last, _COUNTS.pack(events, artefacts), *tags]
        parts += [_ARTEFACT.pack(sha256, size) for sha256, size in stored]
        self.last = hmac.digest(self._key, b"".join(parts), "sha256")
        return self.last


# The key -------------------------------------------------------------------------------------------------------------


def state_folder() -> Path:
    """Where keys and heads live unless told otherwise: outside of every run's folder."""
    chosen = os.environ.get("XDG_STATE_HOME")
    return (Path(chosen) if chosen else Path.home() / ".local" / "state") / "perilune"


def load_or_create_key(path: Path | None = None) -> bytes:
    """The key in `path` (default: `seal.key` in the state folder), made on first use, readable by its owner alone."""
    path = path or state_folder() / "seal.key"
    if not path.exists():
        _create_key(path)
    try:
        status, text = path.stat(), path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise JournalError(f"seal key {str(path)!r} cannot be read: {error}") from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        raise JournalError(
            f"seal key {str(path)!r} has mode {mode:04o}, expected 0600: others may have read or changed it. "
            f"If you trust it: chmod 600 {path}"
        )
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise JournalError(f"seal key {str(path)!r} does not hold {2 * KEY_BYTES} hexadecimal digits: restore it")
    return key


def _create_key(path: Path) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(os.urandom(KEY_BYTES).hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            # A link fails where a rename would replace the key that another process made meanwhile.
            os.link(unfinished, path)
        except FileExistsError:
            pass
        finally:
            unfinished.unlink()
    except OSError as error:
        raise JournalError(f"seal key {str(path)!r} cannot be created: {error}") from None


# The head outside ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Head:
    """The last seal that is known outside of the journal."""

    events: int
    seals: int
    mac: bytes


def read_head(folder: Path | None, identity: str) -> tuple[Head | None, str | None]:
    """The head outside of a journal, and why it cannot be read if it cannot."""
    try:
        return (None if folder is None else HeadFile(folder, identity).read()), None
    except JournalError as error:
        return None, str(error)


class HeadFile:
    """One small file per journal, replaced as a whole."""

    def __init__(self, folder: Path, identity: str) -> None:
        if not re.fullmatch(r"[0-9a-f]{32}", identity):  # it names a file: a changed one must name no other
            raise JournalError(
                f"the journal's identity is {identity!r}, expected 32 hexadecimal digits: it was changed"
            )
        self.path = folder / f"{identity}.json"
        self._written = float("-inf")
        self._unwritten: Head | None = None
        self._lock = threading.Lock()

    def read(self) -> Head | None:
        try:
            plain = orjson.loads(self.path.read_bytes())
            return Head(events=plain["events"], seals=plain["seals"], mac=bytes.fromhex(plain["mac"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise JournalError(f"head file {str(self.path)!r} cannot be read: {error!r}") from None

    def due(self) -> float | None:
        """Seconds until the file should be written; None when it is up to date."""
        return max(0.0, self._written + HEAD_SECONDS - time.monotonic()) if self._unwritten else None

    def check(self, journal: str, head: Head, found: tuple[int, bytes] | None) -> None:
        """What is known outside must still be there; `found`: events and seal of the journal at the head's number."""
        if found != (head.events, head.mac):
            raise JournalError(
                f"journal {journal} does not hold the last seal known outside, at {head.events} events: it was cut, "
                f"rewritten or replaced by an older copy. Restore it, or remove {str(self.path)!r} to accept it as is"
            )

    def update(self, head: Head) -> None:
        with self._lock:
            if self._unwritten is None or self._unwritten.seals < head.seals:
                self._unwritten = head
        if self.due() == 0:
            self.write()

    def write(self) -> None:
        with self._lock:
            head, self._unwritten = self._unwritten, None
            if head is None:
                return
            known = self.read()
            # Another process that writes the same journal may know more.
            if known is None or known.seals < head.seals:
                self._replace(orjson.dumps({"events": head.events, "seals": head.seals, "mac": head.mac.hex()}))
            self._written = time.monotonic()

    def _replace(self, content: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = self.path.with_suffix(f".{os.getpid()}.unfinished")
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content + b"\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path)


__all__ = ["KEY_BYTES", "TAG_BYTES", "Head", "HeadFile", "Seal", "load_or_create_key", "state_folder"]
