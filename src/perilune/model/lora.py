"""Low-rank adapters (LoRA, arXiv 2106.09685): a model learns in a small space beside weights that stay as they are.

    y = W x + scale * B (A x)          W [out, in] frozen; A [rank, in] random, B [out, rank] zero; scale = alpha / rank

B = 0 makes the first forward that of the model itself. What this file promises:
  * only A and B of the maps that `targets` names learn. Everything else is frozen: also the routing of experts, whose
    biases move without gradients, and QK-Clip, which leaves frozen heads alone;
  * `merge_adapters` gives a model without adapters that computes the same: decoding, export and serving see plain
    maps;
  * names of the weights stay: an adapter adds `NAME.lora_a` and `NAME.lora_b` beside `NAME.weight`.

The factors go to AdamW without decay: an orthogonalised update of one factor means nothing for the product of the two.
"""

import fnmatch
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.model.linear import Linear
from perilune.model.moe import Router
from perilune.optim.matrices import Adam, Layout

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
BALANCED = "_config_before_adapters"
"""Where a router keeps the config by which its biases move, while they are frozen."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: int = 0
    """Of the adapters; 0: none, all weights learn."""
    alpha: float = 0.0
    """scale = alpha / rank; 0 stands for twice the rank."""
    targets: tuple[str, ...] = ("*_proj", "*_proj_with_mqa")
    """Maps that get an adapter, as patterns of their names: those of attention and dense MLPs; not stacked experts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))  # JSON has no tuples
        if self.rank < 0:
            raise ValueError(f"lora.rank is {self.rank!r}, expected 1 or more, or 0 for no adapters")
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"lora.alpha is {self.alpha!r}, expected a positive number, or 0 for twice the rank")
        if not self.targets:
            raise ValueError("lora.targets is empty, expected patterns of names such as '*_proj'")

    @property
    def scale(self) -> float:
        return (self.alpha or 2.0 * self.rank) / self.rank


class LoraLinear(Linear):
    """A frozen map with an adapter beside it."""

    def __init__(self, base: Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)  # the weight is that of `base`: nothing to allocate
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        # Not Linear.forward: the operator it takes on a GPU would compute the gradient of the frozen weight as well.
        y = F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        return y + self.scale * F.linear(F.linear(x, self.lora_a.to(x.dtype)), self.lora_b.to(x.dtype))

    def merged(self) -> Linear:
        """A plain map with weight W + scale B A."""
        with torch.device("meta"):
            plain = Linear(self.in_features, self.out_features, bias=self.bias is not None)
        with torch.no_grad():
            change = (self.lora_b.double() @ self.lora_a.double()) * self.scale
            plain.weight = nn.Parameter((self.weight.double() + change).to(self.weight.dtype))
        plain.bias = None if self.bias is None else nn.Parameter(self.bias.detach())
        return plain

    def logical_matrices(self) -> Mapping[str, Layout]:
        return {"lora_a": Adam(), "lora_b": Adam()}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.lora_a.shape[0]}, scale={self.scale}"


def add_adapters(model: nn.Module, config: LoraConfig, *, seed: int) -> None:
    """Freeze the model and put adapters beside the maps that `config.targets` names; in place, and nothing at rank 0.

    A is drawn by the seed on the CPU, map by map, so that it is the same on every device.
    """
    if not config.rank:
        return
    chosen = {
        name: module
        for name, module in model.named_modules()
        if type(module) is Linear and any(fnmatch.fnmatchcase(name, pattern) for pattern in config.targets)
    }
    if not chosen:
        raise ValueError(f"lora.targets is {config.targets!r}, which names no map of the model, e.g. '*.q_proj'")
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Router):
            setattr(module, BALANCED, module.config)
            module.config = replace(module.config, bias_update_rate=0.0)
    generator = torch.Generator().manual_seed(seed)
    for name, module in chosen.items():
        adapted = LoraLinear(module, config.rank, config.scale)
        drawn = torch.empty(adapted.lora_a.shape).uniform_(-1, 1, generator=generator)
        with torch.no_grad():
            adapted.lora_a.copy_(drawn / math.sqrt(module.in_features))
        adapted.train(module.training)
        _put(model, name, adapted)


def merge_adapters(model: nn.Module) -> None:
    """Replace every adapted map by the plain one that computes the same; in place. All weights may learn again."""
    for name, module in list(adapted_maps(model)):
        _put(model, name, module.merged().train(module.training))
    for module in model.modules():
        if isinstance(module, Router) and hasattr(module, BALANCED):
            module.config = getattr(module, BALANCED)
    model.requires_grad_(True)


def has_adapters(model: nn.Module) -> bool:
    return next(adapted_maps(model), None) is not None


def adapted_maps(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def copy_places(source: nn.Module, target: nn.Module) -> None:
    """Give `target`, a plain model, adapters where `source` has them; their values are to be loaded."""
    maps = dict(target.named_modules())
    for name, module in adapted_maps(source):
        plain = maps[name]
        assert isinstance(plain, Linear)
        _put(target, name, LoraLinear(plain, module.lora_a.shape[0], module.scale))


def save_adapters(model: nn.Module, folder: str | Path, config: LoraConfig) -> int:
    """Write the adapters alone, in the files and names of the PEFT library; returns how many numbers they hold."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, module in adapted_maps(model):
        tensors[f"{PREFIX}{name}.lora_A.weight"] = module.lora_a.detach().cpu().contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = module.lora_b.detach().cpu().contiguous()
    if not tensors:
        raise ValueError("the model has no adapters to write: it was trained with lora.rank=0, or they are merged")
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.rank,
        "lora_alpha": config.scale * config.rank,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name, _ in adapted_maps(model)}),
        "bias": "none",
    }
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    (path / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return sum(tensor.numel() for tensor in tensors.values())


def load_adapters(model: nn.Module, folder: str | Path) -> None:
    """Give a model with adapters the values that `save_adapters` wrote; ValueError unless they are the same maps."""
    from safetensors.torch import load_file

    tensors = load_file(Path(folder) / WEIGHTS)
    own = {
        f"{PREFIX}{name}.lora_{letter}.weight": factor
        for name, module in adapted_maps(model)
        for letter, factor in (("A", module.lora_a), ("B", module.lora_b))
    }
    wrong = sorted(
        name for name in {*own, *tensors} if name not in own or name not in tensors
        or own[name].shape != tensors[name].shape
    )  # fmt: skip
    if wrong:
        raise ValueError(f"{str(folder)!r} holds other adapters than the model: {wrong[:3]!r} differ")
    with torch.no_grad():
        for name, factor in own.items():
            factor.copy_(tensors[name])


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)
