"""A worker that claims agents of a run and takes each through its steps, for tests that kill it.

    python -m tests.swarm.journal.leased_worker DSN RUN NAME SECONDS STEPS

Every step is announced on stdout before it is written, so that a test can count what was tried, and confirmed after.
"""

import asyncio
import sys

from perilune.swarm.journal.leases import Lease, StaleLease
from perilune.swarm.journal.postgres import PostgresJournal
from tests.swarm.journal.appending import KEY


async def work(dsn: str, run: str, name: str, seconds: float, steps: int) -> None:
    journal = await PostgresJournal.open(dsn, run=run, key=KEY, leases=True)
    held: dict[str, Lease] = {}

    async def agent(lease: Lease) -> None:
        done = sum(event.kind == "reply" for event in await journal.read(lease.agent))
        try:
            for step in range(done, steps):
                await asyncio.sleep(0.01)
                await journal.append(lease.agent, "reply", {"step": step}, {"worker": name})
            await journal.append(lease.agent, "finished", {"status": "done"}, {"worker": name})
        except StaleLease:
            print("stale", lease.agent, flush=True)
        held.pop(lease.agent, None)

    async with asyncio.TaskGroup() as agents:
        while any(event.kind == "started" for event in await journal.read()) and await unfinished(journal):
            for lease in await journal.claim(name, seconds, limit=2):
                held[lease.agent] = lease
                print("claimed", lease.agent, flush=True)
                agents.create_task(agent(lease))
            await journal.renew(held.values(), seconds)
            await asyncio.sleep(seconds / 10)
    await journal.close()


async def unfinished(journal: PostgresJournal) -> int:
    kinds = [event.kind for event in await journal.read()]
    return kinds.count("started") - kinds.count("finished")


if __name__ == "__main__":
    dsn, run, name, seconds, steps = sys.argv[1:]
    asyncio.run(work(dsn, run, name, float(seconds), int(steps)))
