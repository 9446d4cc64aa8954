"""What the deterministic mode costs: the same work in both modes, and whether the bits agree.

    python benchmarks/deterministic_cost.py            about a minute on two cores

The training forward (hidden states and logits of one packed row of documents), the prefill of prompts, and decoding
steps of several requests at once, each in the ordinary and in the deterministic mode, best of several. Then the
log-probs that decoding gave are compared with those of the training forward: the largest difference in the ordinary
mode, and the number of tokens whose bits differ in the deterministic one, which must be 0. Writes
benchmarks/results/deterministic_cost.json.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from perilune.model import Decoder
from perilune.model.deterministic import TILE, token_log_probs
from perilune.recipes import recipe
from perilune.serve.plan import Share, StepPlan
from perilune.serve.runner import Runner
from perilune.train.environment import describe_environment


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
    results: Path = Path("benchmarks/results")


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


def best_time(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def scores(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """[B, T - 1] log-prob of every next token, in the way of the deterministic mode."""
    rows = logits_BTV[:, :-1].flatten(0, 1)
    return token_log_probs(rows, tokens_BT[:, 1:].flatten()).view(len(tokens_BT), -1)


def measure(settings: Settings, *, deterministic: bool) -> tuple[dict[str, float], Tensor]:
    """Tokens per second by kind of work, and the difference of served and trained log-probs."""
    config = recipe(settings.recipe).model
    model = Decoder(config, seed=0).eval()
    model.deterministic = deterministic
    generator = torch.Generator().manual_seed(0)
    length = settings.prompt + settings.answer
    tokens = torch.randint(config.vocab_size, (settings.batch, length), generator=generator)
    packed = torch.randint(config.vocab_size, (1, settings.documents * 2 * settings.prompt), generator=generator)
    borders = torch.arange(0, packed.shape[1] + 1, 2 * settings.prompt)
    with torch.no_grad():
        trained = scores(model(tokens), tokens)
        forward = best_time(lambda: model(packed, cu_seqlens=borders), settings.repeats)
    requests = Requests(model, tokens, settings.prompt, deterministic=deterministic)
    prefill = best_time(requests.prefill, settings.repeats)
    rows = [requests.prefill()]
    began = time.perf_counter()
    rows += [requests.decode(position).unsqueeze(1) for position in range(settings.prompt, length)]
    decode = time.perf_counter() - began
    speed = {
        "training forward": packed.numel() / forward,
        "prefill": settings.batch * settings.prompt / prefill,
        "decode": settings.batch * settings.answer / decode,
    }
    return speed, scores(torch.cat(rows, dim=1), tokens) - trained


def main(settings: Settings) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    ordinary, ordinary_gap = measure(settings, deterministic=False)
    exact, exact_gap = measure(settings, deterministic=True)
    differing = int((exact_gap != 0).sum())
    result = {
        "environment": describe_environment(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "settings": {key: value for key, value in vars(settings).items() if key != "results"},
        "tokens_per_s": {"ordinary": ordinary, "deterministic": exact},
        "times_slower": {name: ordinary[name] / exact[name] for name in ordinary},
        "log_probs": exact_gap.numel(),
        "largest_difference_ordinary": float(ordinary_gap.abs().max()),
        "differing_deterministic": differing,
    }
    settings.results.mkdir(parents=True, exist_ok=True)
    path = settings.results / "deterministic_cost.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    table = Table("work", "ordinary, tokens/s", "deterministic, tokens/s", "times slower")
    for name in ordinary:
        table.add_row(name, f"{ordinary[name]:,.0f}", f"{exact[name]:,.0f}", f"{ordinary[name] / exact[name]:.1f}")
    console = Console()
    console.print(table)
    console.print(
        f"log-probs served and trained, {exact_gap.numel()} tokens: ordinary within "
        f"{result['largest_difference_ordinary']:.1e}, deterministic {differing} differ; written to {path}"
    )
    if differing:
        sys.exit(1)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
