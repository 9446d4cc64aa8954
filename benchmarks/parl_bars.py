"""Every bar of the experiment with PARL, and what the rows of benchmarks/parl.py say to it.

A bar that was not measured says so, one that was not met is not left out, and one that was judged on fewer than three
seeds says on how many. An arm that was not trained to its end counts for no bar, and is shown with what it has. The
claim of a product is in parl_product.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from parl_product import Row, f1_of, is_over, product_text, wide_seconds

from perilune.report.plots import Plot, Series, Threshold, save_png

SEEDS = 3
SWARM = "full"
KINDS = ("wide", "narrow", "chain")
UNCAPPED = 1000.0
"""Times the cap: as many steps as an agent likes."""
SIDE_BY_SIDE = 2.0
"""Workers in the widest group of a wide task, on average, below which nothing is parallel."""
FEW_POINTS = 40
"""Up to so many iterations are drawn as points on a line."""
ALIKE = ("tasks", "samples", "lr", "cooldown", "ptx", "over", "spare_steps")
"""Settings that seeds of one arm are to have in common."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    goal: str
    bar: str
    measured: str
    met: bool | None
    """By all seeds that there are; None: not measured."""
    seeds: int = 0
    """That it was judged on."""
    met_by: int | None = None
    """Seeds, where each is judged by itself."""

    @property
    def told(self) -> str:
        if self.met is None:
            return "not measured"
        said = "yes" if self.met else "NO"
        if not self.met and self.met_by:
            said += f", met by {self.met_by} of {self.seeds} seeds"
        return said if self.seeds >= SEEDS else f"{said}, {self.seeds} of {SEEDS} seeds"


def bars_text(rows: Sequence[Row], *, tiny: bool = False, recipe: str = "full", swarm: str = SWARM) -> str:
    """Tables in Markdown: the bars, the claim of a product, and all arms. With the recipe nano: of the released model's
    arms alone, as if they were those of the bars. With another arm for the swarm: that one in the place of `full`."""
    kept = [row for row in rows if bool(row.get("tiny")) == tiny]
    kept = _in_place(_as_the_full(kept, recipe), swarm)
    lines = ["| goal | bar | measured | met |", "|---|---|---|---|"]
    lines += [f"| {each.goal} | {each.bar} | {each.measured or 'nothing'} | {each.told} |" for each in bars(kept)]
    other = "" if swarm == SWARM else f"The arm {swarm!r} stands in the place of {SWARM!r}."
    notes = [each for each in (other, starts_text(kept), unlike_text(kept)) if each]
    return "\n\n".join(["\n".join(lines), *notes, product_text(kept), arms_text(kept)])


def _as_the_full(rows: Sequence[Row], recipe: str) -> list[Row]:
    if recipe != "nano":
        return list(rows)
    return [{**row, "recipe": "full"} for row in rows if row.get("recipe") == "nano"]


def _in_place(rows: Sequence[Row], swarm: str) -> list[Row]:
    """Rows of an arm as those of `full`, whose own are left out."""
    if swarm == SWARM:
        return list(rows)
    kept = (row for row in rows if row.get("arm") != SWARM and row.get("row") != "best-of")  # which tells of its F1
    return [{**row, "arm": SWARM} if row.get("arm") == swarm else row for row in kept]


def plot_spawn(rows: Sequence[Row], path: Path, *, recipe: str = "full", kind: str = "wide") -> Path:
    """Episodes with a worker by iteration."""
    wanted = Threshold(value=0.05, name="collapse") if kind == "wide" else Threshold(value=0.2, name="at most")
    titles = {"wide": "Workers on wide tasks", "narrow": "Workers on narrow tasks", "chain": "Workers on chains"}
    plot = Plot(
        title=titles[kind], x_label="iteration", y_label="share of episodes with a worker",
        series=_curves(rows, recipe, kind, "spawn"), from_zero=True, thresholds=[wanted],
    )  # fmt: skip
    return save_png(plot, path)


def plot_widths(rows: Sequence[Row], path: Path, *, recipe: str = "full") -> Path:
    """Workers in the widest group of wide tasks by iteration: a share of episodes with workers does not tell one after
    another from side by side."""
    plot = Plot(
        title="Workers side by side on wide tasks", x_label="iteration", y_label="workers in the widest group, mean",
        series=_curves(rows, recipe, "wide", "width"), from_zero=True,
    )  # fmt: skip
    return save_png(plot, path)


def _curves(rows: Sequence[Row], recipe: str, kind: str, name: str) -> list[Series]:
    """Of every seed that was trained, of arms that have tools for workers."""
    trained = [row for row in _as_the_full(rows, recipe) if row.get("row") == "train" and not row.get("tiny")]
    arms = dict.fromkeys(row["arm"] for row in trained if row.get("recipe", "full") == "full")
    series = []
    for colour, arm in enumerate(arm for arm in arms if arm != "serial"):
        for row in _of(trained, "train", arm):
            values = row["curves"].get(kind, {}).get(name, ())
            seen = [(number, value) for number, value in enumerate(values, start=1) if value is not None]
            told = arm if not any(each.colour == colour for each in series) else ""
            series.append(Series(name=told, x=[number for number, _ in seen], y=[value for _, value in seen],
                                 points=len(values) <= FEW_POINTS, colour=colour))  # fmt: skip
    return series


def bars(rows: Sequence[Row]) -> list[Bar]:
    return [
        _worker(rows),
        _collapse(rows),
        _prevented(rows),
        _quality(rows),
        _latency(rows),
        _hollow(rows),
        _cost(rows),
        _joint(rows),
        _audit(rows),
    ]


def starts_text(rows: Sequence[Row]) -> str:
    """What seeds have in common, where they have."""
    trained = [row for row in rows if row.get("row") == "train"]
    shared = sorted({(row["models"], row["seed"]) for row in trained if row.get("models", row["seed"]) != row["seed"]})
    told = [
        f"Seeds {', '.join(str(seed) for models, seed in shared if models == start)} begin with the models of seed "
        f"{start}: they differ in the tasks that are drawn and in what is sampled."
        for start in dict.fromkeys(models for models, _ in shared)
    ]
    return "\n".join(told)


def unlike_text(rows: Sequence[Row]) -> str:
    """Where rows that are judged together were trained in other ways."""
    told = []
    for arm, recipe in dict.fromkeys((row.get("arm"), row.get("recipe", "full")) for row in rows):
        trained = [row for row in rows if (row.get("row"), row.get("arm"), row.get("recipe", "full")) == (
            "train", arm, recipe)]  # fmt: skip
        for name in ("wanted", *ALIKE):
            values = sorted({row[name] for row in trained if row.get(name) is not None})
            if len(values) > 1:
                had = ", ".join(f"{each:g}" for each in values)
                told.append(f"NOT alike: seeds of {arm} ({recipe}) have {name} {had}.")
    return "\n".join(told)


# Rows -----------------------------------------------------------------------------------------------------------------


def _of(
    rows: Sequence[Row], row: str, arm: str | None = None, *, cap: float | None = None, recipe: str = "full"
) -> list[Row]:
    """By seed, also those of arms that were not trained to their end."""
    found = [
        each for each in rows
        if each.get("row") == row and each.get("recipe", "full") == recipe
        and (arm is None or each.get("arm") == arm) and (cap is None or each.get("cap") == cap)
    ]  # fmt: skip
    return sorted(found, key=lambda each: each.get("seed", 0))


def _over(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if is_over(row)]


def _seeds(rows: Sequence[Row]) -> int:
    return len({(row.get("seed"), row.get("models", row.get("seed"))) for row in rows})


def _last(row: Row, kind: str, name: str) -> float | None:
    return ((row.get("last_fifth") or {}).get(kind) or {}).get(name)


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else f"{value:{form}}"


def _progress(*rows: Row) -> str:
    """Of arms that are not finished, how far they are."""
    begun = [row for row in rows if not is_over(row)]
    told = ", ".join(f"seed {row.get('seed')} at {row.get('iterations')} of {row.get('wanted')}" for row in begun)
    return f" (not finished: {told})" if told else ""


def _each(rows: Sequence[Row], read: Callable[[Row], float | None], form: str = ".2f") -> str:
    return ", ".join(f"{_number(read(row), form)}{_progress(row)}" for row in rows) or "nothing"


def _paired(first: Sequence[Row], second: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Of one seed, from the same models."""
    others = {_start(row): row for row in second}
    return [(row, others[_start(row)]) for row in first if _start(row) in others]


def _start(row: Row) -> tuple[int, int]:
    return row["seed"], row.get("models", row["seed"])


# Bars -----------------------------------------------------------------------------------------------------------------


def _worker(rows: Sequence[Row]) -> Bar:
    found = _of(rows, "worker")
    met = all(row["right"] >= 0.9 for row in found) if found else None
    told = _each(found, lambda row: row["right"])
    return Bar(goal="frozen worker", bar="90% of single lookups in 8 steps", measured=told, met=met,
               seeds=_seeds(found))  # fmt: skip


def _collapse(rows: Sequence[Row]) -> Bar:
    found = _of(rows, "train", "outcome")
    spawn = [_last(row, "wide", "spawn") for row in _over(found)]
    met = all(value is not None and value < 0.05 for value in spawn) if spawn else None
    told = _each(found, lambda row: _last(row, "wide", "spawn"))
    return Bar(goal="serial collapse shown", bar=f"outcome only: spawn < 5% over the last fifth, {SEEDS} seeds",
               measured=told, met=met, seeds=len(spawn))  # fmt: skip


def _prevented(rows: Sequence[Row]) -> Bar:
    found = _of(rows, "train", "full")
    told = _spawn_by_kind(found)
    if greedy := [row for row in _over(_of(rows, "test", "full", cap=1.0)) if set(KINDS) <= set(row["kinds"])]:
        shares = (f"{kind} {_each(greedy, lambda row, kind=kind: row['kinds'][kind]['spawn'])}" for kind in KINDS)
        told += f" (greedy test tasks: {'; '.join(shares)})"
    widths = [_last(row, "wide", "width") for row in found]
    if any(widths):
        told += f"; the widest group on wide ones {', '.join(_number(width, '.1f') for width in widths)} workers"
    if thrifty := _of(rows, "train", "economy"):
        told += f" (with economy: {_spawn_by_kind(thrifty)})"
    judged = [_is_prevented(row) for row in _over(found)]
    # A kind that nobody looked at is not prevented.
    met = False if False in judged else True if judged and None not in judged else None
    wanted = f"full: spawn >= 80% on wide, side by side, <= 20% on narrow and chain, {SEEDS} seeds"
    return Bar(goal="prevented", bar=wanted, measured=told if found else "", met=met, seeds=len(judged),
               met_by=judged.count(True))  # fmt: skip


def _is_prevented(row: Row) -> bool | None:
    """None: a kind of task was not looked at, and those that were say nothing against it."""
    spawn = {kind: _last(row, kind, "spawn") for kind in KINDS}
    for kind, value in spawn.items():
        if value is not None and (value < 0.8 if kind == "wide" else value > 0.2):
            return False
    width = _last(row, "wide", "width")
    if width is not None and width < SIDE_BY_SIDE:
        return False  # one worker after another is serial work, with more steps
    return None if width is None or None in spawn.values() else True


def _spawn_by_kind(rows: Sequence[Row]) -> str:
    return "; ".join(f"{kind} {_each(rows, lambda row, kind=kind: _last(row, kind, 'spawn'))}" for kind in KINDS)


def _quality(rows: Sequence[Row]) -> Bar:
    told, judged = list[str](), list[float]()
    for cap in (0.5, 1.0, 2.0):
        pairs = _paired(_of(rows, "test", "full", cap=cap), _of(rows, "test", "serial", cap=cap))
        gains = [(100 * (f1_of(swarm) - f1_of(single)), swarm, single) for swarm, single in pairs]
        if gains:
            values = (f"{gain:+.1f}{_progress(swarm, single)}" for gain, swarm, single in gains)
            told.append(f"{cap:g}x cap {', '.join(values)}")
        if cap == 1.0:
            judged = [gain for gain, swarm, single in gains if is_over(swarm) and is_over(single)]
    met_by = sum(gain >= 20 for gain in judged)
    return Bar(goal="quality at equal cap", bar="item-F1 >= +20 points over the serial-trained agent",
               measured="; ".join(told), met=met_by == len(judged) if judged else None, seeds=len(judged),
               met_by=met_by)  # fmt: skip


def _latency(rows: Sequence[Row]) -> Bar:
    """Critical steps of both at the swarm's F1 at the cap, or at the serial agent's best F1 where that is lower. The
    serial agent's are read between its caps, from nothing on; the swarm's are those of a cap that it was tested at. The
    nearer to its best F1, the more a serial agent pays for the last of it: ratios at less are told too."""
    ratios, told = list[float](), list[str]()
    for swarm in _over(_of(rows, "test", "full", cap=1.0)):
        swarms, serials = (
            [row for row in _over(_of(rows, "test", arm)) if _start(row) == _start(swarm) and _steps(row)]
            for arm in ("full", "serial")
        )
        if not _steps(swarm) or not any(row["cap"] >= UNCAPPED for row in serials):
            continue  # or tests of the serial agent are not over: it is to have as many steps as it likes
        best = max(f1_of(row) for row in serials)
        wanted = min(f1_of(swarm), best)
        # Of caps at which it does the same, the one that is judged: the seconds beside it are those.
        fast = min((row for row in swarms if f1_of(row) >= wanted), key=lambda row: (_steps(row), abs(row["cap"] - 1)))
        slow = min((row for row in serials if f1_of(row) >= wanted), key=_steps)
        curve = [(f1_of(row), _steps(row)) for row in serials]
        needed = steps_at(curve, wanted)
        ratios.append(needed / _steps(fast))
        reached = "" if best >= f1_of(swarm) else f"F1 {f1_of(swarm):.2f} not reached by the serial agent; "
        lower = (f1 for f1 in (wanted - 0.05, wanted - 0.1) if f1 > 0)
        less = ", ".join(f"{steps_at(curve, f1) / _steps(fast):.1f}x at {f1:.2f}" for f1 in lower)
        told.append(
            f"{reached}{needed / _steps(fast):.1f}x at F1 {wanted:.2f}: {needed:.1f} steps against "
            f"{_steps(fast):.1f} ({less}); wall-clock of all wide tasks at once "
            f"{_number(wide_seconds(slow), '.0f')} s against {_number(wide_seconds(fast), '.0f')} s"
        )
    told += [
        f"one task at a time {single['each_seconds']['mean']:.2f} s (F1 {f1_of(single):.2f}) against "
        f"{swarm['each_seconds']['mean']:.2f} s (F1 {f1_of(swarm):.2f})"
        for swarm, single in _paired(_of(rows, "one-by-one", "full"), _of(rows, "one-by-one", "serial"))
    ]
    met_by = sum(ratio >= 3 for ratio in ratios)
    return Bar(goal="latency", bar="critical steps at equal F1 >= 3x lower", measured="; ".join(told),
               met=met_by == len(ratios) if ratios else None, seeds=len(ratios), met_by=met_by)  # fmt: skip


def _steps(row: Row) -> float:
    return (row["kinds"].get("wide") or {}).get("critical_steps") or 0.0


def steps_at(curve: Sequence[tuple[float, float]], wanted: float) -> float:
    """Steps at which (F1, steps) first reach F1 `wanted`, which they do, on a line between them and from nothing on."""
    before = (0.0, 0.0)
    for f1, steps in sorted(curve, key=lambda pair: pair[1]):
        if f1 >= wanted:
            share = (wanted - before[0]) / (f1 - before[0]) if f1 > before[0] else 1.0
            return before[1] + share * (steps - before[1])
        before = (f1, steps) if f1 >= before[0] else before
    raise ValueError(f"F1 {wanted!r} is not reached by {curve!r}")


def _hollow(rows: Sequence[Row]) -> Bar:
    found, contrast = _of(rows, "train", "full"), _of(rows, "train", "instantiation")
    pairs = [(_last(row, "wide", "finished"), _last(row, "wide", "unused")) for row in _over(found)]
    met_by = sum(done is not None and done >= 0.9 and idle is not None and idle <= 0.1 for done, idle in pairs)
    told = [
        f"{name} {_each(rows_of, lambda row, key=key: _last(row, 'wide', key), '.3f')}"
        for name, key, rows_of in (
            ("finish", "finished", found), ("unused", "unused", found),
            ("paid for instantiation alone: unused", "unused", contrast),
        )
    ]  # fmt: skip
    if greedy := [row for row in _over(_of(rows, "test", "full", cap=1.0)) if "wide" in row["kinds"]]:
        shares = ((name, _each(greedy, lambda row, key=key: row["kinds"]["wide"].get(key), ".3f"))
                  for name, key in (("finish", "finished"), ("unused", "unused")))  # fmt: skip
        told.append(f"greedy test tasks: {', '.join(f'{name} {values}' for name, values in shares)}")
    if contrast:
        told.append(f"workers where it is paid for instantiation alone: {_spawn_by_kind(contrast)}")
    return Bar(goal="no hollow work", bar="finish >= 0.9; unused workers <= 10%", measured="; ".join(told),
               met=met_by == len(pairs) if pairs else None, seeds=len(pairs), met_by=met_by)  # fmt: skip


def _cost(rows: Sequence[Row]) -> Bar:
    found, told = _of(rows, "best-of"), list[str]()
    for row in found:
        clipped = f" (equal tokens are {row['samples_wanted']:.1f})" if row.get("is_clipped") else ""
        told.append(
            f"best of {row['samples_each']}{clipped} serial samples {f1_of(row):.2f} against "
            f"{row['swarm_f1']['mean']:.2f} at {row['swarm_tokens']:,.0f} tokens"
        )
    for row in _of(rows, "test", "serial", cap=UNCAPPED):
        told.append(
            f"the serial agent with as many steps as it likes {f1_of(row):.2f} at {row['kinds']['wide']['tokens']:,.0f}"
        )
    for row in _of(rows, "test", "full", cap=1.0):
        if "wide" in row["kinds"]:
            wide = row["kinds"]["wide"]
            told.append(
                f"{wide['total_steps']:.1f} steps and {wide['tokens']:,.0f} tokens of everybody an episode"
                f"{_progress(row)}"
            )
    return Bar(goal="honest cost", bar="total steps and tokens; equal-token best-of-N serial", measured="; ".join(told),
               met=True if found else None, seeds=_seeds(found))  # fmt: skip


def _joint(rows: Sequence[Row]) -> Bar:
    pairs = _paired(_of(rows, "test", "full", cap=1.0), _of(rows, "test", "joint", cap=1.0))
    told = "; ".join(
        f"frozen {f1_of(frozen):.2f}, joint {f1_of(joint):.2f}{_progress(frozen, joint)}" for frozen, joint in pairs
    )
    judged = [frozen for frozen, joint in pairs if is_over(frozen) and is_over(joint)]
    return Bar(goal="freeze or not", bar="frozen against jointly trained", measured=told,
               met=True if judged else None, seeds=len(judged))  # fmt: skip


def _audit(rows: Sequence[Row]) -> Bar:
    """An arm whose episodes were not judged again yet, or not all of them, meets nothing."""
    trained = [row for recipe in ("full", "plain") for row in _over(_of(rows, "train", recipe=recipe))]
    judged = [row for row in trained if row.get("replayed") is not None]
    episodes = sum(row["episodes"] for row in trained)
    again, equal = (sum(row[name] for row in judged) for name in ("replayed", "replayed_equal"))
    told = f"{equal:,} of {again:,} episodes of {len(judged)} runs, evaluations included"
    if len(judged) < len(trained):
        told += f"; not judged again yet: {', '.join(row.get('name', '') for row in trained if row not in judged)}"
    met = equal == again and all(row["replayed"] >= row["episodes"] for row in judged)
    if met and len(judged) < len(trained):
        met = None
    return Bar(goal="audit", bar="100% of training episodes replay with the identical reward",
               measured=told if episodes else "", met=met if judged else None, seeds=_seeds(judged))  # fmt: skip


# All arms -------------------------------------------------------------------------------------------------------------


def arms_text(rows: Sequence[Row]) -> str:
    """Whatever there is of every arm, finished or not."""
    lines = ["| arm | recipe | seed | iterations | spawn: wide, narrow, chain | wide F1 by cap | judged again |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    tests: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("row") == "test":
            tests.setdefault(row.get("name", ""), []).append(row)
    for row in sorted((row for row in rows if row.get("row") == "train"), key=lambda row: str(row.get("name"))):
        spawn = ", ".join(_number(_last(row, kind, "spawn")) for kind in KINDS)
        found = sorted(tests.get(row.get("name", ""), []), key=lambda each: each["cap"])
        f1 = ", ".join(f"{each['cap']:g}x {f1_of(each):.2f}" for each in found)
        again = "no" if row.get("replayed") is None else f"{row['replayed_equal']:,} of {row['replayed']:,} equal"
        state = f"{row.get('iterations')} of {row.get('wanted')}{'' if is_over(row) else ', not finished'}"
        lines.append(
            f"| {row.get('arm')} | {row.get('recipe', 'full')} | {row.get('seed')} | {state} | {spawn} | "
            f"{f1 or 'not tested'} | {again} |"
        )
    return "\n".join(lines)
