"""Forward and backward of small models as CUDA graphs: recorded once, replayed with the numbers of every micro-batch.

A small model takes the host longer to launch than the device to compute. A graph launches it all at once, with the
shapes and addresses it was recorded with:

    tokens, targets, borders, 1 / V     are copied into buffers that stay. Borders are filled up with empty documents to
                                        the next of a few sizes; an empty document changes nothing anywhere
    gradients                           stay where they are; zeroed once a step, every micro-batch adds to them
    maxima of attention logits          stay as well (optim/heads.py), and QK-Clip reads them as ever
    features of pictures and places     are copied like tokens, and filled up by the last of them again and again: the
                                        same numbers to the same place

Pictures are of any number and size, so the vision tower runs without a graph. The language model is recorded from its
features on, and leaves their gradient, which goes back through the tower (decoupled.py, without the second forward).

There is a recording for every (tokens, documents, features) that comes; its first micro-batches run without one, on
the same buffers, which compiles every kernel. All recordings share one piece of memory: their activations, kept until
the end. The numbers are those of the step without graphs: the same kernels in the same order. (Of a KDA layer with
heads of 64 or 128 on a GPU, gradients of A_log and dt_bias are sums over chunks, into which empty documents bring
zeros: there the last bit may be another. And into how many pieces KDA cuts long documents depends on their number, the
empty ones included: where it cuts them, the forward may differ in the last bits too.)

A step that cannot be recorded goes on without a graph, and says so once. When there is none to begin with is up to
`why_not`. `record` is the seam: tests on a CPU give one that runs the same code every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perilune.data.chat_rows import ChatRows
from perilune.kernels.recording import recording
from perilune.kernels.triton_support import HAS_TRITON
from perilune.model import Decoder, MediaInput
from perilune.model.linear import HALF, has_hooks
from perilune.optim.heads import HeldMaxima, MaxLogitRecorder
from perilune.optim.qk_clip import find_heads
from perilune.train import ranks
from perilune.train.batches import MicroBatch, RunData
from perilune.train.run import Run
from perilune.train.run_config import RunConfig
from perilune.train.step import backward

Compute = Callable[[], Tensor]
Record = Callable[[Compute], Compute]
"""Takes what a step computes and returns what to call in its place; does not run it."""

WARM_UPS = 2
MOST_RECORDINGS = 12
"""Micro-batches of yet another shape run without a graph: somebody has rows of any length."""
SMALL = 2**28
"""Tokens of a micro-batch times width times layers up to which launches, not arithmetic, take the time: with 8 layers
of width 256 and 65,536 tokens (half of it) an H200 was busy for 20 of 50 ms."""


def of_run(run: Run) -> GraphedBackward | None:
    """For the steps of this run; None where they go without. Says why where somebody asked for graphs."""
    if reason := why_not(run.config, run.model, run.data, run.device):
        if run.config.trainer.cuda_graphs:
            run.outputs.say(f"trainer.cuda_graphs is True, but steps are not recorded: {reason}")
        return None
    record, pictures = cuda_recorder(run.device), run.config.data.has_pictures
    return GraphedBackward(run.model, record=record, pictures=pictures, say=run.outputs.say)


def why_not(config: RunConfig, model: Decoder, data: RunData, device: torch.device) -> str | None:
    """Why the steps of this run are not recorded, or None."""
    trainer = config.trainer
    if trainer.cuda_graphs is False:
        return "trainer.cuda_graphs is False"
    if device.type != "cuda":
        return f"it runs on {device.type}"
    if ranks.distributed():
        return "it runs on several ranks"
    if model.compute_dtype not in HALF:
        return f"it computes in {str(model.compute_dtype).removeprefix('torch.')}, which plans attention on the host"
    if trainer.compile:
        return "trainer.compile is on"
    if config.model.moe is not None:
        return "routers of experts make the host wait"
    chat = data.train if isinstance(data.train, ChatRows) else None
    if trainer.decoupled_vision:
        return "trainer.decoupled_vision is on: the vision tower looks at all pictures of a step before the first row"
    if chat is not None and chat.num_with_pictures:
        return "some dialogues hold pictures, and how many of them a step has varies"
    if config.parallel.recompute != "none":
        return f"parallel.recompute is {config.parallel.recompute!r}"
    if model.deterministic:
        return "the model is deterministic, document by document"
    if any(map(has_hooks, model.modules())) or any(map(_has_gradient_hooks, model.parameters())):
        return "somebody has hooks in the model"
    size = trainer.micro_batch_rows * config.data.seq_len * config.model.hidden_size * config.model.num_hidden_layers
    if trainer.cuda_graphs is None and size > SMALL:
        return "micro-batches are large enough without (trainer.cuda_graphs=True records them all the same)"
    return None


def _has_gradient_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def padded_documents(count: int) -> int:
    """The next of the sizes 1, 2, 4, 8, 16, 32, 48, 64, ..., 128, 160, 192, ...: a quarter too many from 64 on.

    Few stay few: KDA splits long documents into pieces only where there are not many.
    """
    if count <= 16:
        return 1 << max(count - 1, 0).bit_length()
    unit = max(16, 1 << (count.bit_length() - 3))
    return -(-count // unit) * unit


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffers:
    """What a recording reads."""

    tokens_1T: Tensor
    targets_1T: Tensor
    cu_seqlens: Tensor
    weight: Tensor
    """1 / targets of the global batch, a scalar: the gradient of the loss."""
    media: MediaInput | None = None
    """Features, a leaf whose gradient stays, and their places; None for text."""

    @classmethod
    def like(cls, batch: MicroBatch, num_documents: int, model: Decoder) -> Buffers:
        media = None
        if batch.media is not None:
            count = padded_documents(batch.media.positions.numel())
            shape = (count, model.config.hidden_size)
            leaf = torch.zeros(shape, dtype=model.compute_dtype, device=batch.tokens_BT.device).requires_grad_()
            leaf.grad = torch.zeros_like(leaf)
            media = MediaInput(positions=batch.media.positions.new_empty(count), features=leaf)
        wide = torch.promote_types(model.compute_dtype, torch.float32)
        return cls(
            tokens_1T=torch.empty_like(batch.tokens_BT),
            targets_1T=torch.empty_like(batch.targets_BT),
            cu_seqlens=batch.cu_seqlens.new_empty(num_documents + 1),
            weight=torch.empty((), dtype=wide, device=batch.tokens_BT.device),
            media=media,
        )

    @torch.no_grad()
    def fill(self, batch: MicroBatch, features: Tensor | None, num_targets: int) -> None:
        self.tokens_1T.copy_(batch.tokens_BT)
        self.targets_1T.copy_(batch.targets_BT)
        _fill_up(self.cu_seqlens, batch.cu_seqlens)
        self.weight.fill_(1.0 / max(1, num_targets))
        if self.media is not None and batch.media is not None and features is not None:
            assert self.media.features is not None
            _fill_up(self.media.features, features)
            _fill_up(self.media.positions, batch.media.positions)

    @property
    def feature_gradients(self) -> Tensor:
        assert self.media is not None and self.media.features is not None and self.media.features.grad is not None
        return self.media.features.grad


def _fill_up(buffer: Tensor, rows: Tensor) -> None:
    """`rows`, then the last of them until the end: a border of an empty document, or a feature at its place again."""
    buffer[: len(rows)].copy_(rows)
    buffer[len(rows) :].copy_(rows[-1:].expand(len(buffer) - len(rows), *rows.shape[1:]))


class HeldGradients:
    """Gradients of some parameters in memory that stays where it is."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._gradients = [torch.zeros_like(parameter) for parameter in parameters]

    def place(self) -> None:
        """Gradients go on where they stay: from zero, or from what is there already."""
        fresh = []
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is None:
                fresh.append(gradient)
            elif parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient
        if fresh:
            torch._foreach_zero_(fresh)


@dataclass(eq=False)
class _Shape:
    """Micro-batches of one shape: what they are copied to, how many there were, what runs them."""

    buffers: Buffers
    count: int = 0
    replay: Compute | None = None


class GraphedBackward:
    """Forwards and backwards of micro-batches on one device; the gradients end in .grad, as without it.

    `record` as `cuda_recorder` makes it. `pictures`: some micro-batches of the run hold them, if not those of every
    step. `say` is told when a step cannot be recorded.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        record: Record,
        pictures: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._model, self._record, self._say = model, record, say
        self._recorders: list[MaxLogitRecorder] = [heads.recorder for heads in find_heads(model).values()]
        self._shapes: dict[tuple[int, int, int], _Shape] = {}
        towers = [tower for tower in (model.vision_tower, model.mm_projector) if tower is not None]
        self._tower = [parameter for tower in towers for parameter in tower.parameters() if parameter.requires_grad]
        self._learning: list[nn.Parameter] = []
        self._gradients: HeldGradients | None = None
        self._tower_gradients: HeldGradients | None = None
        self._maxima: HeldMaxima | None = None
        self._works = True
        self._pictures, self._saw_pictures = pictures, False

    @property
    def gradients_stay(self) -> bool:
        """Whether the gradients of this step are where those of every such step will be.

        In a run with pictures that is a step that has some: without any, the vision tower has no gradients.
        """
        return self._works and self._gradients is not None and self._saw_pictures == self._pictures

    def __len__(self) -> int:
        """Recordings so far."""
        return sum(shape.replay is not None for shape in self._shapes.values())

    def __call__(self, batches: Sequence[MicroBatch], num_targets: int) -> Iterator[Tensor]:
        """The summed loss of every micro-batch of a step in nats; gradients of it over `num_targets` into .grad."""
        self._saw_pictures = False
        if self._gradients is not None:
            self._gradients.place()
        for batch in batches:
            if batch.media is not None and self._gradients is not None:
                self._place_tower_gradients()
            yield self._one(batch, num_targets)

    def _one(self, batch: MicroBatch, num_targets: int) -> Tensor:
        shape = self._shape_of(batch) if self._works and not batch.filler else None
        if shape is None:
            return backward(self._model, batch, num_targets)
        features = self._features(batch)
        shape.buffers.fill(batch, features, num_targets)
        shape.count += 1
        if shape.count <= WARM_UPS:
            loss = self._computed(shape.buffers)
            if self._gradients is None:
                self._learning = [parameter for parameter in self._language() if parameter.grad is not None]
        else:
            if shape.replay is None:
                shape.replay = self._recorded(shape.buffers)
            if shape.replay is None:
                return backward(self._model, batch, num_targets)
            self._take_maxima()
            loss = shape.replay().clone()  # the next replay writes to the same place
        if features is not None and features.requires_grad:
            features.backward(shape.buffers.feature_gradients[: len(features)])
        return loss

    def _features(self, batch: MicroBatch) -> Tensor | None:
        """What the vision tower makes of the pictures of a micro-batch, with all that its backward needs."""
        if batch.media is None:
            return None
        assert batch.media.pixels is not None, "the micro-batches of a run hold pixels"
        return self._model.vision_features(batch.media.pixels, batch.media.grids).to(self._model.compute_dtype)

    def _language(self) -> Iterator[nn.Parameter]:
        tower = set(map(id, self._tower))
        return (parameter for parameter in self._model.parameters() if id(parameter) not in tower)

    def _shape_of(self, batch: MicroBatch) -> _Shape | None:
        num_documents = padded_documents(batch.cu_seqlens.numel() - 1)
        num_features = 0 if batch.media is None else padded_documents(batch.media.positions.numel())
        key = batch.tokens_BT.numel(), num_documents, num_features
        if key not in self._shapes and len(self._shapes) < MOST_RECORDINGS:
            self._shapes[key] = _Shape(Buffers.like(batch, num_documents, self._model))
        return self._shapes.get(key)

    def _computed(self, buffers: Buffers) -> Tensor:
        borders = _borders_of_all_layers(buffers.cu_seqlens)
        if buffers.media is not None:
            buffers.feature_gradients.zero_()
        loss = self._model.loss(buffers.tokens_1T, buffers.targets_1T, borders, media=buffers.media)
        loss.backward(buffers.weight)
        return loss.detach()

    def _recorded(self, buffers: Buffers) -> Compute | None:
        """What replays the computation on these buffers; None where it cannot be recorded."""
        if self._gradients is None:
            self._gradients = HeldGradients(self._learning)
            self._gradients.place()
            self._maxima = HeldMaxima(self._recorders)
        self._take_maxima()
        maxima = self._maxima
        assert maxima is not None

        def compute() -> Tensor:
            loss = self._computed(buffers)
            maxima.keep()
            return loss

        try:
            replay = self._record(compute)
        except RuntimeError as error:
            # Nothing of it ran: gradients and maxima are as they were. They no longer have to stay.
            self._works = False
            self._shapes, self._gradients, self._tower_gradients = {}, None, None
            maxima.point()
            self._say(f"no CUDA graph of the training step ({_first_line(error)}): it goes on without")
            return None
        if not len(self):
            self._say("from here on steps are CUDA graphs (trainer.cuda_graphs); their activations stay in memory")
        return replay

    def _take_maxima(self) -> None:
        assert self._maxima is not None
        self._maxima.take()

    def _place_tower_gradients(self) -> None:
        if self._tower_gradients is None:
            self._tower_gradients = HeldGradients(self._tower)
        self._tower_gradients.place()
        self._saw_pictures = True


def _borders_of_all_layers(cu_seqlens: Tensor) -> Tensor:
    """A copy that lives for a forward and its backward: layers share what they derive from it, also in a graph."""
    borders = cu_seqlens.clone()
    if borders.is_cuda and HAS_TRITON:
        from perilune.kernels.kda.triton_tables import share_tables

        share_tables(borders)
    return borders


def cuda_recorder(device: torch.device) -> Record:
    """Records CUDA graphs that share memory; they are replayed one after the other on the current stream."""
    memory = torch.cuda.graph_pool_handle()

    def record(compute: Compute) -> Compute:
        graph = torch.cuda.CUDAGraph()
        with recording(graph, device, memory=memory):
            loss = compute()

        def replay() -> Tensor:
            graph.replay()
            return loss

        return replay

    return record


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
