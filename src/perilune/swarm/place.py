"""Where the journal of a run is: a file in the run's folder, or a PostgreSQL server that many machines reach.

The rest of the command asks here, and need not know which. An address holds no password: it is kept in the run's folder
and seen in the list of processes. PGPASSWORD or a password file (`~/.pgpass`) give it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from perilune.swarm.journal.event import Journal, JournalError
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.journal.verify import Report, verify

if TYPE_CHECKING:  # asyncpg is optional
    from perilune.swarm.journal.postgres_reader import PostgresReader

JOURNAL = "journal.sqlite"
SCHEMES = ("postgresql", "postgres")


@dataclass(frozen=True, kw_only=True)
class JournalPlace:
    folder: Path
    address: str | None = None
    """None: the file in the folder."""
    run: str = ""
    """The run's name on the server."""

    def __post_init__(self) -> None:
        if self.address is not None:
            check_address(self.address)

    def exists(self) -> bool:
        """Whether a run has begun there. A server is not asked: it tells when the journal is opened."""
        return self.address is not None or (self.folder / JOURNAL).exists()

    def reader(self) -> SQLiteReader | PostgresReader:
        if self.address is None:
            return SQLiteReader(self.folder / JOURNAL)
        with _with_asyncpg():
            from perilune.swarm.journal.postgres_reader import PostgresReader
        return PostgresReader(self.address, self.run)

    def verify(self, key: bytes, *, heads: Path) -> Report:
        if self.address is None:
            return verify(self.folder / JOURNAL, key, heads=heads)
        with _with_asyncpg():
            from perilune.swarm.journal.postgres import verify_run
        return verify_run(self.address, self.run, key, heads=heads)

    def opener(self, key: bytes, *, heads: Path, elsewhere: bool) -> Callable[[], Awaitable[Journal]] | None:
        """For `Swarm(open_journal=...)`; None for the file, which it opens itself. `elsewhere`: workers hold the
        sub-agents, not this process."""
        if self.address is None:
            return None
        with _with_asyncpg():
            from perilune.swarm.scale.leased import open_run
        address = self.address
        return lambda: open_run(address, run=self.run, key=key, heads=heads, elsewhere=elsewhere)


def check_address(address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme not in SCHEMES:
        raise JournalError(f"--journal is {address!r}, expected postgresql://USER@HOST/DATABASE")
    if parts.password is not None or "password" in parse_qs(parts.query):
        raise JournalError("--journal holds a password: take it out, and give it in PGPASSWORD or in ~/.pgpass")


@contextmanager
def _with_asyncpg() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise JournalError(
            f"a journal in PostgreSQL needs the extra 'scale': pip install 'perilune[scale]' ({error})"
        ) from None


__all__ = ["JOURNAL", "JournalPlace", "check_address"]
