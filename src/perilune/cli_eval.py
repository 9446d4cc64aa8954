"""`perilune eval RUN`: the command's part of looking at what a run can do; `perilune eval safety` is cli_safety.py."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perilune.cli import _parse, _positional, _print_json, _run_folder


@dataclass(kw_only=True)
class EvalFlags:
    rows: int = 64
    """Rows of the run's length to read of each domain, or of a probe."""
    domains: bool = True
    """Bits per byte by domain."""
    copy_lengths: tuple[int, ...] = (16, 64)
    """Random tokens to copy."""
    positions: int = 0
    """Loss by position in rows of so many tokens; 0: not."""
    position_rows: int = 8
    needle: tuple[int, ...] = ()
    """Lengths of texts to find needles in: --needle 4096 32768"""
    needles: int = 8
    """Facts in each text; all are asked for."""
    needle_rows: int = 8
    """Texts of each length."""
    probe_lengths: tuple[int, ...] = ()
    """Of a run on a probe: other lengths to ask at."""
    corpus: str | None = None
    """Held-out documents of another corpus than the run's."""
    split_field: str | None = None
    """With --corpus: the field of its records that says train or valid."""
    device: str = "auto"
    """"auto" takes the first of cuda, cpu that is there."""
    runs: str = "runs"
    """Folder that holds runs."""
    json: bool = False


def eval_verb(arguments: list[str]) -> None:
    """What a run can do: bits per byte by domain, copying, loss by position, retrieval; `safety`: see cli_safety."""
    if arguments[:1] == ["safety"]:
        from perilune.cli_safety import safety_verb

        return safety_verb(arguments[1:])
    name, rest = _positional(arguments, "RUN", "a run's name or folder", "perilune eval nano")
    help_text = (
        "What a run can do: bits per byte by domain, copying, loss by position, retrieval from long texts.\n\n"
        f"example: perilune eval {name} --positions 2048 --needle 1024 4096"
    )
    flags = _parse(f"perilune eval {name}", help_text, EvalFlags, rest)
    folder = _run_folder(name, flags.runs)
    from perilune.eval import EvalConfig, evaluate_run
    from perilune.train.progress import DataProgress
    from perilune.train.run_folder import read_config
    from perilune.train.trainer import pick_device

    corpus = None
    if flags.corpus is not None:
        corpus = dataclasses.replace(
            read_config(folder).data.corpus, source=flags.corpus, split_field=flags.split_field, id_field=None
        )
    config = EvalConfig(
        corpus=corpus,
        domains=flags.domains,
        rows=flags.rows,
        copy_lengths=flags.copy_lengths,
        positions=flags.positions,
        position_rows=flags.position_rows,
        needle_lengths=flags.needle,
        needles=flags.needles,
        needle_rows=flags.needle_rows,
        probe_lengths=flags.probe_lengths,
    )
    with DataProgress(quiet=flags.json) as progress:
        found = evaluate_run(folder, config, device=pick_device(flags.device, "--device"), progress=progress)
    _print_json(found) if flags.json else show(found)


def show(found: dict[str, Any]) -> None:
    """One table: what was asked, of what, and the numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = f"{found['run']}: {found['parameters']:,} parameters, trained on rows of {found['trained_length']:,} tokens"
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for column in ("check", "of", "result", ""):
        table.add_column(column, justify="right" if column == "result" else "left")
    for row in table_rows(found):
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def table_rows(found: dict[str, Any]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for domain, numbers in found.get("domains", {}).items():
        part = "" if numbers["whole"] else " (a sample)"
        size = f"{numbers['documents']:,} documents, {numbers['bytes']:,} bytes{part}"
        rows.append(("bits per byte", domain, f"{numbers['bits_per_byte']:.3f}", size))
    for copy in found.get("copy", []):
        nats = f"{copy['nats']:.2f} nats a token, {copy['nats_first_half']:.2f} the first time"
        rows.append(("copying", f"{copy['length']} random tokens", f"{copy['accuracy']:.1%}", nats))
    for bucket in found.get("positions", []):
        place = f"tokens {bucket['from']:,} to {bucket['to']:,}"
        bits = f"{bucket['bits_per_byte']:.3f} bits per byte, {bucket['tokens']:,} tokens"
        rows.append(("loss by position", place, f"{bucket['nats']:.3f} ± {bucket['standard_error']:.3f}", bits))
    for needle in found.get("needle", []):
        depths = " ".join("-" if share is None else f"{share:.0%}" for share in needle["ranked_by_depth"])
        more = f"chance {needle['chance']:.1%}; exact {needle['exact']:.1%}; by depth {depths}"
        rows.append(("needles found", f"{needle['length']:,} tokens", f"{needle['ranked']:.1%}", more))
    for probe in found.get("probe", []):
        whole = f"{probe['exact_match']:.1%} of rows without a mistake, loss {probe['loss']:.3f}"
        rows.append(("answers", f"{probe['length']:,} tokens", f"{probe['accuracy']:.1%}", whole))
    return rows
