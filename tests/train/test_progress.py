"""What a person reads while a run goes on."""

import io

import pytest
from rich.console import Console

from perilune.train.progress import TrainingProgress


def lines_of(total_steps: int, records: list[dict], *, quiet: bool = False) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=200, quiet=quiet)
    with TrainingProgress(total_steps=total_steps, quiet=quiet, console=console) as progress:
        for record in records:
            progress.record(record)
    return out.getvalue().splitlines()


def train_record(step: int, **changes: object) -> dict:
    record = {"kind": "train", "step": step, "loss": 2.0, "bits_per_byte": 1.5, "grad_norm": 1.0, "skipped": 0}
    return {**record, "max_logit": [3.0, 7.5], "tokens_per_s": 1234.5, **changes}


@pytest.mark.parametrize(("total_steps", "expected"), [(10, 10), (600, 51), (100_000, 51)])
def test_away_from_a_terminal_a_run_prints_about_fifty_lines(total_steps: int, expected: int) -> None:
    lines = lines_of(total_steps, [train_record(step) for step in range(1, total_steps + 1)])
    assert len(lines) == expected
    assert lines[0] == f"step 1/{total_steps}  loss 2.000  1.500 bits/byte  max logit 7.5  1,234 tok/s"
    assert lines[-1].startswith(f"step {total_steps}/{total_steps}")


def test_skipped_steps_and_validation_are_always_said_and_only_where_they_happen() -> None:
    records = [train_record(step) for step in range(1, 601)]
    records[16] = train_record(17, loss=None, skipped=1)
    records[17:] = [{**record, "skipped": 1} for record in records[17:]]
    records.insert(33, {"kind": "valid", "step": 33, "loss": 1.9, "bits_per_byte": 1.4})
    lines = lines_of(600, records)
    assert [line for line in lines if "skipped" in line] == [
        "step 17/600  not finite, skipped (1 so far)  1.500 bits/byte  max logit 7.5  1,234 tok/s"
    ]
    assert "step 33/600  valid loss 1.900  1.400 bits/byte" in lines


def test_an_upper_bound_of_the_largest_logit_is_said_to_be_one() -> None:
    records = [
        train_record(1, max_logit_is_bound=[False, True]),
        train_record(2, max_logit_is_bound=[True, False]),
        train_record(3, max_logit=[None, 2.0], max_logit_is_bound=[False, True]),
        train_record(4, max_logit=[None, None]),
    ]
    said = [line.partition("max logit ")[2].partition("  ")[0] for line in lines_of(4, records)]
    assert said == ["<= 7.5", "7.5", "<= 2.0", ""]


def test_quiet_says_nothing() -> None:
    assert lines_of(10, [train_record(step) for step in range(1, 11)], quiet=True) == []
