"""`perilune eval safety ENDPOINT|RUN|FOLDER`: ask a model the shipped safety probes and write the report.

Exit status: 0 when the report is written, whatever it says; 1 when the model cannot be asked, or more than a fifth of
the probes stayed without an answer; 2 for wrong arguments.
"""

import asyncio
import math
import os
import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.chat_client import ChatError, Endpoint
from perilune.cli import UserError, _nearest, _parse, _positional, _print_json

if TYPE_CHECKING:
    from perilune.eval.safety import Outcome, Probe, SafetyConfig
    from perilune.swarm.provider import Secret

EXAMPLE = "perilune eval safety http://127.0.0.1:8000"
MODELS_SECONDS = 30.0


@dataclass(kw_only=True)
class SafetyFlags:
    model: str | None = None
    """Name of the model at the endpoint; default: the first it offers."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that may hold the endpoint's key. Keys are never taken as arguments."""
    out: str | None = None
    """Folder for safety.json, .html and .md; default: that of the run or model, or one under runs/safety."""
    categories: tuple[str, ...] = ("refusal", "injection", "sabotage", "over_refusal")
    probes: str | None = None
    """Folder with probes of your own, one JSON-lines file a category."""
    concurrency: int = 8
    """Probes at a time."""
    attempts: int = 3
    """How often a call is tried."""
    seconds: float = 300.0
    """Longest that one try may take."""
    max_tokens: int = 512
    """Of one reply."""
    temperature: float = 0.0
    seed: int = 0
    turns: int = 8
    """Replies of the model in one probe."""
    device: str = "auto"
    """Where a run or folder is computed; "auto" takes the first of cuda, cpu that is there."""
    runs: str = "runs"
    """Folder that holds runs."""
    json: bool = False
    """Print safety.json's scores, and nothing else on standard output."""


def safety_verb(arguments: list[str]) -> None:
    if arguments[:1] in (["-h"], ["--help"]):
        arguments = ["TARGET", *arguments]
    target, rest = _positional(arguments, "TARGET", "an address, a run's name or a folder", EXAMPLE)
    flags = _parse(
        f"perilune eval safety {target}",
        "Ask a model 84 probes: does it decline what it should, keep to its task when a tool's result gives orders, "
        "leave tests and logs alone, and answer harmless questions. Rules judge, no model does. Writes safety.json, "
        "safety.html and safety.md, and the section of the model card in an exported folder.\n\n"
        f"example: {EXAMPLE} --model NAME\n\nexample: perilune eval safety nano-sft --categories refusal injection",
        SafetyFlags,
        rest,
    )
    from perilune.eval.safety import FILES, SafetyConfig, load_probes, write_reports

    config = SafetyConfig(
        concurrency=flags.concurrency,
        max_tokens=flags.max_tokens,
        temperature=flags.temperature,
        seed=flags.seed,
        turns=flags.turns,
    )
    if flags.attempts < 1:
        raise UserError(f"--attempts is {flags.attempts}, expected at least 1")
    if not 0 < flags.seconds < math.inf:
        raise UserError(f"--seconds is {flags.seconds:g}, expected more than 0")
    probes = load_probes(tuple(name.replace("-", "_") for name in flags.categories), folder=flags.probes)
    with ExitStack() as stack:
        base_url, key, model, home = _target(target, flags, stack)
        folder = Path(flags.out) if flags.out is not None else home
        _check_writable(folder)  # before anything is asked
        outcome = asyncio.run(_asked(base_url, key, model, probes, config, flags))
    write_reports(outcome, folder)
    if flags.out is None and home is not None:
        _tell_card(home, outcome)
    if flags.json:
        _print_json({name: value for name, value in outcome.plain().items() if name != "answered"})
    else:
        show(outcome)
        print(f"{folder / FILES[1]}; also {FILES[0]} and {FILES[2]} there")
    if not outcome.is_complete:
        print("perilune: more than a fifth of the probes have no answer: the report is incomplete", file=sys.stderr)
        raise SystemExit(1)


def _check_writable(folder: Path) -> None:
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UserError(f"the report cannot be written to {str(folder)!r}: give --out FOLDER")


def _target(target: str, flags: SafetyFlags, stack: ExitStack) -> "tuple[str, Secret | None, str, Path]":
    """(address, key, model's name, folder for the report) of what was named."""
    from perilune.swarm.provider import Secret

    if "://" in target:
        key = os.environ.get(flags.api_key_env, "").strip() if flags.api_key_env else ""
        endpoint = _endpoint(target, key)
        model = flags.model or _offered(endpoint, None)
        parts = re.findall(r"[\w.]+", f"{endpoint.url.partition('://')[2].removesuffix('/v1')}-{model}")
        home = Path(flags.runs) / "safety" / "-".join(parts)[:100]
        return endpoint.url, Secret(key) if key else None, model, home
    from perilune.cli_serve import model_folder, served_inside

    home = model_folder(target, flags.runs)
    inside = served_inside(target, runs=flags.runs, device=flags.device, sequences=flags.concurrency)
    address, key = stack.enter_context(inside)
    endpoint = _endpoint(address, key)
    return endpoint.url, Secret(key), _offered(endpoint, flags.model), home


def _endpoint(address: str, key: str) -> Endpoint:
    try:
        found = Endpoint.at(address, key=key or None)
        return Endpoint(url=found.url, key=found.key, seconds=MODELS_SECONDS)
    except ChatError as error:
        raise UserError(str(error)) from None


def _offered(endpoint: Endpoint, wanted: str | None) -> str:
    """A model that the endpoint has; an endpoint that is not there says so here."""
    try:
        names = [each["id"] for each in endpoint.models()]
    except ChatError as error:
        raise UserError(str(error)) from None
    if not names:
        raise UserError(f"{endpoint.url} offers no model: give --model")
    if wanted is not None and wanted not in names:
        raise UserError(f"there is no model {wanted!r}{_nearest(wanted, names)}: {', '.join(names)}")
    return wanted or names[0]


async def _asked(
    base_url: str, key: "Secret | None", model: str, probes: "list[Probe]", config: "SafetyConfig", flags: SafetyFlags
) -> "Outcome":
    from perilune.eval.safety import run_probes
    from perilune.swarm.http_client import HTTPClient
    from perilune.swarm.provider import Limits

    limits = Limits(
        attempts=flags.attempts, attempt_seconds=flags.seconds, patience_seconds=20.0, first_patience_seconds=5.0
    )
    client = HTTPClient(base_url=base_url, api_key_env=None, api_key=key, limits=limits, max_concurrent=None)
    async with client:
        with _Progress(quiet=flags.json) as progress:
            return await run_probes(client, model, probes, config, progress=progress.tell)


class _Progress:
    """A bar on a terminal; nothing elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty())
        self._task: Any = None

    def __enter__(self) -> "_Progress":
        self._bar.start()
        self._task = self._bar.add_task("asking", total=None)
        return self

    def __exit__(self, *problem: object) -> None:
        self._bar.stop()

    def tell(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)


def _tell_card(folder: Path, outcome: "Outcome") -> None:
    """The section of the card of an exported model, where there is one."""
    if not (folder / "README.md").exists():
        return
    from perilune.hub.safety_section import write_section

    if write_section(folder, outcome.plain()):
        print(f"the card {folder / 'README.md'} has these results", file=sys.stderr)


def show(outcome: "Outcome") -> None:
    """One table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from perilune.eval.safety.report import COLUMNS, rows

    table = Table(box=box.SIMPLE, title=Text(f"{outcome.model}: {len(outcome.answered)} probes"), title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for row in rows(outcome):
        table.add_row(*map(str, row))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


__all__ = ["SafetyFlags", "safety_verb", "show"]
