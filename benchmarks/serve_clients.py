"""Does the server survive many streaming clients at once? No error, and memory that stays flat.

    python benchmarks/serve_clients.py                                   200 clients, 60 s
    python benchmarks/serve_clients.py --clients 50 --seconds 10 --out other.json

A server with a real engine and a tiny model of random weights runs in a process of its own. Each client holds one
connection and streams chat after chat: most read to the end, some leave in the middle, some read slowly. Every answer
is checked: events that are JSON, a finish reason, usage that agrees with what came, [DONE]. The memory of the server
process (RSS) is read all the while, after a warm-up whose errors count too. Prints a table and writes JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import aiohttp
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "serve_clients.json"
VOCAB_SIZE = 320


@dataclass(frozen=True, kw_only=True)
class Settings:
    clients: int = 200
    seconds: float = 60.0
    max_tokens: int = 48
    leave: float = 0.05
    """Share of requests whose client leaves after a few events."""
    slow: float = 0.05
    """Share of requests whose client reads with pauses."""
    out: Path = RESULTS
    serve: bool = False
    """Be the server process (used by the benchmark itself)."""


@dataclass
class Count:
    whole: int = 0
    left: int = 0
    slow: int = 0
    refused: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """Seconds to the first token."""


# The server -----------------------------------------------------------------------------------------------------------


def serve_tiny(settings: Settings) -> None:
    """Serve until standard input ends; the first line printed is the address."""
    from perilune.data.tokenizer import Tokenizer
    from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig
    from perilune.serve.api import ServerConfig
    from perilune.serve.async_engine import AsyncEngine
    from perilune.serve.engine import Engine, EngineConfig
    from perilune.serve.limits import Limits
    from perilune.serve.server import Server

    tokenizer = Tokenizer.train(["The moon turns around the earth, and a model writes about it.\n"], VOCAB_SIZE)
    config = ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=4,
        kda=KDAConfig(num_heads=2, head_dim=8),
        mla=MLAConfig(num_attention_heads=2, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
        intermediate_size=48,
    )
    model = Decoder(config, seed=0).eval()
    engine = Engine(model, tokenizer, EngineConfig(max_sequences=64, page_size=16, num_pages=4096, max_length=512))
    limits = Limits(drain_seconds=5.0)
    server = Server(AsyncEngine(engine), tokenizer, "tiny", ServerConfig(max_length=engine.max_length, limits=limits))
    print(server.start(), flush=True)
    sys.stdin.read()
    server.stop()


def resident_mib(pid: int) -> float:
    """Memory of a process that is really in use."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# The clients ----------------------------------------------------------------------------------------------------------


async def client(url: str, number: int, end: float, settings: Settings, count: Count) -> None:
    dice = random.Random(number)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=1)) as session:
        while time.monotonic() < end:
            kind = dice.random()
            leaves, is_slow = kind < settings.leave, settings.leave <= kind < settings.leave + settings.slow
            try:
                await one_chat(url, session, dice, settings, count, leaves=leaves, is_slow=is_slow)
            except Exception as error:
                count.errors.append(f"{type(error).__name__}: {error}")


async def one_chat(
    url: str,
    session: aiohttp.ClientSession,
    dice: random.Random,
    settings: Settings,
    count: Count,
    *,
    leaves: bool,
    is_slow: bool,
) -> None:
    body = {
        "messages": [{"role": "user", "content": "moon " * dice.randint(1, 30)}],
        "max_tokens": dice.randint(2, settings.max_tokens),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": dice.choice([0, 0.7, 1]),
    }
    began, written, reason, usage, is_done = time.monotonic(), 0, None, None, False
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status == 429:
            count.refused += 1
            await asyncio.sleep(min(2.0, float(response.headers["Retry-After"])))
            return
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {(await response.text())[:200]}")
        events = 0
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                is_done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"an error in the stream: {event['error']['message']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if written == 0 and choice.get("token_ids"):
                    count.first.append(time.monotonic() - began)
                written += len(choice.get("token_ids") or ())
                reason = choice["finish_reason"] or reason
            events += 1
            if leaves and events > 3:
                response.close()
                count.left += 1
                return
            if is_slow:
                await asyncio.sleep(0.05)
    if not (is_done and reason and usage and usage["completion_tokens"] == written):
        raise RuntimeError(f"a stream that is not whole: done {is_done}, reason {reason}, {written} tokens, {usage}")
    count.whole += 1
    count.slow += is_slow
    count.tokens += written


async def watch(pid: int, end: float, rows: list[tuple[float, float]]) -> None:
    began = time.monotonic()
    with Progress(transient=True, disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("streaming", total=end - began)
        while time.monotonic() < end:
            rows.append((time.monotonic() - began, resident_mib(pid)))
            progress.update(bar, completed=time.monotonic() - began)
            await asyncio.sleep(1.0)
    rows.append((time.monotonic() - began, resident_mib(pid)))


async def play(url: str, pid: int, settings: Settings) -> tuple[Count, list[tuple[float, float]], float]:
    warming, rows = Count(), []
    warm = time.monotonic() + min(10.0, settings.seconds / 4)
    await asyncio.gather(*(client(url, n, warm, settings, warming) for n in range(settings.clients)))
    count = Count(errors=warming.errors)
    began = time.monotonic()
    end = began + settings.seconds
    await asyncio.gather(
        watch(pid, end, rows), *(client(url, n, end, settings, count) for n in range(settings.clients))
    )
    return count, rows, time.monotonic() - began


# The result -----------------------------------------------------------------------------------------------------------


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    ).stdout.strip()


def main(settings: Settings) -> int:
    """Run the clients; 0 if nothing went wrong."""
    if settings.serve:
        serve_tiny(settings)
        return 0
    command = [sys.executable, __file__, "--serve"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        count, rows, seconds = asyncio.run(play(url, process.pid, settings))
    finally:
        process.stdin.close()
        code = process.wait(60)
    memory = [mib for _, mib in rows]
    fifth = max(1, len(memory) // 5)
    start, middle, last = mean(memory[:fifth]), memory[len(memory) // 2], mean(memory[-fifth:])
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "starlette", "uvicorn", "aiohttp")},
        },
        "commit": commit(),
        "settings": asdict(settings) | {"out": settings.out.name},
        "seconds": round(seconds, 1),
        "requests": {"whole": count.whole, "of these slow": count.slow, "left": count.left, "refused": count.refused},
        "errors": len(count.errors),
        "error_samples": count.errors[:5],
        "tokens_per_second": round(count.tokens / seconds, 1),
        "seconds_to_first_token": {f"p{share}": round(percentile(count.first, share / 100), 3) for share in (50, 99)},
        "server_exit_code": code,
        "rss_mib": {
            name: round(mib, 1)
            for name, mib in (("start", start), ("middle", middle), ("end", last), ("highest", max(memory)))
        },
        "rss_growth": round(last / start - 1, 4),
        "rss_series": [(round(second, 1), round(mib, 1)) for second, mib in rows],
    }  # fmt: skip
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(json.dumps(result, indent=1) + "\n")
    table = Table("what", "value")
    for name in ("requests", "errors", "tokens_per_second", "seconds_to_first_token", "rss_mib", "rss_growth"):
        table.add_row(name, str(result[name]))
    Console(width=120).print(table)
    for text in count.errors[:5]:
        print(text)
    return 1 if count.errors or code else 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Settings, description=__doc__)))
