"""`perilune swarm demo`: a swarm at work, without a key and without a network.

With the released model (released.py) a swarm of nano agents answers a question about many things from a library of
20,000 made-up pages, each agent a model of this process. Without it, or for documents and questions of one's own,
researchers, fact checkers and a writer answer from local documents, and their model is a script that quotes.
"""

import shutil
import sys
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.cli import UserError, _parse
from perilune.released import named_in_vain, released_model

if TYPE_CHECKING:
    from perilune.rl.environments.wide_search_demo import LibraryClient

DEMO_TASK = "Which moons have an ocean under their ice, and who discovered each of them?"
AT_A_TIME = 16
"""Agents that the released model answers at once."""


@dataclass(kw_only=True)
class DemoFlags:
    docs: str | None = None
    """Folder of documents for the scripted model to search; default: a few about moons, which ship with the package."""
    task: str | None = None
    """The question; default: one that fits the model."""
    scripted: bool = False
    """Use the scripted model, also where the released one is."""
    out: str | None = None
    """Folder of the run; default: runs/swarm/demo, replaced each time."""
    view: bool = False
    json: bool = False
    quiet: bool = False


def demo_step(arguments: list[str]) -> None:
    text = (
        "A swarm at work, without a key and without a network. Where models/perilune-nano is, nano agents answer a "
        "question about many things from a made-up library. Else researchers, fact checkers and a writer answer from "
        "local documents, and the model is scripted: it ships with the package and quotes instead of thinking."
    )
    flags = _parse("perilune swarm demo", f"{text}\n\nexample: perilune swarm demo --view", DemoFlags, arguments)
    folder = Path(flags.out) if flags.out else Path("runs") / "swarm" / "demo"
    model = chosen_model(flags)
    if flags.out is None and folder.exists():
        shutil.rmtree(folder)
    if model is None:
        _scripted(folder, flags)
    else:
        from perilune.cli_serve import served_inside

        with served_inside(str(model), runs="runs", device="cpu", sequences=AT_A_TIME) as (url, key):
            library_demo(folder, f"{url}/v1", key, served_name(url, key), flags)


def served_name(url: str, key: str) -> str:
    """What a server calls its model."""
    from perilune.chat_client import Endpoint

    return Endpoint.at(url, key=key).models()[0]["id"]


def chosen_model(flags: DemoFlags) -> Path | None:
    """The folder of the released model, where it is there, can run and can be asked this; None: the scripted one."""
    if flags.scripted or flags.docs is not None:
        return None
    model = released_model()
    if model is None:
        _say_why_scripted(named_in_vain())
        return None
    from perilune.cli_serve import missing_packages

    if missing := missing_packages():
        _say_why_scripted(missing)
        return None
    if flags.task is None:
        return model
    from perilune.rl.environments.wide_search_questions import parse_question

    return model if parse_question(flags.task) is not None else None  # it knows one library and nothing else


def _say_why_scripted(reason: str | None) -> None:
    if reason is not None:
        print(f"perilune: {reason}; the scripted model takes its place", file=sys.stderr)


def _scripted(folder: Path, flags: DemoFlags) -> None:
    from perilune.cli_swarm import _conduct
    from perilune.swarm.scripted import Behaviour, start_server
    from perilune.swarm.session import Settings

    if not flags.json:
        print("The model of this demonstration is scripted: a program that quotes documents, not a neural network.")
    with resources.as_file(resources.files("perilune.swarm") / "demo") as shipped:
        with start_server("demo", {}, Behaviour(latency=(0.05, 0.3))) as server:
            settings = Settings(
                model="scripted",
                base_url=server.base_url,
                api_key_env=None,
                docs=flags.docs or str(shipped),
                tools=("search_documents", "read_document"),
            )
            _conduct(flags.task or DEMO_TASK, folder, settings, flags)


def library_demo(folder: Path, base_url: str, key: str, model: str, flags: DemoFlags) -> None:
    """A question about many things, answered by the model behind an address."""
    from perilune.cli_swarm import _conduct
    from perilune.rl.environments.wide_search import WideSearch
    from perilune.rl.environments.wide_search_demo import EndpointTalk, LibraryClient, demo_task
    from perilune.rl.environments.wide_search_tools import tools
    from perilune.swarm.http_client import HTTPClient
    from perilune.swarm.provider import Provider, Secret
    from perilune.swarm.session import Settings

    environment = WideSearch()
    try:
        task = demo_task(environment, flags.task)
    except ValueError as error:
        raise UserError(str(error)) from None
    if not flags.json:
        print(
            f"{model} answers from a library of {environment.corpus.pages:,} made-up pages, with sub-agents or alone."
        )
        print(f"question: {task.data['question']}")
    provider = Provider(
        base_url=base_url,
        api_key=Secret(key),
        body={"chat_template_kwargs": {"thinking": False}},
        max_concurrent=AT_A_TIME,
    )
    client = LibraryClient(EndpointTalk(HTTPClient(providers=(provider,)), model), environment, task)
    settings = Settings(
        model=model,
        base_url=base_url,
        api_key_env=None,
        tools=("search", "open", "answer"),
        config={
            "system_prompt": environment.settings(task).system_prompt,
            "main_steps": None,
            "subagent_steps": None,
            "max_active": environment.max_workers + 1,
        },
    )
    began = time.monotonic()
    given = tools(environment.library)
    _conduct(task.data["question"], folder, settings, flags, more_tools=given, client=client, prepare=client.prepare)
    if not flags.json:
        _tell(client, len(task.data["items"]), time.monotonic() - began)


def _tell(client: "LibraryClient", items: int, seconds: float) -> None:
    found = f"{client.right()} of {items} right, by the library; {seconds:.0f} s"
    print(f"{found}; look at it: perilune swarm view demo" if sys.stdout.isatty() else found)
