"""A server with a scripted engine in a process of its own, for tests that send it signals: prints its address."""

from __future__ import annotations

import sys

from perilune.serve.api import ServerConfig
from perilune.serve.limits import Limits
from perilune.serve.server import serve
from tests.serve.api_engine import MODEL, ScriptedEngine, endless, tokenizer


def main() -> None:
    drain_seconds = float(sys.argv[1])
    engine = ScriptedEngine(endless, pace=0.01)
    config = ServerConfig(limits=Limits(drain_seconds=drain_seconds))
    serve(engine, tokenizer(), MODEL, config, port=0, on_ready=lambda url: print(url, flush=True))
    print("closed" if engine.is_closed else "open", len(engine.cancelled), flush=True)


if __name__ == "__main__":
    main()
