"""`perilune swarm run|resume|demo|view|replay|audit|...`: the command's part of agent swarms. Imports no torch."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from perilune.cli import UserError, _fail, _nearest, _parse, _positional, _print_json

STEPS = ("run", "resume", "demo", "view", "replay", "audit", "traces", "spans", "list", "pins")


@dataclass(kw_only=True)
class RunFlags:
    model: str | None = None
    """Name of the model; default: the variable PERILUNE_MODEL."""
    base_url: str | None = None
    """OpenAI-compatible endpoint, up to /v1; default: the variable OPENAI_BASE_URL."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; "" for an endpoint without one. Keys are never taken as arguments."""
    docs: str | None = None
    """Folder of documents (text, Markdown, HTML, PDF, DOCX) that agents may search and cite."""
    out: str | None = None
    """Folder of the run; default: a new one under runs/swarm."""
    budget: tuple[str, ...] = ()
    """Limits of the whole run: --budget calls=500 tokens=2e6 cost=5 seconds=3600 agents=100 steps=2000"""
    price: tuple[float, float] | None = None
    """Of a million prompt and completion tokens, for cost."""
    tools: tuple[str, ...] | None = None
    """Names of the tools to offer; default: all that work here."""
    hosts: tuple[str, ...] = ()
    """Hosts that agents may fetch from: en.wikipedia.org, "*.example.org", "*"."""
    search_url: str | None = None
    """Search service for web_search: a SearXNG instance."""
    browser: bool = False
    """Offer a browser, inside --hosts."""
    mcp: str | None = None
    """TOML file with [[server]] tables: MCP servers shared by all agents."""
    policy: str | None = None
    """TOML file with [[rule]] tables: which calls are allowed, denied or asked for."""
    token_ids: bool = False
    """Ask the endpoint for token ids and log-probabilities, and keep them: see `perilune swarm traces`."""
    depth: int = 1
    """How deep sub-agents may create sub-agents; 1: only the orchestrator does."""
    agents: int = 300
    """Agents at work at a time; more of them queue."""
    context_tokens: int = 128_000
    """Window of the model."""
    max_tokens: int = 16_384
    """Of one reply."""
    temperature: float | None = None
    seed: int = 0
    engine: Literal["local", "ray"] = "local"
    """Where sub-agents run: in this process, or in a pool of Ray workers (needs --journal and the extra `scale`)."""
    workers: int = 2
    """Of the pool; each runs many agents."""
    journal: str | None = None
    """PostgreSQL server for the journal, postgresql://USER@HOST/DATABASE; the password comes from PGPASSWORD or
    ~/.pgpass. Default: a file in the run's folder."""
    view: bool = False
    """Serve the web view while it runs; it also takes approvals."""
    port: int = 0
    """Of the web view; 0: any that is free."""
    json: bool = False
    quiet: bool = False


@dataclass(kw_only=True)
class ResumeFlags:
    view: bool = False
    """Serve the web view while it runs; it also takes approvals."""
    port: int = 0
    json: bool = False
    quiet: bool = False


@dataclass(kw_only=True)
class ReplayFlags:
    speed: float = 1.0
    json: bool = False


@dataclass(kw_only=True)
class ViewFlags:
    port: int = 0


@dataclass(kw_only=True)
class ListFlags:
    json: bool = False


def swarm_verb(arguments: list[str]) -> None:
    """Run a swarm of agents on a task, resume one, watch it, play it again, audit it."""
    expected = f"one of {', '.join(STEPS)}"
    step, rest = _positional(arguments, "STEP", expected, "perilune swarm demo")
    if step not in STEPS:
        _fail(f"unknown step {step!r}{_nearest(step, STEPS)}; expected {expected}", code=2)
    {
        "run": _run,
        "resume": _resume,
        "demo": _demo,
        "view": _view,
        "replay": _replay,
        "audit": _audit,
        "traces": _traces,
        "spans": _spans,
        "list": _list,
        "pins": _pins,
    }[step](rest)


# ---------------------------------------------------------------------------------------------------------------------
# run, resume, demo


def _run(arguments: list[str]) -> None:
    example = 'perilune swarm run "Compare the moons" --docs FOLDER --model NAME --base-url URL'
    task, rest = _positional(arguments, "TASK", "what the swarm is to do, in quotes", example)
    text = "Do a task with an orchestrator and the sub-agents it creates; writes answer.md with its sources."
    flags = _parse('perilune swarm run "TASK"', f"{text}\n\nexample: {example}", RunFlags, rest)
    from perilune.swarm.session import Settings

    model = flags.model or os.environ.get("PERILUNE_MODEL")
    base_url = flags.base_url or os.environ.get("OPENAI_BASE_URL")
    if not model:
        raise UserError("no model: give --model, or set PERILUNE_MODEL")
    if not base_url:
        raise UserError("no endpoint: give --base-url, or set OPENAI_BASE_URL (`perilune swarm demo` needs none)")
    settings = Settings(
        model=model,
        base_url=base_url,
        api_key_env=flags.api_key_env or None,
        docs=flags.docs,
        tools=flags.tools,
        hosts=flags.hosts,
        search_url=flags.search_url,
        browser=flags.browser,
        policy=flags.policy,
        mcp=flags.mcp,
        limits=_limits(flags.budget),
        price=flags.price,
        token_ids=flags.token_ids,
        config={
            "max_depth": flags.depth,
            "max_active": flags.agents,
            "context_tokens": flags.context_tokens,
            "max_tokens": flags.max_tokens,
            "temperature": flags.temperature,
            "seed": flags.seed,
        },
        engine=flags.engine,
        workers=flags.workers,
        journal=flags.journal,
    )
    folder = Path(flags.out) if flags.out else _new_folder(Path("runs") / "swarm")
    _conduct(task, folder, settings, flags)


def _resume(arguments: list[str]) -> None:
    example = "perilune swarm resume runs/swarm/20261115-1"
    name, rest = _positional(arguments, "RUN", "the folder of a run", example)
    text = "Go on with a run whose process ended; nothing that is in its journal is done again."
    flags = _parse(f"perilune swarm resume {name}", f"{text}\n\nexample: {example}", ResumeFlags, rest)
    from perilune.swarm import session

    folder = _folder(name)
    _conduct(None, folder, session.load(folder), flags)


def _demo(arguments: list[str]) -> None:
    from perilune.cli_swarm_demo import demo_step

    demo_step(arguments)


def _conduct(task: str | None, folder: Path, settings: Any, flags: Any, **more: Any) -> None:
    """Run, show and tell how it ended; `more` goes to `session.conduct`."""
    from perilune.swarm.client import ModelError
    from perilune.swarm.session import conduct

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    quiet, port = flags.quiet or flags.json, getattr(flags, "port", 0)
    work = conduct(task, folder, settings, view=flags.view, quiet=quiet, port=port, say=say, **more)
    try:
        result = _until_interrupted(work)
    except ModelError as error:
        raise UserError(f"the model cannot be reached: {error}; `perilune swarm resume {folder}` goes on") from None
    if result is None:
        _fail(f"interrupted; `perilune swarm resume {folder}` goes on", code=130)
    if flags.json:
        parallel = result.parallelism
        _print_json(
            {
                "status": result.status,
                "answer": result.answer,
                "error": result.error,
                "folder": str(folder),
                "agents": result.agents,
                "steps": parallel.total_steps,
                "critical_steps": parallel.critical_steps,
                "width": parallel.width,
                "speed_up": round(parallel.speed_up, 3),
                "warnings": list(parallel.warnings),
                "spent": {name: line["spent"] for name, line in result.spent.items()},
            }
        )
    else:
        print(f"\n{result.answer.rstrip()}\n" if result.status == "done" else f"\nno answer: {result.error}")
        for warning in result.parallelism.warnings:
            print(f"warning: {warning}")
        print(f"{folder / 'answer.md'}; journal: {folder}")
    if result.status != "done":
        raise SystemExit(1)


def _until_interrupted(work: Coroutine[Any, Any, Any]) -> Any:
    """The result, or None when a person or the system asked for the end: agents leave as they are."""

    async def watched() -> Any:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return None

    return asyncio.run(watched())


def _limits(assignments: tuple[str, ...]) -> dict[str, float]:
    from perilune.swarm.budget import DIMENSIONS

    limits: dict[str, float] = {}
    for each in assignments:
        name, equals, text = each.partition("=")
        if not equals or name not in DIMENSIONS:
            raise UserError(f"--budget {each!r}: expected one of {', '.join(DIMENSIONS)} with a number, calls=500")
        try:
            value = float(text)
        except ValueError:
            raise UserError(f"--budget {each!r}: {text!r} is not a number") from None
        limits[name] = value if name in ("cost", "seconds") else int(value)
    return limits


def _new_folder(parent: Path) -> Path:
    day = time.strftime("%Y%m%d")
    number = 1
    while (parent / f"{day}-{number}").exists():
        number += 1
    return parent / f"{day}-{number}"


def _folder(name: str) -> Path:
    from perilune.swarm.session import place_of

    for folder in (Path(name), Path("runs") / "swarm" / name):
        if folder.is_dir() and place_of(folder).exists():
            return folder
    raise UserError(f"no run in {name!r}: `perilune swarm list` shows what there is")


# ---------------------------------------------------------------------------------------------------------------------
# view, replay, audit, list


def _view(arguments: list[str]) -> None:
    example = "perilune swarm view runs/swarm/demo"
    name, rest = _positional(arguments, "RUN", "the folder of a run", example)
    text = "Serve the web view of a run, finished or under way in another process, until Ctrl-C."
    flags = _parse(f"perilune swarm view {name}", f"{text}\n\nexample: {example}", ViewFlags, rest)
    from perilune.swarm.session import place_of
    from perilune.swarm.view.server import View

    view = View(reader=place_of(_folder(name)).reader(), port=flags.port)
    print(f"watch it at {view.start()}", flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        view.stop()


def _replay(arguments: list[str]) -> None:
    example = "perilune swarm replay runs/swarm/demo --speed 4"
    name, rest = _positional(arguments, "RUN", "the folder of a run", example)
    text = "Play a run again in the terminal, at its own pace or faster."
    flags = _parse(f"perilune swarm replay {name}", f"{text}\n\nexample: {example}", ReplayFlags, rest)
    if not flags.speed > 0:
        raise UserError(f"--speed is {flags.speed}, expected more than 0")
    from rich.console import Console
    from rich.live import Live

    from perilune.swarm.replay import frames, play
    from perilune.swarm.session import place_of
    from perilune.swarm.terminal import PlainLines, Screen, summary

    with place_of(_folder(name)).reader() as reader:
        console = Console()
        if flags.json:
            for frame in frames(reader.events()):
                events = [{"kind": event.kind, "chain": event.chain, **event.read()} for event in frame.events]
                print(json.dumps({"seconds": round(frame.seconds, 3), "events": events}))
            return
        last = None
        if console.is_terminal:
            with Live(console=console, auto_refresh=False, transient=True) as live:
                for frame in play(reader.events(), speed=flags.speed):
                    live.update(Screen(frame.state, int(1000 * frame.events[-1].time)), refresh=True)
                    last = frame.state
        else:
            lines = PlainLines()
            for frame in frames(reader.events()):
                for line in lines.since_last(frame.state, int(1000 * frame.events[-1].time)):
                    print(line)
                last = frame.state
        for line in summary(last) if last is not None else ():
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _audit(arguments: list[str]) -> None:
    from perilune.cli_audit import audit_step

    audit_step(arguments)


@dataclass(kw_only=True)
class TracesFlags:
    out: str | None = None
    """File for the traces, one JSON object a line; default: standard output."""
    agents: tuple[str, ...] | None = None
    """Only of these agents, such as main."""


def _traces(arguments: list[str]) -> None:
    example = "perilune swarm traces runs/swarm/20261115-1 --out traces.jsonl"
    name, rest = _positional(arguments, "RUN", "the folder of a run made with --token-ids", example)
    text = "Token ids, log-probabilities and masks exactly as the endpoint served them, for training."
    flags = _parse(f"perilune swarm traces {name}", f"{text}\n\nexample: {example}", TracesFlags, rest)
    from perilune.swarm.session import place_of
    from perilune.swarm.traces import trace_lines

    with place_of(_folder(name)).reader() as reader:
        lines = list(trace_lines(reader, flags.agents))
    if not lines:
        raise UserError(f"{name!r} has no tokens: run it with --token-ids, against an endpoint that returns them")
    if flags.out is None:
        for line in lines:
            sys.stdout.write(line.decode())
        return
    Path(flags.out).write_bytes(b"".join(lines))
    print(f"{len(lines)} traces in {flags.out}")


@dataclass(kw_only=True)
class SpansFlags:
    pass


def _spans(arguments: list[str]) -> None:
    example = "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 perilune swarm spans runs/swarm/demo"
    name, rest = _positional(arguments, "RUN", "the folder of a run", example)
    text = "Send a run as OpenTelemetry spans to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names."
    _parse(f"perilune swarm spans {name}", f"{text}\n\nexample: {example}", SpansFlags, rest)
    from perilune.swarm.session import place_of
    from perilune.swarm.spans import Spans, collector

    folder = _folder(name)
    provider = collector()
    with place_of(folder).reader() as reader:
        spans = Spans(folder.name, provider)
        spans.receive(reader.events())
        spans.close()
    if not provider.force_flush():
        raise UserError("the collector did not take the spans: is it there? OTEL_EXPORTER_OTLP_ENDPOINT names it")
    print(f"sent the spans of {folder}")


def _list(arguments: list[str]) -> None:
    text = "Runs in a folder: when, how they ended, what they were to do."
    place = arguments.pop(0) if arguments and not arguments[0].startswith("-") else str(Path("runs") / "swarm")
    flags = _parse("perilune swarm list", f"{text}\n\nexample: perilune swarm list runs/swarm", ListFlags, arguments)
    from perilune.swarm.session import place_of

    found = []
    for path in sorted(each for each in Path(place).glob("*") if each.is_dir() and place_of(each).exists()):
        with place_of(path).reader() as reader:
            chain = list(reader.events("run"))
        if not chain:
            continue
        end = next((event.read()["status"] for event in chain if event.kind == "run_finished"), "unfinished")
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(chain[0].time))
        found.append({"run": str(path), "began": began, "status": end, "task": chain[0].read()["task"]})
    if flags.json:
        _print_json(found)
        return
    if not found:
        print(f"no runs in {place}")
    for each in found:
        print(f"{each['run']:<32} {each['began']}  {each['status']:<10} {' '.join(each['task'].split())[:70]}")


@dataclass(kw_only=True)
class PinsFlags:
    approve: str | None = None
    """SERVER/TOOL whose new description is right."""
    json: bool = False


def _pins(arguments: list[str]) -> None:
    text = "Tools of MCP servers whose description changed since it was first seen: they wait here for approval."
    example = "perilune swarm pins --approve git/git_log"
    flags = _parse("perilune swarm pins", f"{text}\n\nexample: {example}", PinsFlags, arguments)
    from perilune.swarm.journal.seal import state_folder
    from perilune.swarm.tools.mcp_pins import Pins, difference

    pins = Pins.load(state_folder() / "mcp_pins.json")
    if flags.approve is not None:
        server, _, name = flags.approve.partition("/")
        pins.approve(server, name)
        print(f"{flags.approve} is approved as it is described now")
        return
    waiting = [
        {"tool": f"{server}/{name}", "change": difference(name, pins.servers.get(server, {}).get(name), described)}
        for server, tools in pins.pending.items()
        for name, described in tools.items()
    ]
    if flags.json:
        _print_json(waiting)
        return
    for each in waiting:
        print(f"{each['tool']}\n{each['change']}\n")
    print(f"{len(waiting)} waiting for approval" + (f"; {example.split(' git/')[0]} SERVER/TOOL" if waiting else ""))
