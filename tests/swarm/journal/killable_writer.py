"""A process that appends from several agents and says what returned, until it is killed.

    python -m tests.swarm.journal.killable_writer FOLDER

Each line on stdout is one event whose append returned: chain, number, hash. Artefacts are named in the events.
"""

import asyncio
import os
import sys
from pathlib import Path

from tests.swarm.journal.appending import open_journal

AGENTS = 8


async def write(folder: Path) -> None:
    journal = open_journal(folder)

    async def agent(number: int) -> None:
        chain, step = f"main/agent-{number}", 0
        while True:
            artefact = await journal.put(os.urandom(100 * (number + 1)))
            event = await journal.append(chain, "reply", {"step": step, "result": artefact.plain()})
            os.write(1, f"{chain} {event.seq} {event.hash.hex()}\n".encode())
            step += 1

    await asyncio.gather(*(agent(number) for number in range(AGENTS)))


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1])))
