"""Five MuonClip steps of a small decoder with every kind of layer, on one process or spread over a world."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from perilune.model.moe import Router
from perilune.optim import MuonClip, clip_grad_norm_
from perilune.optim.sharded import ShardedMuonClip

# Sizes that 3 and 4 do not divide, and matrices with fewer rows (the two of b_proj) than there are ranks.
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=38,
    num_hidden_layers=3,
    layer_types=("kda", "mla", "kda"),
    kda=KDAConfig(num_heads=2, head_dim=9),
    mla=MLAConfig(num_attention_heads=2, kv_lora_rank=13, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=7),
    intermediate_size=54,
    moe=MoEConfig(num_experts=4, num_experts_per_token=2, moe_intermediate_size=20, routed_scaling_factor=1.5),
    residual="plain",
    initializer_range=0.2,
)
STEPS, ROWS, LENGTH = 5, 12, 24
OPTIONS: dict[str, Any] = {
    "lr": 0.01,
    "adam_lr": 0.002,
    "qk_clip_tau": 2.0,  # below what the first steps see, so that heads are clipped
    "orthogonalize_dtype": torch.float32,
}


def rows_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(CONFIG.vocab_size, (ROWS, LENGTH + 1), generator=generator)


def backward(model: Decoder, rows: Tensor, scale: float = 1.0) -> None:
    """Gradients of the mean loss over all ROWS; `scale` undoes an average over ranks."""
    loss = model.loss(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    (loss * scale / (ROWS * LENGTH)).backward()


def counts_of(model: Decoder) -> list[Tensor]:
    return [module.counts for module in model.modules() if isinstance(module, Router)]


def finish_step(model: Decoder, optimizer: MuonClip) -> int:
    """Clip, step, balance experts; how many heads were clipped."""
    if isinstance(optimizer, ShardedMuonClip):
        optimizer.clip_grad_norm_(1.0, sums=counts_of(model))
    else:
        clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    # Counts that were summed already are summed again by the router: only the sign of count - mean matters.
    model.after_optimizer_step()
    assert optimizer.qk_report is not None
    return int(optimizer.qk_report.num_clipped)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_of(model: Decoder) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def one_process(steps: int = STEPS, **options: Any) -> dict[str, Any]:
    """The reference; needs torch.distributed not to be initialised."""
    model = Decoder(CONFIG, seed=0)
    start = weights_of(model)
    optimizer = MuonClip.for_model(model, **{**OPTIONS, **options})
    clipped = 0
    for step in range(steps):
        backward(model, rows_of(step))
        clipped += finish_step(model, optimizer)
    return {"start": start, "weights": weights_of(model), "clipped": clipped}


def shard_model(model: Decoder, mesh: DeviceMesh, *, experts_by_rows: bool = False) -> None:
    place = (lambda parameter: Shard(1) if parameter.ndim == 3 else None) if experts_by_rows else None
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "loss")


@dataclass
class Counted:
    """Collectives and the bytes this rank sends to others, by name."""

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, num_bytes: int) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.bytes[name] = self.bytes.get(name, 0) + num_bytes


@contextmanager
def counting() -> Iterator[Counted]:
    """Every collective that starts inside is counted."""
    counted, rank, world = Counted(), dist.get_rank(), dist.get_world_size()
    # The names of torch 2.11 and those of 2.13; what is called by neither must not be called at all.
    names = {
        "all_to_all_single": "all_to_all_single",
        "all_reduce": "all_reduce",
        **dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), "all_gather"),
        **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), "reduce_scatter"),
    }
    others = ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "all_gather_object", "send", "recv")

    def sent_by(name: str, arguments: tuple[Any, ...]) -> int:
        tensor = arguments[0] if name == "all_reduce" else arguments[1]
        if name == "all_to_all_single":
            return tensor.element_size() * (tensor.numel() - arguments[3][rank])
        return tensor.element_size() * tensor.numel() * (world - 1 if name == "all_gather" else 1)

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counted.add(name, sent_by(name, arguments))
            return real(*arguments, **options)

        return call

    real = {name: getattr(dist, name) for name in (*names, *others) if hasattr(dist, name)}
    for name, function in real.items():
        setattr(dist, name, wrap(names[name], function) if name in names else wrap_unexpected(name))
    try:
        yield counted
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def wrap_unexpected(name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"a step calls {name}")

    return call


def own_rows(step: int) -> Tensor:
    return rows_of(step).tensor_split(dist.get_world_size())[dist.get_rank()]


def largest_change_error(result: dict[str, Tensor], reference: dict[str, Any]) -> tuple[float, str]:
    """Over all tensors: how far the change since the start is from that of one process, relative to it."""
    worst = (0.0, "")
    for name, expected in reference["weights"].items():
        change = expected - reference["start"][name]
        error = float((result[name] - expected).norm() / change.norm().clamp(min=1e-12))
        worst = max(worst, (error, name))
    return worst


def smallest_change_cosine(result: dict[str, Tensor], reference: dict[str, Any]) -> tuple[float, str]:
    worst = (math.inf, "")
    for name, expected in reference["weights"].items():
        change, other = (each - reference["start"][name] for each in (expected, result[name]))
        if float(change.norm()) > 0:
            cosine = float(torch.nn.functional.cosine_similarity(change.flatten(), other.flatten(), dim=0))
            worst = min(worst, (cosine, name))
    return worst
