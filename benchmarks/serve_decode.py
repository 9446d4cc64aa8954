"""Decoding a long context: Kimi Linear 3:1 and 7:1 beside all-MLA and grouped-query attention, on one GPU.

    python benchmarks/serve_decode.py                                 on a GPU: all kinds, 4K to 1M
    python benchmarks/serve_decode.py --tiny                          the same code on a CPU, in seconds

Four models of one width and depth, with random weights: three of them run as the engine runs them (serve/runner.py:
paged latents, states in slots, CUDA graphs), the fourth has grouped-query attention (32 query heads, 8 key heads of
128) over a cache that lies in one piece, read by the fastest library kernel. Contexts hold random numbers: what is
measured is a step of decoding, not what comes out.

For each context: the time of a step with one sequence, and tokens a second with as many sequences as fit into
`--memory-gb` of cache, the same for all. Beside each the bound: bytes that must move (weights, the cache of all
sequences, states once more to write them) over the copy bandwidth measured in the same run. Rows go to
benchmarks/results/serve_decode.json.
"""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from perilune.bench.timing import copy_bandwidth
from perilune.kernels.mla_decode import gqa_decode
from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig
from perilune.model.config import LayerType
from perilune.model.paged import bytes_per_page, bytes_per_slot
from perilune.serve.plan import Share, StepPlan
from perilune.serve.runner import Runner
from perilune.train.environment import describe_environment

KINDS = ("3to1", "7to1", "mla", "gqa")
PAGE = 64


@dataclass(frozen=True, kw_only=True)
class Shape:
    hidden: int = 2048
    layers: int = 24
    heads: int = 32
    head_dim: int = 128
    kv_heads: int = 8
    intermediate: int = 5632
    vocabulary: int = 32_768


@dataclass(frozen=True, kw_only=True)
class Settings:
    kinds: tuple[str, ...] = KINDS
    lengths: tuple[int, ...] = (4096, 32_768, 131_072, 524_288, 1_048_576)
    memory_gb: float = 104.0
    """For the cache, the same for all kinds."""
    most_sequences: int = 512
    seconds: float = 0.5
    """Measured for each number, after warming up."""
    tiny: bool = False
    commit: str = ""
    results: Path = Path("benchmarks/results/serve_decode.json")


class GroupedQuery(nn.Module):
    """One decoding step of a decoder with grouped-query attention: the peer. No positions, as in the others."""

    def __init__(self, shape: Shape, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden, **options)
        self.qkv = nn.ModuleList(
            nn.Linear(shape.hidden, queries + 2 * keys, bias=False, **options) for _ in range(shape.layers)
        )
        self.out = nn.ModuleList(nn.Linear(queries, shape.hidden, bias=False, **options) for _ in range(shape.layers))
        self.up = nn.ModuleList(
            nn.Linear(shape.hidden, 2 * shape.intermediate, bias=False, **options) for _ in range(shape.layers)
        )
        self.down = nn.ModuleList(
            nn.Linear(shape.intermediate, shape.hidden, bias=False, **options) for _ in range(shape.layers)
        )
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False, **options)
        cache = (batch, length, shape.kv_heads, shape.head_dim)
        self.keys = [torch.zeros(cache, **options) for _ in range(shape.layers)]
        self.values = [torch.zeros(cache, **options) for _ in range(shape.layers)]
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(batch, dtype=torch.long, device=device)

    def forward(self) -> Tensor:
        shape, last = self.shape, self.keys[0].shape[1] - 1
        x = self.embedding(self.tokens)
        parts = [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim]
        for layer in range(shape.layers):
            h = F.rms_norm(x, (shape.hidden,))
            q, k, v = self.qkv[layer](h).split(parts, dim=-1)
            self.keys[layer][:, last] = k.unflatten(-1, (shape.kv_heads, shape.head_dim))
            self.values[layer][:, last] = v.unflatten(-1, (shape.kv_heads, shape.head_dim))
            attended = gqa_decode(
                q.unflatten(-1, (shape.heads, shape.head_dim)), self.keys[layer], self.values[layer], self.lengths
            )  # fmt: skip
            x = x + self.out[layer](attended.flatten(1))
            gate, up = self.up[layer](F.rms_norm(x, (shape.hidden,))).chunk(2, dim=-1)
            x = x + self.down[layer](F.silu(gate) * up)
        return self.head(F.rms_norm(x, (shape.hidden,)))


def model_config(kind: str, shape: Shape, dtype: str) -> ModelConfig:
    period = {"3to1": 4, "7to1": 8, "mla": 1}[kind]
    pattern: tuple[LayerType, ...] = tuple("mla" if i % period == period - 1 else "kda" for i in range(shape.layers))
    rank, rope = (512, 64) if shape.head_dim == 128 else (4 * shape.head_dim, shape.head_dim // 2)
    return ModelConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        layer_types=pattern,
        kda=KDAConfig(num_heads=shape.heads, head_dim=shape.head_dim),
        mla=MLAConfig(
            num_attention_heads=shape.heads, kv_lora_rank=rank, qk_nope_head_dim=shape.head_dim, qk_rope_head_dim=rope,
            v_head_dim=shape.head_dim,
        ),
        intermediate_size=shape.intermediate,
        residual="plain",
        compute_dtype=dtype,  # pyrefly: ignore[bad-argument-type]
    )  # fmt: skip


def cache_bytes(kind: str, shape: Shape, config: ModelConfig | None, length: int) -> int:
    """What one sequence of `length` tokens keeps."""
    if config is None:
        return 2 * shape.layers * shape.kv_heads * shape.head_dim * 2 * length
    return bytes_per_page(config, PAGE) * -(-length // PAGE) + bytes_per_slot(config)


def model_of(kind: str, shape: Shape, device: torch.device) -> Decoder | None:
    """With random weights, made where it runs; None for grouped-query attention, which is made with its cache."""
    if kind == "gqa":
        return None
    config = model_config(kind, shape, "bfloat16" if device.type == "cuda" else "float32")
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1.0) if "norm" in name else parameter.data.normal_(0.0, 0.02)
    model.reset_parameters(torch.Generator(device).manual_seed(0))
    return model


def step_of(
    model: Decoder | None, shape: Shape, batch: int, length: int, device: torch.device
) -> tuple[Callable[[], Any], int]:
    """A function that runs one step of `batch` sequences of `length` tokens, and the bytes of the weights."""
    if model is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        peer = GroupedQuery(shape, batch, length, device, dtype).eval()
        weights = sum(parameter.nbytes for parameter in peer.parameters())
        return _graphed(peer, device), weights
    pages = -(-length // PAGE)
    runner = Runner(
        model, num_pages=batch * pages, page_size=PAGE, num_slots=batch, max_sequences=batch, device=device
    )  # fmt: skip
    shares = tuple(
        Share(
            request_id=str(row), start=length - 1, tokens=(row % shape.vocabulary,),
            pages=tuple(range(row * pages, (row + 1) * pages)), slot=row, want="last", samples=True,
        )
        for row in range(batch)
    )  # fmt: skip
    plan = StepPlan(shares=shares)
    weights = sum(parameter.numel() for parameter in model.parameters()) * model.compute_dtype.itemsize
    if device.type == "cuda":  # the device's share of a step: the graph itself, with its numbers in place
        runner.run(plan)
        assert runner._graphs is not None
        (recording,) = runner._graphs._recordings.values()
        assert recording.graph is not None
        graph = recording.graph

        def replay(keep: Runner = runner) -> None:  # the graph writes into the runner's pools
            graph.replay()

        return replay, weights
    return lambda: runner.run(plan), weights


@torch.inference_mode()
def _graphed(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Any]:
    if device.type != "cuda":
        return torch.inference_mode()(step)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds_of(step: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Of one call, over many in a row."""
    for _ in range(3):
        step()
    _wait(device)
    count, began = 0, time.perf_counter()
    while count < 3 or time.perf_counter() - began < seconds:
        for _ in range(5):
            step()
        count += 5
        _wait(device)
    return (time.perf_counter() - began) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(settings: Settings) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() and not settings.tiny else "cpu")
    shape = Shape()
    lengths, budget = settings.lengths, settings.memory_gb * 1e9
    if settings.tiny:
        shape = Shape(hidden=64, layers=8, heads=4, head_dim=16, kv_heads=2, intermediate=128, vocabulary=320)
        lengths, budget = (256, 1024), 4e6
    bandwidth = copy_bandwidth(device)
    rows: list[dict[str, Any]] = []
    made = describe_environment(device)
    for kind in settings.kinds:
        model = model_of(kind, shape, device)
        for length in lengths:
            each = cache_bytes(kind, shape, None if model is None else model.config, length)
            most = min(settings.most_sequences, int(budget // each))
            for batch in dict.fromkeys((1, most)):
                if batch < 1:
                    continue
                rows.append(_row(kind, model, shape, batch, length, each, bandwidth, device, settings))
                print(_line(rows[-1]), flush=True)
                rows.sort(key=lambda row: (row["length"], settings.kinds.index(row["kind"]), row["batch"]))
                found = {"tiny": settings.tiny, "copy_bytes_per_s": bandwidth, "memory_gb": budget / 1e9, "rows": rows,
                         "commit": settings.commit or made.get("commit", ""), "environment": made}  # fmt: skip
                settings.results.parent.mkdir(parents=True, exist_ok=True)
                settings.results.write_text(json.dumps(found, indent=1) + "\n")
        del model
    print_ratios(rows)


def _row(
    kind: str, model: Decoder | None, shape: Shape, batch: int, length: int, each: int, bandwidth: float,
    device: torch.device, settings: Settings,
) -> dict[str, Any]:  # fmt: skip
    row: dict[str, Any] = {"kind": kind, "length": length, "batch": batch, "cache_bytes": each}
    try:
        step, weights = step_of(model, shape, batch, length, device)
        seconds = seconds_of(step, device, settings.seconds)
    except torch.OutOfMemoryError:
        return {**row, "error": "does not fit into memory"}
    finally:
        step = None
        if device.type == "cuda":
            gc.collect()  # a runner and its graphs refer to each other
            torch.cuda.empty_cache()
    states = 0 if model is None else bytes_per_slot(model.config)
    bound = (weights + batch * (each + states)) / bandwidth
    return {
        **row, "ms": 1e3 * seconds, "tokens_per_s": batch / seconds, "bound_ms": 1e3 * bound,
        "share_of_bound": bound / seconds, "weight_bytes": weights,
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    head = f"{row['kind']:>5} {row['length']:>9,} tokens x {row['batch']:>3}"
    if "error" in row:
        return f"{head}: {row['error']}"
    return f"{head}: {row['ms']:8.3f} ms, {row['tokens_per_s']:9.0f} tokens/s, {row['share_of_bound']:.0%} of the bound"


def print_ratios(rows: list[dict[str, Any]]) -> None:
    """How many times the tokens a second of the peers: at one sequence, and in equal memory."""
    for length in dict.fromkeys(row["length"] for row in rows):
        best: dict[str, list[float]] = {}
        for row in rows:
            if row["length"] == length and "tokens_per_s" in row:
                best.setdefault(row["kind"], []).append(row["tokens_per_s"])
        if "3to1" not in best:
            continue
        for peer in ("mla", "gqa", "7to1"):
            if peer in best:
                one, many = best["3to1"][0] / best[peer][0], best["3to1"][-1] / best[peer][-1]
                print(f"{length:>9,}: 3to1 over {peer}: {one:.2f}x with one sequence, {many:.2f}x in equal memory")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
