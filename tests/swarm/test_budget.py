"""Budgets: nothing is overshot, nothing is lost, and a refusal leaves no trace."""

import asyncio
import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from perilune.swarm.budget import ACCOUNTS, Budget, BudgetClosed, BudgetExceeded, Limits, Price, Prices, meter
from perilune.swarm.client import Usage


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def amounts(budget: Budget, dimension: str) -> tuple[float, float]:
    line = budget.snapshot()[dimension]
    return line["spent"], line["reserved"]


# The tree against a model that recomputes everything from its history -----------------------------------------------


class Node:
    """The model of a budget: its own reservations and spending, and nothing derived."""

    def __init__(self, budget: Budget, parent: "Node | None", limits: dict[str, int]) -> None:
        self.budget, self.parent, self.limits = budget, parent, limits
        self.children: list[Node] = []
        self.spent = {"calls": 0, "tokens": 0, "agents": 0}
        self.open: list[tuple[object, dict[str, int]]] = []
        self.is_closed = False

    def below(self) -> "list[Node]":
        return [self, *(node for child in self.children for node in child.below())]

    def total_spent(self, dimension: str) -> int:
        return sum(node.spent[dimension] for node in self.below())

    def account(self, dimension: str) -> "Node | None":
        node: Node | None = self
        while node is not None and dimension not in node.limits:
            node = node.parent
        return node

    def load(self, dimension: str) -> int:
        """What this node takes of the account it draws on, or has taken of its own."""
        own = self.spent[dimension] + sum(units.get(dimension, 0) for _, units in self.open)
        return own + sum(child.weight(dimension) for child in self.children)

    def weight(self, dimension: str) -> int:
        if dimension not in self.limits:
            return self.load(dimension)
        return self.load(dimension) if self.is_closed else max(self.limits[dimension], self.load(dimension))


class BudgetTree(RuleBasedStateMachine):
    """Any interleaving of spawning, reserving, settling (also above the reservation), closing and restoring."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.excess = 0

    @initialize(calls=st.integers(0, 40), tokens=st.integers(0, 400), agents=st.integers(0, 6))
    def plant(self, calls: int, tokens: int, agents: int) -> None:
        limits = {"calls": calls, "tokens": tokens, "agents": agents}
        self.nodes.append(Node(Budget.root(Limits(**limits), clock=Clock()), None, limits))

    def pick(self, data: st.DataObject, *, is_open: bool = True) -> Node:
        return data.draw(st.sampled_from([node for node in self.nodes if not (is_open and node.is_closed)]))

    def fits(self, node: Node, asked: dict[str, int]) -> bool:
        for dimension, amount in asked.items():
            account = node.account(dimension)
            if account is not None and amount > max(0, account.limits[dimension] - account.load(dimension)):
                return False
        return True

    @precondition(lambda self: any(not node.is_closed for node in self.nodes))
    @rule(data=st.data(), calls=st.none() | st.integers(0, 20), tokens=st.none() | st.integers(0, 200))
    def spawn(self, data: st.DataObject, calls: int | None, tokens: int | None) -> None:
        parent = self.pick(data)
        limits = {name: limit for name, limit in (("calls", calls), ("tokens", tokens)) if limit is not None}
        before = [node.budget.snapshot() for node in self.nodes]
        fits = self.fits(parent, limits | {"agents": 1})
        try:
            budget = parent.budget.child(Limits(**limits))
        except BudgetExceeded:
            assert not fits
            assert before == [node.budget.snapshot() for node in self.nodes]
            return
        assert fits
        child = Node(budget, parent, limits)
        parent.spent["agents"] += 1
        parent.children.append(child)
        self.nodes.append(child)

    @precondition(lambda self: any(not node.is_closed for node in self.nodes))
    @rule(data=st.data(), calls=st.integers(0, 5), tokens=st.integers(0, 80))
    def reserve(self, data: st.DataObject, calls: int, tokens: int) -> None:
        node = self.pick(data)
        asked = {"calls": calls, "tokens": tokens}
        fits = self.fits(node, asked)
        try:
            reservation = node.budget.reserve(**asked)
        except BudgetExceeded:
            assert not fits
            return
        assert fits
        node.open.append((reservation, asked))

    @precondition(lambda self: any(node.open for node in self.nodes))
    @rule(data=st.data(), share=st.floats(0, 1), over=st.just(0) | st.integers(0, 60))
    def settle(self, data: st.DataObject, share: float, over: int) -> None:
        node = data.draw(st.sampled_from([node for node in self.nodes if node.open]))
        reservation, asked = node.open.pop(data.draw(st.integers(0, len(node.open) - 1)))
        calls, tokens = int(share * asked["calls"]), int(share * asked["tokens"]) + over
        excess = reservation.settle(calls=calls, tokens=tokens)
        beyond = max(0, tokens - asked["tokens"])
        assert excess == ({"tokens": beyond} if beyond else {})
        self.excess += beyond
        node.spent["calls"] += calls
        node.spent["tokens"] += tokens

    @precondition(lambda self: len(self.nodes) > 1)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(self.nodes[1:]))
        node.budget.close()
        for each in node.below():
            each.is_closed = True

    @rule(data=st.data(), tokens=st.integers(0, 30))
    def restore(self, data: st.DataObject, tokens: int) -> None:
        node = self.pick(data, is_open=False)
        account = node.account("tokens")
        if tokens > account.limits["tokens"] - account.load("tokens") or account.is_closed:
            self.excess += tokens  # a life before may have spent more than there is now
        node.budget.restore(tokens=tokens)
        node.spent["tokens"] += tokens

    @invariant()
    def every_budget_says_what_the_model_says(self) -> None:
        for node in self.nodes:
            assert node.budget.is_closed == node.is_closed
            for dimension in ("calls", "tokens", "agents"):
                spent, reserved = amounts(node.budget, dimension)
                assert spent == node.total_spent(dimension)
                assert reserved == node.load(dimension) - spent >= 0
                account = node.account(dimension)
                free = account.limits[dimension] - account.load(dimension)
                if not any(each.is_closed for each in (node, account)):
                    assert node.budget.left(dimension) == max(0, free)

    @invariant()
    def what_children_have_fits_into_the_parent(self) -> None:
        for node in self.nodes:
            for dimension in ("calls", "tokens"):
                parts = [sum(amounts(child.budget, dimension)) for child in node.children]
                assert sum(parts) <= sum(amounts(node.budget, dimension))

    @invariant()
    def nothing_is_overshot(self) -> None:
        for node in self.nodes:
            for dimension, limit in node.limits.items():
                allowed = limit + (self.excess if dimension == "tokens" else 0)
                assert sum(amounts(node.budget, dimension)) <= allowed
        if self.nodes:
            reported = self.nodes[0].budget.snapshot()["tokens"]["excess"]
            assert reported <= self.excess

    def teardown(self) -> None:
        """When all is settled and closed, the root holds exactly what was spent."""
        for node in self.nodes:
            for reservation, _ in node.open:
                reservation.release()
            node.open.clear()
        for node in self.nodes[1:]:
            node.budget.close()
            node.is_closed = True
        if self.nodes:
            for dimension in ("calls", "tokens", "agents"):
                assert amounts(self.nodes[0].budget, dimension) == (self.nodes[0].total_spent(dimension), 0)


TestBudgetTree = BudgetTree.TestCase
TestBudgetTree.settings = settings(max_examples=50, stateful_step_count=30)


# Stated contracts -----------------------------------------------------------------------------------------------------


def test_a_hundred_concurrent_spenders_never_overshoot() -> None:
    limit = 957
    root = Budget.root(Limits(calls=limit, tokens=limit * 90, cost=limit * 0.05))
    price = Price(prompt=100.0, completion=1000.0)
    sent = used_tokens = 0
    draw = random.Random(3)

    async def spend(budget: Budget) -> int:
        nonlocal sent, used_tokens
        refused = 0
        for _ in range(20):
            attempt = meter(budget, price)
            try:
                attempt.begin(prompt_bound=60, max_tokens=40)
            except BudgetExceeded:
                refused += 1
                await asyncio.sleep(0)
                continue
            sent += 1
            await asyncio.sleep(draw.choice((0, 0.0001)))
            usage = Usage(prompt_tokens=draw.randint(0, 60), completion_tokens=draw.randint(0, 40))
            used_tokens += usage.total
            attempt.end(usage)
        return refused

    async def main() -> int:
        return sum(await asyncio.gather(*(spend(root.child(Limits())) for _ in range(100))))

    refused = asyncio.run(main())
    assert refused, "the limits were never reached"
    lines = root.snapshot()
    assert lines["calls"] == {"limit": limit, "spent": sent, "reserved": 0, "excess": 0}
    assert lines["tokens"]["spent"] == used_tokens <= limit * 90
    assert lines["cost"]["spent"] <= limit * 0.05
    assert sent <= limit


def test_a_refusal_names_dimension_amounts_and_owner_and_reserves_nothing() -> None:
    root = Budget.root(Limits(calls=5, tokens=100))
    child = root.child(Limits(tokens=40), name="main/researcher-0.0")
    with pytest.raises(BudgetExceeded, match="'main/researcher-0.0'.*tokens: 50 asked, 40 left") as caught:
        child.reserve(calls=1, tokens=50)
    assert (caught.value.dimension, caught.value.asked, caught.value.left) == ("tokens", 50, 40)
    assert amounts(root, "calls") == (0, 0)
    with pytest.raises(BudgetExceeded, match="'run'.*calls: 6 asked, 5 left"):
        child.reserve(calls=6, tokens=1)
    with pytest.raises(BudgetExceeded, match="'run'.*tokens: 61 asked, 60 left"):
        root.child(Limits(calls=1, tokens=61))
    assert amounts(root, "calls") == (0, 0) and amounts(root, "agents") == (1, 0)


def test_agents_count_the_new_one_and_its_allotment_together() -> None:
    root = Budget.root(Limits(agents=3))
    with pytest.raises(BudgetExceeded, match="agents: 4 asked, 3 left"):
        root.child(Limits(agents=3))
    team = root.child(Limits(agents=2))
    with pytest.raises(BudgetExceeded, match="agents: 1 asked, 0 left"):
        root.child()
    team.child()
    team.close()
    assert amounts(root, "agents") == (2, 0)
    assert root.child(agents=0).left("agents") == 1


def test_closing_gives_back_the_unspent_of_all_descendants_once() -> None:
    root = Budget.root(Limits(tokens=1000))
    team = root.child(Limits(tokens=600))
    worker = team.child(Limits(tokens=500))
    worker.reserve(tokens=200).settle(tokens=120)
    assert amounts(root, "tokens") == (120, 480)
    for _ in range(2):
        team.close()
        assert worker.is_closed
        assert amounts(root, "tokens") == (120, 0)
    with pytest.raises(BudgetClosed):
        worker.reserve(tokens=1)
    with pytest.raises(BudgetClosed):
        team.child(agents=0)


def test_a_reservation_in_flight_outlives_its_budget_and_refunds_to_the_root() -> None:
    root = Budget.root(Limits(tokens=1000))
    team = root.child(Limits(tokens=600))
    worker = team.child(Limits(tokens=500))
    call = worker.reserve(tokens=300)
    team.close()
    assert amounts(root, "tokens") == (0, 300)
    call.settle(tokens=100)
    assert amounts(root, "tokens") == (100, 0)


def test_excess_is_spent_reported_and_stops_what_follows() -> None:
    root = Budget.root(Limits(tokens=1000))
    child = root.child(Limits(tokens=100))
    assert child.reserve(tokens=80).settle(tokens=130) == {"tokens": 50}
    assert child.snapshot()["tokens"] == {"limit": 100, "spent": 130, "reserved": 0, "excess": 50}
    assert root.snapshot()["tokens"] == {"limit": 1000, "spent": 130, "reserved": 0, "excess": 50}
    assert child.left("tokens") == 0
    with pytest.raises(BudgetExceeded, match="0 left"):
        child.reserve(tokens=1)
    child.close()
    assert root.left("tokens") == 870
    root.close()
    assert root.left("tokens") == 0


def test_what_is_in_flight_stays_covered_after_an_excess() -> None:
    root = Budget.root(Limits(tokens=10))
    child = root.child(Limits(tokens=4))
    first, second = child.reserve(tokens=2), child.reserve(tokens=2)
    first.settle(tokens=5)
    assert root.left("tokens") == 10 - 5 - 2
    child.close()
    assert root.left("tokens") == 3
    second.settle(tokens=0)
    assert root.left("tokens") == 5


def test_counts_cannot_be_settled_above_their_reservation() -> None:
    budget = Budget.root(Limits())
    reservation = budget.reserve(calls=1, tokens=5)
    with pytest.raises(ValueError, match="settle calls is 2, more than the 1 reserved"):
        reservation.settle(calls=2)
    with pytest.raises(ValueError, match="settle steps: only calls, tokens was reserved"):
        reservation.settle(steps=1)
    reservation.settle(tokens=3)
    assert amounts(budget, "calls") == (1, 0) and amounts(budget, "tokens") == (3, 0)
    with pytest.raises(ValueError, match="settled already"):
        reservation.release()


def test_time_passes_for_the_whole_tree_and_a_child_ends_no_later_than_its_parent() -> None:
    clock = Clock()
    root = Budget.root(Limits(seconds=60), clock=clock)
    long, short = root.child(Limits(seconds=500), name="long"), root.child(Limits(seconds=10), name="short")
    assert (root.deadline, long.deadline, short.deadline) == (160.0, 160.0, 110.0)
    clock.now = 110.0
    assert long.left("seconds") == 50.0
    long.reserve(calls=1)
    with pytest.raises(BudgetExceeded, match="'short' exceeded: seconds: time is over"):
        short.reserve(calls=1)
    clock.now = 160.0
    with pytest.raises(BudgetExceeded, match="'run' exceeded: seconds"):
        long.child()
    assert long.left("seconds") == 0.0
    assert root.snapshot()["seconds"] == {"limit": 60, "spent": 60.0, "reserved": 0, "excess": 0}


def test_restored_spending_counts_and_restored_time_moves_the_deadline() -> None:
    clock = Clock()
    root = Budget.root(Limits(tokens=100, seconds=60), clock=clock)
    root.restore(tokens=70, seconds=45)
    assert root.deadline == 115.0 and root.left("tokens") == 30
    root.restore(tokens=70)
    assert root.left("tokens") == 0
    endless = Budget.root(Limits(), clock=clock)
    endless.restore(seconds=9)
    assert endless.deadline is None and endless.snapshot()["seconds"]["spent"] == 9


def test_time_limit_ends_the_body_with_budget_exceeded_and_passes_other_timeouts() -> None:
    async def main() -> None:
        root = Budget.root(Limits(seconds=0.01))
        with pytest.raises(BudgetExceeded, match="seconds"):
            async with root.time_limit():
                await asyncio.sleep(30)
        endless = Budget.root(Limits())
        assert endless.loop_deadline() is None
        with pytest.raises(TimeoutError):
            async with endless.time_limit():
                raise TimeoutError
        async with endless.time_limit():
            pass

    asyncio.run(main())


def test_a_meter_reserves_the_bound_and_settles_what_was_used() -> None:
    root = Budget.root(Limits(calls=3, tokens=1000, cost=1.0))
    attempt = meter(root, Price(prompt=100, completion=1000))
    attempt.begin(prompt_bound=200, max_tokens=300)
    lines = root.snapshot()
    assert [lines[name]["reserved"] for name in ("calls", "tokens", "cost")] == [1, 500, 0.32]
    attempt.end(Usage(prompt_tokens=50, completion_tokens=10))
    assert amounts(root, "tokens") == (60, 0) and amounts(root, "cost") == (0.015, 0)
    attempt.begin(prompt_bound=200, max_tokens=300)
    attempt.end(None)
    assert amounts(root, "tokens") == (560, 0) and amounts(root, "cost") == (0.335, 0)
    attempt.begin(prompt_bound=10, max_tokens=10)
    attempt.end(Usage(prompt_tokens=10, completion_tokens=25))
    assert attempt.excess == {"tokens": 15, "cost": 0.015}
    with pytest.raises(BudgetExceeded, match="calls: 1 asked, 0 left"):
        attempt.begin(prompt_bound=1, max_tokens=1)


def test_a_meter_is_begun_and_ended_in_turn() -> None:
    attempt = meter(Budget.root(Limits()), None)
    with pytest.raises(RuntimeError, match="end\\(\\) without begin"):
        attempt.end(None)
    attempt.begin(prompt_bound=1, max_tokens=1)
    with pytest.raises(RuntimeError, match="begin\\(\\) again"):
        attempt.begin(prompt_bound=1, max_tokens=1)
    attempt.end(Usage(prompt_tokens=1))


def test_a_limit_of_cost_needs_a_price() -> None:
    child = Budget.root(Limits(cost=1)).child(Limits(calls=3), name="main")
    with pytest.raises(ValueError, match="Budget\\('main'\\) has a limit of cost, but the model has no price"):
        meter(child, None)


def test_prices_by_model_with_a_star_for_the_rest() -> None:
    prices = Prices({"kimi": Price(prompt=1, completion=2), "*": Price(prompt=10, completion=20)})
    assert prices.cost("kimi", 1_000_000, 500_000) == 2.0
    assert prices.cost("other", 1_000_000, 0) == 10.0
    assert Prices().cost("other", 5, 5) == 0 and Prices().of("other") is None
    with pytest.raises(ValueError, match="price completion is -1"):
        Price(prompt=0, completion=-1)


def test_a_thousand_small_costs_sum_exactly() -> None:
    budget = Budget.root(Limits(cost=0.1))
    for _ in range(1000):
        budget.reserve(cost=0.0001).settle()
    assert budget.left("cost") == 0 and amounts(budget, "cost") == (0.1, 0)
    with pytest.raises(BudgetExceeded):
        budget.reserve(cost=0.000000001)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "3", math.inf, math.nan])
def test_amounts_are_whole_numbers_of_known_dimensions(wrong: object) -> None:
    budget = Budget.root(Limits(calls=10))
    with pytest.raises(ValueError, match=f"reserve calls is {wrong!r}, expected a whole number"):
        budget.reserve(calls=wrong)
    with pytest.raises(ValueError, match="limit tokens"):
        Limits(tokens=wrong)
    if wrong != 1.5:
        with pytest.raises(ValueError, match="limit cost is .*, expected a finite number"):
            Limits(cost=wrong)
    with pytest.raises(ValueError, match="reserve 'seconds': expected one of calls, steps, agents, tokens, cost"):
        budget.reserve(seconds=1)
    assert budget.left("calls") == 10


def test_without_any_limit_there_is_no_bound_but_a_count() -> None:
    root = Budget.root(Limits())
    root.child(name="a").child().reserve(tokens=7).settle(tokens=5)
    assert root.left("tokens") == math.inf and amounts(root, "tokens") == (5, 0)
    assert not root.has_cost_limit and Budget.root(Limits(cost=1)).child().has_cost_limit
    assert repr(root) == "Budget('run')"
    root.close()
    assert repr(root) == "Budget('run', closed)"
    assert set(root.snapshot()) == {*ACCOUNTS, "seconds"}
    assert Limits(calls=3).plain() == dict.fromkeys(("steps", "agents", "tokens", "cost", "seconds")) | {"calls": 3}
