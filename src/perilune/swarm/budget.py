"""Budgets form a tree: what a child may spend is set aside from its parent, what it does not spend comes back.

Six dimensions: calls of models (each attempt is one), steps, agents, tokens, cost and seconds. A budget with a limit of
its own in a dimension keeps an account there; without one it draws on the nearest ancestor that has an account. For
every account, in every dimension but seconds:

    spent + reserved <= limit
    reserved = open reservations + what open children were given and have not spent

A spender reserves the most it may need, in all dimensions or in none, and settles with what it used. Counts (calls,
steps, agents) cannot be settled above their reservation, so they are never overshot. Tokens and cost can, when an
endpoint ignores `max_tokens`: the difference is spent, and kept as `excess` in every budget up to the root.

Seconds are not spent but pass: a child's deadline is the earlier of its own and its parent's, and after it nothing can
be reserved.

Every method is a plain function that does not wait, so on one event loop each is atomic. A budget is not for threads.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from perilune.swarm.client import Usage
from perilune.swarm.prices import BILLIONTHS, Price, Prices, billionths

Dimension = Literal["calls", "steps", "agents", "tokens", "cost", "seconds"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
ACCOUNTS: tuple[str, ...] = DIMENSIONS[:-1]
"""All but seconds."""
COUNTS = frozenset({"calls", "steps", "agents"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """None: no limit of its own."""

    calls: int | None = None
    steps: int | None = None
    agents: int | None = None
    """How many may be created below."""
    tokens: int | None = None
    cost: float | None = None
    """Money, in the currency of the prices."""
    seconds: float | None = None
    """Wall-clock time from the moment the budget is made."""

    def __post_init__(self) -> None:
        for dimension, value in self.plain().items():
            if value is not None:
                _check("limit", dimension, value, among=DIMENSIONS)

    def units(self) -> dict[str, int]:
        """The limits that are accounts, as the ledger counts."""
        given = {dimension: getattr(self, dimension) for dimension in ACCOUNTS}
        return {dimension: _units(dimension, limit) for dimension, limit in given.items() if limit is not None}

    def plain(self) -> dict[str, float | None]:
        return {name: getattr(self, name) for name in DIMENSIONS}


class BudgetExceeded(RuntimeError):
    """A reservation that does not fit. Nothing was reserved."""

    def __init__(self, *, dimension: str, asked: float, left: float, owner: str) -> None:
        what = "time is over" if dimension == "seconds" else f"{asked:g} asked, {left:g} left"
        super().__init__(f"budget of {owner!r} exceeded: {dimension}: {what}")
        self.dimension = dimension
        self.asked = asked
        self.left = left
        self.owner = owner


class BudgetClosed(BudgetExceeded):
    """The budget was closed: its agent has ended."""


class Budget:
    """One node of the tree. Made by `Budget.root` and `child`."""

    def __init__(self, limits: Limits, parent: Budget | None, name: str, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.parent = parent
        self.name = name
        self.is_closed = False
        self._clock = clock
        self._began = clock()
        self._children: dict[int, Budget] = {}
        self._spent = dict.fromkeys(ACCOUNTS, 0)
        self._reserved = dict.fromkeys(ACCOUNTS, 0)
        self._excess = dict.fromkeys(ACCOUNTS, 0)
        self._allotted = limits.units()
        """What the account holds in all. A closed budget keeps here only what it spent or has still reserved."""
        self._deadline = math.inf if limits.seconds is None else self._began + limits.seconds
        if parent is not None:
            self._deadline = min(self._deadline, parent._deadline)

    @classmethod
    def root(cls, limits: Limits, *, clock: Callable[[], float] = time.monotonic, name: str = "run") -> Budget:
        return cls(limits, None, name, clock)

    def child(
        self, limits: Limits | None = None, *, name: str = "child", agents: int = 1, is_repeated: bool = False
    ) -> Budget:
        """A budget for a new agent: takes `agents` (spent for good) and the limits (set aside) from this one. Raises
        `BudgetExceeded` for more than is left; a longer time than is left ends with this budget's. `is_repeated`: it
        was made in an earlier life of the run, so no limit refuses it."""
        limits = limits or Limits()
        asked, created = limits.units(), int(_check("child", "agents", agents))
        if not is_repeated:
            self._require(asked | {"agents": asked.get("agents", 0) + created})
        self._record("agents", used=created, released=0)
        for dimension, amount in asked.items():
            self._hold(dimension, amount)
        made = Budget(limits, self, name, self._clock)
        self._children[id(made)] = made
        return made

    def reserve(self, **amounts: float) -> Reservation:
        """Set amounts aside, all or none; raises `BudgetExceeded`."""
        units = {dimension: _units(dimension, _check("reserve", dimension, n)) for dimension, n in amounts.items()}
        self._require(units)
        for dimension, amount in units.items():
            self._hold(dimension, amount)
        return Reservation(self, units)

    def restore(self, **amounts: float) -> None:
        """Count what an earlier life of the run spent here. It happened, so no limit refuses it. `seconds` moves the
        deadline of this budget forward, not of children made before."""
        for dimension, value in amounts.items():
            _check("restore", dimension, value, among=DIMENSIONS)
        seconds = amounts.pop("seconds", 0.0)
        self._began -= seconds
        if self.limits.seconds is not None:
            self._deadline = min(self._deadline, self._began + self.limits.seconds)
        for dimension, value in amounts.items():
            self._record(dimension, used=_units(dimension, value), released=0)

    def grow(self, **amounts: float) -> None:
        """Raise the limits of a root: whoever gave it its allotment gives more."""
        if self.parent is not None:
            raise ValueError(f"{self!r} cannot grow: only a root can, a child has what its parent set aside")
        for dimension, value in amounts.items():
            if dimension not in self._allotted:
                raise ValueError(f"grow {dimension!r}: {self!r} has no limit there")
            self._allotted[dimension] += _units(dimension, _check("grow", dimension, value))

    def close(self) -> None:
        """Give back to the parent what is neither spent nor reserved; children are closed first. Reservations that are
        still open stay, and give back the rest when they are settled."""
        if self.is_closed:
            return
        for each in list(self._children.values()):
            each.close()
        self.is_closed = True
        for dimension in self._allotted:
            self._give_back(dimension)
        if self.parent is not None:
            self.parent._children.pop(id(self), None)

    @property
    def deadline(self) -> float | None:
        """When time is over, on the budget's clock; None when never."""
        return None if self._deadline == math.inf else self._deadline

    def loop_deadline(self) -> float | None:
        """The deadline on the running loop's clock, for `asyncio.timeout_at`."""
        if self._deadline == math.inf:
            return None
        return asyncio.get_running_loop().time() + self._deadline - self._clock()

    @asynccontextmanager
    async def time_limit(self) -> AsyncIterator[None]:
        """End the body at the deadline with `BudgetExceeded`. A TimeoutError of the body itself passes through."""
        limit = asyncio.timeout_at(self.loop_deadline())
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._time_is_over() from None

    def left(self, dimension: Dimension) -> float:
        """How much could be reserved now; infinite without a limit up to the root."""
        if dimension == "seconds":
            return max(0.0, self._deadline - self._clock())
        account = self._account(dimension)
        return math.inf if account is None else max(0, _shown(dimension, account._free(dimension)))

    @property
    def has_cost_limit(self) -> bool:
        return self._account("cost") is not None

    def snapshot(self) -> dict[str, dict[str, float | None]]:
        """Per dimension its own limit, and spent, reserved and excess including all descendants."""
        lines: dict[str, dict[str, float | None]] = {}
        for name in ACCOUNTS:
            sums = {"spent": self._spent, "reserved": self._reserved, "excess": self._excess}
            lines[name] = {"limit": getattr(self.limits, name)}
            lines[name] |= {what: _shown(name, amounts[name]) for what, amounts in sums.items()}
        passed = self._clock() - self._began
        lines["seconds"] = {"limit": self.limits.seconds, "spent": passed, "reserved": 0, "excess": 0}
        return lines

    def __repr__(self) -> str:
        return f"Budget({self.name!r}{', closed' if self.is_closed else ''})"

    # The ledger ------------------------------------------------------------------------------------------------------

    def _account(self, dimension: str) -> Budget | None:
        node: Budget | None = self
        while node is not None and dimension not in node._allotted:
            node = node.parent
        return node

    def _free(self, dimension: str) -> int:
        return self._allotted[dimension] - self._spent[dimension] - self._reserved[dimension]

    def _require(self, units: Mapping[str, int]) -> None:
        if self.is_closed:
            dimension, asked = next(iter(units.items()), ("calls", 0))
            raise BudgetClosed(dimension=dimension, asked=_shown(dimension, asked), left=0, owner=self.name)
        if self._clock() >= self._deadline:
            raise self._time_is_over()
        for dimension, asked in units.items():
            account = self._account(dimension)
            if account is not None and asked > (left := max(0, account._free(dimension))):
                asked_for, there = _shown(dimension, asked), _shown(dimension, left)
                raise BudgetExceeded(dimension=dimension, asked=asked_for, left=there, owner=account.name)

    def _time_is_over(self) -> BudgetExceeded:
        owner = self
        while owner.parent is not None and owner.parent._deadline <= self._deadline:
            owner = owner.parent
        return BudgetExceeded(dimension="seconds", asked=0, left=0, owner=owner.name)

    def _hold(self, dimension: str, amount: int) -> None:
        """Count as reserved, up to the account. Above it the account's own share already covers it."""
        node: Budget | None = self
        while node is not None:
            node._reserved[dimension] += amount
            if dimension in node._allotted:
                return
            node = node.parent

    def _record(self, dimension: str, *, used: int, released: int) -> None:
        """Count as spent, up to the root, and no longer as reserved."""
        node: Budget | None = self
        while node is not None:
            before = node._taken(dimension)
            node._reserved[dimension] -= released
            node._spent[dimension] += used
            if dimension in node._allotted:
                # The parent had set aside all that the account takes: the part just spent is no longer reserved there.
                released = used - (node._taken(dimension) - before)
            node = node.parent

    def _taken(self, dimension: str) -> int:
        """What the account takes from the one above: its allotment, or more after an excess."""
        return max(self._allotted.get(dimension, 0), self._spent[dimension] + self._reserved[dimension])

    def _give_back(self, dimension: str) -> None:
        """Pass what closed accounts from here up do not need to the accounts above them."""
        node: Budget | None = self
        while node is not None:
            if node.is_closed and dimension in node._allotted and (free := node._free(dimension)) > 0:
                node._allotted[dimension] -= free
                if node.parent is not None:
                    node.parent._hold(dimension, -free)
            node = node.parent


class Reservation:
    """Amounts set aside by `Budget.reserve`, until `settle`."""

    def __init__(self, budget: Budget, units: Mapping[str, int]) -> None:
        self._budget = budget
        self._units = units
        self.is_settled = False

    def settle(self, **actual: float) -> dict[str, float]:
        """Spend what was used and give back the rest; a dimension that is not named was used up. Returns the excess by
        dimension: what was used beyond the reservation."""
        if self.is_settled:
            raise ValueError("the reservation is settled already")
        used = dict(self._units)
        for name, value in actual.items():
            if name not in used:
                raise ValueError(f"settle {name}: only {', '.join(used) or 'nothing'} was reserved")
            used[name] = _units(name, _check("settle", name, value))
            if name in COUNTS and used[name] > self._units[name]:
                raise ValueError(f"settle {name} is {value!r}, more than the {self._units[name]} reserved")
        self.is_settled = True
        excess: dict[str, float] = {}
        for dimension, reserved in self._units.items():
            self._budget._record(dimension, used=used[dimension], released=reserved)
            if used[dimension] > reserved:
                excess[dimension] = _shown(dimension, used[dimension] - reserved)
                _count_excess(self._budget, dimension, used[dimension] - reserved)
            self._budget._give_back(dimension)
        return excess

    def release(self) -> None:
        """Nothing was used."""
        self.settle(**dict.fromkeys(self._units, 0))


def _count_excess(budget: Budget, dimension: str, amount: int) -> None:
    node: Budget | None = budget
    while node is not None:
        node._excess[dimension] += amount
        node = node.parent


class _BudgetMeter:
    """`client.Meter` on a budget: one reservation per attempt."""

    def __init__(self, budget: Budget, price: Price | None) -> None:
        self._budget = budget
        self._price = price
        self._open: Reservation | None = None
        self.excess: dict[str, float] = {}
        """What attempts used beyond their bounds, summed."""

    def begin(self, *, prompt_bound: int, max_tokens: int) -> None:
        if self._open is not None:
            raise RuntimeError("meter: begin() again before end() of the attempt before")
        amounts: dict[str, Any] = {"calls": 1, "tokens": prompt_bound + max_tokens}
        if self._price is not None:
            amounts["cost"] = self._price.cost(prompt_bound, max_tokens)
        self._open = self._budget.reserve(**amounts)

    def end(self, usage: Usage | None) -> None:
        if self._open is None:
            raise RuntimeError("meter: end() without begin()")
        attempt, self._open = self._open, None
        if usage is None:
            attempt.settle()
            return
        actual: dict[str, Any] = {"tokens": usage.total}
        if self._price is not None:
            actual["cost"] = self._price.cost(usage.prompt_tokens, usage.completion_tokens)
        for dimension, amount in attempt.settle(**actual).items():
            self.excess[dimension] = self.excess.get(dimension, 0) + amount


def meter(budget: Budget, price: Price | None) -> _BudgetMeter:
    """Charge the attempts of one call of a model to a budget; under a limit of cost the model needs a price."""
    if price is None and budget.has_cost_limit:
        raise ValueError(
            f"{budget!r} has a limit of cost, but the model has no price: give its price per million tokens"
        )
    return _BudgetMeter(budget, price)


def _check(what: str, dimension: str, value: float, *, among: Sequence[str] = ACCOUNTS) -> float:
    """The value, if it is an amount of this dimension."""
    if dimension not in among:
        raise ValueError(f"{what} {dimension!r}: expected one of {', '.join(among)}")
    whole = dimension not in ("cost", "seconds")
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 <= value < math.inf:
        raise ValueError(
            f"{what} {dimension} is {value!r}, expected a {'whole' if whole else 'finite'} number, 0 or more"
        )
    return value


def _units(dimension: str, value: float) -> int:
    """As the ledger counts: money in billionths."""
    return billionths(value) if dimension == "cost" else int(value)


def _shown(dimension: str, units: int) -> float:
    return units / BILLIONTHS if dimension == "cost" else units


__all__ = ["Budget", "BudgetClosed", "BudgetExceeded", "Limits", "Price", "Prices", "Reservation", "meter"]
