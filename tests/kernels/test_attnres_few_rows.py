"""The kernel that reads Attention Residuals for a few tokens, in Triton's interpreter, against the definition."""

import pytest
import torch

from perilune.kernels.attnres.few_rows import MOST_READERS, merge_few_rows, open_few_rows, read_few_rows, takes_few_rows
from perilune.kernels.attnres.reference import reference_mix
from perilune.kernels.norm.reference import reference_rms_norm

EPS, NORM_EPS = 1e-6, 1e-4


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("sources, places, tokens, width", [(0, 1, 1, 8), (0, 4, 3, 24), (2, 3, 5, 40), (5, 9, 2, 64)])
def test_a_read_adds_mixes_and_norms(
    sources: int, places: int, tokens: int, width: int, adds: bool, closes: bool
) -> None:
    generator = torch.Generator().manual_seed(sources)
    bank = torch.randn(places, 1, tokens, width, generator=generator)
    bank[sources:] = torch.nan  # what is no source yet counts for nothing
    running, x = torch.randn(2, 1, tokens, width, generator=generator)
    query, gain, weight = torch.randn(3, width, generator=generator)
    before = bank.clone()
    total, normed = read_few_rows(
        bank, sources, running if adds else None, x, query, gain, weight, eps=EPS, norm_eps=NORM_EPS, closes=closes
    )
    right = running + x if adds else x
    torch.testing.assert_close(total, right)
    every = [source.double() for source in (*before[:sources], right)]
    mixed = reference_mix(every, query.double(), gain=gain.double(), eps=EPS)
    expected = reference_rms_norm(mixed, weight.double(), NORM_EPS)
    torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-5)
    if closes:
        torch.testing.assert_close(bank[sources], right)
        bank[sources] = torch.nan
    torch.testing.assert_close(bank, before, equal_nan=True)


def right_read(sources: list[torch.Tensor], query: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor):
    mixed = reference_mix([source.double() for source in sources], query.double(), gain=gain.double(), eps=EPS)
    return reference_rms_norm(mixed, weight.double(), NORM_EPS)


@pytest.mark.parametrize("readers", [1, 2, 5, MOST_READERS])
@pytest.mark.parametrize("sources, places, tokens, width", [(0, 1, 1, 8), (2, 4, 3, 24), (7, 8, 2, 40)])
def test_later_readers_of_a_block_join_the_bank_with_what_the_block_has_written(
    sources: int, places: int, tokens: int, width: int, readers: int
) -> None:
    generator = torch.Generator().manual_seed(readers)
    bank = torch.randn(places, 1, tokens, width, generator=generator)
    bank[sources:] = torch.nan
    x, *written = torch.randn(readers, 1, tokens, width, generator=generator)
    queries, gains = torch.randn(2, readers, width, generator=generator)
    weight = torch.randn(width, generator=generator)
    finished = [*bank[:sources].clone(), x]
    total, normed, ahead = open_few_rows(
        bank, sources, None, x, list(queries), list(gains), weight, eps=EPS, norm_eps=NORM_EPS, closes=True
    )
    torch.testing.assert_close(total, x)
    torch.testing.assert_close(bank[sources], x)
    right = right_read(finished, queries[0], gains[0], weight)
    torch.testing.assert_close(normed.double(), right, rtol=1e-5, atol=1e-5)
    running = None
    for number, output in enumerate(written, 1):
        query, gain = queries[number], gains[number]
        running, normed = merge_few_rows(
            ahead, number - 1, running, output, query, gain, weight, eps=EPS, norm_eps=NORM_EPS
        )
        torch.testing.assert_close(running, sum(written[1:number], written[0]))
        right = right_read([*finished, running], query, gain, weight)
        torch.testing.assert_close(normed.double(), right, rtol=1e-5, atol=1e-5)


def test_a_score_beyond_the_range_of_exp_is_no_problem_to_a_merge() -> None:
    bank, weight = torch.empty(1, 1, 1, 16), torch.ones(16)
    query = torch.full((16,), 1000.0)
    x, output = torch.ones(1, 1, 16), torch.full((1, 1, 16), -2.0)
    for sign in (1.0, -1.0):  # the score of the running sum is 32,000 less than the bank's, or more
        options = {"eps": EPS, "norm_eps": NORM_EPS}
        *_, ahead = open_few_rows(
            bank, 0, None, x, [weight, sign * query], [weight] * 2, weight, closes=True, **options
        )
        _, normed = merge_few_rows(ahead, 0, None, output, sign * query, weight, weight, **options)
        torch.testing.assert_close(normed, sign * torch.ones(1, 1, 16), rtol=1e-3, atol=1e-3)


def test_more_readers_than_a_kernel_takes_are_refused() -> None:
    many = [torch.ones(8)] * (MOST_READERS + 1)
    with pytest.raises(ValueError, match=f"1 to {MOST_READERS}"):
        open_few_rows(
            torch.zeros(2, 1, 2, 8), 0, None, torch.zeros(1, 2, 8), many, many, many[0], eps=1.0, norm_eps=1.0,
            closes=True,
        )  # fmt: skip


def test_a_bank_without_a_place_for_the_total_is_refused() -> None:
    x = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="no place in a bank of 2"):
        read_few_rows(torch.zeros(2, 1, 2, 8), 2, None, x, *torch.ones(3, 8), eps=1.0, norm_eps=1.0, closes=False)


def test_many_tokens_and_many_sources_are_left_to_the_two_phases() -> None:
    assert takes_few_rows(torch.empty(1, 64, 128, device="meta"), 9)
    assert not takes_few_rows(torch.empty(1, 2048, 128, device="meta"), 9)
    assert not takes_few_rows(torch.empty(1, 64, 128, device="meta"), 33)
    assert not takes_few_rows(torch.empty(1, 0, 128, device="meta"), 9)


@pytest.mark.gpu
@pytest.mark.parametrize("sources, tokens, width", [(0, 1, 2048), (3, 64, 1024), (8, 8, 2048), (8, 512, 1536)])
def test_half_precision_on_cuda_stays_near_the_definition(sources: int, tokens: int, width: int) -> None:
    bank = torch.randn(9, 1, tokens, width, device="cuda").bfloat16()
    running, x = torch.randn(2, 1, tokens, width, device="cuda").bfloat16()
    query, gain, weight = torch.randn(3, width, device="cuda")
    query *= width**-0.5
    total, normed = read_few_rows(
        bank, sources, running, x, query, gain, weight, eps=EPS, norm_eps=NORM_EPS, closes=False
    )
    every = [source.double() for source in (*bank[:sources], total)]
    mixed = reference_mix(every, query.double(), gain=gain.double(), eps=EPS)
    expected = reference_rms_norm(mixed, weight.double(), NORM_EPS)
    assert (normed.double() - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("readers", [2, 5])
@pytest.mark.parametrize("sources, tokens, width", [(0, 1, 2048), (3, 64, 1024), (7, 8, 2048)])
def test_merges_in_half_precision_on_cuda_stay_near_the_definition(
    sources: int, tokens: int, width: int, readers: int
) -> None:
    bank = torch.randn(9, 1, tokens, width, device="cuda").bfloat16()
    x, *written = torch.randn(readers, 1, tokens, width, device="cuda").bfloat16()
    queries, gains = torch.randn(2, readers, width, device="cuda")
    queries *= width**-0.5
    weight, running = torch.randn(width, device="cuda"), None
    finished = [*bank[:sources].clone(), x]
    _, normed, ahead = open_few_rows(
        bank, sources, None, x, list(queries), list(gains), weight, eps=EPS, norm_eps=NORM_EPS, closes=True
    )
    right = right_read(finished, queries[0], gains[0], weight)
    assert (normed.double() - right).norm() < 5e-3 * right.norm()
    for number, output in enumerate(written, 1):
        query, gain = queries[number], gains[number]
        running, normed = merge_few_rows(
            ahead, number - 1, running, output, query, gain, weight, eps=EPS, norm_eps=NORM_EPS
        )
        right = right_read([*finished, running], query, gain, weight)
        assert (normed.double() - right).norm() < 5e-3 * right.norm()
