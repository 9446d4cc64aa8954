"""Bars of benchmarks/parl.py: what was not met, not measured or not finished is said, and on how many seeds."""

import pytest

from tests.benchmark_scripts import load_script


def row(name: str, arm: str = "full", *, seed: int = 0, recipe: str = "full", **more) -> dict:
    told = {"row": name, "arm": arm, "name": f"{arm}-{recipe}-{seed}", "seed": seed, "recipe": recipe, "tiny": False}
    return {**told, "iterations": 60, "wanted": 60, **more}


def a_test(
    arm: str, f1: float, steps: float, *, cap: float = 1.0, seconds: float = 9.0, f1s: dict | None = None, **more
) -> dict:
    wide = {"critical_steps": steps, "total_steps": 40.0, "tokens": 1700.0, "worker_tokens": 900.0}
    interval = {"mean": f1, "low": f1, "high": f1}
    told = {"wide_f1": interval, "wide_f1s": f1s, "wide_seconds": seconds, "play_seconds": 2 * seconds}
    return row("test", arm, cap=cap, kinds={"wide": wide}, **told, **more)


def trained(arm: str, *, wide: float, narrow: float | None = 0.0, chain: float | None = 0.0, **more) -> dict:
    last = {"wide": {"spawn": wide, "finished": 0.95, "unused": 0.05, "width": 11.6}}
    last |= {kind: {"spawn": value} for kind, value in (("narrow", narrow), ("chain", chain)) if value is not None}
    told = {"last_fifth": last, "episodes": 10, "replayed": 14, "replayed_equal": 14, "train_seconds": 300.0}
    return row("train", arm, **{**told, **more})


def cells(**f1: float) -> list[dict]:
    """Tests of all four cells of the product, `plain_single` and so on."""
    arms = {"single": "serial", "swarm": "full"}
    return [
        a_test(arms[name.split("_")[1]], value, 6.0, recipe=name.split("_")[0], f1s={"0": value, "1": value})
        for name, value in f1.items()
    ]


@pytest.fixture
def bars(monkeypatch):
    return load_script(monkeypatch, "parl_bars")


@pytest.fixture
def product(monkeypatch):
    return load_script(monkeypatch, "parl_product")


def told(bars, rows) -> dict[str, str]:
    return {each.goal: each.told for each in bars.bars(rows)}


def measured(bars, rows) -> dict[str, str]:
    return {each.goal: each.measured for each in bars.bars(rows)}


def test_what_was_not_measured_is_said_and_nothing_is_met_by_it(bars):
    assert set(told(bars, []).values()) == {"not measured"}
    assert bars.bars_text([]).count("not measured") >= 9


def test_bars_are_met_by_three_seeds_and_by_fewer_only_as_many_as_they_are(bars):
    rows = [trained("outcome", wide=0.01, seed=seed) for seed in range(3)]
    assert told(bars, rows[:1])["serial collapse shown"] == "yes, 1 of 3 seeds"
    assert told(bars, rows[:2])["serial collapse shown"] == "yes, 2 of 3 seeds"
    assert told(bars, rows)["serial collapse shown"] == "yes"
    assert told(bars, [*rows[:2], trained("outcome", wide=0.2, seed=2)])["serial collapse shown"] == "NO"
    full = [trained("full", wide=0.9, narrow=0.1, seed=seed) for seed in range(3)]
    assert told(bars, full)["prevented"] == "yes" and told(bars, full)["no hollow work"] == "yes"
    eager = [*full[:2], trained("full", wide=0.9, narrow=0.5, seed=2)]
    assert told(bars, eager)["prevented"] == "NO, met by 2 of 3 seeds"
    beside = [*eager, trained("economy", wide=0.85, narrow=0.1)]  # shown, and counts for nothing
    assert told(bars, beside)["prevented"] == "NO, met by 2 of 3 seeds"
    assert "(with economy: wide 0.85; narrow 0.10; chain 0.00)" in measured(bars, beside)["prevented"]
    assert told(bars, [a_test("full", 0.9, 6.0), a_test("serial", 0.5, 15.0)])["quality at equal cap"] == (
        "yes, 1 of 3 seeds"
    )


def test_spawning_is_not_prevented_where_a_kind_of_task_was_not_looked_at(bars):
    full = [trained("full", wide=0.9, seed=seed) for seed in range(3)]
    assert told(bars, full)["prevented"] == "yes"
    for missing in ("narrow", "chain"):
        some = [*full[:2], trained("full", wide=0.9, seed=2, **{missing: None})]
        assert told(bars, some)["prevented"] == "not measured"
    assert told(bars, [trained("full", wide=0.3, narrow=None)])["prevented"] == "NO, 1 of 3 seeds"


def test_workers_one_after_another_prevent_nothing(bars):
    rows = [trained("full", wide=1.0, seed=seed) for seed in (0, 1, 2)]
    rows[1]["last_fifth"]["wide"]["width"] = None
    assert told(bars, rows)["prevented"] == "not measured"
    rows[1]["last_fifth"]["wide"]["width"] = 1.02
    assert told(bars, rows)["prevented"] == "NO, met by 2 of 3 seeds"
    assert "the widest group on wide ones 11.6, 1.0, 11.6 workers" in measured(bars, rows)["prevented"]


def test_a_bar_that_some_seeds_miss_says_how_many_meet_it(bars):
    rows = [trained("full", wide=wide, seed=seed) for seed, wide in enumerate((0.9, 0.95, 0.3, 0.99))]
    assert told(bars, rows)["prevented"] == "NO, met by 3 of 4 seeds"
    rows += [a_test("full", f1, 6.0, seed=seed) for seed, f1 in enumerate((0.9, 0.5))]
    rows += [a_test("serial", 0.6, 30.0, seed=seed, cap=cap) for seed in (0, 1) for cap in (1.0, 1000.0)]
    said = told(bars, rows)
    assert said["quality at equal cap"] == "NO, met by 1 of 2 seeds, 2 of 3 seeds"
    assert said["no hollow work"] == "yes" and said["latency"] == "yes, 2 of 3 seeds"
    assert told(bars, rows[:1])["prevented"] == "yes, 1 of 3 seeds"
    assert told(bars, rows[2:3])["prevented"] == "NO, 1 of 3 seeds"


def test_another_arm_is_judged_in_the_place_of_full(bars):
    slow = "full, lr0.0001"
    rows = [trained("full", wide=0.3), *(trained(slow, wide=0.9, seed=seed) for seed in (0, 1, 2))]
    assert "| wide 0.30; narrow 0.00;" in bars.bars_text(rows)
    text = bars.bars_text(rows, swarm=slow)
    assert "| wide 0.90, 0.90, 0.90; narrow" in text and "0.30" not in text
    assert "The arm 'full, lr0.0001' stands in the place of 'full'." in text
    best = row("best-of", "serial", samples_each=3, samples_wanted=3.0, wide_f1={"mean": 0.5}, swarm_f1={"mean": 0.9},
               swarm_tokens=1500.0)  # fmt: skip
    assert "best of 3" in bars.bars_text([*rows, best]) and "best of 3" not in bars.bars_text([*rows, best], swarm=slow)


def test_an_arm_that_is_not_finished_meets_no_bar_and_is_shown_with_what_it_has(bars):
    rows = [trained("outcome", wide=0.01, seed=seed) for seed in range(3)]
    rows[2] |= {"iterations": 34}
    assert told(bars, rows)["serial collapse shown"] == "yes, 2 of 3 seeds"
    assert measured(bars, rows)["serial collapse shown"] == "0.01, 0.01, 0.01 (not finished: seed 2 at 34 of 60)"
    only = [trained("outcome", wide=0.31, iterations=34, replayed=None, replayed_equal=None)]
    assert told(bars, only)["serial collapse shown"] == "not measured"
    assert "| outcome | full | 0 | 34 of 60, not finished | 0.31, 0.00, 0.00 | not tested | no |" in bars.bars_text(
        only
    )
    tests = [a_test("full", 0.9, 6.0, iterations=34), a_test("serial", 0.5, 15.0)]
    assert told(bars, tests)["quality at equal cap"] == "not measured"
    assert measured(bars, tests)["quality at equal cap"] == "1x cap +40.0 (not finished: seed 0 at 34 of 60)"


def test_an_audit_counts_only_what_was_judged_again(bars):
    full = [trained("full", wide=0.9, seed=seed) for seed in range(3)]
    assert told(bars, full)["audit"] == "yes"
    assert told(bars, [*full[:2], {**full[2], "replayed_equal": 13}])["audit"] == "NO"
    assert told(bars, [*full[:2], {**full[2], "replayed": 9, "replayed_equal": 9}])["audit"] == "NO"
    waiting = [*full[:2], {**full[2], "replayed": None, "replayed_equal": None}]
    assert told(bars, waiting)["audit"] == "not measured"
    assert "not judged again yet: full-full-2" in measured(bars, waiting)["audit"]


def test_equal_quality_is_looked_for_between_the_caps_of_the_serial_agent(bars):
    assert bars.steps_at([(0.9, 30.0), (0.5, 15.0)], 0.7) == 22.5
    serial = [a_test("serial", f1, steps, cap=cap, seconds=2 * steps)
              for cap, f1, steps in ((1.0, 0.5, 15.0), (1000.0, 0.9, 30.0))]  # fmt: skip
    quick = [a_test("full", 0.9, 6.0, seconds=11.0), *serial]
    assert told(bars, quick)["latency"] == "yes, 1 of 3 seeds"
    assert "5.0x at F1 0.90: 30.0 steps against 6.0 (4.7x at 0.85, 4.4x at 0.80)" in measured(bars, quick)["latency"]
    assert "wall-clock of all wide tasks at once 60 s against 11 s" in measured(bars, quick)["latency"]
    assert told(bars, [a_test("full", 0.9, 12.0), *serial])["latency"] == "NO, 1 of 3 seeds"
    # One whose tests are not over, or that began with other models, says nothing yet.
    assert told(bars, quick[:2])["latency"] == "not measured"
    assert told(bars, [quick[0] | {"models": 3}, *serial])["latency"] == "not measured"


def test_a_quality_that_the_serial_agent_never_reaches_is_compared_at_the_best_that_both_reach(bars):
    serial = [a_test("serial", f1, steps, cap=cap) for cap, f1, steps in ((1.0, 0.5, 15.0), (1000.0, 0.6, 90.0))]
    swarm = [a_test("full", 0.95, 10.0), a_test("full", 0.7, 7.5, cap=0.5)]
    found = measured(bars, [*swarm, *serial])["latency"]
    assert "F1 0.95 not reached by the serial agent" in found and "12.0x at F1 0.60: 90.0 steps against 7.5" in found
    # Its most steps say nothing about a quality that it has not: here it needs as few as the swarm for what it has.
    weak = [a_test("serial", 0.5, 15.0), a_test("serial", 0.4, 90.0, cap=1000.0)]
    assert told(bars, [*swarm[:1], *weak])["latency"] == "NO, 1 of 3 seeds"
    assert "1.5x at F1 0.50" in measured(bars, [*swarm[:1], *weak])["latency"]


def test_best_of_fewer_samples_than_equal_tokens_are_says_so(bars):
    best = row("best-of", "serial", samples_each=16, samples_wanted=21.4, is_clipped=True, swarm_tokens=1700.0,
               wide_f1={"mean": 0.6}, swarm_f1={"mean": 0.9})  # fmt: skip
    assert "best of 16 (equal tokens are 21.4) serial samples 0.60" in measured(bars, [best])["honest cost"]
    assert "(equal" not in measured(bars, [{**best, "is_clipped": False}])["honest cost"]


# The product ----------------------------------------------------------------------------------------------------------


def test_the_product_has_an_interval_over_tasks_with_one_seed_and_over_seeds_with_three(product):
    one = cells(plain_single=0.2, plain_swarm=0.4, full_single=0.3, full_swarm=0.6)
    assert "at the cap (1: gains multiply): 1.00 [1.00, 1.00], 95%, bootstrap over tasks, 1 of 3 seeds" in (
        product.product_text(one)
    )
    # A task that one cell gets and another does not makes it wider, on both sides of the mean.
    one[0] |= {"wide_f1s": {"0": 0.4, "1": 0.0}}
    low, high = _interval(product.product_text(one))
    assert low < 1 < high
    three = [{**each, "seed": seed, "wide_f1": {"mean": each["wide_f1"]["mean"] + 0.01 * seed}}
             for each in one for seed in range(3)]  # fmt: skip
    assert "over 3 seeds of reinforcement learning a cell" in product.product_text(three)
    assert "not measured" in product.product_text(one[:3])
    assert "not defined: seed 0 of full swarm has nothing" in product.product_text(
        [*one[:3], {**one[3], "wide_f1": {"mean": 0.0}}]
    )
    assert "no interval" in product.product_text([{**each, "wide_f1s": None} for each in one])


def test_the_product_s_interval_over_seeds_takes_all_that_a_cell_has(product):
    single = [a_test("serial", f1, 15.0, recipe=recipe, seed=seed) for recipe in ("plain", "full")
              for seed, f1 in enumerate((0.6, 0.6, 0.6))]  # fmt: skip
    plain = [a_test("full", f1, 6.0, recipe="plain", seed=seed) for seed, f1 in enumerate((0.6, 0.6, 0.6))]
    swarm = [a_test("full", f1, 6.0, seed=seed) for seed, f1 in enumerate((0.9, 0.8, 1.0, 0.4))]
    # By scipy: t.interval(0.95, 3, mean(log([.9, .8, 1, .4])) - log(.6), sem(log([.9, .8, 1, .4]))), exponentiated.
    text = product.product_text([*single, *plain, *swarm])
    assert "1.22 [0.63, 2.36], 95%, t with 3 degrees of freedom over 3 to 4 seeds" in text
    # By scipy: ttest_ind(log([.9, .8, 1, .4]), log([.5, .6, .8]), equal_var=False).df is 4.8, and with t.ppf(0.975, 4):
    uneven = [{**row, "wide_f1": {"mean": f1}} for row, f1 in zip(plain, (0.5, 0.6, 0.8))]
    assert "1.18 [0.59, 2.35], 95%, t with 4 degrees" in product.product_text([*single, *uneven, *swarm])


def _interval(text: str) -> tuple[float, float]:
    low, high = text.split("[")[1].split("]")[0].split(", ")
    return float(low), float(high)


def test_equal_serving_seconds_take_the_cap_that_is_nearest_to_the_swarm_s(product):
    rows = cells(plain_single=0.2, plain_swarm=0.4, full_single=0.3, full_swarm=0.6)
    longer = [a_test("serial", 0.5, 30.0, cap=2.0, seconds=20.0), a_test("serial", 0.9, 60.0, cap=6.0, seconds=90.0)]
    rows[2]["wide_seconds"], rows[3]["wide_seconds"] = 5.0, 24.0
    text = product.product_text([*rows, *longer])
    assert "| full | single | - + - | 0.30 | 5.0 | 0.50 at 2x | 20.0 |" in text
    assert "| full | swarm | - + - | 0.60 | 24.0 | 0.60 at 1x | 24.0 |" in text
    # The same episodes again, at twice the cap, are not as long: nothing was new to the engine.
    again = product.product_text([*rows, *longer, a_test("full", 0.6, 6.0, cap=2.0, seconds=6.0)])
    assert "| full | single | - + - | 0.30 | 5.0 | 0.30 at 1x | 5.0 |" in again
    assert "| full | swarm | - + - | 0.60 | 24.0 | 0.60 at 2x | 6.0 |" in again


def test_seconds_of_a_quiet_machine_are_taken_where_all_four_cells_have_them(product):
    rows = cells(plain_single=0.2, plain_swarm=0.4, full_single=0.3, full_swarm=0.6)
    rows.append(a_test("serial", 0.5, 30.0, cap=2.0, seconds=9.0))
    timed = [
        row("served", arm, recipe=recipe, seed=3, cap=cap, wide_seconds=seconds, kinds={"wide": {"tokens": 1600.0}})
        for recipe in ("plain", "full")
        for arm, cap, seconds in (("serial", 1.0, 3.0), ("serial", 2.0, 5.0), ("full", 1.0, 6.0))
    ]
    assert "| full | single | - + - | 0.30 | 9.0 | 0.30 at 1x | 9.0 |" in product.product_text([*rows, *timed[:-1]])
    unlike = {**timed[-1], "seed": 4, "wide_seconds": 2.0, "kinds": {"wide": {"tokens": 700.0}}}
    text = product.product_text([*rows, unlike, *timed])
    assert "| full | single | - + - | 0.30 | 3.0 (as seed 3) | 0.50 at 2x | 5.0 (as seed 3) |" in text
    # Of a seed that writes as much.
    assert "| full | swarm | - + - | 0.60 | 6.0 (as seed 3) | 0.60 at 1x | 6.0 (as seed 3) |" in text
    # Tested at no other cap.
    assert "| plain | single | - + - | 0.20 | 3.0 (as seed 3) | 0.20 at 1x | 3.0 (as seed 3) |" in text
    assert "Nothing ran beside what was served" in text
    own = product.product_text([*rows, *timed, {**unlike, "seed": 0}])
    assert "| full | swarm | - + - | 0.60 | 2.0 | 0.60 at 1x | 2.0 |" in own
    assert "| full | swarm | - + - | 0.60 | - | - | - |" in product.product_text([*rows, *timed[:-1], unlike])
    unfinished = [{**each, "iterations": 12} for each in timed]
    assert "Arms that ran side by side shared the card" in product.product_text([*rows, *unfinished])


def test_what_is_not_equal_is_told_as_not_equal(product):
    rows = cells(plain_single=0.2, plain_swarm=0.4, full_single=0.3, full_swarm=0.6)
    assert "training the models not known" in product.product_text(rows)
    for recipe, seconds in (("plain", 200.0), ("full", 210.0)):
        rows += [row("base", "", recipe=recipe, seconds=seconds), row("sft", "", recipe=recipe, seconds=seconds,
                                                                      mix="mostly-serial")]  # fmt: skip
        rows += [trained(arm, wide=0.5, recipe=recipe, train_seconds=100.0 if arm == "serial" else 300.0)
                 for arm in ("serial", "full")]  # fmt: skip
    text = product.product_text(rows)
    assert "training the models equal (400 to 420)" in text and "reinforcement learning NOT equal (100 to 300)" in text
    assert "| plain | swarm | 400 + 300 |" in text


def test_seeds_that_begin_with_one_model_took_its_seconds(product):
    rows = cells(plain_single=0.2, plain_swarm=0.4, full_single=0.3, full_swarm=0.6)
    rows = [{**each, "seed": seed} for each in rows for seed in (0, 1)]
    for recipe, seconds in (("plain", 200.0), ("full", 210.0)):
        rows += [row(stage, "", recipe=recipe, seconds=seconds, mix="mostly-serial",
                     as_long={"steps": 800, "full_steps": 1000} if recipe == "plain" else None)
                 for stage in ("base", "sft")]  # fmt: skip
        rows += [trained(arm, wide=0.5, recipe=recipe, models=0, seed=seed, train_seconds=100.0)
                 for arm in ("serial", "full") for seed in (0, 1)]  # fmt: skip
    text = product.product_text(rows)
    assert "| plain | swarm | 400 + 100, 400 + 100 |" in text
    assert "equal by speeds measured turn about (steps of plain for full: 800 for 1000 (base), 800" in text
    own = [{**each, "models": each["seed"]} if each["row"] == "train" else each for each in rows]
    assert "training the models not known" in product.product_text(own)


def test_seeds_that_begin_with_one_model_are_told(bars):
    own = [trained("full", wide=0.9, seed=seed, models=seed) for seed in (0, 1)]
    assert "begin with" not in bars.bars_text(own)
    shared = [trained("full", wide=0.9, seed=seed, models=0) for seed in (0, 1, 2)]
    assert "Seeds 1, 2 begin with the models of seed 0: they differ in" in bars.bars_text(shared)


def test_agents_are_compared_from_the_same_models_and_unlike_arms_are_told(bars):
    swarm = [a_test("full", 0.9, 6.0, seed=seed, models=0) for seed in (0, 1, 2)]
    own = [a_test("serial", 0.6, 15.0, seed=seed, models=seed) for seed in (0, 1, 2)]
    shared = [a_test("serial", 0.6, 15.0, seed=seed, models=0) for seed in (0, 1, 2)]
    assert told(bars, [*swarm, *own])["quality at equal cap"] == "yes, 1 of 3 seeds"
    assert told(bars, [*swarm, *shared])["quality at equal cap"] == "yes"
    arms = [trained("full", wide=0.9, seed=seed, lr=lr) for seed, lr in ((0, 2e-4), (1, 2e-4), (2, 1e-4))]
    assert "NOT alike: seeds of full (full) have lr 0.0001, 0.0002." in bars.bars_text(arms)
    assert "NOT alike" not in bars.bars_text(arms[:2])


def test_the_released_model_s_arms_have_a_table_of_their_own(bars):
    rows = [trained("full", wide=0.9, seed=seed) for seed in (0, 1, 2)] + [trained("full", wide=0.3, recipe="nano")]
    assert "on narrow and chain, 3 seeds | wide 0.90, 0.90, 0.90;" in bars.bars_text(rows)
    text = bars.bars_text(rows, recipe="nano")
    assert "| wide 0.30; narrow 0.00; chain 0.00; the widest group" in text and "| NO, 1 of 3 seeds |" in text
    assert "0.90" not in text


def test_a_plot_shows_every_arm_and_leaves_out_iterations_without_wide_tasks(bars, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(bars, "save_png", lambda plot, path: drawn.append(plot) or path)
    curves = {"wide": {"spawn": [0.1, None, 0.3]}}
    arms = [(arm, seed) for arm in ("full", "outcome") for seed in (0, 1)]
    rows = [trained(arm, wide=0.3, seed=seed, recipe="nano", curves=curves) for arm, seed in arms]
    other = trained("full", wide=0.9, curves={"wide": {"spawn": [0.9]}})
    bars.plot_spawn([*rows, other], tmp_path / "a.png", recipe="nano")
    assert [(each.name, list(each.x), list(each.y)) for each in drawn[0].series] == [
        (name, [1, 3], [0.1, 0.3]) for name in ("full", "", "outcome", "")
    ]
    alone = trained("serial", wide=0.0, curves={"wide": {"spawn": [0.0]}})
    bars.plot_spawn([*rows, other, alone], tmp_path / "b.png")
    assert [list(each.y) for each in drawn[1].series] == [[0.9]]  # who has no tools for workers is not shown
    narrow = trained("full", wide=0.9, curves={"narrow": {"spawn": [0.2, 0.4]}})
    bars.plot_spawn([narrow], tmp_path / "c.png", kind="narrow")
    one = trained("full", wide=1.0, curves={"wide": {"spawn": [1.0, 1.0], "width": [1.0, None]}})
    bars.plot_widths([one], tmp_path / "d.png")
    assert "side by side" in drawn[3].title and [list(each.y) for each in drawn[3].series] == [[1.0]]
    assert drawn[2].title == "Workers on narrow tasks" and [list(each.y) for each in drawn[2].series] == [[0.2, 0.4]]


def test_hollow_work_of_samples_is_judged_and_that_of_greedy_tasks_told(bars):
    told_last = {"wide": {"spawn": 0.9, "finished": 0.97, "unused": 0.11}}
    greedy = a_test("full", 0.9, 6.0)
    greedy["kinds"]["wide"] |= {"finished": 0.99, "unused": 0.04}
    rows = [trained("full", wide=0.9, last_fifth=told_last), greedy, trained("instantiation", wide=1.0, narrow=0.9)]
    said = measured(bars, rows)["no hollow work"]
    assert "finish 0.970; unused 0.110" in said and "greedy test tasks: finish 0.990, unused 0.040" in said
    assert "for instantiation alone: wide 1.00; narrow 0.90" in said
    assert told(bars, rows)["no hollow work"].startswith("NO")


def test_seconds_of_one_task_at_a_time_are_told_of_both_agents(bars):
    def alone(arm: str, seconds: float, f1: float) -> dict:
        return row("one-by-one", arm, each_seconds={"mean": seconds}, wide_f1={"mean": f1})

    rows = [a_test("full", 0.9, 5.0), a_test("serial", 0.9, 30.0), alone("full", 1.5, 0.93), alone("serial", 4.0, 0.8)]
    assert "one task at a time 4.00 s (F1 0.80) against 1.50 s (F1 0.93)" in measured(bars, rows)["latency"]
    assert "one task" not in measured(bars, rows[:3])["latency"]
