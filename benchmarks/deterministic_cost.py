"""What the deterministic mode costs: the same work in both modes, and whether the bits agree.

    python benchmarks/deterministic_cost.py            about a minute on two cores
    python benchmarks/deterministic_cost.py --tiny     a few tokens

The training forward (hidden states and logits of one packed row of documents), the prefill of prompts, and decoding
steps of several requests at once, each in the ordinary and in the deterministic mode, in turns, best of several. Then
the log-probs that decoding gave are compared with those of the training forward: the largest difference in the ordinary
mode, and the number of tokens whose bits differ in the deterministic one, which must be 0.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import tyro
from parts import Session, results_file
from torch import Tensor

from perilune.model import Decoder
from perilune.model.deterministic import TILE, token_log_probs
from perilune.recipes import recipe
from perilune.serve.plan import Share, StepPlan
from perilune.serve.runner import Runner


@dataclass(frozen=True, kw_only=True)
class Settings:
    recipe: str = "nano"
    documents: int = 4
    prompt: int = 192
    """Tokens of a prompt, and of half a training document."""
    answer: int = 64
    batch: int = 8
    repeats: int = 3
    threads: int | None = None  # torch's default when not given
    seconds: float = 300.0
    """Repeats that would begin later are left out."""
    tiny: bool = False
    commit: str = ""
    results: Path | None = None
    """File of the rows; benchmarks/results/deterministic_cost.json when not given, and never that of a miniature."""


class Requests:
    """Prompts with given answers, decoded together: the tokens are the same in both modes."""

    def __init__(self, model: Decoder, tokens_BT: Tensor, num_prompt: int, *, deterministic: bool) -> None:
        self.tokens, self.num_prompt = tokens_BT, num_prompt
        self.deterministic = deterministic
        self.batch, length = tokens_BT.shape
        self.each = -(-length // TILE)
        self.runner = Runner(
            model,
            num_pages=self.batch * self.each,
            page_size=TILE,
            num_slots=self.batch,
            max_sequences=self.batch,
            deterministic=deterministic,
        )

    def prefill(self) -> Tensor:
        """Logits [batch, prompt, vocabulary]."""
        for slot in range(self.batch):
            self.runner.clear_state(slot)
        return self._run(0, self.num_prompt, "all").view(self.batch, self.num_prompt, -1)

    def decode(self, position: int) -> Tensor:
        """Logits [batch, vocabulary] after the token at `position`."""
        return self._run(position - position % TILE if self.deterministic else position, position + 1, "last")

    def _run(self, start: int, end: int, want) -> Tensor:
        shares = (
            Share(
                request_id=str(index),
                start=start,
                tokens=tuple(self.tokens[index, start:end].tolist()),
                pages=tuple(range(index * self.each, index * self.each - (-end // TILE))),
                slot=index,
                want=want,
                samples=True,
            )
            for index in range(self.batch)
        )
        return self.runner.run(StepPlan(shares=tuple(shares)))


class Mode:
    """The work in one of the two modes, and how fast it was at best, in tokens per second."""

    def __init__(self, settings: Settings, *, deterministic: bool) -> None:
        config = recipe(settings.recipe).model
        self.settings = settings
        self.model = Decoder(config, seed=0).eval()
        self.model.deterministic = deterministic
        generator = torch.Generator().manual_seed(0)
        self.length = settings.prompt + settings.answer
        self.tokens = torch.randint(config.vocab_size, (settings.batch, self.length), generator=generator)
        document = 2 * settings.prompt
        self.packed = torch.randint(config.vocab_size, (1, settings.documents * document), generator=generator)
        self.borders = torch.arange(0, self.packed.shape[1] + 1, document)
        with torch.no_grad():
            self.trained = scores(self.model(self.tokens), self.tokens)
        # A runner lays the weights of its model as decoding likes them: the trainer keeps its own.
        served = Decoder(config, seed=0).eval()
        served.deterministic = deterministic
        self.requests = Requests(served, self.tokens, settings.prompt, deterministic=deterministic)
        # With one thread the time of the processor is that of the work, whatever else the machine does meanwhile.
        self.clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        self.speeds: dict[str, float] = {}
        self.served = torch.empty(0)

    def measure(self) -> None:
        settings = self.settings
        with torch.no_grad():
            self._timed(
                "training forward", self.packed.numel(), lambda: self.model(self.packed, cu_seqlens=self.borders)
            )  # fmt: skip
        prompt = self._timed("prefill", settings.batch * settings.prompt, self.requests.prefill)
        answer = self._timed("decode", settings.batch * settings.answer, self._decode)
        self.served = scores(torch.cat([prompt, answer], dim=1), self.tokens)

    def _decode(self) -> Tensor:
        """Logits [batch, answer, vocabulary]"""
        positions = range(self.settings.prompt, self.length)
        return torch.cat([self.requests.decode(position).unsqueeze(1) for position in positions], dim=1)

    def _timed(self, name: str, tokens: int, work: Callable[[], Tensor]) -> Tensor:
        began = self.clock()
        found = work()
        self.speeds[name] = max(self.speeds.get(name, 0.0), tokens / (self.clock() - began))
        return found


def scores(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """[B, T - 1] log-prob of every next token, in the way of the deterministic mode."""
    rows = logits_BTV[:, :-1].flatten(0, 1)
    return token_log_probs(rows, tokens_BT[:, 1:].flatten()).view(len(tokens_BT), -1)


def compare(session: Session, settings: Settings) -> None:
    ordinary, exact = Mode(settings, deterministic=False), Mode(settings, deterministic=True)
    for repeat in range(settings.repeats + 1):  # the first warms up, and counts if it was the fastest
        if repeat and session.left() <= 0:
            session.note(f"stopped after {repeat} rounds: the time is over")
            break
        ordinary.measure()
        exact.measure()
    case = f"deterministic mode, {settings.recipe}, {torch.get_num_threads()} threads"
    for name, speed in exact.speeds.items():
        peers = {"ordinary": ordinary.speeds[name]}
        session.bench.add(case, name, "tokens/s", speed, peers=peers, lower_is_better=False)
    differing = int((exact.served != exact.trained).sum())
    gap = float((ordinary.served - ordinary.trained).abs().max())
    session.bench.add(case, f"log-probs of {exact.served.numel()} that differ", "", differing)
    session.bench.add(case, "largest difference of log-probs, ordinary mode", "nats", gap)
    session.note(f"load of the machine {os.getloadavg()[0]:.1f}")
    if differing:
        raise RuntimeError(f"{differing} log-probs served are not, bit by bit, those of the training forward")


def main(settings: Settings) -> int:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.tiny:
        settings = replace(settings, recipe="micro", documents=2, prompt=20, answer=4, batch=2, repeats=1)
    results = results_file("deterministic_cost", settings.results, tiny=settings.tiny)
    session = Session(settings.seconds, results, settings.commit, torch.device("cpu"))
    session.run("compare", partial(compare, session, settings))
    return session.close()


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
