"""Tokens a second of the whole loop of reinforcement learning, against a plain loop around transformers' generate.

    python benchmarks/rl_throughput.py                      30M parameters on a GPU, nano's shape on a CPU
    python benchmarks/rl_throughput.py --pattern mla        latent attention with rotary positions, as DeepSeek-V3
    python benchmarks/rl_throughput.py --tiny               to see that it works

Both sides have the same weights (exported and read by AutoModelForCausalLM), prompts of one length, samples, lengths
and rewards, and take one on-policy step on all samples in an iteration:

    ours    Loop: engine, judges, learner, weights handed over; the engine's log-probs are the old ones
    theirs  generate with a cache and sampling at temperature 1, forward and backward over the same tokens with the same
            advantages, torch.optim.AdamW; on a GPU in bfloat16, weights too

A rate is sampled tokens over the time of whole iterations; the first ones, which compile and record, are left out. Both
sides take turns, so that what else runs on the machine meets both. Waiting is the share of an iteration in which the
learner does nothing. Which class transformers used is in the row: without one of its own for KDA it runs the code that
our export brings along. Rows go to benchmarks/results/rl_throughput.json.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rl_rows import add_rows, say

from perilune import hub
from perilune.data.chat import encode, parse_messages, render
from perilune.data.generated import SplitMix, generate
from perilune.data.tokenizer import Tokenizer
from perilune.hub.targets import choose
from perilune.model import Decoder, ModelConfig, RopeConfig
from perilune.recipes.pretrain import micro, nano_text
from perilune.recipes.vision import vision_small
from perilune.rl.environment import OUTCOME, Message, Split, Talk, Task, last_answer
from perilune.rl.learner import LearnerConfig
from perilune.rl.loop import Loop, RLConfig
from perilune.rl.objective import advantages
from perilune.rl.rollout import RolloutConfig
from perilune.rl.talk import TalkConfig
from perilune.serve.engine import EngineConfig
from perilune.train import OptimizerConfig
from perilune.train.environment import describe_environment
from perilune.train.trainer import pick_device

KEY = ("pattern", "device", "tiny", "overlap")
WORDS = ("moon", "orbit", "tide", "comet", "crater", "signal", "beacon", "rover", "lens", "anchor")


@dataclass(frozen=True, kw_only=True)
class Settings:
    pattern: Literal["hybrid", "mla"] = "hybrid"
    tasks: int = 32
    samples: int = 8
    tokens: int = 128
    """Sampled for every answer."""
    iterations: int = 8
    """That are measured."""
    warm_ups: int = 2
    peer_iterations: int = 3
    rows_at_once: int = 64
    """Samples in one forward and backward of the plain loop."""
    overlap: bool = False
    optimizer: Literal["adamw", "muonclip"] = "adamw"
    """Ours; the plain loop has AdamW."""
    lr: float = 1e-4
    tiny: bool = False
    commit: str = ""
    results: Path = Path("benchmarks/results/rl_throughput.json")


def model_config(settings: Settings, device: torch.device) -> ModelConfig:
    """Plain residuals and text alone: what transformers has classes for."""
    if settings.tiny:
        model = micro().model
    else:
        model = vision_small().model if device.type == "cuda" else nano_text().model
    pattern = None if settings.pattern == "hybrid" else ("mla",) * model.num_hidden_layers
    heads = model.mla if settings.pattern == "hybrid" else replace(model.mla, rope=RopeConfig())
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    return replace(model, layer_types=pattern, mla=heads, residual="plain", vision=None, compute_dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Hashing:
    """Prompts of one length; an answer is worth a number that follows from its text, so that every group teaches."""

    prompts: tuple[str, ...]
    max_tokens: int
    name: str = "hashing"

    def task(self, number: int, split: Split) -> Task:
        text = self.prompts[number % len(self.prompts)]
        return Task(name=text, data={"text": text})

    async def episode(self, task: Task, talk: Talk) -> None:
        talk.add({"role": "user", "content": task.data["text"]})
        await talk.ask(max_tokens=self.max_tokens)

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        return {OUTCOME: worth(last_answer(messages))}


def worth(text: str) -> float:
    return zlib.crc32(text.encode("utf-8", "replace")) / 2**32


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return encode(tokenizer, render(parse_messages([{"role": "user", "content": text}]), thinking=False)).tokens


def equal_prompts(tokenizer: Tokenizer, count: int) -> tuple[str, ...]:
    """Different prompts that have as many tokens as the first: no row of the plain loop needs padding."""
    found: dict[str, None] = {}
    length = None
    for number in range(100_000):
        dice = SplitMix(number)
        text = " ".join(dice.choose(WORDS) for _ in range(16))
        if length is None:
            length = len(prompt_ids(tokenizer, text))
        if len(prompt_ids(tokenizer, text)) == length:
            found[text] = None
        if len(found) == count:
            return tuple(found)
    raise SystemExit(f"only {len(found)} of {count} prompts have {length} tokens: lower --tasks")


# Ours -----------------------------------------------------------------------------------------------------------------


async def our_loop(
    model: Decoder, tokenizer: Tokenizer, environment: Hashing, settings: Settings, between: Callable[[], None]
) -> list[dict[str, Any]]:
    """Records of the measured iterations; `between` them the other side has its turn."""
    sequences = settings.tasks * settings.samples
    config = RLConfig(
        iterations=settings.warm_ups + settings.iterations,
        tasks=settings.tasks,
        pool=len(environment.prompts),
        overlap=settings.overlap,
        rollout=RolloutConfig(
            group_size=settings.samples, concurrency=sequences, talk=TalkConfig(max_tokens=settings.tokens)
        ),
        learner=LearnerConfig(
            optimizer=OptimizerConfig(kind=settings.optimizer, lr=settings.lr, weight_decay=0.0),
            row_tokens=65_536 if model.embed_tokens.weight.is_cuda else 16_384,
        ),
        engine=EngineConfig(
            max_sequences=sequences, token_budget=max(2048, 2 * sequences), max_queue=sequences,
            max_length=512 + settings.tokens, memory_gib=8.0 if not settings.tiny else 0.25, num_snapshots=64,
        ),
        checkpoint_every=0,
        keep_trajectories=False,
    )  # fmt: skip
    records = []
    with tempfile.TemporaryDirectory() as folder:
        async with Loop(model, tokenizer, {"hashing": environment}, config, folder=folder) as loop:
            say("engine ready")
            for number in range(config.iterations):
                records.append(await loop.step())
                say(f"iteration {number + 1} of {config.iterations}, {records[-1]['seconds']:.2f} s")
                between()
    return records[settings.warm_ups :]


# Theirs ---------------------------------------------------------------------------------------------------------------


def peer_of(model: Decoder, tokenizer: Tokenizer, device: torch.device) -> Any:
    """The same weights in transformers: in a class of its own where it has one, else in the code of our export."""
    try:
        import torchvision  # noqa: F401
    except Exception:  # without its compiled operators it would break the import below, and nothing here sees
        sys.modules["torchvision"] = None  # pyrefly: ignore
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    target: str = choose(model.config)
    is_known = target in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        hub.export_model(model, Path(folder) / "model", tokenizer=tokenizer, target=target if is_known else "perilune")
        peer = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=dtype, trust_remote_code=not is_known)
    return peer.to(device)


class PlainLoop:
    """An iteration at a time; `times` are those after the first."""

    def __init__(
        self, peer: Any, tokenizer: Tokenizer, environment: Hashing, settings: Settings, device: torch.device
    ) -> None:
        self.peer, self.tokenizer, self.environment = peer, tokenizer, environment
        self.settings, self.device = settings, device
        self.optimizer = torch.optim.AdamW(peer.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.iteration = 0
        self.times: list[dict[str, float]] = []

    def turn(self) -> None:
        """One more iteration, until there are enough."""
        settings, device = self.settings, self.device
        if len(self.times) == settings.peer_iterations:
            return
        began = _now(device)
        numbers = range(self.iteration * settings.tasks, (self.iteration + 1) * settings.tasks)
        texts = [self.environment.task(number, "train").data["text"] for number in numbers]
        prompts = torch.tensor([prompt_ids(self.tokenizer, text) for text in texts], device=device)
        prompts = prompts.repeat_interleave(settings.samples, dim=0)
        self.peer.eval()
        with torch.inference_mode():
            whole = self.peer.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=settings.tokens, do_sample=True,
                temperature=1.0, top_k=0, top_p=1.0, use_cache=True, pad_token_id=self.tokenizer.pad_id,
                eos_token_id=None,
            )  # fmt: skip
        answers = whole[:, prompts.shape[1] :].tolist()
        rewards = torch.tensor([worth(self.tokenizer.decode(answer)) for answer in answers], dtype=torch.float64)
        relative = torch.cat([advantages(group) for group in rewards.split(settings.samples)]).to(device)
        played = _now(device)
        _plain_step(self.peer, self.optimizer, whole.clone(), prompts.shape[1], relative, settings)
        ended = _now(device)
        if self.iteration:
            self.times.append({"playing": played - began, "learning": ended - played, "all": ended - began,
                               "tokens": float(sum(map(len, answers)))})  # fmt: skip
        self.iteration += 1
        say(f"plain loop: iteration {self.iteration}, {ended - began:.2f} s")


def _plain_step(
    peer: Any, optimizer: torch.optim.Optimizer, whole: torch.Tensor, start: int, relative: torch.Tensor,
    settings: Settings,
) -> None:  # fmt: skip
    """The on-policy gradient of Kimi K2.5's objective: ratio 1, so that its mask and its pull are silent."""
    peer.train()
    count = whole[:, start:].numel()
    for rows, advantage in zip(whole.split(settings.rows_at_once), relative.split(settings.rows_at_once)):
        logits = peer(rows[:, :-1], use_cache=False).logits[:, start - 1 :].float()
        new = logits.log_softmax(-1).gather(2, rows[:, start:, None])[..., 0]
        ((new - new.detach()).exp() * -advantage[:, None].float()).sum().div(count).backward()
    torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# Both -----------------------------------------------------------------------------------------------------------------


def measure(settings: Settings) -> dict[str, Any]:
    device = pick_device("auto")
    config = model_config(settings, device)
    tokenizer = Tokenizer.train([text for _, text in generate(0, 200)], config.vocab_size)
    model = Decoder(config, seed=0).to(device)
    environment = Hashing(prompts=equal_prompts(tokenizer, 4 * settings.tasks), max_tokens=settings.tokens)
    plain_loop = PlainLoop(peer_of(model, tokenizer, device), tokenizer, environment, settings, device)
    kind = type(plain_loop.peer)
    if settings.overlap:  # ours would play during their turn
        while len(plain_loop.times) < settings.peer_iterations:
            plain_loop.turn()
    records = asyncio.run(our_loop(model, tokenizer, environment, settings, plain_loop.turn))
    theirs = plain_loop.times
    tokens = [record["length"] * record["episodes"] for record in records]
    seconds = statistics.median(record["seconds"] for record in records)
    ours = statistics.median(count / record["seconds"] for count, record in zip(tokens, records))
    plain = statistics.median(each["tokens"] / each["all"] for each in theirs)
    environment_of = describe_environment(device)
    return {
        "pattern": settings.pattern,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "tiny": settings.tiny,
        "overlap": settings.overlap,
        "parameters": model.num_parameters(),
        "tasks": settings.tasks,
        "samples": settings.samples,
        "prompt_tokens": len(prompt_ids(tokenizer, environment.prompts[0])),
        "sampled_tokens": settings.tokens,
        "optimizer": settings.optimizer,
        "tokens_per_s": ours,
        "seconds_an_iteration": seconds,
        "rollout_tokens_per_s": statistics.median(record["rollout_tokens_per_s"] for record in records),
        "trainer_tokens_per_s": statistics.median(record["learn_tokens_per_s"] for record in records),
        "waiting": statistics.median(record["waiting"] for record in records),
        "gap": statistics.median(record["gap"] for record in records),
        "peer": f"{kind.__module__.removeprefix('transformers_modules.')}.{kind.__name__}",
        "peer_tokens_per_s": plain,
        "peer_seconds_an_iteration": statistics.median(each["all"] for each in theirs),
        "peer_rollout_tokens_per_s": statistics.median(each["tokens"] / each["playing"] for each in theirs),
        "peer_trainer_tokens_per_s": statistics.median(each["tokens"] / each["learning"] for each in theirs),
        "ratio": ours / plain,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "commit": settings.commit or environment_of.get("commit", ""),
        "environment": environment_of,
    }


def main(settings: Settings) -> None:
    if settings.tiny:
        settings = replace(
            settings, tasks=min(settings.tasks, 2), samples=min(settings.samples, 2), tokens=min(settings.tokens, 8),
            iterations=min(settings.iterations, 2), warm_ups=1, peer_iterations=1,
        )  # fmt: skip
    row = measure(settings)
    add_rows(settings.results, [row], key=KEY)
    print(json.dumps({name: value for name, value in row.items() if name != "environment"}, indent=1))
    print(f"{row['tokens_per_s']:.0f} tokens/s, {row['peer']} {row['peer_tokens_per_s']:.0f}: {row['ratio']:.2f}x")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
