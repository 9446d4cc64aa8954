"""Pages: every page is used or free, and a hash finds what it names until the page is taken for something else."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from perilune.serve.pages import Pages, block_hashes, root_hash
from tests.serve import tiny


def hashes_of(tokens: tuple[int, ...], *, salt: str = "", epoch: int = 0, page_size: int = 4, pictures=()) -> list:
    hashes: list[bytes] = []
    block_hashes(hashes, root_hash(salt, epoch), tokens, page_size, pictures)
    return hashes


def test_a_hash_names_tokens_before_it_salt_and_weights() -> None:
    tokens = tuple(range(12))
    first = hashes_of(tokens)
    assert len(set(first)) == 3
    assert hashes_of(tokens[:11]) == first[:2], "only full blocks have one"
    assert hashes_of((*tokens[:4], 99, *tokens[5:]))[0] == first[0]
    for other in (
        hashes_of((99, *tokens[1:])),
        hashes_of(tokens, salt="a"),
        hashes_of(tokens, epoch=1),
    ):
        assert not set(other) & set(first)


def test_a_hash_names_the_pictures_of_its_block_and_of_those_before_it() -> None:
    prompt, one = tiny.prompt_with_pictures((1, 2, 3), (0, 1))
    _, other = tiny.prompt_with_pictures((1, 2, 3), (0, 2))
    prompt += (5,) * 8
    first, second = hashes_of(prompt, pictures=one), hashes_of(prompt, pictures=other)
    before = one[1].start // 4
    assert first[:before] == second[:before]
    assert len(first) > before + 1 and not set(first[before:]) & set(second[before:])


def test_hashes_grow_with_the_sequence() -> None:
    tokens = tuple(range(32))
    grown: list[bytes] = []
    for length in range(33):
        block_hashes(grown, root_hash("", 0), tokens[:length], 4)
    assert grown == hashes_of(tokens)


def test_the_end_of_a_sequence_is_given_up_before_its_beginning() -> None:
    evicted: list[bytes] = []
    pages = Pages(4, 4, on_evict=evicted.append)
    names = [b"a", b"b", b"c"]
    taken = pages.take(3)
    for page, name in zip(taken, names):
        pages.remember(page, name)
    pages.release(taken)
    assert pages.match(names) == taken
    pages.take(2)
    assert evicted == [b"c"] and pages.match(names) == taken[:2]


def test_releasing_twice_is_noticed() -> None:
    pages = Pages(2, 4)
    taken = pages.take(1)
    pages.release(taken)
    with pytest.raises(AssertionError, match="released more often"):
        pages.release(taken)


class PagesMachine(RuleBasedStateMachine):
    """Sequences take, share, fill and release pages in any order; a simple model says what must be found."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(8, 4, on_evict=lambda block: self.found.pop(block))
        self.users: list[list[int]] = []
        self.found: dict[bytes, int] = {}
        self.counter = 0

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        if count <= self.pages.num_free:
            in_use = {page for user in self.users for page in user}
            taken = self.pages.take(count)
            assert len(set(taken)) == count and not set(taken) & in_use
            self.users.append(taken)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(data.draw(st.sampled_from(self.users))))
        self.counter += 1
        block = self.counter.to_bytes(4, "little")
        if page not in self.found.values():
            self.found[block] = page
        self.pages.remember(page, block)

    @precondition(lambda self: self.found)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.found)))
        shared = self.pages.match([block, b"never seen"])
        free = self.pages.num_free
        expected = free - self.pages.num_unused(shared)
        self.pages.share(shared)
        assert self.pages.num_free == expected
        self.users.append(shared)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pages.release(self.users.pop(data.draw(st.integers(0, len(self.users) - 1))))

    @rule()
    def forget_all(self) -> None:
        self.pages.forget_all()
        assert not self.found

    @invariant()
    def every_page_is_used_or_free_and_hashes_find_their_page(self) -> None:
        used = {page for user in self.users for page in user}
        assert self.pages.num_free == 8 - len(used)
        assert self.pages.num_remembered == len(self.found)
        for block, page in self.found.items():
            assert self.pages.match([block]) == [page]


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40)
