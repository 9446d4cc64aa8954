"""Which collective operation a rank waits in, as PyTorch's flight recorder knows it.

The recorder is on by default (TORCH_FR_BUFFER_SIZE=0 turns it off) and keeps the last operations of every process group
with their numbers. On a GPU it is the only witness: the host runs ahead of collectives that do not end, and its stack
shows some other line. Ranks of a group count its operations alike, so a rank whose count is behind has not come.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch._C._distributed_c10d as bindings
import torch.distributed.distributed_c10d as c10d


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One that was begun and has not ended."""

    group: str
    members: tuple[int, ...]
    """Ranks of the group."""
    name: str
    number: int
    """Among those of its group."""
    sizes: str

    def __str__(self) -> str:
        return f"{self.name} of {self.sizes} (number {self.number} of {self.group})"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the recorder of one rank says."""

    pending: tuple[Operation, ...] = ()
    begun: Mapping[tuple[str, tuple[int, ...]], int]
    """Group and its ranks -> how many operations this rank has begun there."""

    def has_come_to(self, operation: Operation) -> bool:
        return self.begun.get((operation.group, operation.members), 0) >= operation.number


def recorded() -> Recorded:
    """Of this rank, now. Nothing where this torch has no recorder that speaks JSON."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(bindings, name, None)
        if dump is not None:
            return read(json.loads(dump(True, False)), _members())
    return Recorded(begun={})


def read(trace: Mapping[str, Any], members: Mapping[str, tuple[int, ...]]) -> Recorded:
    """`trace` is what the recorder dumps, `members` the ranks of every group.

    Sends and receives are left out: they have other numbers on each rank.
    """
    begun: dict[tuple[str, tuple[int, ...]], int] = {}
    pending = []
    for entry in trace.get("entries", ()):
        if entry.get("is_p2p"):
            continue
        name, description = entry["process_group"]
        group, ranks = f"group {name} {description}".strip(), members.get(name, ())
        number = int(entry["collective_seq_id"])
        begun[group, ranks] = max(number, begun.get((group, ranks), 0))
        if not entry["retired"] and entry["state"] != "completed":
            shape = "x".join(str(size) for size in (entry["input_sizes"] or [[]])[0])
            sizes = f"{shape} {(entry['input_dtypes'] or [''])[0]}".strip()
            operation = entry["profiling_name"].rpartition(":")[2]
            pending.append(Operation(group=group, members=ranks, name=operation, number=number, sizes=sizes))
    return Recorded(pending=tuple(pending), begun=begun)


def _members() -> dict[str, tuple[int, ...]]:
    # The dump has a place for them, which gloo leaves empty.
    return {name: tuple(c10d._world.pg_group_ranks[group]) for group, name in c10d._world.pg_names.items()}
