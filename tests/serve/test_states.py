"""States: a slot belongs to one sequence, a snapshot to one block, and none is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from perilune.serve.states import States


def test_slots_of_sequences_and_snapshots_are_apart() -> None:
    states = States(2, 3)
    assert {states.take(), states.take()} == {0, 1} and states.num_free == 0
    assert {states.reserve(evict=False) for _ in range(3)} == {2, 3, 4}
    assert states.reserve(evict=True) is None, "those being written give way to nobody"
    assert states.num_slots == 5 and states.num_reserved == 3


def test_the_snapshot_unused_for_longest_gives_way() -> None:
    states = States(1, 2)
    for block in (b"a", b"b"):
        snapshot = states.reserve(evict=True)
        assert snapshot is not None and states.remember(block, snapshot)
    kept = states.find(b"a")
    assert states.reserve(evict=False) is None and not states.has_room
    assert states.reserve(evict=True) not in (None, kept)
    assert b"a" in states and b"b" not in states


def test_two_snapshots_of_one_block_are_one() -> None:
    states = States(1, 2)
    first, second = states.reserve(evict=True), states.reserve(evict=True)
    assert first is not None and second is not None
    assert states.remember(b"a", first) and not states.remember(b"a", second)
    assert states.find(b"a") == first and states.has_room and states.num_reserved == 0


def test_a_model_without_states_has_no_snapshots() -> None:
    assert States(4, 16, needed=False).num_slots == 4


def test_releasing_twice_is_noticed() -> None:
    states = States(2, 0)
    slot = states.take()
    states.release(slot)
    with pytest.raises(AssertionError, match="released twice"):
        states.release(slot)


class StatesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.states = States(3, 4)
        self.taken: list[int] = []
        self.reserved: list[int] = []
        self.known: dict[bytes, int] = {}
        self.blocks = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])

    @precondition(lambda self: self.states.num_free)
    @rule()
    def take(self) -> None:
        slot = self.states.take()
        assert slot not in self.taken
        self.taken.append(slot)

    @precondition(lambda self: self.taken)
    @rule()
    def release(self) -> None:
        self.states.release(self.taken.pop())

    @rule(evict=st.booleans())
    def reserve(self, evict: bool) -> None:
        snapshot = self.states.reserve(evict=evict)
        if snapshot is not None:
            assert snapshot not in self.reserved and snapshot >= 3
            self.reserved.append(snapshot)
            self.known = {block: slot for block, slot in self.known.items() if slot != snapshot}

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        block, snapshot = data.draw(self.blocks), self.reserved.pop()
        assert self.states.remember(block, snapshot) == (block not in self.known)
        self.known.setdefault(block, snapshot)

    @precondition(lambda self: self.reserved)
    @rule()
    def unreserve(self) -> None:
        self.states.unreserve(self.reserved.pop())

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(self.blocks)
        self.states.forget(block)
        self.known.pop(block, None)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.states.num_free == 3 - len(self.taken)
        assert self.states.num_reserved == len(self.reserved)
        assert self.states.num_remembered == len(self.known)
        for block, snapshot in self.known.items():
            assert block in self.states and self.states.find(block) == snapshot


TestStates = StatesMachine.TestCase
TestStates.settings = settings(max_examples=60, stateful_step_count=40)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), max_size=40))
def test_a_sequence_gets_the_lowest_free_slot(releases: list[int]) -> None:
    states, taken = States(6, 0), set()
    for choice in releases:
        if choice in taken:
            taken.remove(choice)
            states.release(choice)
        elif states.num_free:
            slot = states.take()
            assert slot == min(set(range(6)) - taken)
            taken.add(slot)
