"""`python -m perilune.swarm.scripted`: a scripted model behind an OpenAI-compatible address, until Ctrl-C.

Example: python -m perilune.swarm.scripted worker --options '{"steps": 3}' --latency 0.2 --port 8000
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from perilune.swarm.scripted.chaos import FAULTS, Chaos
from perilune.swarm.scripted.launch import SCRIPTS, load_script, serve_until_input_closes
from perilune.swarm.scripted.server import Behaviour, ScriptedServer


@dataclass(frozen=True, kw_only=True)
class Flags:
    script: Annotated[str, tyro.conf.Positional] = "swarm"
    """Name in the library (listed below), or package.module:function that makes a script."""
    options: str = "{}"
    """Options of the script, as JSON: '{"agents": 10}'."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    latency: tuple[float, ...] = (0.0,)
    """Seconds before a response begins; two numbers are the borders of a random one."""
    seed: int = 0
    """Of random latencies and of chaos."""
    max_concurrent: int | None = None
    """Calls at a time; one more is refused with 429."""
    retry_after: float = 1.0
    """Seconds in the Retry-After header of a refusal."""
    chaos: float = 0.0
    """Share of calls that are faulty, from 0 to 1."""
    faults: tuple[str, ...] = FAULTS
    """Kinds of faults that chaos deals out."""


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--options {text!r} is not JSON ({error})") from None
    if not isinstance(options, dict):
        raise ValueError(f"--options {text!r}: expected a JSON object like '{{\"agents\": 10}}'")
    return options


def main(arguments: list[str] | None = None) -> None:
    description = f"A model server whose model is a script, for trials and tests.\n\nScripts: {', '.join(SCRIPTS)}."
    flags = tyro.cli(Flags, args=arguments, prog="python -m perilune.swarm.scripted", description=description)
    try:
        if len(flags.latency) not in (1, 2):
            raise ValueError(f"--latency {flags.latency!r}: expected one number or two")
        behaviour = Behaviour(
            latency=flags.latency[0] if len(flags.latency) == 1 else (flags.latency[0], flags.latency[1]),
            seed=flags.seed,
            max_concurrent=flags.max_concurrent,
            retry_after=flags.retry_after,
            chaos=Chaos(share=flags.chaos, seed=flags.seed, faults=flags.faults) if flags.chaos else None,  # pyrefly: ignore
        )
        script = load_script(flags.script, _options(flags.options))
        server = ScriptedServer(script, behaviour, host=flags.host, port=flags.port)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve_until_input_closes(server, watch_input=False))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
