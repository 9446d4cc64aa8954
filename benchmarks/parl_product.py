"""The claim that a better recipe and a swarm multiply: wide F1 of {plain, full recipe} x {single agent, swarm}.

    interaction = F1(full, swarm) F1(plain, single) / (F1(full, single) F1(plain, swarm))         1: gains multiply

Twice: every agent at the cap, and every agent at the tested cap whose wide tasks took nearest to as long as those of
the full recipe's swarm at the cap. Seconds are those of rows `served`, alone on a machine, where all four cells have
some; else those of the tests. They depend on what agents do: a seed that was not served itself takes those of its
cell's seed whose agents write most nearly as much, and has none if that is much more or less. The interval is over
seeds (t) where each cell has three, and takes all that there are, means of logarithms against each other; with fewer it
is a bootstrap over tasks, which are the same in all four cells: it says nothing about another training. What is equal
and what is not is read from the rows and told below the table.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]
Cell = tuple[str, str]
ARMS = {"single": "serial", "swarm": "full"}
CELLS: tuple[Cell, ...] = (("plain", "single"), ("plain", "swarm"), ("full", "single"), ("full", "swarm"))
FEWEST_SEEDS = 3
T_VALUES = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}
"""Of 95% intervals, by degrees of freedom; with more the last one, which is a little too wide."""
ROUNDS = 2000
ALIKE = 1.1
"""Seconds whose largest is at most so many times the smallest are told as equal."""
AS_MUCH = 1.25
"""Agents that write at most so many times what others do take as long as they."""


def is_over(row: Row) -> bool:
    """Whether the arm of a row was trained to its end."""
    return row.get("iterations", 0) >= row.get("wanted", 0)


def f1_of(row: Row) -> float:
    return (row.get("wide_f1") or {}).get("mean", 0.0)


def wide_seconds(row: Row) -> float | None:
    return row.get("wide_seconds")


def product_text(rows: Sequence[Row]) -> str:
    tests, quiet = {cell: _tests(rows, cell) for cell in CELLS}, _served(rows)
    if quiet:
        tests = {cell: _with_seconds(tests[cell], quiet[cell]) for cell in CELLS}
    at_cap = {cell: {seed: caps[1.0] for seed, caps in tests[cell].items() if 1.0 in caps} for cell in CELLS}
    as_long = _as_long(tests)
    lines = [
        "| recipe | agent | seconds of training: models + arm | F1 at the cap | seconds | F1 in as long | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in CELLS:
        trained = ", ".join(
            f"{_whole(_model_seconds(rows, cell, seed))} + {_whole(_arm_seconds(rows, cell, seed))}"
            for seed in sorted(at_cap[cell])
        )
        cells = [*cell, trained, _values(at_cap[cell]), _seconds(at_cap[cell]),
                 _values(as_long[cell], with_cap=True), _seconds(as_long[cell])]  # fmt: skip
        lines.append(f"| {' | '.join(each or '-' for each in cells)} |")
    told = [f"Interaction at the cap (1: gains multiply): {interaction_text(at_cap)}."]
    told.append(f"Interaction in equal serving seconds: {interaction_text(as_long)}.")
    if all(at_cap.values()):
        told += [_equal_text(rows, at_cap, as_long, is_quiet=bool(quiet))]
    return "\n".join([*lines, "", "\n".join(told)])


# Cells ----------------------------------------------------------------------------------------------------------------


def _tests(rows: Sequence[Row], cell: Cell) -> dict[int, dict[float, Row]]:
    """Seed -> times the cap -> row; of arms that are finished."""
    found: dict[int, dict[float, Row]] = {}
    for row in rows:
        told = row.get("row"), row.get("recipe", "full"), row.get("arm")
        if told == ("test", cell[0], ARMS[cell[1]]) and is_over(row):
            found.setdefault(row["seed"], {})[row["cap"]] = row
    return found


def _served(rows: Sequence[Row]) -> dict[Cell, dict[float, list[Row]]]:
    """Cell -> times the cap -> what was timed on a quiet machine; empty unless all cells have some."""
    found: dict[Cell, dict[float, list[Row]]] = {}
    for row in rows:
        for cell in CELLS:
            told = row.get("row"), row.get("recipe", "full"), row.get("arm")
            if told == ("served", cell[0], ARMS[cell[1]]) and is_over(row):
                found.setdefault(cell, {}).setdefault(row["cap"], []).append(row)
    return found if len(found) == len(CELLS) else {}


def _with_seconds(
    tests: Mapping[int, Mapping[float, Row]], quiet: Mapping[float, Sequence[Row]]
) -> dict[int, dict[float, Row]]:
    return {
        seed: {cap: {**row, **_quiet_seconds(row, quiet.get(cap, ()))} for cap, row in caps.items()}
        for seed, caps in tests.items()
    }


def _quiet_seconds(row: Row, timed: Sequence[Row]) -> dict[str, Any]:
    alike = [each for each in timed if _tokens(row) / AS_MUCH <= _tokens(each) <= _tokens(row) * AS_MUCH]
    found = [each for each in timed if each["seed"] == row["seed"]] or alike
    if not found:
        return {"wide_seconds": None}
    nearest = min(found, key=lambda each: abs(_tokens(each) - _tokens(row)))
    return {"wide_seconds": wide_seconds(nearest), "timed_seed": nearest["seed"]}


def _tokens(row: Row) -> float:
    """That all agents write for a wide task."""
    return (row["kinds"].get("wide") or {}).get("tokens", 0.0)


def _as_long(tests: Mapping[Cell, Mapping[int, Mapping[float, Row]]]) -> dict[Cell, dict[int, Row]]:
    """Of every cell and seed the row whose wide tasks took nearest to as long as the full swarm's at the cap or above,
    where its episodes are the same and the sooner one of them had shapes that were new to the engine."""
    found: dict[Cell, dict[int, Row]] = {cell: {} for cell in CELLS}
    for seed, caps in tests["full", "swarm"].items():
        timed = {wide_seconds(row): row for cap, row in caps.items() if cap >= 1 and wide_seconds(row)}
        if 1.0 not in caps or not timed:
            continue
        wanted = min(timed)
        for cell in CELLS:
            rows = [(seconds, row) for row in tests[cell].get(seed, {}).values() if (seconds := wide_seconds(row))]
            if rows:
                found[cell][seed] = min(rows, key=lambda pair: abs(math.log(pair[0] / wanted)))[1]
        found["full", "swarm"][seed] = timed[wanted]
    return found


def _values(rows: Mapping[int, Row], *, with_cap: bool = False) -> str:
    caps = {seed: f" at {row['cap']:g}x" if with_cap else "" for seed, row in rows.items()}
    return ", ".join(f"{f1_of(row):.2f}{caps[seed]}" for seed, row in sorted(rows.items()))


def _seconds(rows: Mapping[int, Row]) -> str:
    def timed(seed: int, row: Row) -> str:
        other = row.get("timed_seed", seed)
        return _whole(wide_seconds(row), ".1f") + ("" if other == seed else f" (as seed {other})")

    return ", ".join(timed(seed, row) for seed, row in sorted(rows.items()))


def _whole(value: float | None, form: str = ".0f") -> str:
    return "-" if value is None else f"{value:{form}}"


# The interaction ------------------------------------------------------------------------------------------------------


def interaction_text(cells: Mapping[Cell, Mapping[int, Row]]) -> str:
    if not all(cells.values()):
        return "not measured: all four cells are needed"
    nothing = [f"seed {seed} of {' '.join(cell)}" for cell, rows in cells.items() for seed, row in sorted(rows.items())
               if not f1_of(row)]  # fmt: skip
    if nothing:
        return f"not defined: {', '.join(nothing)} has nothing right"
    logs = {cell: [math.log(f1_of(row)) for row in rows.values()] for cell, rows in cells.items()}
    mean = _log_ratio({cell: math.exp(sum(each) / len(each)) for cell, each in logs.items()})
    counts = {len(each) for each in logs.values()}
    fewest = min(counts)
    if fewest >= FEWEST_SEEDS:
        reach, freedom = _reach(list(logs.values()))
        seeds = " to ".join(str(count) for count in dict.fromkeys((fewest, max(counts))))
        how = f"95%, t with {freedom} degrees of freedom over {seeds} seeds of reinforcement learning a cell"
        low, high = mean - reach, mean + reach
    else:
        drawn = _bootstrap(cells)
        if drawn is None:
            return f"{math.exp(mean):.2f} (no interval: rows without the F1 of every task)"
        (low, high), how = drawn, f"95%, bootstrap over tasks, {fewest} of {FEWEST_SEEDS} seeds"
    return f"{math.exp(mean):.2f} [{math.exp(low):.2f}, {math.exp(high):.2f}], {how}"


def _reach(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Half of the interval of a sum and difference of means, and its degrees of freedom (Welch and Satterthwaite):
    cells have spreads and numbers of seeds of their own."""
    means = [sum(each) / len(each) for each in groups]
    variances = [sum((value - mean) ** 2 for value in each) / (len(each) - 1) / len(each)
                 for each, mean in zip(groups, means)]  # fmt: skip
    total = sum(variances)
    if not total:
        return 0.0, sum(len(each) - 1 for each in groups)
    freedom = int(total**2 / sum(each**2 / (len(group) - 1) for each, group in zip(variances, groups)))
    return T_VALUES.get(freedom, T_VALUES[max(T_VALUES)]) * math.sqrt(total), freedom


def _log_ratio(f1: Mapping[Cell, Any]) -> Any:
    gain, other = f1["full", "swarm"] * f1["plain", "single"], f1["full", "single"] * f1["plain", "swarm"]
    return np.log(gain) - np.log(other)


def _bootstrap(cells: Mapping[Cell, Mapping[int, Row]]) -> tuple[float, float] | None:
    """By drawing the tasks that all cells have again with replacement."""
    known = {cell: [row.get("wide_f1s") or {} for row in rows.values()] for cell, rows in cells.items()}
    tasks = sorted(set.intersection(*(set(each) for rows in known.values() for each in rows)))
    if not tasks:
        return None
    drawn = np.random.default_rng(0).integers(0, len(tasks), (ROUNDS, len(tasks)))
    f1 = dict[Cell, Any]()
    for cell, rows in known.items():
        # A draw in which a seed has nothing right would be infinite.
        means = [np.maximum(np.array([row[task] for task in tasks])[drawn].mean(1), 1e-4) for row in rows]
        f1[cell] = np.exp(sum(np.log(each) for each in means) / len(means))
    low, high = np.quantile(_log_ratio(f1), (0.025, 0.975))
    return float(low), float(high)


# What is equal --------------------------------------------------------------------------------------------------------


def _model_seconds(rows: Sequence[Row], cell: Cell, seed: int) -> float | None:
    """Of pre-training and fine-tuning, all calls."""
    models = _models(rows, cell, seed)
    found = [
        row["seconds"] for row in rows
        if row.get("seed") == models and row.get("recipe", "full") == cell[0]
        and (row.get("row") == "base" or (row.get("row") == "sft" and row.get("mix") == "mostly-serial"))
    ]  # fmt: skip
    return sum(found) if len(found) == 2 else None


def _arm_seconds(rows: Sequence[Row], cell: Cell, seed: int) -> float | None:
    row = _arm_row(rows, cell, seed)
    return None if row is None else row.get("train_seconds")


def _models(rows: Sequence[Row], cell: Cell, seed: int) -> int:
    """The seed of the models that an arm began with."""
    row = _arm_row(rows, cell, seed)
    return seed if row is None else row.get("models", seed)


def _arm_row(rows: Sequence[Row], cell: Cell, seed: int) -> Row | None:
    wanted = "train", cell[0], ARMS[cell[1]], seed
    for row in rows:
        if (row.get("row"), row.get("recipe", "full"), row.get("arm"), row.get("seed")) == wanted:
            return row
    return None


def _equal_text(
    rows: Sequence[Row],
    at_cap: Mapping[Cell, Mapping[int, Row]],
    as_long: Mapping[Cell, Mapping[int, Row]],
    *,
    is_quiet: bool,
) -> str:
    pairs = [(cell, seed) for cell in CELLS for seed in at_cap[cell]]
    models = [_model_seconds(rows, cell, seed) for cell, seed in pairs]
    arms = [_arm_seconds(rows, cell, seed) for cell, seed in pairs]
    served = [wide_seconds(as_long[cell][seed]) if seed in as_long[cell] else None for cell, seed in pairs]
    wanted = {at_cap[cell][seed].get("wanted") for cell, seed in pairs}
    iterations = "equal" if len(wanted) == 1 else "NOT equal"
    speeds = _as_long_text(rows, sorted({seed for cell, seed in pairs if cell[0] == "plain"}))
    company = "Nothing ran beside what was served" if is_quiet else "Arms that ran side by side shared the card"
    return (
        f"At the cap, critical steps are equal; iterations of reinforcement learning are {iterations}. Seconds: of "
        f"training the models {_alike(models)}{speeds}; of reinforcement learning {_alike(arms)}; of serving, in the "
        f"last two columns, {_alike(served)}. {company}. Intervals are of reinforcement learning: seeds that begin "
        "with one model say nothing of another."
    )


def _as_long_text(rows: Sequence[Row], seeds: Sequence[int]) -> str:
    """Where models of the plain recipe were given as long as the others by the speeds of both on one machine."""
    models = {_models(rows, cell, seed) for cell in CELLS if cell[0] == "plain" for seed in seeds}
    found = [row for row in rows if row.get("as_long") and row["row"] in ("base", "sft")
             and row.get("recipe") == "plain" and row.get("seed") in models]  # fmt: skip
    if len(found) < 2 * len(models):
        return ""
    told = ", ".join(f"{row['as_long']['steps']} for {row['as_long']['full_steps']} ({row['row']})" for row in found)
    return f" as they went, equal by speeds measured turn about (steps of plain for full: {told})"


def _alike(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return "not known"
    low, high = min(known), max(known)
    return f"{'equal' if high <= ALIKE * low else 'NOT equal'} ({low:.0f} to {high:.0f})"
