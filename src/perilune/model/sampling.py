"""One token from each row of logits, as a pure function of the logits, the settings, a seed and an index.

    u       = uniform(seed, index)                                    index: how many tokens were drawn before
    weight  = floor(exp((logit - largest) / temperature) * 2**bits)   integers; the most likely has 2**bits
    kept    = weight >= threshold                                     after top-k, then top-p, then min-p
    token   = the first id whose running sum of kept weights exceeds floor(u * their total)

What is promised:
  * order: temperature, top-k, top-p (of what top-k left), min-p (of the largest). Tokens as likely as the last one kept
    are kept too, so nothing depends on how a sort breaks ties;
  * sums of integers are exact, so a row's token depends neither on the other rows, nor on threads, nor on the order in
    which a device adds;
  * temperature 0 is greedy: the first of the largest logits;
  * a row without a token to draw (a NaN or +inf, or every token banned with -inf) gets id 0 and a problem; the other
    rows are not touched;
  * on CUDA nothing is copied to the host and nothing waits for the device.

Tokens less likely than 2**-bits of the most likely are never drawn; bits is 43 for 160K tokens, 52 at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

# --- the counter-based generator --------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(start: int, index: int) -> int:
    """Output number `index` of the generator SplitMix64 (Steele, Lea and Flood 2014) that begins at `start`."""
    z = (start + (index + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 bits, the same on every machine.

    The seed is scrambled first: sequences of a plain SplitMix64 whose seeds differ by a multiple of its step overlap.
    """
    return (splitmix64(splitmix64(seed, 0), index) >> 11) * 2.0**-53


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """`uniform` of many pairs at once; seeds as `scrambled` gives them, both uint64 [N]."""
    return (_mixed(seeds + (indices + np.uint64(1)) * np.uint64(_GOLDEN)) >> np.uint64(11)) * 2.0**-53


def scrambled(seeds: Sequence[int]) -> np.ndarray:
    """uint64 [N], for `uniforms`."""
    return _mixed(np.array([seed & _MASK for seed in seeds], np.uint64) + np.uint64(_GOLDEN))


def _mixed(z: np.ndarray) -> np.ndarray:
    """Sums and products of uint64 wrap around, as they do in `splitmix64`."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# --- drawing ----------------------------------------------------------------------------------------------------------

FINE, NOT_A_NUMBER, NOTHING_ALLOWED = 0, 1, 2
PROBLEMS: dict[int, str] = {
    NOT_A_NUMBER: "the logits hold NaN or +inf: the weights or the input of the model are broken",
    NOTHING_ALLOWED: "every token is banned: nothing is left to sample",
}

TILE_ELEMENTS = 1 << 24  # rows are weighed in tiles of so many numbers: 128 MiB for each tensor of a tile
GREEDY = -1
UNIFORM = 4  # of the columns
MAX_SHORT = 1024  # top-k up to here looks for the k largest; beyond, rows are sorted


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of a batch, one entry per row, on the host: which rows need which work is known without asking the device."""

    temperature: Sequence[float] | np.ndarray
    """0 is greedy."""
    top_k: Sequence[int] | np.ndarray
    """0 keeps all."""
    top_p: Sequence[float] | np.ndarray
    min_p: Sequence[float] | np.ndarray
    uniform: Sequence[float] | np.ndarray

    def __post_init__(self) -> None:
        lengths = {each.name: len(getattr(self, each.name)) for each in fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"settings have {lengths!r} entries, expected one per row in each")


@dataclass(eq=False)
class Arranged:
    """The same as arrays, with rows by the work that they need. Of a batch that stays the same, `columns[UNIFORM]` is
    all that changes from token to token."""

    columns: np.ndarray
    """float64 [5, N]: temperature, top_k, top_p, min_p, uniform"""
    groups: list[tuple[int, np.ndarray]]
    """(how many of the largest weights the cuts have to see, rows); greedy rows are in none."""

    @staticmethod
    def of(settings: Settings, vocab_size: int) -> "Arranged":
        given = (settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.uniform)
        columns = np.array([np.asarray(column, np.float64) for column in given])
        widths = _widths(columns, vocab_size)
        groups = [(width, np.flatnonzero(widths == width)) for width in sorted(set(widths.tolist()) - {GREEDY})]
        return Arranged(columns=columns, groups=groups)


def draw(logits_NV: Tensor, settings: Settings | Arranged) -> tuple[Tensor, Tensor]:
    """(token ids [N] int64, problems [N] int64: FINE or a key of PROBLEMS), on the device of the logits."""
    rows = len(settings.temperature) if isinstance(settings, Settings) else settings.columns.shape[1]
    if logits_NV.ndim != 2 or len(logits_NV) != rows:
        raise ValueError(f"logits have the shape {tuple(logits_NV.shape)!r}, expected [{rows}, vocabulary]")
    if not logits_NV.numel():
        return logits_NV.new_zeros(0, dtype=torch.long), logits_NV.new_zeros(0, dtype=torch.long)
    largest_N, ids_N, problems_N = _largest(logits_NV)
    arranged = Arranged.of(settings, logits_NV.shape[1]) if isinstance(settings, Settings) else settings
    tile = max(1, TILE_ELEMENTS // logits_NV.shape[1])
    for width, members in arranged.groups:
        for start in range(0, len(members), tile):
            some = members[start : start + tile]
            own = arranged.columns if len(some) == len(logits_NV) else np.ascontiguousarray(arranged.columns[:, some])
            columns_5n = to_device(own, logits_NV.device)
            if len(some) == len(logits_NV):
                ids_N = _drawn(logits_NV, largest_N, columns_5n, width)
            else:
                index_n = to_device(some, logits_NV.device)
                ids_N[index_n] = _drawn(logits_NV[index_n], largest_N[index_n], columns_5n, width)
    return torch.where(problems_N == FINE, ids_N, 0), problems_N


def draw_alike(logits_NV: Tensor, columns_5N: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`draw` of rows that are one group of `Arranged`, or all GREEDY, with its columns on the device: it can be part of
    a CUDA graph."""
    largest_N, ids_N, problems_N = _largest(logits_NV)
    if width != GREEDY:
        ids_N = _drawn(logits_NV, largest_N, columns_5N, width)
    return torch.where(problems_N == FINE, ids_N, 0), problems_N


def _largest(logits_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(largest logit, its id, problem) of every row."""
    largest_N, ids_N = logits_NV.max(dim=-1)  # NaN counts as largest, and the first of equals is taken
    not_a_number = torch.where(largest_N < torch.inf, FINE, NOT_A_NUMBER)
    return largest_N, ids_N, torch.where(largest_N == -torch.inf, NOTHING_ALLOWED, not_a_number)


def _widths(columns: np.ndarray, vocab_size: int) -> np.ndarray:
    """How many of the largest weights the cuts of each row have to see, [N]; GREEDY: none is weighed.

    0: no cut needs the weights in order. Rows share a width so that a few of them do not make all of them sort.
    """
    temperature, top_k, top_p = columns[:3]
    cuts = (top_k > 0) & (top_k < vocab_size)
    widths = np.where(cuts | (top_p < 1), vocab_size, 0)
    widths[cuts & (top_k <= MAX_SHORT)] = min(MAX_SHORT, vocab_size)
    widths[temperature <= 0] = GREEDY
    return widths


def _drawn(logits_NV: Tensor, largest_N: Tensor, columns_5N: Tensor, width: int) -> Tensor:
    vocab_size = logits_NV.shape[1]
    temperature_N, top_k_N, top_p_N, min_p_N, uniform_N = columns_5N
    weights_NV = _weights(logits_NV, largest_N, temperature_N)
    threshold_N = (min_p_N * 2.0 ** _bits(vocab_size)).ceil().long()
    if width:
        top_k_N = torch.where(top_k_N > 0, top_k_N, vocab_size)
        threshold_N = torch.maximum(threshold_N, _cut(weights_NV, width, top_k_N, top_p_N))
    running_NV = weights_NV.masked_fill_(weights_NV < threshold_N[:, None], 0).cumsum(-1)
    # A total has up to 62 bits, and its product with u is rounded to 53: never past the last token.
    total_N = running_NV[:, -1]
    place_N = torch.minimum((uniform_N * total_N.double()).long(), total_N - 1)
    return torch.searchsorted(running_NV, place_N[:, None], right=True)[:, 0]


def _bits(vocab_size: int) -> int:
    """As many as keep the sum of all weights below 2**62 and a weight exact in float64."""
    return min(52, 61 - vocab_size.bit_length())


def _weights(logits_NV: Tensor, largest_N: Tensor, temperature_N: Tensor) -> Tensor:
    # Relative to the largest first: a tiny temperature must make the others -inf, not the largest inf.
    scaled_NV = (logits_NV.double() - largest_N.double()[:, None]).div_(temperature_N[:, None])
    # NaN is left in rows with a problem alone: whatever is found there is not used.
    return scaled_NV.exp_().mul_(2.0 ** _bits(logits_NV.shape[1])).long()


def _cut(weights_NV: Tensor, width: int, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """The smallest weight that top-k and then top-p keep, [N]."""
    if width < weights_NV.shape[1]:
        ordered_NW = weights_NV.topk(width, dim=-1).values
    else:
        ordered_NW = weights_NV.sort(dim=-1, descending=True).values
    place_W = torch.arange(width, device=weights_NV.device)
    ordered_NW = ordered_NW.masked_fill_(place_W >= top_k_N[:, None], 0)
    running_NW = ordered_NW.cumsum(-1)
    total_N = running_NW[:, -1]
    enough_N = torch.where(top_p_N < 1, (top_p_N * total_N.double()).ceil().long(), total_N)
    kept_N = (running_NW - ordered_NW < enough_N[:, None]).sum(-1)
    return ordered_NW.gather(-1, (kept_N - 1).clamp_min_(0)[:, None])[:, 0]


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy that does not wait for the device."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
