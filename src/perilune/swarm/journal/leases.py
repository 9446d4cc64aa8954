"""Who works on an agent: leases with tokens, in the tables of a PostgreSQL journal.

A lease is held until it expires by the server's clock, and is renewed while its worker lives. Every change of hands
raises the token by one. Holding a lease gives a worker the right to try; what counts is the token that its events
carry into the transaction that writes them (`postgres`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import asyncpg

from perilune.swarm.journal.event import JournalError
from perilune.swarm.journal.postgres_reader import FAILURES, SCHEMA

# Chosen first and once: inside a join the planner may choose again for every row, and so pass the limit.
CLAIM = f"""
WITH free AS MATERIALIZED (
    SELECT agent FROM {SCHEMA}.leases
    WHERE run = $1 AND NOT finished AND expires <= clock_timestamp() AND ($5::text[] IS NULL OR agent = ANY($5))
    ORDER BY position LIMIT $4 FOR UPDATE SKIP LOCKED
)
UPDATE {SCHEMA}.leases AS mine
SET worker = $2, token = mine.token + 1, expires = clock_timestamp() + make_interval(secs => $3)
FROM free
WHERE mine.run = $1 AND mine.agent = free.agent
RETURNING mine.agent, mine.token, mine.position
"""
RENEW = f"""
UPDATE {SCHEMA}.leases AS mine SET expires = clock_timestamp() + make_interval(secs => $4)
FROM (
    SELECT held.agent FROM {SCHEMA}.leases AS held
    JOIN unnest($2::text[], $3::bigint[]) AS asked (agent, token) USING (agent, token)
    WHERE held.run = $1 ORDER BY held.agent FOR UPDATE OF held
) AS kept
WHERE mine.run = $1 AND mine.agent = kept.agent
RETURNING mine.agent
"""
RELEASE = f"""
UPDATE {SCHEMA}.leases AS mine SET expires = '-infinity', worker = NULL, token = mine.token + 1
FROM unnest($2::text[], $3::bigint[]) AS asked (agent, token)
WHERE mine.run = $1 AND mine.agent = asked.agent AND mine.token = asked.token
"""
# Locked: nobody claims these agents before the transaction ends.
LOCK = f"SELECT agent, token FROM {SCHEMA}.leases WHERE run = $1 AND agent = ANY($2) ORDER BY agent FOR NO KEY UPDATE"
BEGIN = f"INSERT INTO {SCHEMA}.leases (run, agent, position) SELECT $1, * FROM unnest($2::text[], $3::bigint[])"
FINISH = f"UPDATE {SCHEMA}.leases SET finished = true WHERE run = $1 AND agent = ANY($2)"


class StaleLease(JournalError):
    """The agent belongs to another worker by now: stop working on it."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    agent: str
    worker: str
    token: int


async def claim(
    pool: asyncpg.Pool, run: str, worker: str, seconds: float, limit: int, agents: Sequence[str] | None
) -> list[Lease]:
    """Take agents that nobody holds, the longest waiting first."""
    rows = await _change(pool, CLAIM, run, worker, float(seconds), limit, None if agents is None else list(agents))
    rows = sorted(rows, key=lambda row: row["position"])
    return [Lease(agent=row["agent"], worker=worker, token=row["token"]) for row in rows]


async def renew(pool: asyncpg.Pool, run: str, leases: Iterable[Lease], seconds: float) -> list[Lease]:
    """Those of the leases that are still held, for that much longer."""
    leases = list(leases)
    kept = {row["agent"] for row in await _change(pool, RENEW, run, *_columns(leases), float(seconds))}
    return [lease for lease in leases if lease.agent in kept]


async def release(pool: asyncpg.Pool, run: str, leases: Iterable[Lease]) -> None:
    await _change(pool, RELEASE, run, *_columns(leases))


def _columns(leases: Iterable[Lease]) -> tuple[list[str], list[int]]:
    leases = list(leases)
    return [lease.agent for lease in leases], [lease.token for lease in leases]


async def _change(pool: asyncpg.Pool, query: str, run: str, *values: object) -> list[asyncpg.Record]:
    try:
        return await pool.fetch(query, run, *values)
    except FAILURES as error:
        raise JournalError(f"leases of run {run!r} cannot be changed: {error}") from None


__all__ = ["Lease", "StaleLease"]
