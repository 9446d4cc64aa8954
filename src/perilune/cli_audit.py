"""`perilune swarm audit RUN`: is the journal of a run what was written, and what in it deserves a second look.

By default a page for a person; with --json, or into the file of --out, the whole journal as JSON lines. A run of
reinforcement learning whose episodes are swarms is audited episode by episode, and its files are verified by the
checksum of every line, which finds damage and edits by hand; seals, which need a key, are in journals alone.

Exit status:

    0    the journal is intact; flags may be raised
    1    it was tampered with, or there is no run
    2    wrong arguments
    3    it is intact, and a flag named with --fail-on was raised ("serious" and "any" name many)
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.cli import UserError, _fail, _nearest, _parse, _positional

if TYPE_CHECKING:
    from perilune.swarm.audit_patterns import Patterns

EXIT_FLAGGED = 3
SHOWN_PROBLEMS = 20
"""Of damaged episodes; --json lists all."""
EXAMPLE = "perilune swarm audit runs/swarm/demo"


@dataclass(kw_only=True)
class AuditFlags:
    json: bool = False
    """The whole journal as JSON lines on standard output: verification, summary with flags, every event."""
    out: str | None = None
    """File for the same JSON lines; the page for a person is still shown."""
    contents: bool = False
    """With the stored results themselves, not only their hashes."""
    protect: tuple[str, ...] = ()
    """More files that agents have no business with, KIND=PATTERN: --protect reward=scoring/* data=*.gold.json
    A kind without a pattern (tests=) is not looked for."""
    fail_on: tuple[str, ...] = ()
    """Exit with 3 when one of these flags is raised: names of flags, "serious" or "any"."""


def audit_step(arguments: list[str]) -> None:
    from perilune.cli_swarm import _folder

    name, rest = _positional(arguments, "RUN", "the folder of a run", EXAMPLE)
    text = (
        "Verify the journal of a run and show what in it deserves a look: spawn attempts by sub-agents, writes outside "
        "the sandbox, access to rewards, judges, weights and keys, empty or repeated tasks, claims without a call.\n\n"
        "Exit status: 0 intact, 1 tampered with or no run, 2 wrong arguments, 3 a flag of --fail-on was raised.\n\n"
        f"example: {EXAMPLE} --fail-on serious\n\nexample: {EXAMPLE} --out audit.jsonl --contents"
    )
    flags = _parse(f"perilune swarm audit {name}", text, AuditFlags, rest)
    from perilune.swarm.audit import audit_lines, summarize
    from perilune.swarm.audit_patterns import PatternError, with_changes
    from perilune.swarm.audit_view import page
    from perilune.swarm.journal.seal import load_or_create_key, state_folder
    from perilune.swarm.session import place_of

    try:
        patterns = with_changes(flags.protect)
        failing = _failing(flags.fail_on)
    except (PatternError, UserError) as error:
        _fail(str(error), code=2)
    if (run := _episodes_of(name)) is not None:
        return _audit_episodes(run, patterns, failing, flags)
    place = place_of(_folder(name))
    report = place.verify(load_or_create_key(), heads=state_folder() / "heads")
    with place.reader() as reader:
        summary = summarize(reader, patterns)
        if flags.json or flags.out is not None:
            _write(audit_lines(reader, report, contents=flags.contents, summary=summary), flags.out)
        if not flags.json:
            for line in page(reader, report, summary):
                print(line)
    for problem in report.problems:
        print(f"perilune: {problem}", file=sys.stderr)
    state = "intact" if report.intact else f"{len(report.problems) + report.more_problems} problems"
    print(f"{report.events:,} events on {report.chains} chains, {report.artefacts} results: {state}", file=sys.stderr)
    if not report.intact:
        raise SystemExit(1)
    _leave(failing, summary)


def _leave(failing: set[str], summary: dict[str, Any]) -> None:
    raised = failing & set(summary["flag_counts"])
    if raised:
        print(f"perilune: raised: {', '.join(sorted(raised))}", file=sys.stderr)
        raise SystemExit(EXIT_FLAGGED)


# Episodes of reinforcement learning ----------------------------------------------------------------------------------


def _episodes_of(name: str) -> Path | None:
    """The folder of a run of reinforcement learning, by its name or folder; None for what is none."""
    return next((each for each in (Path(name), Path("runs") / name) if (each / "rl.json").is_file()), None)


def _not_there(run: Path) -> list[str]:
    """Files of episodes that the run's own records tell of, and that are not there: never kept, or taken away."""
    missing = []
    for records, folder, first in (("records.jsonl", "trajectories", 1), ("evaluations.jsonl", "evaluations", 0)):
        lines = (run / records).read_bytes().splitlines() if (run / records).is_file() else []
        for line in lines:
            try:
                number = int(json.loads(line)["iteration"]) - first
            except (KeyError, TypeError, ValueError):
                continue  # cut while it was written
            if not (run / folder / f"{number:06d}.jsonl").is_file():
                missing.append(f"{folder}/{number:06d}.jsonl")
    return list(dict.fromkeys(missing))


def _audit_episodes(run: Path, patterns: "Patterns", failing: set[str], flags: AuditFlags) -> None:
    from perilune.rl.trajectory import verified_trajectories
    from perilune.swarm.audit_episodes import Episode, summarize_episodes
    from perilune.swarm.audit_view import episodes_page

    files = sorted(run.glob("trajectories/*.jsonl")) + sorted(run.glob("evaluations/*.jsonl"))
    if not files:
        raise UserError(f"the run in {str(run)!r} kept no episodes (keep_trajectories): there is nothing to audit")
    problems: list[str] = []

    def episodes() -> Iterator[Episode]:
        for path in files:
            found, wrong = verified_trajectories(path)
            problems.extend(wrong)
            for each in found:
                if each.events:
                    yield f"{path.parent.name}/{path.stem} {each.task}/{each.sample}", each.events

    summary = summarize_episodes(episodes(), patterns, problems)
    if not summary["episodes"] and not problems:
        raise UserError(f"the episodes in {str(run)!r} have no agents: there is nothing to audit")
    missing = _not_there(run)
    if flags.json or flags.out is not None:
        verification = {"files": len(files), "episodes": summary["episodes"], "intact": not problems}
        verification |= {"missing": missing} if missing else {}
        records = [
            {"record": "verification", **verification, "problems": problems},
            {"record": "summary", **summary},
        ]
        _write((json.dumps(record).encode() + b"\n" for record in records), flags.out)
    if not flags.json:
        for line in episodes_page(summary, len(files), problems=len(problems)):
            print(line)
    if missing:
        told = f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
        print(f"perilune: {len(missing)} files of episodes are not there, though the run tells of them: {told}",
              file=sys.stderr)  # fmt: skip
    for problem in problems[:SHOWN_PROBLEMS]:
        print(f"perilune: {problem}", file=sys.stderr)
    if problems:
        print(f"{summary['episodes']:,} episodes from {len(files)} files: {len(problems)} problems", file=sys.stderr)
        raise SystemExit(1)
    _leave(failing, summary)


# ---------------------------------------------------------------------------------------------------------------------


def _write(lines: Iterable[bytes], out: str | None) -> None:
    if out is None:
        for line in lines:
            sys.stdout.write(line.decode())
        return
    with Path(out).open("wb") as file:
        file.writelines(lines)


def _failing(names: tuple[str, ...]) -> set[Any]:
    from perilune.swarm.audit import SERIOUS
    from perilune.swarm.audit_view import MEANINGS

    found: set[str] = set()
    for name in names:
        if name in ("any", "serious"):
            found |= set(MEANINGS) if name == "any" else SERIOUS
        elif name in MEANINGS:
            found.add(name)
        else:
            raise UserError(f"--fail-on {name!r} is no flag{_nearest(name, MEANINGS)}: expected serious, any or one of "
                            f"{', '.join(MEANINGS)}")  # fmt: skip
    return found


__all__ = ["AuditFlags", "audit_step"]
