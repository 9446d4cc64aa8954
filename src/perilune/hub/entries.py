"""One tensor of ours against the public tensors it is made of: the vocabulary in which formats are written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.model import ModelConfig, MoEConfig


class FormatError(ValueError):
    """A public folder that cannot be read, or a model that has no public form."""


@dataclass(frozen=True)
class Entry:
    ours: str
    public: tuple[tuple[str, ...], ...]
    """For each public tensor its names: the one written, then others that are read as well."""
    join: Callable[[list[Tensor]], Tensor]
    split: Callable[[Tensor], list[Tensor]]

    def read(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self.join([tensors[name] for name in self.found(tensors)])

    def found(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """The names under which its public tensors are there; FormatError names the first that is missing."""
        result = []
        for names in self.public:
            name = next((name for name in names if name in tensors), None)
            if name is None:
                raise FormatError(f"the weights lack {names[0]!r}: the folder is incomplete or of another architecture")
            result.append(name)
        return result

    def written(self, tensor: Tensor) -> dict[str, Tensor]:
        parts = self.split(tensor)
        return {names[0]: part.contiguous() for names, part in zip(self.public, parts, strict=True)}

    def names(self) -> set[str]:
        return {name for names in self.public for name in names}


def top_entries(config: ModelConfig) -> list[Entry]:
    """Embedding, final norm and head. A tied head is written out for readers that do not tie, and checked when read."""

    def same_twice(parts: list[Tensor]) -> Tensor:
        if not torch.equal(parts[0], parts[1]):
            raise FormatError("tie_word_embeddings is true, but lm_head.weight differs from the embedding")
        return parts[0]

    result = [renamed("norm.weight", "model.norm.weight")]
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if config.tie_word_embeddings:
        # Where the head is left out, as transformers does when it ties, the embedding stands for it.
        names = ((embedding,), (head, embedding))
        return [*result, Entry("embed_tokens.weight", names, same_twice, lambda tensor: [tensor, tensor.clone()])]
    return [*result, renamed("embed_tokens.weight", embedding), renamed("lm_head.weight", head)]


def renamed(ours: str, *public: str) -> Entry:
    return Entry(ours, (public,), lambda parts: parts[0], lambda tensor: [tensor])


def reshaped(ours: str, public: str, our_shape: tuple[int, ...], public_shape: tuple[int, ...]) -> Entry:
    return Entry(
        ours, ((public,),), lambda parts: parts[0].reshape(our_shape), lambda tensor: [tensor.reshape(public_shape)]
    )


def expert_entries(ours: str, layer: str, moe: MoEConfig, folder: str, gate: str, up: str, down: str) -> list[Entry]:
    """Router, shared experts, and the stacks gate_up [E, 2I, d] and down [E, d, I] of one public tensor an expert."""
    public = layer + folder
    count, inner = moe.num_experts, moe.moe_intermediate_size

    def join_gate_up(parts: list[Tensor]) -> Tensor:
        return torch.cat([torch.stack(parts[:count]), torch.stack(parts[count:])], dim=1)

    def split_gate_up(joined: Tensor) -> list[Tensor]:
        gates, ups = joined.split(inner, dim=1)
        return [*gates.unbind(0), *ups.unbind(0)]

    def each(part: str) -> tuple[tuple[str, ...], ...]:
        return tuple((f"{public}experts.{expert}.{part}.weight",) for expert in range(count))

    result = [
        Entry(ours + "experts.gate_up_proj", each(gate) + each(up), join_gate_up, split_gate_up),
        Entry(ours + "experts.down_proj", each(down), torch.stack, lambda stack: list(stack.unbind(0))),
        renamed(ours + "gate.weight", public + "gate.weight"),
        renamed(ours + "gate.e_score_correction_bias", public + "gate.e_score_correction_bias"),
    ]
    if moe.num_shared_experts:
        shared = [f"shared_experts.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")]
        result += [renamed(ours + name, public + name) for name in shared]
    return result


def check_supported(public: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> None:
    """A config that asks for another computation must not load as this one."""
    for key, values in supported.items():
        if public.get(key) is not None and public[key] not in values:
            raise FormatError(f"{key}={public[key]!r} is not supported: expected {' or '.join(map(repr, values))}")


def require(public: Mapping[str, Any], key: str) -> Any:
    if key not in public:
        raise FormatError(f"config.json lacks {key!r}: expected a Kimi-Linear or DeepSeek-V3 config")
    return public[key]
