"""Items are dealt out by size: evenly, the same on every rank, and without needless travel."""

from hypothesis import given
from hypothesis import strategies as st

from perilune.train.media_exchange import deal_by_size, dealt_out


@given(st.lists(st.lists(st.integers(1, 50), max_size=8), min_size=1, max_size=5))
def test_no_rank_has_more_than_the_mean_and_one_item(sizes: list[list[int]]) -> None:
    holders = deal_by_size(sizes)
    assert [len(each) for each in holders] == [len(each) for each in sizes]
    sums = [0] * len(sizes)
    for owned, to in zip(sizes, holders, strict=True):
        for size, holder in zip(owned, to, strict=True):
            sums[holder] += size
    largest = max((size for owned in sizes for size in owned), default=0)
    assert sum(sums) == sum(map(sum, sizes)) and max(sums) - min(sums) <= largest


@given(st.integers(1, 5), st.integers(0, 6), st.integers(1, 50))
def test_equal_items_in_equal_numbers_stay_where_they_are(ranks: int, count: int, size: int) -> None:
    assert deal_by_size([[size] * count for _ in range(ranks)]) == [[rank] * count for rank in range(ranks)]


def test_alone_a_process_keeps_what_it_has() -> None:
    deal = dealt_out([(1, 2, 2), (4, 2, 4)])
    assert deal.grids == ((1, 2, 2), (4, 2, 4)) and deal.holders == deal.owners == (0, 0)
