"""A run as a person starts it: endpoint, tools, documents, servers, policy, the two views and the answer's files.

`Settings` is all a person may choose; it is kept as `session.json` in the run's folder, so that `resume` needs nothing
but the folder. `conduct` puts the parts together, runs, and takes them apart again in the right order.
"""

from __future__ import annotations

import os
import tomllib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson
from rich.console import Console

from perilune.public_web import NetworkPolicy
from perilune.swarm.answer import write_answer
from perilune.swarm.budget import Limits, Price, Prices
from perilune.swarm.client import ModelClient
from perilune.swarm.http_client import HTTPClient
from perilune.swarm.journal.seal import load_or_create_key, state_folder
from perilune.swarm.place import JournalPlace
from perilune.swarm.policy import Policy, load_policy
from perilune.swarm.run import Engine, Run
from perilune.swarm.sandbox import Mount, Sandbox, open_sandbox, sandbox_report
from perilune.swarm.secrets import Secrets
from perilune.swarm.settings import SwarmConfig
from perilune.swarm.swarm import JOURNAL, Live, Swarm, SwarmError, SwarmResult
from perilune.swarm.terminal import TerminalView
from perilune.swarm.tools.browser import open_browser
from perilune.swarm.tools.documents import build_index
from perilune.swarm.tools.registry import Toolbox, standard_tools
from perilune.swarm.tools.tool import Tool
from perilune.swarm.tools.web import SearchEndpoint
from perilune.swarm.view.controls import Approvals, Decision
from perilune.swarm.view.server import View

if TYPE_CHECKING:  # needs the extra `scale`
    from perilune.swarm.scale.orders import Workplace

SESSION = "session.json"


@dataclass(frozen=True, kw_only=True)
class Settings:
    model: str
    base_url: str
    api_key_env: str | None = "OPENAI_API_KEY"
    """Environment variable that holds the key; None: the endpoint needs none."""
    docs: str | None = None
    """Folder of documents that agents may search."""
    tools: tuple[str, ...] | None = None
    """Names of the tools to offer; None: all that work here."""
    hosts: tuple[str, ...] = ()
    """Hosts that agents may fetch from: names, "*.example.org", or "*"."""
    search_url: str | None = None
    """A SearXNG instance, or any service that answers alike."""
    browser: bool = False
    policy: str | None = None
    """TOML file with [[rule]] tables."""
    mcp: str | None = None
    """TOML file with [[server]] tables."""
    limits: Mapping[str, float] = field(default_factory=dict)
    token_ids: bool = False
    """Ask for token ids and log-probabilities, for traces."""
    price: tuple[float, float] | None = None
    """Of a million prompt and completion tokens."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of SwarmConfig."""
    journal: str | None = None
    """Address of a PostgreSQL server for the journal; None: a file in the run's folder."""
    run: str = ""
    """The run's name there."""
    engine: Literal["local", "ray"] = "local"
    """Where sub-agents run: in this process, or in a pool of Ray workers."""
    workers: int = 2
    """In the pool."""

    def place(self, folder: Path) -> JournalPlace:
        return JournalPlace(folder=folder, address=self.journal, run=self.run)

    def swarm_config(self) -> SwarmConfig:
        values = dict(self.config)
        if self.limits:
            limits: dict[str, Any] = {"steps": 10_000, "agents": 1000, **self.limits}
            values["limits"] = Limits(**limits)
        return SwarmConfig(model=self.model, **values)


def save(settings: Settings, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SESSION).write_bytes(orjson.dumps(asdict(settings), option=orjson.OPT_INDENT_2))


def load(folder: Path) -> Settings:
    path = folder / SESSION
    try:
        plain = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise SwarmError(f"{folder} holds no run: there is no {SESSION}") from None
    except orjson.JSONDecodeError as error:
        raise SwarmError(f"{path} cannot be read: {error}") from None
    known = {each.name for each in fields(Settings)}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain.items() if name in known
    }
    return Settings(**values)


def place_of(folder: Path) -> JournalPlace:
    """Where the journal of the run in this folder is."""
    return load(folder).place(folder) if (folder / SESSION).exists() else JournalPlace(folder=folder)


async def conduct(
    task: str | None,
    folder: Path,
    settings: Settings,
    *,
    view: bool = False,
    quiet: bool = False,
    port: int = 0,
    more_tools: tuple[Tool, ...] = (),
    client: ModelClient | None = None,
    prepare: Callable[[Live], None] = lambda live: None,
    say: Callable[[str], None] = lambda text: None,
) -> SwarmResult:
    """Run the task (None: go on with the run in the folder), show it, and write `answer.md`. `client` takes the place
    of the settings' endpoint; `prepare` is given the run before it begins."""
    if task is not None and ((folder / JOURNAL).exists() or (folder / SESSION).exists()):
        raise SwarmError(f"{folder} holds a run already: `perilune swarm resume {folder}` goes on with it")
    if settings.journal is not None and not settings.run:
        settings = replace(settings, run=f"{folder.name}-{uuid.uuid4().hex[:8]}")
    place = settings.place(folder)
    if task is None and not place.exists():
        raise SwarmError(f"{folder} holds no run: there is no {JOURNAL}")
    if task is None:
        _check_journal(place, folder)
    async with AsyncExitStack() as stack:
        toolbox = await _toolbox(settings, folder, stack, more_tools)
        for name, why in toolbox.missing.items():
            if settings.tools is not None and name in settings.tools:
                raise SwarmError(f"tool {name!r} was asked for but cannot work: {why}")
        policy = load_policy(Path(settings.policy)) if settings.policy else Policy()
        client = client or _client(settings)
        stack.push_async_callback(client.close)
        swarm = Swarm(
            settings.swarm_config(),
            client=client,
            tools=toolbox.tools.values(),
            policy=policy,
            secrets=Secrets.from_environment(os.environ),
            prices=_prices(settings),
            open_sandbox=_sandboxes(settings) if _sandbox_missing() is None else None,
            extras=_extras(settings),
            key=load_or_create_key(),
            heads=state_folder() / "heads",
            open_journal=place.opener(
                load_or_create_key(), heads=state_folder() / "heads", elsewhere=settings.engine == "ray"
            ),
            open_engine=_engine(settings, folder, more_tools),
        )
        if settings.engine == "ray":
            say(f"starting {settings.workers} workers")
        live = await stack.enter_async_context(swarm.start(task, folder=folder))
        prepare(live)
        if task is not None:
            save(settings, folder)
        approvals = Approvals()
        address = stack.enter_context(_web_view(live, settings, port, approvals)) if view else None
        if address:
            say(f"watch it at {address}")
        if not quiet:
            reader = place.reader()
            cost = _prices(settings).cost if settings.price else None
            stack.enter_context(
                TerminalView(
                    reader=reader, journal=live.journal, cost=cost, approvals=approvals, console=Console(stderr=True)
                )
            )
        result = await live.finish()
    with place.reader() as reader:
        write_answer(result.answer if result.status == "done" else _without_answer(result), reader, folder)
    return result


def _check_journal(place: JournalPlace, folder: Path) -> None:
    """A run goes on only from a journal that nobody changed: agents will act on what it says."""
    report = place.verify(load_or_create_key(), heads=state_folder() / "heads")
    if not report.intact:
        more = len(report.problems) + report.more_problems - 1
        rest = f" and {more} more problems" if more else ""
        raise SwarmError(
            f"the journal of {folder} is not intact: {report.problems[0]}{rest}; `perilune swarm audit {folder}` tells"
        )


def _without_answer(result: SwarmResult) -> str:
    return f"The run ended without an answer ({result.status}): {result.error or 'no reason given'}"


# Workers -------------------------------------------------------------------------------------------------------------


def _engine(
    settings: Settings, folder: Path, more: tuple[Tool, ...]
) -> Callable[[Run], AbstractAsyncContextManager[Engine]] | None:
    """A pool of workers, where one is asked for."""
    if settings.engine == "local":
        return None
    if settings.journal is None:
        raise SwarmError("--engine ray needs a journal that all workers reach: --journal postgresql://USER@HOST/NAME")
    if settings.workers < 1:
        raise SwarmError(f"--workers is {settings.workers}, expected 1 or more")
    if more:
        raise SwarmError(f"tool {more[0].name!r} is an object of this process: Ray workers cannot have it")
    from perilune.swarm.scale.orders import Plan
    from perilune.swarm.scale.ray_engine import open_ray_engine

    plan = Plan(
        dsn=settings.journal,
        run=settings.run,
        key=load_or_create_key(),
        config=settings.swarm_config(),
        folder=str(folder.resolve()),
        workplace="perilune.swarm.session:workplace",
        options={"settings": settings, "folder": str(folder.resolve())},
    )
    return open_ray_engine(plan, workers=settings.workers)


@asynccontextmanager
async def workplace(settings: Settings, folder: str) -> AsyncIterator[Workplace]:
    """What a worker gives its agents: the same as the process that runs the orchestrator."""
    from perilune.swarm.scale.orders import Workplace

    async with AsyncExitStack() as stack:
        toolbox = await _toolbox(settings, Path(folder), stack, ())
        client = _client(settings)
        stack.push_async_callback(client.close)
        yield Workplace(
            client=client,
            tools=toolbox.tools.values(),
            policy=load_policy(Path(settings.policy)) if settings.policy else Policy(),
            secrets=Secrets.from_environment(os.environ),
            prices=_prices(settings),
            open_sandbox=_sandboxes(settings) if _sandbox_missing() is None else None,
            extras=_extras(settings),
        )


# Parts ---------------------------------------------------------------------------------------------------------------


async def _toolbox(settings: Settings, folder: Path, stack: AsyncExitStack, more: tuple[Tool, ...]) -> Toolbox:
    documents = None
    missing = _sandbox_missing()
    if settings.docs is not None:
        if not Path(settings.docs).is_dir():
            raise SwarmError(f"--docs {settings.docs!r} is not a folder")
        (folder / "reading").mkdir(parents=True, exist_ok=True)
        reading = open_sandbox(folder / "reading") if missing is None else None
        try:
            documents = await build_index(Path(settings.docs), folder / "documents.sqlite", sandbox=reading)
        finally:
            if reading is not None:
                await reading.close()
    network = NetworkPolicy(allow=None if "*" in settings.hosts else settings.hosts) if settings.hosts else None
    browser = None
    if settings.browser:
        if network is None:
            raise SwarmError("--browser needs --hosts: the hosts it may open")
        browser = await stack.enter_async_context(open_browser(network))
    servers = None
    if settings.mcp is not None:
        from perilune.swarm.tools.mcp import ServerSpec, mcp_servers
        from perilune.swarm.tools.mcp_pins import Pins

        specs = [ServerSpec(**_server(table)) for table in _tables(Path(settings.mcp), "server")]
        servers = await stack.enter_async_context(mcp_servers(specs, pins=Pins.load(state_folder() / "mcp_pins.json")))
    box = standard_tools(
        sandbox_missing=missing,
        documents=documents,
        network=network,
        search=SearchEndpoint(url=settings.search_url) if settings.search_url else None,
        browser=browser,
        servers=servers,
        more=more,
    )
    if settings.tools is None:
        return box
    unknown = [name for name in settings.tools if name not in box.tools and name not in box.missing]
    if unknown:
        raise SwarmError(f"there is no tool {unknown[0]!r}; there are {', '.join(sorted(box.tools))}")
    return Toolbox(tools={n: t for n, t in box.tools.items() if n in settings.tools}, missing=box.missing)


def _tables(path: Path, name: str) -> list[dict[str, Any]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SwarmError(f"{path} cannot be read: {error}") from None
    if set(tables) - {name} or not isinstance(tables.get(name, []), list):
        raise SwarmError(f"{path}: expected [[{name}]] tables and nothing else")
    return tables.get(name, [])


def _server(table: dict[str, Any]) -> dict[str, Any]:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    if "folder" in table:
        values["folder"] = Path(table["folder"])
    return values


def _sandbox_missing() -> str | None:
    state = sandbox_report()[0][1]
    return None if state == "ready" else state


def _sandboxes(settings: Settings) -> Callable[[Path], Sandbox]:
    mounts = (Mount(source=Path(settings.docs).resolve(), target="/docs"),) if settings.docs else ()
    return lambda workspace: open_sandbox(workspace, mounts=mounts)


def _extras(settings: Settings) -> dict[str, Any]:
    """What tools find beside their arguments: folders that agents may read, and why there is no sandbox."""
    folders = {"/docs": Path(settings.docs).resolve()} if settings.docs else {}
    return {"folders": folders, "sandbox_missing": _sandbox_missing()}


def _client(settings: Settings) -> HTTPClient:
    return HTTPClient(base_url=settings.base_url, api_key_env=settings.api_key_env, token_ids=settings.token_ids)


def _prices(settings: Settings) -> Prices:
    if settings.price is None:
        return Prices()
    return Prices({"*": Price(prompt=settings.price[0], completion=settings.price[1])})


# The web view --------------------------------------------------------------------------------------------------------


class PersonControls:
    """What a person does in the web view, done to the run."""

    def __init__(self, live: Live) -> None:
        self._live = live

    async def cancel(self, agent: str) -> None:
        await self._live.cancel(agent)

    async def steer(self, agent: str, text: str) -> None:
        await self._live.steer(agent, text)

    def decide(self, request_id: str, decision: Decision) -> None:
        desk = self._live.run.desk
        if decision == "deny":
            desk.deny(request_id, by="web view")
            return
        request = next((each for each in desk.pending() if each.id == request_id), None)
        desk.approve(request_id, by="web view", seen=request.arguments_sha256 if request else "")


@contextmanager
def _web_view(live: Live, settings: Settings, port: int, approvals: Approvals) -> Iterator[str]:
    """The view's address while it is there. Somebody may look, so approvals are asked for."""
    cost = _prices(settings).cost if settings.price else None
    reader = settings.place(live.run.folder).reader()
    view = View(
        reader=reader, journal=live.journal, controls=PersonControls(live), approvals=approvals, cost=cost, port=port
    )

    live.run.desk.on_change = approvals.show
    leave = live.run.desk.attach("web view")
    try:
        yield view.start()
    finally:
        leave()
        view.stop()
