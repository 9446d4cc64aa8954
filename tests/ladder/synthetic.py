"""Results of a ladder that nobody ran: losses on a known curve, with noise that the arms of a seed share."""

import random
from collections.abc import Mapping
from pathlib import Path

from perilune.ladder import cost
from perilune.ladder.design import Cell, Ladder
from perilune.ladder.results import Result, write_result
from perilune.ladder.run import legs

STARTED = "2026-11-15T10:00:00+00:00"


def write_synthetic(
    ladder: Ladder,
    folder: Path,
    *,
    rho: Mapping[str, float],
    held_out: bool = False,
    floor: float = 1.7,
    exponent: float = 0.15,
    sd: float = 0.004,
    paired_sd: float = 0.0015,
    started: str = STARTED,
    ran_alone: bool = False,
) -> list[Result]:
    """A result for every cell; `rho` by arm, 1 for those not named."""
    found = []
    for cell in ladder.cells(held_out=held_out):
        costs = cost.cost(ladder, cell.rung, cell.arm)
        for place, leg in enumerate(legs(ladder, cell)):
            compute = costs.flops_per_token * costs.tokens[place]
            reducible = 2.3 * 1.03**place * (rho.get(cell.arm.name, 1.0) * compute / 1e15) ** -exponent
            found.append(
                Result(
                    rung=cell.rung.name, arm=cell.arm.name, seed=cell.seed, horizon=leg.horizon.name,
                    loss=floor + reducible + _noise(cell, sd, shared=True) + _noise(cell, paired_sd, shared=False),
                    bits_per_byte=1.0, tokens=costs.tokens[place], flops=compute, baseline_flops=compute,
                    parameters=costs.parameters, epochs=0.5 + place,
                    tokens_per_s=2e6 / (1 + costs.flops_per_token / 1e8), ran_alone=ran_alone, skipped_steps=0,
                    lr=leg.tip.optimizer.lr, fingerprint=leg.fingerprint, seconds=30.0, corpus="0123456789abcdef",
                    environment={"started": started, "commit": "abc1234", "torch": "2.13.0", "machine": "NVIDIA H200"},
                    max_logits=[(step, 5.0 + 0.1 * step) for step in range(0, 1000, 50)],
                )
            )  # fmt: skip
            write_result(folder, found[-1])
    return found


def _noise(cell: Cell, sd: float, *, shared: bool) -> float:
    mark = f"{cell.rung.name} {cell.seed} {'' if shared else cell.arm.name}"
    return sd * random.Random(mark).gauss(0, 1)
