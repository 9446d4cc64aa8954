"""Decoding eight requests at once on a CPU: the engine against transformers' generate, on the same weights.

    python benchmarks/serve_cpu.py                 nano's shape with plain residuals, which transformers knows

The model is written as a Kimi-Linear folder and read by transformers' own class. Both answer eight prompts of one
length greedily, with all cores the machine has (OMP_NUM_THREADS limits them); the tokens are compared. Rows go to
benchmarks/results/serve_cpu.json.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro

from perilune import hub
from perilune.data import Tokenizer
from perilune.model import Decoder
from perilune.recipes.pretrain import nano_text
from perilune.serve.engine import Engine, EngineConfig, forbidden_ids
from perilune.serve.request import Request, SamplingParams
from perilune.train.environment import describe_environment


@dataclass(frozen=True, kw_only=True)
class Settings:
    batch: int = 8
    prompt: int = 64
    tokens: int = 128
    rounds: int = 5
    results: Path = Path("benchmarks/results/serve_cpu.json")


def main(settings: Settings) -> None:
    # Nothing here looks at pictures, and a torchvision without its compiled operators would break the import.
    sys.modules.setdefault("torchvision", None)  # pyrefly: ignore
    from transformers import AutoModelForCausalLM

    config = replace(nano_text().model, residual="plain")
    model = Decoder(config, seed=0)
    tokenizer = Tokenizer.train(["a few words to begin with"], config.vocab_size)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 256, (settings.batch, settings.prompt), generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        hub.save_pretrained(model, Path(folder) / "model", target="kimi_linear")
        peer = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32).eval()
    banned = [*forbidden_ids(tokenizer, config.vocab_size), tokenizer.eos_id]  # what our engine never samples

    def ours() -> list[list[int]]:
        for number, prompt in enumerate(prompts.tolist()):
            params = SamplingParams(
                max_tokens=settings.tokens, min_tokens=settings.tokens, temperature=0.0,
            )  # fmt: skip
            engine.add(Request(request_id=str(number), prompt=tuple(prompt), params=params))
        said: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                said.setdefault(output.request_id, []).extend(output.token_ids)
        return [said[str(number)] for number in range(settings.batch)]

    @torch.inference_mode()
    def theirs() -> list[list[int]]:
        found = peer.generate(
            prompts, max_new_tokens=settings.tokens, min_new_tokens=settings.tokens, do_sample=False,
            suppress_tokens=banned, attention_mask=torch.ones_like(prompts), pad_token_id=0,
        )  # fmt: skip
        return found[:, settings.prompt :].tolist()

    engine = Engine(
        model, tokenizer, EngineConfig(max_sequences=settings.batch, prefix_caching=False, num_snapshots=0)
    )  # fmt: skip
    mine, other = ours(), theirs()  # also warms up
    same = sum(first == second for first, second in zip(mine, other))
    times = {"ours": [], "transformers": []}
    for _ in range(settings.rounds):  # in turns: what else runs on the machine meets both
        times["ours"].append(_seconds(ours))
        times["transformers"].append(_seconds(theirs))
    count = settings.batch * settings.tokens
    rates = {name: count / statistics.median(each) for name, each in times.items()}
    row = {
        "batch": settings.batch, "prompt": settings.prompt, "tokens": settings.tokens,
        "tokens_per_s": rates, "ratio": rates["ours"] / rates["transformers"], "equal_answers": same,
        "seconds": times, "threads": torch.get_num_threads(), "load": os.getloadavg()[0],
        "environment": describe_environment(torch.device("cpu")),
    }  # fmt: skip
    settings.results.parent.mkdir(parents=True, exist_ok=True)
    settings.results.write_text(json.dumps(row, indent=1) + "\n")
    print(
        f"{settings.batch} sequences: {rates['ours']:.0f} tokens/s, transformers {rates['transformers']:.0f}: "
        f"{row['ratio']:.2f}x; {same} of {settings.batch} answers equal"
    )


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
