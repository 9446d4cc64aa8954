"""`perilune train extend --from RUN`: the command's part of extending a context."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from perilune.cli import UserError, _run_folder

if TYPE_CHECKING:
    from perilune.train.run_config import RunConfig


@dataclass(kw_only=True)
class ExtendFlags:
    source: Annotated[str, tyro.conf.arg(name="from")] = ""
    """The run to extend, by name or folder."""
    length: int = 32_768
    """Tokens in a row from now on."""
    steps: int | None = None
    """A tenth of the run's own when not given."""


HELP = """
    --from RUN       the run to extend, by name or folder
    --length 32768   tokens in a row from now on
    --steps N        a tenth of the run's own when not given
"""


def extended(arguments: list[str], runs: str) -> tuple["RunConfig", list[str]]:
    """The config that extends the run that `--from` names, and the arguments that are left for its fields."""
    known = [argument for argument in arguments if argument not in ("-h", "--help")]
    flags, rest = tyro.cli(ExtendFlags, args=known, return_unknown_args=True)
    asks_for_help = len(known) < len(arguments)
    if not flags.source:
        if asks_for_help:
            print(f"perilune train extend: go on with a trained run in longer rows.\n{HELP}\nand every field of a run")
            print("\nexample: perilune train extend --from base --length 32768")
            raise SystemExit(0)
        raise UserError("--from is missing: the run to extend (example: perilune train extend --from base)")
    from perilune.recipes.extend import extend
    from perilune.train.run_folder import read_config

    folder = _run_folder(flags.source, runs)
    config = extend(read_config(folder), folder, length=flags.length, steps=flags.steps)
    return config, [*rest, "--help"] if asks_for_help else rest
