"""Distributed MuonClip: one step of MuonClip over many ranks, for replicated and for sharded parameters.

    backward            gradients: all-reduced (DDP), or reduce-scattered into shards (FSDP2)
    clip_grad_norm_     one SUM all-reduce: squared norms of shards, and the sums handed in (expert counts)
    step                one MAX all-reduce: attention maxima of all layers, and who has which gradient
        sharded         bucket 0   [a2a in ][ orthogonalise ][a2a out][ apply ]
                        bucket 1            [a2a in ]        [ orthogonalise ][a2a out][ apply ]
        replicated      bucket 0   [ orthogonalise ][ all-gather ][ apply ]
        AdamW           elementwise on what the rank holds
        QK-Clip         each rank scales the rows it holds

Ownership is planned once (ownership.py): a matrix is orthogonalised by one rank, matrices that are whole where they lie
never travel. A bucket costs at most two collectives whatever it holds (exchange.py, bucket_step.py). Which mode applies
is read off each parameter; both may occur in one model:

    plain tensor or replicated DTensor    DDP with ZeRO-1 for Muon: the owner alone keeps the momentum and updates from
                                          its own copy of the gradient; updates return by one packed all-gather
    sharded DTensor (FSDP2, HSDP, TP, EP) momentum is sharded like the parameter; rows of the direction meet on the
                                          owner by one packed all-to-all and their updates return by another

State, float32: 4 bytes a matrix parameter over the ranks that share it, in either mode.

Two small all-reduces and not one: maxima and sums are different operations, and to carry the one by the other every
rank would need a slot of its own (world size times the bytes). Sums travel with the norm, maxima with the flags.

Promises: the result of one process up to rounding (the order in which ranks sum gradients; the payload where it is
bfloat16), equal replicas, no dependence on the number of ranks otherwise. A parameter that has a gradient on some ranks
only counts as zero on the others; without any it stands still. Every rank of the group has to call `step`,
`clip_grad_norm_` and `reduce_gradients` alike. Facts: Moonlight (arXiv 2502.16982, algorithm 1) gathers the direction
in bfloat16, as the default payload here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from perilune.kernels.newton_schulz import orthogonalize
from perilune.optim.adamw import adamw_update
from perilune.optim.bucket_step import BucketSettings, BucketStep, LocalParameter, run_buckets
from perilune.optim.exchange import Bucket, Part, pack, reduce_to_owners, route_bucket, unpack
from perilune.optim.matrices import Adam, Layout
from perilune.optim.muon import MUON, MuonClip, _clip_for, fast_dtype
from perilune.optim.owned_state import OwnedMomentum
from perilune.optim.ownership import Ownership, PlacedParameter, plan_buckets, plan_ownership
from perilune.optim.plan import PlannedParameter, plan_parameters
from perilune.optim.shards import Box, as_matrix, cut, local_box, local_part, whole_box

PAYLOADS = (torch.float32, torch.bfloat16, torch.float64)


class ShardedMuonClip(MuonClip):
    """MuonClip over the ranks of a process group. Build it after the model is wrapped, on every rank:
    `ShardedMuonClip.for_model(model, lr=...)`; all options of MuonClip hold but `capturable`.

    `ownership` is the plan, `buckets` what this rank does in it. `process_group` None: all ranks; under pipeline
    parallelism, the ranks of one stage.
    """

    def __init__(
        self,
        plan: Sequence[PlannedParameter],
        *,
        lr: float,
        per_head: bool = False,
        process_group: dist.ProcessGroup | None = None,
        payload_dtype: torch.dtype = torch.bfloat16,
        bucket_bytes: int = 2**28,
        same_gradients: bool = False,
        stages: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        if payload_dtype not in PAYLOADS:
            raise ValueError(f"payload_dtype is {payload_dtype!r}; expected torch.float32 or torch.bfloat16")
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes!r}; expected a positive number of bytes such as 2**28")
        if options.get("capturable"):
            raise ValueError("capturable=True: a CUDA graph cannot record a step over several ranks; use MuonClip")
        self.process_group, self.payload_dtype = process_group, payload_dtype
        self.bucket_bytes, self.same_gradients = bucket_bytes, same_gradients
        self.stages = stages
        self.rank, self.world = _place_in(process_group)
        self._planned = list(plan)
        self._numbers = {entry.parameter: number for number, entry in enumerate(plan)}
        self._placed = _place_parameters(plan, process_group, self.world)
        self._muon_numbers = [number for number, entry in enumerate(plan) if not isinstance(entry.layout, Adam)]
        self.ownership: Ownership = plan_ownership(
            [self._placed[number] for number in self._muon_numbers], per_head=per_head
        )
        self._muon_indices = {number: index for index, number in enumerate(self._muon_numbers)}
        self._owned: dict[int, list[Box]] = {number: [] for number in self._muon_numbers}
        for matrix in self.ownership.matrices:
            if matrix.owner == self.rank:
                self._owned[self._muon_numbers[matrix.parameter]].append(matrix.box)
        self._buckets: dict[frozenset[int], list[Bucket]] = {}
        self._gradients_at_owners = False
        # Asked for every parameter in every step, on a host that has better things to do.
        self._of_muon = tuple(not isinstance(entry.layout, Adam) for entry in plan)
        self._whole_everywhere = tuple(
            all(box == whole_box(placed.shape) for box in placed.boxes) for placed in self._placed
        )
        super().__init__(plan, lr=lr, per_head=per_head, **options)

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        *,
        lr: float,
        qk_clip_tau: float | None = 100.0,
        gqa: Literal["query", "balanced"] = "query",
        decay_norm_gains: bool = True,
        overrides: Mapping[str, Layout] | None = None,
        process_group: dist.ProcessGroup | None = None,
        payload_dtype: torch.dtype = torch.bfloat16,
        bucket_bytes: int = 2**28,
        same_gradients: bool = False,
        stages: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> ShardedMuonClip:
        """As MuonClip.for_model, on every rank of `process_group`.

        payload_dtype: of directions and updates on their way, float32 or bfloat16. bucket_bytes: how much of them an
        owner takes in at once; about four times that is in use during a step. same_gradients: the promise that all
        ranks have gradients for the same parameters; on a GPU it saves a wait for the device in every step.
        stages: ranks that optimise the rest of the model, one of each stage of a pipeline; the gradient norm counts it.
        """
        return cls(
            plan_parameters(model, overrides=overrides, decay_norm_gains=decay_norm_gains),
            lr=lr,
            process_group=process_group,
            payload_dtype=payload_dtype,
            bucket_bytes=bucket_bytes,
            same_gradients=same_gradients,
            stages=stages,
            qk_clip=None if qk_clip_tau is None else _clip_for(model, qk_clip_tau, gqa),
            **options,
        )

    # -----------------------------------------------------------------------------------------------------------------
    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient on any rank, then QK-Clip."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active, maxima = self._agree()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if self._numbers[parameter] in active]
            if parameters and group["name"] == MUON:
                self._muon_step(group, parameters)
            elif parameters:
                self._adam_step(group, parameters)
        if active and self.qk_clip is not None:
            self.qk_report = self.qk_clip.apply(maxima)
        self._gradients_at_owners = False
        return loss

    def _agree(self) -> tuple[set[int], Tensor | None]:
        """Numbers of the parameters that have a gradient on any rank, and the attention maxima over all ranks."""
        mine = {number for number, entry in enumerate(self._planned) if entry.parameter.grad is not None}
        maxima = None if self.qk_clip is None else self.qk_clip.recorded()
        if self.world == 1:
            return mine, maxima
        device = local_part(self._planned[0].parameter).device if maxima is None else maxima.device
        dtype = torch.float32 if maxima is None else maxima.dtype
        flags = torch.zeros(0 if self.same_gradients else len(self._planned), dtype=dtype)
        if not self.same_gradients:
            flags[sorted(mine)] = 1
        shared = flags.to(device) if maxima is None else torch.cat([flags.to(device), maxima.flatten()])
        if shared.numel():
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.process_group)
        if maxima is not None:
            maxima = shared[len(flags) :].view_as(maxima)
        if self.same_gradients:
            return mine, maxima
        return {number for number, flag in enumerate(shared[: len(flags)].tolist()) if flag > 0}, maxima

    def _adam_step(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
        weights = [local_part(parameter) for parameter in parameters]
        masters = [weight.to(torch.promote_types(weight.dtype, torch.float32)) for weight in weights]
        gradients = [
            torch.zeros_like(master) if gradient is None else gradient.to(master.dtype)
            for master, gradient in zip(masters, map(self._local_gradient, parameters), strict=True)
        ]
        states = [
            {key: value if key == "step" else local_part(value) for key, value in self._state_of(parameter).items()}
            for parameter in parameters
        ]
        settings = self._settings_for(group, weights[0].device)
        adamw_update(
            masters,
            gradients,
            states,
            lr=group["lr"],
            lr_on_device=None if settings is None else settings[0],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        for weight, master in zip(weights, masters, strict=True):
            if master.dtype != weight.dtype:
                weight.copy_(master)

    def _muon_step(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
        if self.world == 1 and self._step_alone(group, parameters):
            return
        local = {self._muon_indices[self._numbers[parameter]]: self._local(parameter) for parameter in parameters}
        dtype = self.orthogonalize_dtype or fast_dtype(next(iter(local.values())).weight.device.type)
        settings = BucketSettings(
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            orthogonalize=lambda stack: orthogonalize(stack, coefficients=self.coefficients, dtype=dtype),
            payload_dtype=self.payload_dtype,
            group=self.process_group,
            rank=self.rank,
        )
        steps = [BucketStep(bucket, self.ownership, local, settings) for bucket in self.buckets(frozenset(local))]
        home = [step for step in steps if step.bucket.kind == "home"]
        run_buckets(home, [step for step in steps if step.bucket.kind != "home"])

    def _step_alone(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> bool:
        """A rank that holds everything steps as a single process on a GPU does; False where that is not possible."""
        weights = [local_part(parameter) for parameter in parameters]
        settings = self._settings_for(group, weights[0].device)
        if settings is None:
            return False
        gradients = [gradient for gradient in map(self._local_gradient, parameters) if gradient is not None]
        states = [{"momentum_buffer": local_part(self._state_of(each)["momentum_buffer"])} for each in parameters]
        layouts = [self._layouts[parameter] for parameter in parameters]
        return self._fused_update(group, weights, gradients, states, settings, layouts)

    def buckets(self, parameters: frozenset[int] | None = None) -> list[Bucket]:
        """What this rank does for these parameters of the ownership plan (None: all), in order; the kinds and the
        number of those that travel are the same on every rank."""
        chosen = frozenset(range(len(self._muon_numbers))) if parameters is None else parameters
        if chosen not in self._buckets:
            limit = max(1, self.bucket_bytes // self.payload_dtype.itemsize)
            found: list[Bucket] = []
            for kind in ("home", "exchanged", "replicated"):
                matrices = [
                    index
                    for index, matrix in enumerate(self.ownership.matrices)
                    if matrix.kind == kind
                    and matrix.parameter in chosen
                    and (kind != "home" or matrix.owner == self.rank)
                ]
                cut_up = plan_buckets(self.ownership, matrices, max_elements=limit) if matrices else []
                found += [route_bucket(self.ownership, bucket, self.rank) for bucket in cut_up]
            # Planned again only when another set of parameters has gradients.
            self._buckets = {chosen: found}
        return self._buckets[chosen]

    # -----------------------------------------------------------------------------------------------------------------
    # Gradients

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, sums: Sequence[Tensor] = ()) -> Tensor:
        """Scale AdamW's gradients down to `max_norm`, by the norm of all gradients of all ranks; returns that norm.

        sums: tensors to be replaced by their sum over the ranks, in the same all-reduce. Counts stay exact up to 2^53.
        """
        alike: list[Tensor] = []
        spread: list[Tensor] = []
        scaled: list[Tensor] = []
        # In the order of MuonClip's own, so that the norm of replicated gradients has the same bits.
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            number, gradient = self._numbers[parameter], self._local_gradient(parameter)
            if gradient is None:
                continue
            if not self._is_muon(number):
                scaled.append(gradient)
            if self._is_at_owners(number):
                spread += [cut(gradient, box, whole_box(gradient.shape)) for box in self._owned[number]]
            elif self._is_whole_everywhere(number):
                alike.append(gradient)
            elif self._placed[number].replica_of_rank[self.rank][0] == 0:
                spread.append(gradient)
        device = local_part(self._planned[0].parameter).device
        norm = torch.nn.utils.get_total_norm(alike) if alike else torch.zeros((), device=device)
        some_spread = not all(self._whole_everywhere) or any(map(self._is_at_owners, range(len(self._planned))))
        if self.world > 1 and (some_spread or sums):
            square = (
                torch.stack([each.double() for each in torch._foreach_norm(spread)]).square().sum() if spread else 0.0
            )
            shared = pack([torch.as_tensor(square), *sums], dtype=torch.float64, device=device)
            dist.all_reduce(shared, group=self.process_group)
            total, *reduced = unpack(shared, [(), *(tuple(each.shape) for each in sums)])
            for each, value in zip(sums, reduced, strict=True):
                each.copy_(value)
            if some_spread:
                norm = (norm.double().square() + total).sqrt().to(norm.dtype)
        if self.stages is not None:
            square = norm.double().square()
            dist.all_reduce(square, group=self.stages)
            norm = square.sqrt().to(norm.dtype)
        if scaled:
            torch._foreach_mul_(scaled, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(scaled[0].device))
        return norm

    @torch.no_grad()
    def reduce_gradients(self, *, average: bool = True) -> None:
        """Instead of an all-reduce, for replicated parameters whose gradients every rank computed from its own rows:
        matrices go to their owners by one packed reduce-scatter a bucket, the rest by one packed all-reduce.

        Half the traffic of an all-reduce for the matrices. Afterwards a rank's gradient is right only where it owns.
        """
        active, _ = self._agree() if self.world > 1 else (set(), None)
        replicated = [number for number in sorted(active) if self._is_whole_everywhere(number)]
        for number in replicated:
            parameter = self._planned[number].parameter
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        share = 1.0 / self.world if average else 1.0
        for bucket in self.buckets(
            frozenset(self._muon_indices[number] for number in replicated if self._is_muon(number))
        ):
            if bucket.kind != "replicated":
                continue
            parts = [part for parts in bucket.by_owner for part in parts]
            views = [as_matrix(self._gradient_of_part(part)) for part in parts]
            dtype = torch.promote_types(views[0].dtype, torch.float32)
            reduced = reduce_to_owners(bucket, views, dtype=dtype, device=views[0].device, group=self.process_group)
            for part, value in reduced:
                as_matrix(self._gradient_of_part(part)).copy_(value * share)
            self._gradients_at_owners = True
        others = [number for number in replicated if not self._is_muon(number)]
        gradients = [
            local_part(gradient) for number in others if (gradient := self._planned[number].parameter.grad) is not None
        ]
        if gradients:
            dtype = torch.promote_types(gradients[0].dtype, torch.float32)
            shared = pack(gradients, dtype=dtype, device=gradients[0].device)
            dist.all_reduce(shared, group=self.process_group)
            for gradient, value in zip(
                gradients, unpack(shared, [tuple(each.shape) for each in gradients]), strict=True
            ):
                gradient.copy_(value * share)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._gradients_at_owners = False
        super().zero_grad(set_to_none)

    # -----------------------------------------------------------------------------------------------------------------
    # State

    def checkpoint_tensors(self) -> dict[str, Any]:
        """ "<parameter>.<entry>" -> tensor, DTensor or OwnedMomentum, all sharing storage with the optimizer: what
        torch.distributed.checkpoint saves, and loads in place, on any number of ranks."""
        return {
            f"{entry.name}.{key}": value
            for entry in self._planned
            for key, value in self._state_of(entry.parameter).items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Also takes the whole momentum of one process for replicated parameters; each rank keeps what it owns."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        state = dict(state_dict["state"])
        for number, parameter in zip(numbers, parameters):
            momentum = state.get(number, {}).get("momentum_buffer")
            is_whole = isinstance(momentum, Tensor) and not isinstance(momentum, OwnedMomentum)
            if is_whole and self._keeps_owned(parameter) and momentum.shape == parameter.shape:
                state[number] = {"momentum_buffer": self._new_momentum(parameter).take_from(momentum)}
        super().load_state_dict({**state_dict, "state": state})

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("ShardedMuonClip holds a process group and cannot be copied or pickled; save its state_dict()")

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        if self._keeps_owned(parameter) and not self.state[parameter]:
            self.state[parameter]["momentum_buffer"] = self._new_momentum(parameter)
        return super()._state_of(parameter)

    def _keeps_owned(self, parameter: nn.Parameter) -> bool:
        number = self._numbers[parameter]
        return self.world > 1 and self._is_muon(number) and self._placed[number].is_replicated

    def _new_momentum(self, parameter: nn.Parameter) -> OwnedMomentum:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        boxes = self._owned[self._numbers[parameter]]
        return OwnedMomentum.zeros(parameter.shape, boxes, dtype=dtype, device=local_part(parameter).device)

    # -----------------------------------------------------------------------------------------------------------------
    # A parameter's place: its number in the plan of all, its index among Muon's, and what this rank has of it

    def _is_muon(self, number: int) -> bool:
        return self._of_muon[number]

    def _is_whole_everywhere(self, number: int) -> bool:
        return self._whole_everywhere[number]

    def _is_at_owners(self, number: int) -> bool:
        return self._gradients_at_owners and self._is_muon(number) and self._placed[number].is_replicated

    def _local_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        if parameter.grad is None:
            return None
        self._check_gradient(parameter)
        gradient, weight = local_part(parameter.grad), local_part(parameter)
        if gradient.shape != weight.shape:
            raise ValueError(
                f"gradient of {self._names[parameter]!r} has {tuple(gradient.shape)} elements on this rank, its "
                f"parameter {tuple(weight.shape)}; shard both alike"
            )
        return gradient

    def _gradient_of_part(self, part: Part) -> Tensor:
        number = self._muon_numbers[self.ownership.matrices[part.matrix].parameter]
        gradient = self._planned[number].parameter.grad
        assert gradient is not None
        return cut(local_part(gradient), part.box, self._placed[number].boxes[self.rank])

    def _local(self, parameter: nn.Parameter) -> LocalParameter:
        momentum = self._state_of(parameter)["momentum_buffer"]
        box = self._placed[self._numbers[parameter]].boxes[self.rank]
        if isinstance(momentum, OwnedMomentum):
            momentum_of = lambda part: momentum.blocks[part.box]  # noqa: E731
        else:
            held = local_part(momentum)
            momentum_of = lambda part: cut(held, part.box, box)  # noqa: E731
        return LocalParameter(
            weight=local_part(parameter), gradient=self._local_gradient(parameter), momentum_of=momentum_of
        )


def _place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _place_parameters(
    plan: Sequence[PlannedParameter], group: dist.ProcessGroup | None, world: int
) -> list[PlacedParameter]:
    """Every rank tells what it holds, once. Refuses a group whose ranks optimise different parameters."""
    mine = [(entry.name, tuple(entry.parameter.shape), entry.layout, _box_of(entry)) for entry in plan]
    everyone: list[Any] = [mine] * world
    if world > 1:
        dist.all_gather_object(everyone, mine, group=group)
    kept = [[(name, shape, layout) for name, shape, layout, _ in each] for each in everyone]
    for rank, theirs in enumerate(kept):
        if theirs != kept[0]:
            different = [pair for pair in zip(kept[0], theirs) if pair[0] != pair[1]]
            shown = f"{different[0][0]!r} against {different[0][1]!r}" if different else "one has more than the other"
            raise ValueError(
                f"ranks 0 and {rank} of the group optimise different parameters: {shown}; build the same model on all "
                "of them, or pass the process_group of the ranks that share one (a pipeline stage)"
            )
    return [
        PlacedParameter(name=name, shape=shape, layout=layout, boxes=tuple(each[number][3] for each in everyone))
        for number, (name, shape, layout, _) in enumerate(mine)
    ]


def _box_of(entry: PlannedParameter) -> Box:
    box = local_box(entry.name, entry.parameter)
    if isinstance(entry.parameter, DTensor) and tuple(stop - start for start, stop in box) != tuple(
        local_part(entry.parameter).shape
    ):
        raise ValueError(
            f"{entry.name!r} has {tuple(local_part(entry.parameter).shape)} elements on this rank, its placements "
            f"{entry.parameter.placements!r} say {box!r}; padded shards are not supported"
        )
    return box
