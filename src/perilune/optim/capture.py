"""A whole optimizer step as one CUDA graph, with schedules honoured.

    optimizer = MuonClip.for_model(model, lr=1e-3, capturable=True)
    step = optimizer.captured_step()
    for batch in batches:
        scheduler.step()
        loss(model, batch).backward()
        step()
        optimizer.zero_grad(set_to_none=False)

A graph replays the very same kernels on the very same addresses: it costs the host one call however many matrices there
are. So gradients must stay where they are (`set_to_none=False`), and whatever changes between steps must be read from
device memory: lr, weight decay and momentum of Muon, lr of AdamW, the step counts, and the attention maxima that
QK-Clip looks at. The rest of param_groups is part of the graph; changing it afterwards is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from perilune.kernels.recording import recording

if TYPE_CHECKING:
    from perilune.optim.muon import MuonClip

# What kernels read from device memory, in this order; "momentum" as 1 - momentum, the weight of the newest gradient.
SETTINGS = ("lr", "weight_decay", "momentum")


class CaptureFailed(RuntimeError):
    """A step could not be recorded. Nothing of it was done: `step` can take it."""


def is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Settings:
    """Numbers of one param group in device memory, written only when they change."""

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(len(SETTINGS), dtype=torch.float32, device=device)
        self._written: list[float | None] = [None] * len(SETTINGS)

    def write(self, group: Mapping[str, Any]) -> None:
        for number, name in enumerate(SETTINGS):
            value = group.get(name, 0.0)
            if isinstance(value, Tensor) and value.is_cuda:
                self._written[number] = None
                continue
            value = 1.0 - float(value) if name == "momentum" else float(value)
            if value != self._written[number]:
                self.values[number].fill_(value)
                self._written[number] = value

    def read(self, group: Mapping[str, Any]) -> Tensor:
        """The numbers [lr, weight decay, 1 - momentum]; those that are device tensors are copied by the step itself."""
        for number, name in enumerate(SETTINGS):
            value = group.get(name)
            if isinstance(value, Tensor) and value.is_cuda:
                self.values[number].copy_(1.0 - value if name == "momentum" else value)
        return self.values


class CapturedStep:
    """Steps of a MuonClip: the first as it is, the second recorded, the others replayed. Made by `captured_step`."""

    def __init__(self, optimizer: MuonClip) -> None:
        if not optimizer.capturable:
            raise ValueError("captured_step needs MuonClip(..., capturable=True)")
        self.optimizer = optimizer
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = False
        self._gradients: tuple = ()
        self._places: tuple = ()
        self._tables: list[Any] = []
        self._settings: Any = None
        self._constants: list[dict[str, Any]] = []
        self._maxima: list[tuple[Tensor, Tensor]] = []
        self._recorded_report: Any = None

    def __call__(self) -> None:
        if not self._warm:
            self._check_devices()
            self.optimizer.step()
            self._warm = True
            return
        if self._graph is None:
            self._record()
        self._replay()

    def _record(self) -> None:
        optimizer = self.optimizer
        self._constants = self._constants_now()
        clip, report = optimizer.qk_clip, optimizer.qk_report
        statistics = None if clip is None else (clip.last_max_logits, clip.ever_clipped)
        seen = self._hold_maxima()
        graph, others = torch.cuda.CUDAGraph(), len(optimizer._captured)
        try:
            with recording(graph, optimizer.param_groups[0]["params"][0].device):
                optimizer.step()
        except RuntimeError as error:
            optimizer._captured, optimizer.qk_report = optimizer._captured[:others], report
            if clip is not None and statistics is not None:
                clip.last_max_logits, clip.ever_clipped = statistics
            self._give_back(seen)
            raise CaptureFailed(f"the step could not be recorded as a CUDA graph: {error}") from error
        self._graph = graph
        # The graph reads tables and settings. The optimizer gives both up when a state is loaded, even its own.
        self._tables, optimizer._captured = optimizer._captured[others:], optimizer._captured[:others]
        self._settings = optimizer._settings
        self._gradients, self._places = self._gradient_places(), self._other_places()
        # Recording runs nothing, but QK-Clip has forgotten the maxima of this step as if it had.
        self._recorded_report = optimizer.qk_report
        self._give_back(seen)

    def _replay(self) -> None:
        if self._gradient_places() != self._gradients:
            raise RuntimeError(
                "gradients moved since the step was recorded; keep them where they are: zero_grad(set_to_none=False)"
            )
        if self._other_places() != self._places or self.optimizer._settings is not self._settings:
            raise RuntimeError(
                "parameters, optimizer state or a tensor among the settings moved since the step was recorded, as "
                "load_state_dict does; make a new captured_step()"
            )
        if (now := self._constants_now()) != self._constants:
            raise RuntimeError(f"param_groups changed from {self._constants!r} to {now!r}; make a new captured_step()")
        optimizer = self.optimizer
        optimizer.update_settings()
        for (value, exact), recorder in zip(self._maxima, self._recorders(), strict=True):
            value.copy_(recorder.value)
            exact.copy_(recorder.exact)
            recorder.reset()
        assert self._graph is not None
        self._graph.replay()
        optimizer.qk_report = self._recorded_report
        if optimizer.qk_clip is not None and self._recorded_report is not None:
            optimizer.qk_clip.last_max_logits = self._recorded_report.max_logits

    def _hold_maxima(self) -> list[tuple[Tensor, Tensor]]:
        """Give every recorder tensors that stay, for the graph to read; returns what they held."""
        seen = [(recorder.value, recorder.exact) for recorder in self._recorders()]
        device = self.optimizer.param_groups[0]["params"][0].device
        self._maxima = [(value.to(device, copy=True), exact.to(device, copy=True)) for value, exact in seen]
        for recorder, (value, exact) in zip(self._recorders(), self._maxima, strict=True):
            recorder.value, recorder.exact = value, exact
        return seen

    def _give_back(self, seen: list[tuple[Tensor, Tensor]]) -> None:
        for recorder, (value, exact) in zip(self._recorders(), seen, strict=True):
            recorder.continue_in(value, exact)

    def _recorders(self) -> list[Any]:
        clip = self.optimizer.qk_clip
        return [] if clip is None else [layer.recorder for layer in clip.heads]

    def _check_devices(self) -> None:
        devices = {parameter.device for group in self.optimizer.param_groups for parameter in group["params"]}
        if len(devices) > 1 or next(iter(devices)).type != "cuda":
            found = ", ".join(sorted(map(str, devices)))
            raise RuntimeError(f"captured_step needs all parameters on one CUDA device, found {found}; use step()")

    def _gradient_places(self) -> tuple:
        return tuple(
            None if parameter.grad is None else parameter.grad.data_ptr()
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        )

    def _other_places(self) -> tuple:
        """What else a graph reads and writes that could be replaced between steps."""
        optimizer = self.optimizer
        tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        tensors += [value for parameter in tensors for value in optimizer.state[parameter].values()]
        if optimizer.qk_clip is not None:
            tensors.append(optimizer.qk_clip.ever_clipped)
        settings = [group.get(name) for group in optimizer.param_groups for name in SETTINGS]
        tensors += [value for value in settings if isinstance(value, Tensor) and value.is_cuda]
        return tuple(tensor.data_ptr() for tensor in tensors)

    def _constants_now(self) -> list[dict[str, Any]]:
        constants = []
        for group in self.optimizer.param_groups:
            free = {"params", "lr"} | ({"weight_decay", "momentum"} if "momentum" in group else set())
            constants.append({key: value for key, value in group.items() if key not in free})
        return constants
