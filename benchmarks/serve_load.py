"""A mixed load on one GPU: the engine against transformers' generate on the same weights, and waiting times under load.

    python benchmarks/serve_load.py --seconds 160                 on a GPU
    python benchmarks/serve_load.py --tiny                        the same code on a CPU, in seconds

The model is a 3:1 hybrid of about 0.7B parameters in bfloat16 with random weights, written as a Kimi-Linear folder that
transformers reads. 64 requests arrive at once, with prompts of 64 to 2,048 tokens and answers of 64 to 256, greedy.

  throughput   tokens of answers a second, of all 64 requests.
  peer         the same requests by `generate` as a person calls it, one after the other (as many as there is time for);
               and by `generate` on all 64 as one batch with padding on the left, in which everyone waits for the
               longest answer.
  latency      requests arrive at random times (Poisson) at 25, 50 and 75% of the rate that throughput found: time from
               arrival to the first token, and between tokens, as a reader of AsyncEngine sees them.

The peer lives in a process of its own (serve_load_peer.py), which loads and compiles while the engine does. It is
stopped while the engine is measured, and goes on afterwards: they are never timed beside each other.
"""

import asyncio
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from parts import Session, pick_device, results_file, wait
from serve_decode import Shape, model_config
from serve_load_peer import Peer

from perilune import hub
from perilune.data import Tokenizer
from perilune.model import Decoder
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine, EngineConfig, forbidden_ids
from perilune.serve.graphs import batch_buckets
from perilune.serve.request import Request, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Settings:
    parts: tuple[Literal["throughput", "latency", "peer"], ...] = ("throughput", "latency", "peer")
    seconds: float = 160.0
    """For all of it."""
    requests: int = 64
    prompts: tuple[int, int] = (64, 2048)
    answers: tuple[int, int] = (64, 256)
    rounds: int = 3
    loads: tuple[int, ...] = (25, 50, 75)
    """Percent of the measured capacity."""
    load_seconds: float = 8.0
    """Of arrivals, for each load."""
    token_budget: int = 2048
    tuning: int = 4
    """Settings over which each kernel of the peer is tuned; 0: all, which takes minutes."""
    tiny: bool = False
    commit: str = ""
    results: Path | None = None
    """File of the rows; benchmarks/results/serve_load.json when not given, and never that of a miniature."""


@dataclass(frozen=True)
class Work:
    """What is asked for: token ids of the prompt and the number of tokens of the answer."""

    prompt: tuple[int, ...]
    answer: int


def works(settings: Settings, count: int, seed: int) -> list[Work]:
    """Lengths are the same for every seed that agrees modulo 1000; the tokens never are, so nothing is found cached."""
    lengths, tokens = random.Random(seed % 1000), random.Random(seed)
    found = []
    for _ in range(count):
        prompt, answer = lengths.randint(*settings.prompts), lengths.randint(*settings.answers)
        found.append(Work(tuple(tokens.randrange(256) for _ in range(prompt)), answer))
    return found


def request_of(name: str, work: Work) -> Request:
    params = SamplingParams(max_tokens=work.answer, ignore_eos=True, temperature=0.0)
    return Request(request_id=name, prompt=work.prompt, params=params)


class Load:
    """An engine over a fresh model, and a folder with the same weights for the peer."""

    def __init__(self, session: Session, settings: Settings, folder: Path) -> None:
        self.session, self.settings, self.device = session, settings, session.device
        shape = Shape(hidden=1536, layers=20, heads=12, intermediate=4096)
        if settings.tiny:
            shape = Shape(hidden=64, layers=4, heads=4, head_dim=16, kv_heads=2, intermediate=128, vocabulary=320)
        config = model_config("3to1", shape, "bfloat16" if self.device.type == "cuda" else "float32")
        torch.manual_seed(0)
        with self.device:
            model = Decoder(config)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        session.note(f"{parameters / 1e6:,.1f}M parameters, {config.compute_dtype}, {settings.requests} requests")
        tokenizer = Tokenizer.train(["a few words to begin with"], config.vocab_size)
        self.first = works(settings, settings.requests, seed=1)
        self.peer = None
        if "peer" in settings.parts:
            hub.save_pretrained(model, folder, target="kimi_linear")
            self.peer = Peer(
                folder, self.device, self.first, forbidden_ids(tokenizer, config.vocab_size), settings.tuning
            )  # fmt: skip
        longest = settings.prompts[1] + settings.answers[1]
        self.engine = Engine(
            model, tokenizer,
            EngineConfig(
                max_sequences=settings.requests, token_budget=settings.token_budget, max_queue=100_000,
                max_length=longest, memory_gib=16.0 if self.device.type == "cuda" else 0.25,
            ),
            device=self.device,
        )  # fmt: skip
        self.seconds: float | None = None
        """Until all requests that came at once were answered."""

    def answer(self, asked: Sequence[Work]) -> tuple[float, list[list[int]]]:
        """Seconds until all are answered, and the answers."""
        said: dict[str, list[int]] = {}
        wait(self.device)
        began = time.perf_counter()
        for number, work in enumerate(asked):
            self.engine.add(request_of(str(number), work))
        while self.engine.has_work:
            for output in self.engine.step():
                if output.error is not None:
                    raise RuntimeError(f"request {output.request_id} failed: {output.error}")
                said.setdefault(output.request_id, []).extend(output.token_ids)
        wait(self.device)
        seconds = time.perf_counter() - began
        answers = [said[str(number)] for number in range(len(asked))]
        wrong = [number for number, work in enumerate(asked) if len(answers[number]) != work.answer]
        if wrong:
            raise RuntimeError(
                f"request {wrong[0]} was given {len(answers[wrong[0]])} tokens, not {asked[wrong[0]].answer}"
            )
        return seconds, answers

    def warm_up(self) -> None:
        """As a server warms up; then every graph that can be needed, and every kernel for prompts."""
        began = time.monotonic()
        print(f"    {self.engine.warm_up()} usual steps recorded after {time.monotonic() - began:.1f} s", flush=True)
        short, long = self.settings.prompts
        for bucket in batch_buckets(self.settings.requests):
            for length in (short // 4 + 1, 3 * long // 4):
                # As long as the prompts of all take, and a little: so all of them decode at once in the end.
                answer = min(2 * -(-bucket * length // self.settings.token_budget) + 4, self.settings.answers[1])
                tokens = (random.Random(f"{bucket} {length} {number}") for number in range(bucket))
                self.answer([Work(tuple(rng.randrange(256) for _ in range(length)), answer) for rng in tokens])
        self.answer(works(self.settings, self.settings.requests, seed=1001))
        print(f"    engine warm after {time.monotonic() - began:.1f} s", flush=True)


# --- throughput -------------------------------------------------------------------------------------------------------


def throughput(load: Load) -> None:
    session, settings = load.session, load.settings
    load.warm_up()
    if load.peer is not None:
        load.peer.pause()
    times = []
    for number in range(settings.rounds):
        seconds, _ = load.answer(works(settings, settings.requests, seed=1001 + 1000 * (number + 1)))
        times.append(seconds)
        print(f"    {settings.requests} requests at once: {seconds:.2f} s", flush=True)
    load.seconds = statistics.median(times)
    read, written = (sum(counts) for counts in zip(*((len(work.prompt), work.answer) for work in load.first)))
    case = f"{settings.requests} requests at once"
    session.bench.add(case, "answers", "tokens/s", written / load.seconds)
    session.bench.add(case, "prompts and answers", "tokens/s", (read + written) / load.seconds)


def against_peer(load: Load) -> None:
    session, peer = load.session, load.peer
    if load.seconds is None or peer is None:
        raise RuntimeError("throughput was not measured, so there is nothing to compare")
    _, (ours,) = load.answer(load.first[:1])
    peer.resume()
    if not peer.wait_until_ready(session.left() - 5):
        raise RuntimeError(f"transformers was not ready in time; its last words: {peer.last_words()}")
    same = next((n for n, (a, b) in enumerate(zip(ours, peer.first_tokens)) if a != b), len(peer.first_tokens))
    session.note(f"{peer.name}: the first answer begins with {same} of {len(peer.first_tokens)} equal tokens")
    rate = sum(work.answer for work in load.first) / load.seconds
    for found in peer.measure(seconds=max(1.0, min(40.0, 0.6 * session.left()))):
        goal = ", at least 10x" if found.mode == "one by one" else ""
        session.bench.add(
            f"{len(load.first)} requests at once", f"against generate {found.mode}{goal}", "tokens/s", rate,
            peers={"transformers": found.tokens / found.seconds}, lower_is_better=False,
        )  # fmt: skip
        session.note(
            f"generate {found.mode}: {found.requests} requests, {found.tokens} tokens in {found.seconds:.1f} s"
        )


# --- waiting times ----------------------------------------------------------------------------------------------------


@dataclass
class Waits:
    """Seconds, of all requests of a load."""

    first: list[float]
    between: list[float]


def latency(load: Load) -> None:
    session, settings = load.session, load.settings
    if load.seconds is None:
        raise RuntimeError("throughput found no capacity, so there is no load to measure waiting times at")
    for number, percent in enumerate(settings.loads):
        rate = percent / 100 * settings.requests / load.seconds
        seconds = min(settings.load_seconds, session.left() / (len(settings.loads) - number) - 2)
        if seconds < settings.load_seconds / 4:
            session.note(f"load {percent}%: no time left")
            continue
        waits = asyncio.run(under_load(load, rate, seconds, seed=7001 + number))
        case = f"load {percent}%, {rate:.1f} requests/s"
        session.bench.add(case, "requests", "", len(waits.first))
        for name, values in (("first token", waits.first), ("between tokens", waits.between)):
            for percentile in (50, 90, 99):
                found = float(np.percentile(values, percentile))
                session.bench.add(case, f"{name}, p{percentile}", "ms", 1e3 * found)


async def under_load(load: Load, rate: float, seconds: float, seed: int) -> Waits:
    arrivals = list(poisson(rate, seconds, seed))
    asked = works(load.settings, len(arrivals), seed)
    waits = Waits(first=[], between=[])
    async with AsyncEngine(load.engine) as served:
        began = time.perf_counter()

        async def visit(name: str, work: Work, at: float) -> None:
            await asyncio.sleep(began + at - time.perf_counter())
            last, count = began + at, 0
            async for output in served.stream(request_of(name, work)):
                if output.error is not None:
                    raise RuntimeError(f"request {name} failed: {output.error}")
                if not output.token_ids:
                    continue
                now, new = time.perf_counter(), len(output.token_ids)
                if count == 0:
                    waits.first.append(now - last)
                else:  # what came together counts as if spread evenly
                    waits.between += [(now - last) / new] * new
                last, count = now, count + new

        names = [f"{seed}-{number}" for number in range(len(asked))]
        await asyncio.gather(*(visit(*each) for each in zip(names, asked, arrivals)))
    return waits


def poisson(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Times of arrival; at least one."""
    rng, at = random.Random(seed), 0.0
    while True:
        yield at
        at += -math.log(1 - rng.random()) / rate
        if at > seconds:
            return


def main(settings: Settings) -> int:
    if settings.tiny:
        settings = replace(
            settings, requests=4, prompts=(8, 40), answers=(4, 12), rounds=1, load_seconds=0.4, token_budget=64
        )  # fmt: skip
    device = pick_device(tiny=settings.tiny)
    session = Session(
        settings.seconds, results_file("serve_load", settings.results, tiny=settings.tiny), settings.commit, device
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        loads: list[Load] = []
        session.run("set up", lambda: loads.append(Load(session, settings, Path(folder) / "model")))
        parts: dict[str, Callable[[Load], None]] = {
            "throughput": throughput,
            "latency": latency,
            "peer": against_peer,
        }
        try:
            for name, part in parts.items() if loads else ():
                if name in settings.parts:
                    session.run(name, partial(part, loads[0]))
        finally:
            for load in loads:
                if load.peer is not None:
                    load.peer.close()
    return session.close()


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
