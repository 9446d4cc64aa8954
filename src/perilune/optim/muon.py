"""MuonClip (Kimi K2, arXiv 2507.20534): Muon for hidden matrices, AdamW for the rest, QK-Clip after the step.

For a matrix W [out, in] with gradient G (Moonlight, arXiv 2502.16982):

    M <- mu M + (1 - mu) G                          momentum, float32
    D  = mu M + (1 - mu) G   (Nesterov), or M
    W <- W - lr (0.2 sqrt(max(out, in)) orthogonalize(D) + weight_decay W)

The factor brings the root mean square of the update to that of AdamW, so one learning rate and one weight decay serve
both. Decay uses the unscaled learning rate. The momentum is an average, not a sum: orthogonalize ignores the scale, but
the buffers of the two conventions differ by 1 - mu, so the convention is part of the state and checked on load.

What a parameter holds is decided in plan.py and shown by `table()`; matrices of equal shape go through Newton-Schulz as
one stack. State exists from the start for every parameter, so checkpoints have the same entries whatever got a
gradient. Parameters without a gradient are left alone: no decay, no momentum. Gradients are only read. No step waits
for the device when the learning rate is a float.

On a GPU the passes over memory are fused (fused.py) and Newton-Schulz runs in float16, whose rounding is an eighth of
bfloat16's and whose range a normalised matrix never leaves. With `capturable=True` a step can be recorded in a CUDA
graph (capture.py).

Muon's half ignores the scale of a gradient at any finite size. AdamW's does not (see adamw.py): clip or skip steps
whose gradients explode.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from perilune.kernels.newton_schulz import orthogonalize, resolve_coefficients
from perilune.kernels.triton_support import HAS_TRITON
from perilune.optim.adamw import adamw_update, new_adamw_state
from perilune.optim.capture import CapturedStep, Settings, is_capturing
from perilune.optim.matrices import Adam, Layout, blocks
from perilune.optim.plan import PlannedParameter, plan_parameters
from perilune.optim.qk_clip import ClipReport, QKClip, find_heads, is_frozen
from perilune.optim.stacks import Stack, gather, members_of, plan_stacks
from perilune.optim.table import GroupRow, format_rows, group_rows

MUON, ADAM_DECAY, ADAM = "muon", "adam_decay", "adam"
CONVENTION = "average"
OWN_ATTRIBUTES = (
    *("per_head", "coefficients", "orthogonalize_dtype", "capturable"),
    *("qk_clip", "qk_report", "_layouts", "_names"),
)


class MuonClip(torch.optim.Optimizer):
    """Build it by `MuonClip.for_model(model, lr=...)`; param_groups are "muon", "adam_decay" and "adam", where not
    empty.

    `qk_clip` is the QKClip it owns (None: no heads found, or switched off); `qk_report` is what the last step saw.
    """

    def __init__(
        self,
        plan: Sequence[PlannedParameter],
        *,
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        per_head: bool = False,
        adam_lr: float | None = None,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        adam_weight_decay: float | None = None,
        coefficients: str | Sequence[tuple[float, float, float]] = "jordan",
        orthogonalize_dtype: torch.dtype | None = None,
        capturable: bool = False,
        qk_clip: QKClip | None = None,
    ) -> None:
        adam_lr = lr if adam_lr is None else adam_lr
        adam_weight_decay = weight_decay if adam_weight_decay is None else adam_weight_decay
        _check(
            lr=lr, weight_decay=weight_decay, adam_lr=adam_lr, adam_weight_decay=adam_weight_decay, adam_eps=adam_eps
        )
        _check_fraction(momentum=momentum, **{"adam_betas[0]": adam_betas[0], "adam_betas[1]": adam_betas[1]})
        if not plan:
            raise ValueError(
                "the model has no parameter that requires a gradient; unfreeze some before building MuonClip"
            )
        self.per_head = per_head
        self.coefficients = coefficients
        self.orthogonalize_dtype = orthogonalize_dtype
        self.capturable = capturable
        self.qk_clip = qk_clip
        self.qk_report: ClipReport | None = None
        self._layouts: dict[nn.Parameter, Layout] = {entry.parameter: entry.layout for entry in plan}
        self._names: dict[nn.Parameter, str] = {entry.parameter: entry.name for entry in plan}
        self._forget_places()
        muon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "momentum_form": CONVENTION,
        }
        adam = {"lr": adam_lr, "betas": tuple(adam_betas), "eps": adam_eps}
        settings = {
            MUON: muon,
            ADAM_DECAY: {**adam, "weight_decay": adam_weight_decay},
            ADAM: {**adam, "weight_decay": 0.0},
        }
        groups = []
        for name, options in settings.items():
            members = [entry.parameter for entry in plan if _group_of(entry.layout) == name]
            if members:
                groups.append({"params": members, "name": name, **options})
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        for parameter in self._layouts:
            self._state_of(parameter)

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        *,
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        qk_clip_tau: float | None = 100.0,
        gqa: Literal["query", "balanced"] = "query",
        per_head: bool = False,
        adam_lr: float | None = None,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        adam_weight_decay: float | None = None,
        decay_norm_gains: bool = True,
        coefficients: str | Sequence[tuple[float, float, float]] = "jordan",
        orthogonalize_dtype: torch.dtype | None = None,
        capturable: bool = False,
        overrides: Mapping[str, Layout] | None = None,
    ) -> MuonClip:
        """MuonClip over all trainable parameters of `model`.

        qk_clip_tau: largest attention logit QK-Clip allows; None switches it off, infinity only watches and reports (on
        a GPU upper bounds, see qk_clip.py). gqa: its rule for shared keys.
        per_head: orthogonalise declared head blocks apart instead of whole projections. adam_lr, adam_weight_decay:
        default to lr and weight_decay. decay_norm_gains: also decay gains of norms, as Moonlight; only where the
        default rule decides, so not for modules that declare their own (use overrides there). coefficients: a
        Newton-Schulz set of perilune.kernels.newton_schulz, or one (a, b, c) a step. orthogonalize_dtype: None takes
        float16 on a GPU, bfloat16 on a CPU that multiplies it in hardware, else float32. Results then differ between
        machines in the third digit of an update; give it to pin them. capturable: let CUDA graphs record `step`, see
        `captured_step`. overrides: layout by parameter name or pattern, e.g. {"blocks.*.gate.weight": Adam()}.
        """
        plan = plan_parameters(model, overrides=overrides, decay_norm_gains=decay_norm_gains)
        return cls(
            plan,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            per_head=per_head,
            adam_lr=adam_lr,
            adam_betas=adam_betas,
            adam_eps=adam_eps,
            adam_weight_decay=adam_weight_decay,
            coefficients=coefficients,
            orthogonalize_dtype=orthogonalize_dtype,
            capturable=capturable,
            qk_clip=None if qk_clip_tau is None else _clip_for(model, qk_clip_tau, gqa),
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient, then QK-Clip. Without any gradient nothing happens at
        all."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        capturing = is_capturing()
        if capturing and not self.capturable:
            raise RuntimeError(
                "a CUDA graph is recording a step of a MuonClip that was not built for it: lr and step counts would be "
                "constants of the graph. Build it with capturable=True"
            )
        moved = False
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            moved = True
            raw_gradients = [self._gradient_of(parameter) for parameter in parameters]
            states = [self._state_of(parameter) for parameter in parameters]
            settings = self._settings_for(group, parameters[0].device)
            layouts = [self._layouts[parameter] for parameter in parameters]
            if group["name"] == MUON and self._fused_update(
                group, parameters, raw_gradients, states, settings, layouts
            ):
                continue
            gradients = [_at_least_float32(gradient) for gradient in raw_gradients]
            # Half-precision parameters are updated in float32 and rounded once.
            masters = [_at_least_float32(parameter.detach()) for parameter in parameters]
            if group["name"] == MUON:
                if capturing:
                    raise RuntimeError(
                        f"{self._names[parameters[0]]!r} and the other matrices cannot be stepped in a CUDA graph: "
                        f"{self._why_not_fused(parameters, raw_gradients, states)}"
                    )
                self._muon_update(group, parameters, masters, gradients, states)
            else:
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
            for parameter, master in zip(parameters, masters, strict=True):
                if master.dtype != parameter.dtype:
                    parameter.copy_(master)
        if moved and self.qk_clip is not None:
            self._apply_qk_clip()
        return loss

    def captured_step(self) -> CapturedStep:
        """A callable to use in place of `step`: the first call is an ordinary step, the second records a CUDA graph,
        all later ones replay it, with the lr, weight decay and momentum that param_groups hold at that time."""
        return CapturedStep(self)

    def update_settings(self) -> None:
        """Bring lr, weight decay and momentum of param_groups to where a recorded step reads them.

        For graphs of your own that contain `step`: call it before each replay. Waits for nothing. Not needed for a
        learning rate that is a tensor on the device and changed in place, as torch's schedulers do.
        """
        for group in self.param_groups:
            for (name, _), settings in self._settings.items():
                if name == group["name"]:
                    settings.write(group)

    def skip_step(self) -> None:
        """Call instead of `step` when a step is thrown away (non-finite loss): its attention maxima must not clip the
        next."""
        if self.qk_clip is not None:
            self.qk_clip.discard()

    def _apply_qk_clip(self) -> None:
        clip = self.qk_clip
        assert clip is not None
        ever_clipped = clip.ever_clipped
        self.qk_report = clip.apply()
        if self.capturable and ever_clipped.device == clip.ever_clipped.device:
            # In place, so that every replay of a graph adds to what earlier ones saw.
            clip.ever_clipped = ever_clipped.copy_(clip.ever_clipped)

    def _settings_for(self, group: dict[str, Any], device: torch.device) -> Tensor | None:
        """lr, weight decay and 1 - momentum in device memory, for what reads them there; None where nothing does."""
        if device.type != "cuda":
            return None
        key = (group["name"], device)
        if key not in self._settings:
            if is_capturing():
                raise RuntimeError("take one step with MuonClip before a CUDA graph records one")
            self._settings[key] = Settings(device)
        if not is_capturing():
            self._settings[key].write(group)
        return self._settings[key].read(group)

    def _why_not_fused(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[dict[str, Tensor]]
    ) -> str | None:
        if parameters[0].device.type != "cuda":
            return "they are not on a GPU"
        if not HAS_TRITON:
            return "Triton is not installed (pip install 'perilune[gpu]')"
        dtype = self.orthogonalize_dtype or fast_dtype("cuda")
        if dtype not in (torch.float16, torch.bfloat16):
            return f"orthogonalize_dtype is {dtype}, not float16 or bfloat16"
        if any(parameter.device != parameters[0].device for parameter in parameters):
            return "they are on several devices"
        from perilune.optim.fused import why_not_fused

        momenta = [state["momentum_buffer"] for state in states]
        return next(filter(None, map(why_not_fused, parameters, gradients, momenta)), None)

    def _fused_update(
        self,
        group: dict[str, Any],
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        settings: Tensor | None,
        layouts: Sequence[Layout],
    ) -> bool:
        """The step of Muon's matrices on a GPU; False where the general path has to do it."""
        if settings is None:
            return False
        momenta = [state["momentum_buffer"] for state in states]
        fused = self._fused
        fits = fused is not None and fused.fits(parameters, gradients, momenta)
        if not fits or not fused.holds(gradients):
            if self._why_not_fused(parameters, gradients, states):
                return False
            if fits:
                fused = fused.with_gradients(gradients)
            else:
                from perilune.optim.fused import FusedMatrices

                fused = FusedMatrices(parameters, gradients, momenta, layouts=layouts, per_head=self.per_head)
        from perilune.kernels.newton_schulz.fast import iterate_normalized

        if is_capturing():
            # Tables written by the graph exist only once it runs, and must live as long as it may run.
            self._captured.append(fused)
        else:
            self._fused = fused
        dtype = self.orthogonalize_dtype or fast_dtype("cuda")
        coefficients = resolve_coefficients(self.coefficients)
        for stack, members in zip(fused.stacks, fused.members(gradients), strict=True):
            directions = stack.direction(members, settings, nesterov=group["nesterov"], dtype=dtype)
            stack.update(settings, iterate_normalized(directions, coefficients))
        return True

    def _muon_update(
        self,
        group: dict[str, Any],
        parameters: Sequence[nn.Parameter],
        masters: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[dict[str, Tensor]],
    ) -> None:
        lr, momentum = float(group["lr"]), group["momentum"]
        averages = [state["momentum_buffer"] for state in states]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        if group["weight_decay"]:
            torch._foreach_mul_(masters, 1 - lr * group["weight_decay"])
        layouts = [self._layouts[parameter] for parameter in parameters]
        master_blocks, gradient_blocks, average_blocks = (
            [
                list(blocks(tensor, layout, per_head=self.per_head))
                for tensor, layout in zip(tensors, layouts, strict=True)
            ]
            for tensors in (masters, gradients, averages)
        )
        for stack in self._stacks_for(parameters, masters):
            direction = gather(members_of(stack, average_blocks))
            if group["nesterov"]:
                direction = gather(members_of(stack, gradient_blocks)).lerp_(direction, momentum)
            dtype = self.orthogonalize_dtype or fast_dtype(direction.device.type)
            update = orthogonalize(direction, coefficients=self.coefficients, dtype=dtype)
            torch._foreach_add_(members_of(stack, master_blocks), list(update.unbind(0)), alpha=-lr * stack.rms_factor)

    def _stacks_for(self, parameters: Sequence[nn.Parameter], masters: Sequence[Tensor]) -> list[Stack]:
        """The stacks of these parameters; planned again only when another set of them has gradients."""
        key = tuple(parameters)
        if key not in self._stacks:
            layouts = [self._layouts[parameter] for parameter in parameters]
            self._stacks = {key: plan_stacks(masters, layouts, per_head=self.per_head)}
        return self._stacks[key]

    def _gradient_of(self, parameter: nn.Parameter) -> Tensor:
        self._check_gradient(parameter)
        assert parameter.grad is not None
        return parameter.grad.detach()

    def _check_gradient(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is not None and (gradient.is_sparse or gradient.is_complex()):
            kind = "sparse" if gradient.is_sparse else "complex"
            raise ValueError(
                f"gradient of {self._names[parameter]!r} is {kind}; "
                "MuonClip needs dense real gradients (nn.Embedding: sparse=False)"
            )

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            if isinstance(self._layouts[parameter], Adam):
                state.update(new_adamw_state(parameter, dtype))
            else:
                state["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        if "step" in state:
            # A graph counts on the device, everything else where reading it does not wait; a loaded state may be from
            # either.
            wanted = parameter.device if self.capturable else torch.device("cpu")
            if state["step"].device != wanted:
                state["step"] = state["step"].to(wanted)
        return state

    def _forget_places(self) -> None:
        """Where parameters, states and settings lie, and the stacks they form: found again by the next step."""
        self._stacks: dict[tuple[nn.Parameter, ...], list[Stack]] = {}
        self._settings: dict[tuple[str, torch.device], Settings] = {}
        self._fused: Any = None
        self._captured: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """For copy.deepcopy and pickle: torch keeps only its own three entries. Copy or pickle the model along with
        the optimizer, as one object, or the copy steps parameters of its own. Stacks are planned again."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in OWN_ATTRIBUTES}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_places()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups follow from the plan of the model; there is no way to add one that knows its layouts."""
        if param_group.get("name") not in (MUON, ADAM_DECAY, ADAM):
            raise ValueError(
                f"cannot add param group {param_group.get('name')!r} to MuonClip; "
                "build it anew with MuonClip.for_model(model, ...)"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The usual "state" and "param_groups", plus QK-Clip's statistics under "qk_clip"."""
        saved = super().state_dict()
        if self.qk_clip is not None:
            saved["qk_clip"] = self.qk_clip.state_dict()
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; "qk_clip" may be missing, as it is after torch.distributed.checkpoint."""
        groups = state_dict["param_groups"]
        self._check_groups(groups)
        numbers = [number for group in groups for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            self._check_entries(parameter, state_dict["state"].get(number, {}))
        super().load_state_dict({"state": state_dict["state"], "param_groups": groups})
        for number, parameter in zip(numbers, parameters, strict=True):
            # torch casts floating-point state to the parameter's dtype; for half-precision parameters that loses bits.
            for key, value in state_dict["state"].get(number, {}).items():
                loaded = self.state[parameter][key]
                wanted = torch.promote_types(loaded.dtype, torch.float32)
                if loaded.dtype != wanted:
                    self.state[parameter][key] = value.to(device=loaded.device, dtype=wanted, copy=True)
            self._state_of(parameter)
        if self.qk_clip is not None and "qk_clip" in state_dict:
            self.qk_clip.load_state_dict(state_dict["qk_clip"])

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        own = {group["name"]: len(group["params"]) for group in self.param_groups}
        saved = {group.get("name"): len(group["params"]) for group in groups}
        if own != saved:
            raise ValueError(
                f"optimizer state has groups {saved!r}, this MuonClip has {own!r} (name: number of parameters); "
                "load it into the same model with the same overrides"
            )
        for group in groups:
            form = group.get("momentum_form", CONVENTION)
            if group["name"] == MUON and form != CONVENTION:
                raise ValueError(
                    f"momentum_form of the saved state is {form!r}, expected {CONVENTION!r}; "
                    "multiply summed momentum buffers by 1 - momentum to convert them"
                )

    def _check_entries(self, parameter: nn.Parameter, entries: Mapping[str, Any]) -> None:
        expected = set(self._state_of(parameter))
        if entries and set(entries) != expected:
            raise ValueError(
                f"state of {self._names[parameter]!r} has entries {sorted(entries)!r}, expected {sorted(expected)!r}"
            )
        for key, value in entries.items():
            if key != "step" and value.shape != parameter.shape:
                shape, wanted = tuple(value.shape), tuple(parameter.shape)
                raise ValueError(f"{key} of {self._names[parameter]!r} has shape {shape}, expected {wanted}")

    def describe(self) -> list[GroupRow]:
        """One row per group and layout: what is optimised how."""
        return group_rows(self.param_groups, self._layouts)

    def table(self) -> str:
        """`describe` as a plain text table."""
        return format_rows(self.describe())


def clip_grad_norm_(optimizer: torch.optim.Optimizer | Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip gradients by their global norm without touching Muon's direction; returns the norm of all gradients.

    Orthogonalisation removes the scale of Muon's update, but a step whose gradient was scaled down would weigh less in
    the momentum average and turn its direction. So the norm is over all gradients, and only those of AdamW are scaled.
    Given plain parameters instead of an optimizer, all are scaled, as torch.nn.utils.clip_grad_norm_ does. Does not
    wait for the device. An optimizer that knows gradients spread over ranks does it itself (sharded.py).
    """
    over_ranks = getattr(optimizer, "clip_grad_norm_", None)
    if over_ranks is not None:
        return over_ranks(max_norm)
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = [(group["params"], group.get("name") == MUON) for group in optimizer.param_groups]
    else:
        groups = [([optimizer] if isinstance(optimizer, Tensor) else list(optimizer), False)]
    everything = [parameter.grad for parameters, _ in groups for parameter in parameters if parameter.grad is not None]
    scaled = [
        parameter.grad
        for parameters, muon in groups
        if not muon
        for parameter in parameters
        if parameter.grad is not None
    ]
    norm = torch.nn.utils.get_total_norm(everything)
    if scaled:
        torch._foreach_mul_(scaled, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(scaled[0].device))
    return norm


@functools.cache
def fast_dtype(device_type: str) -> torch.dtype:
    """Half precision where matrix products in it are faster than in float32, else float32."""
    if device_type == "cuda":
        return torch.float16
    if device_type != "cpu":
        return torch.bfloat16
    # Emulated bfloat16 is several times slower than float32; with the instructions it is about twice as fast.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return torch.bfloat16 if any(getattr(torch.cpu, probe, bool)() for probe in probes) else torch.float32


def _clip_for(model: nn.Module, tau: float, gqa: Literal["query", "balanced"]) -> QKClip | None:
    # A frozen projection must not move, and scaling only the rest of a layer's rows would not be exact.
    found = find_heads(model)
    heads = {name: layer for name, layer in found.items() if not is_frozen(layer, gqa)}
    half_frozen = [
        name
        for name, layer in found.items()
        if name not in heads and any(each.parameter.requires_grad for each in (*layer.rows, *layer.balanced_rows))
    ]
    if half_frozen:
        warnings.warn(
            f"QK-Clip leaves out {', '.join(map(repr, half_frozen))}: one of the q and k projections there is frozen, "
            "the other is not, and their logits may grow. Freeze or train both, or pass qk_clip_tau=None",
            stacklevel=3,
        )
    if heads:
        return QKClip(heads, tau, gqa=gqa)
    if not half_frozen:
        warnings.warn(
            f"qk_clip_tau={tau!r}, but no trainable attention module of {type(model).__name__} declares qk_heads(): "
            "attention logits are not clipped. Implement perilune.optim.ClipsQK, or pass qk_clip_tau=None",
            stacklevel=3,
        )
    return None


def _group_of(layout: Layout) -> str:
    if isinstance(layout, Adam):
        return ADAM_DECAY if layout.weight_decay else ADAM
    return MUON


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _check(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value!r}; expected a finite number >= 0")


def _check_fraction(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value!r}; expected a number in [0, 1)")
