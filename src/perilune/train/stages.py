"""What the loop asks all stages of a pipeline for: each rank has only some layers, a record or a model has all of them.

Every function is called by all ranks and answers the same on all stages; without a pipeline it answers from what this
rank has. Ranks that have the same place in their stages talk to each other (Parallel.stages), first stage first, which
is the order of layers.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.optim import ClipReport
from perilune.train.parallel import Parallel


def of_all_stages(parallel: Parallel | None, own: Any) -> list[Any]:
    """What each stage has to say, the first one first. Small things only: they are pickled."""
    group = None if parallel is None else parallel.stages()
    if group is None:
        return [own]
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, own, group=group)
    return said


def step_statistics(parallel: Parallel | None, clip: ClipReport, imbalance: Tensor | None) -> dict[str, Any]:
    """Of the layers of all stages: what QK-Clip saw and did, and the worst balance of experts."""
    max_logit, is_bound = clip.by_layer()
    own = (max_logit, is_bound, int(clip.num_clipped), None if imbalance is None else float(imbalance))
    of_stages = of_all_stages(parallel, own)
    bounds = [bound for _, each, _, _ in of_stages for bound in each]
    imbalances = [each for *_, each in of_stages if each is not None]
    return {
        "max_logit": [logit for each, *_ in of_stages for logit in each],
        **({"max_logit_is_bound": bounds} if any(bounds) else {}),
        "clipped_heads": sum(clipped for _, _, clipped, _ in of_stages),
        **({"moe_imbalance": max(imbalances)} if imbalances else {}),
    }


def names_elsewhere(parallel: Parallel | None) -> frozenset[str]:
    """Names of weights and buffers that other stages have and this one has not."""
    if parallel is None or parallel.stages() is None:
        return frozenset()
    own = set(parallel.model.state_dict())
    return frozenset().union(*of_all_stages(parallel, own)) - own


def tensors_of_all_stages(parallel: Parallel, own: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Tensors by name, each broadcast from the stage that has it, or from the first of those that do."""
    group = parallel.stages()
    if group is None:
        return dict(own)
    mine = dist.get_rank(group)
    described = of_all_stages(parallel, {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()})
    found: dict[str, Tensor] = {}
    for stage, tensors in enumerate(described):
        for name, (shape, dtype) in tensors.items():
            if name in found:
                continue
            tensor = own[name].contiguous() if stage == mine else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, group=group, group_src=stage)
            found[name] = tensor
    return found


def rows_of_stages(parallel: Parallel | None, own: Tensor | None) -> Tensor | None:
    """Rows of all stages, those of the first one first; None where no stage has any."""
    if parallel is None or parallel.stages() is None:
        return own
    rows = [
        each for each in of_all_stages(parallel, None if own is None else own.cpu()) if each is not None and len(each)
    ]
    return torch.cat(rows) if rows else None


def own_rows(parallel: Parallel | None, count: int) -> slice:
    """Which rows of `rows_of_stages` are those of this stage, which has `count` of them."""
    group = None if parallel is None else parallel.stages()
    if group is None:
        return slice(0, count)
    before = sum(of_all_stages(parallel, count)[: dist.get_rank(group)])
    return slice(before, before + count)
