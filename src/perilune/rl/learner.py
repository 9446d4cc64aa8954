"""From trajectories to an optimizer step.

Branches are packed into rows of documents that never touch; a row is one forward pass, and a sample is in one row. New
log-probs are read at the places whose next token the policy sampled, nowhere else: what tools and users wrote has no
gradient. The losses of rows add up to the loss of the step (objective.py), however samples are packed.

`routing_replay` has every token meet the experts that it met in the engine (model/routes.py), weighed by the trainer's
own scores: a policy with experts then differs from what was sampled by its weights, not by near-ties of its routers.

`ptx_weight` adds the cross entropy of supervised rows per token (PTX), so that RL does not unlearn them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from perilune.data.media import merge_media, tokens_of_grid
from perilune.data.packing import PackedBatch
from perilune.kernels.cpu_products import fast_products
from perilune.model import Decoder, MediaInput
from perilune.model.deterministic import token_log_probs
from perilune.model.routes import Replayed, num_expert_layers
from perilune.rl.objective import ObjectiveConfig, PolicyTokens, Totals, policy_loss
from perilune.rl.trajectory import Branch
from perilune.train.optimizer import Optimization, OptimizerConfig, build_optimization

LOGITS_AT_ONCE = 1 << 26
"""Numbers of logits that are kept for the backward; more are computed again there."""
ROW_UNIT, BORDER_UNIT = 1024, 16
"""On a GPU rows have a multiple of so many tokens, and of so many documents: Triton compiles kernels of attention once
more for numbers that 16 does not divide, and memory is found again where it was."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-4))
    row_tokens: int = 8192
    """Tokens in one forward pass; a longer sample has one of its own."""
    max_grad_norm: float | None = 1.0
    ptx_weight: float = 0.0
    routing_replay: bool = False
    """Take the experts that the engine chose, token by token. For models with experts only."""

    def __post_init__(self) -> None:
        if self.row_tokens < 1:
            raise ValueError(f"learner.row_tokens is {self.row_tokens!r}, expected at least 1")
        if not 0 <= self.ptx_weight < float("inf"):
            raise ValueError(f"learner.ptx_weight is {self.ptx_weight!r}, expected at least 0")


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One episode as the learner sees it."""

    branches: Sequence[Branch]
    advantage: float

    @property
    def num_trained(self) -> int:
        return sum(branch.num_trained for branch in self.branches)


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one optimizer step was."""

    loss: float
    tokens: int
    samples: int
    gap: float
    """Mean over tokens of |log-prob of the trainer - log-prob of the engine|."""
    largest_gap: float
    clipped: float
    """Share of tokens without a policy gradient because of the band."""
    grad_norm: float
    skipped: bool
    """The gradient was not finite: no weight moved."""
    ptx_loss: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyRow:
    """Branches one after the other, on the device."""

    tokens: Tensor
    """[1, T]"""
    cu_seqlens: Tensor
    places: Tensor
    """[n] where in the row the next token was sampled by the policy."""
    chosen: Tensor
    """[n] these next tokens."""
    old: Tensor
    advantage: Tensor
    sample: Tensor
    media: MediaInput | None
    routes: Replayed | None


class Learner:
    """Owns the optimizer of a model that it trains in place."""

    def __init__(self, model: Decoder, config: LearnerConfig) -> None:
        if config.routing_replay and model.config.moe is None:
            raise ValueError("learner.routing_replay is True, expected False: the model has no experts")
        self.model = model
        self.config = config
        self.optimization: Optimization = build_optimization(model, config.optimizer)

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def update(self, samples: Sequence[Sample], *, ptx: PackedBatch | None = None, lr_scale: float = 1.0) -> Update:
        """One optimizer step on all of them and on the supervised rows. Without a trained token in either nothing
        happens."""
        with fast_products(self.device, bits_matter=self.model.deterministic):
            return self._update(samples, ptx=ptx, lr_scale=lr_scale)

    def _update(self, samples: Sequence[Sample], *, ptx: PackedBatch | None, lr_scale: float) -> Update:
        tokens = sum(sample.num_trained for sample in samples)
        supervised = None if ptx is None or not self.config.ptx_weight or not ptx.num_targets else ptx
        if not tokens and supervised is None:
            return Update(loss=0.0, tokens=0, samples=len(samples), gap=0.0, largest_gap=0.0, clipped=0.0,
                          grad_norm=0.0, skipped=False)  # fmt: skip
        totals = Totals(tokens=max(1, tokens), samples=max(1, len(samples)))
        self.model.train()
        # A sum over rows on the device: nothing waits for the host before the step.
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        largest = torch.zeros((), dtype=torch.float64, device=self.device)
        for row in self._rows(samples) if tokens else ():
            found = policy_loss(self._policy_tokens(row), totals, self.config.objective)
            found.loss.backward()
            sums += torch.stack([found.loss.detach(), found.num_clipped, found.gap]).double()
            largest = torch.maximum(largest, found.largest_gap.double())
        ptx_loss = None if supervised is None else self._ptx(supervised)
        self.optimization.set_lr(lr_scale)
        norm = float(self.optimization.clip_gradients(self.config.max_grad_norm))
        skipped = not np.isfinite(norm)
        if skipped:
            self.optimization.skip()
            self.model.discard_step_statistics()
        else:
            self.optimization.step()
            self.model.after_optimizer_step()
        loss, clipped, gap = sums.tolist()
        return Update(
            loss=loss,
            tokens=tokens,
            samples=len(samples),
            gap=gap / totals.tokens,
            largest_gap=float(largest),
            clipped=clipped / totals.tokens,
            grad_norm=norm,
            skipped=skipped,
            ptx_loss=ptx_loss,
        )

    @torch.no_grad()
    def log_probs(self, branches: Iterable[Branch]) -> list[np.ndarray]:
        """Of each branch's trained tokens, under the weights as they are; packed as for an update."""
        asked = list(branches)
        rows = self._rows([Sample(branches=[branch], advantage=0.0) for branch in asked])
        found = [self._policy_tokens(row).new.double().cpu().numpy() for row in rows]
        ends = np.cumsum([branch.num_trained for branch in asked])
        return np.split(np.concatenate([*found, np.zeros(0)]), ends[:-1]) if asked else []

    def _policy_tokens(self, row: PolicyRow) -> PolicyTokens:
        hidden = self.model.hidden(row.tokens, cu_seqlens=row.cu_seqlens, media=row.media, routes=row.routes)
        hidden = hidden[0, row.places]
        return PolicyTokens(
            new=self._log_probs(hidden, row.chosen), old=row.old, advantage=row.advantage, sample=row.sample
        )

    def _log_probs(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """[n] log-probs of the chosen tokens, in at least float32."""
        if self.model.deterministic:
            return token_log_probs(self.model.logits(hidden), chosen)
        step = max(1, LOGITS_AT_ONCE // self.model.config.vocab_size)
        if hidden.shape[0] <= step or not torch.is_grad_enabled():
            parts = [self._part(*pair) for pair in zip(hidden.split(step), chosen.split(step))]
        else:
            parts = [
                checkpoint(self._part, *pair, use_reentrant=False)
                for pair in zip(hidden.split(step), chosen.split(step))
            ]
        return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)

    def _part(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        return self.model.logits(hidden).log_softmax(-1).gather(1, chosen[:, None])[:, 0]

    def _ptx(self, batch: PackedBatch) -> float:
        device = self.device
        media = None
        if batch.pixels is not None and batch.grids:
            assert batch.media_positions is not None
            media = MediaInput(
                positions=torch.from_numpy(batch.media_positions).to(device),
                pixels=torch.from_numpy(batch.pixels).to(device),
                grids=batch.grids,
            )
        loss = self.model.loss(
            torch.from_numpy(batch.tokens).to(device)[None],
            torch.from_numpy(batch.targets).to(device)[None],
            torch.from_numpy(batch.cu_seqlens).to(device),
            media,
        ) / max(1, batch.num_targets)
        (self.config.ptx_weight * loss).backward()
        return float(loss.detach())

    def _rows(self, samples: Sequence[Sample]) -> Iterator[PolicyRow]:
        """Samples with something to learn, in order, as many to a row as fit."""
        row: list[tuple[int, Branch]] = []
        used = 0
        for number, sample in enumerate(samples):
            learnt = [(number, branch) for branch in sample.branches if branch.num_trained]
            length = sum(len(branch.tokens) - 1 for _, branch in learnt)
            if row and used + length > self.config.row_tokens:
                yield self._row(row, samples)
                row, used = [], 0
            row += learnt
            used += length
        if row:
            yield self._row(row, samples)

    def _row(self, members: Sequence[tuple[int, Branch]], samples: Sequence[Sample]) -> PolicyRow:
        tokens, places, chosen, old, advantage, sample, positions = [], [], [], [], [], [], []
        borders = [0]
        first = members[0][0]
        for number, branch in members:
            # The last token is only predicted. The first of a row of tokens is never sampled: a prompt comes before.
            at, trained = borders[-1], np.flatnonzero(branch.mask[1:])
            tokens.append(branch.tokens[:-1])
            places.append(at + trained)
            chosen.append(branch.tokens[1:][trained])
            old.append(branch.logprobs[1:][trained])
            advantage.append(np.full(len(trained), samples[number].advantage))
            sample.append(np.full(len(trained), number - first))
            for item, start in zip(branch.media, branch.starts, strict=True):
                positions.append(at + np.arange(start, start + tokens_of_grid(item.grid)))
            borders.append(at + len(branch.tokens) - 1)
        device = self.device
        if self._fills_up():
            fill_up(tokens, borders, max((longest_text(branch) for _, branch in members), key=len))

        def on_device(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(device=device, dtype=dtype)

        media = None
        shown = [item for _, branch in members for item in branch.media]
        if shown:
            merged = merge_media(shown)
            media = MediaInput(
                positions=on_device(positions, torch.long),
                pixels=torch.from_numpy(merged.pixels).to(device),
                grids=merged.grids,
            )
        exact = torch.float64 if self.model.compute_dtype == torch.float64 else torch.float32
        return PolicyRow(
            tokens=on_device(tokens, torch.long)[None],
            cu_seqlens=torch.tensor(borders, dtype=torch.int32, device=device),
            places=on_device(places, torch.long),
            chosen=on_device(chosen, torch.long),
            old=on_device(old, exact),
            advantage=on_device(advantage, exact),
            sample=on_device(sample, torch.long),
            media=media,
            routes=self._routes([branch for _, branch in members]) if self.config.routing_replay else None,
        )

    def _fills_up(self) -> bool:
        """Where shapes cost time, and more tokens change nothing: they would be counted by routers."""
        return self.device.type == "cuda" and self.model.config.moe is None and not self.model.deterministic

    def _routes(self, branches: Sequence[Branch]) -> Replayed:
        """One row per token of the packed row; ValueError where the engine did not record those of this model."""
        config = self.model.config
        assert config.moe is not None
        wanted = (num_expert_layers(config), config.moe.num_experts_per_token)
        found = []
        for branch in branches:
            routes = branch.routes
            if routes is None:
                raise ValueError(
                    f"a branch of {len(branch.tokens)} tokens has no routes and learner.routing_replay is True: record "
                    "them (engine.record_routes, rollout.talk.record_routes), or set it to False"
                )
            if routes.shape[1:] != wanted or routes.max(initial=0) >= config.moe.num_experts:
                raise ValueError(
                    f"a branch has routes of shape {routes.shape} up to expert {routes.max(initial=0)}, expected "
                    f"{wanted[0]} layers with {wanted[1]} of {config.moe.num_experts} experts: another model sampled it"
                )
            found.append(routes)
        # torch knows too little of uint16
        book = np.concatenate(found).transpose(1, 0, 2).astype(np.uint8 if config.moe.num_experts <= 256 else np.int16)
        return Replayed(book=torch.from_numpy(np.ascontiguousarray(book)).to(self.device))


def longest_text(branch: Branch) -> np.ndarray:
    """The longest piece of a branch between its pictures, without the last token; one token at the least."""
    ends = [start + tokens_of_grid(item.grid) for item, start in zip(branch.media, branch.starts, strict=True)]
    pieces = [branch.tokens[:-1][start:end] for start, end in zip([0, *ends], [*branch.starts, len(branch.tokens)])]
    return max(pieces, key=len) if any(map(len, pieces)) else branch.tokens[:1]


def fill_up(tokens: list[np.ndarray], borders: list[int], text: np.ndarray) -> None:
    """More documents, of which nothing is read, until the row has whole units; the last ones are empty.

    They are beginnings of `text`, a piece of the row, so that attention meets no logits but those of ordinary text:
    QK-Clip looks at them too.
    """
    end = -(-borders[-1] // ROW_UNIT) * ROW_UNIT
    while borders[-1] < end:
        tokens.append(text[: end - borders[-1]])
        borders.append(borders[-1] + len(tokens[-1]))
    borders += [end] * (-(len(borders) - 1) % BORDER_UNIT)
