"""KDA on CPU: our chunked path against transformers' torch path, on the same tensors, in one run.

    python benchmarks/kda_cpu.py            about five minutes on two cores, most of it spent in the peer
    python benchmarks/kda_cpu.py --quick    under a minute: T = 1024 against the peer, 4096 alone

Both compute in float32 with L2-normalised q and k and a pre-computed log decay, B = 1, H = 8. Times are the best of
several runs. The peer is left out at T = 16384, where it forms several tensors of T * 64 * H * D numbers (4 GiB each at
D = 128). Writes benchmarks/results/kda_cpu.json.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from perilune.kernels.kda import kda
from perilune.train.environment import describe_environment

# Nothing here looks at pictures, and a torchvision without its compiled operators would break the import.
sys.modules.setdefault("torchvision", None)  # pyrefly: ignore
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention  # noqa: E402

NUM_HEADS = 8
LENGTHS = (1024, 4096, 16384)
PEER_LENGTHS = (1024, 4096)


@dataclass(frozen=True, kw_only=True)
class Settings:
    quick: bool = False
    threads: int | None = None  # torch's default when not given
    results: Path = Path("benchmarks/results")


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return kda(q, k, v, g, beta, qk_l2norm=True)[0]


def peer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return chunk_kimi_delta_attention(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


def make_tensors(num_tokens: int, head_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, num_tokens, NUM_HEADS, head_dim)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    g = -torch.nn.functional.softplus(torch.randn(shape, generator=generator))
    return [q, k, v, g, torch.rand(shape[:3], generator=generator)]


def best_time(function: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(
    operator: Callable[..., Tensor], tensors: list[Tensor], *, repeats: int, backward_repeats: int
) -> dict[str, float]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    weights = torch.ones_like(tensors[2])

    def forward() -> None:
        with torch.no_grad():
            operator(*tensors)

    def forward_and_backward() -> None:
        torch.autograd.grad(operator(*leaves), leaves, weights)

    return {
        "forward_s": best_time(forward, repeats),
        "forward_backward_s": best_time(forward_and_backward, backward_repeats),
    }


def largest_difference(num_tokens: int, head_dim: int) -> float:
    """The two paths must agree before their times mean anything; relative to the size of the peer's output."""
    tensors = make_tensors(num_tokens, head_dim)
    with torch.no_grad():
        right = peer(*tensors)
        return ((ours(*tensors) - right).norm() / right.norm()).item()


def main(settings: Settings) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    console = Console(width=110)
    differences = {head_dim: largest_difference(256, head_dim) for head_dim in (64, 128)}
    for head_dim, difference in differences.items():
        if difference > 1e-5:
            raise SystemExit(f"ours and transformers differ by {difference:.1e} at D={head_dim}: nothing was timed")

    lengths = LENGTHS[:2] if settings.quick else LENGTHS
    peer_lengths = PEER_LENGTHS[:1] if settings.quick else PEER_LENGTHS
    rows = []
    for head_dim in (64, 128):
        for num_tokens in lengths:
            tensors = make_tensors(num_tokens, head_dim)
            row: dict[str, Any] = {"head_dim": head_dim, "num_tokens": num_tokens}
            ours(*tensors)  # fills caches of layouts and lets the allocator grow
            row["ours"] = measure(ours, tensors, repeats=5, backward_repeats=5)
            row["peer"] = None
            if num_tokens in peer_lengths:
                row["peer"] = measure(peer, tensors, repeats=2, backward_repeats=1)
                row["ratio"] = {name: row["peer"][name] / row["ours"][name] for name in row["ours"]}
            rows.append(row)
            console.print(f"measured D={head_dim} T={num_tokens}", style="dim")

    table = Table(
        "D", "T", "ours fwd", "peer fwd", "ratio", "ours fwd+bwd", "peer fwd+bwd", "ratio", "us/token fwd+bwd"
    )
    for row in rows:
        cells = [str(row["head_dim"]), str(row["num_tokens"])]
        for name in ("forward_s", "forward_backward_s"):
            cells.append(f"{row['ours'][name] * 1e3:.0f} ms")
            cells.append(f"{row['peer'][name]:.2f} s" if row["peer"] else "left out")
            cells.append(f"{row['ratio'][name]:.0f}x" if row["peer"] else "-")
        cells.append(f"{row['ours']['forward_backward_s'] / row['num_tokens'] * 1e6:.1f}")
        table.add_row(*cells)
    console.print(table)

    growth = {}
    for head_dim in (64, 128):
        first, *_, last = (row for row in rows if row["head_dim"] == head_dim)
        length_ratio = last["num_tokens"] / first["num_tokens"]
        growth[str(head_dim)] = last["ours"]["forward_backward_s"] / first["ours"]["forward_backward_s"] / length_ratio
        console.print(
            f"linear in T at D={head_dim}: {length_ratio:.0f}x the tokens take "
            f"{growth[str(head_dim)] * length_ratio:.1f}x the time"
        )

    result = {
        "environment": describe_environment(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "transformers": metadata.version("transformers"),
        "num_heads": NUM_HEADS,
        "relative_difference": {str(head_dim): value for head_dim, value in differences.items()},
        "time_growth_over_token_growth": growth,
        "peer_left_out": f"T={LENGTHS[-1]}: needs several tensors of T*64*H*D float32",
        "rows": rows,
    }
    settings.results.mkdir(parents=True, exist_ok=True)
    path = settings.results / ("kda_cpu_quick.json" if settings.quick else "kda_cpu.json")
    path.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
