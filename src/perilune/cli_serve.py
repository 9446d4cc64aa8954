"""`perilune serve RUN|FOLDER`: an OpenAI-compatible server and a chat page for a trained run or a model folder.

Everything that can be refused is refused before the model is read: the address, the keys, the limits, the port. Keys
come from files or environment variables, never from the command line, where every user of the machine could read them.
Ctrl-C (or SIGTERM) takes no new requests, lets those under way finish, and exits with 0; a second Ctrl-C does not wait
and exits with 130.
"""

import asyncio
import importlib.util
import json
import logging
import os
import re
import secrets
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from perilune.cli import UserError, _nearest, _parse, _positional

if TYPE_CHECKING:
    from perilune.data.chat_folder_template import FolderTemplate
    from perilune.data.images import ProcessorConfig
    from perilune.data.tokenizer import Tokenizer
    from perilune.model import Decoder
    from perilune.serve.api import LoadWeights
    from perilune.serve.async_engine import AsyncEngine
    from perilune.serve.attachments import Fetch
    from perilune.serve.engine import Engine
    from perilune.serve.keys import Keys
    from perilune.serve.sizing import EngineConfig

EXAMPLE = "perilune serve nano"
NEEDED = ("torch", "safetensors", "tokenizers", "PIL", "starlette", "uvicorn", "prometheus_client", "llguidance")
MOST_KEY_BYTES = 1 << 20
Dtype = Literal["auto", "float32", "bfloat16"]


@dataclass(kw_only=True)
class ServeFlags:
    host: str = "127.0.0.1"
    """Where to listen; another address than this machine's own needs an API key."""
    port: int = 8000
    """0 takes any that is free; the start-up line says which."""
    name: str | None = None
    """Name of the model in the API; default: that of the run or folder."""
    api_keys: str | None = None
    """File with API keys, one a line."""
    api_key_env: str = "PERILUNE_API_KEY"
    """Environment variable that may hold an API key."""
    admin_key: str | None = None
    """File with the key that opens /metrics and the loading of weights."""
    admin_key_env: str = "PERILUNE_ADMIN_KEY"
    """Environment variable that may hold that key."""
    chat: bool | None = None
    """Whether the model was trained to chat; default: what its run or folder says, or whether it brings a chat template
    of its own."""
    page: bool = True
    """Serve the chat page at /."""
    image_hosts: tuple[str, ...] = ()
    """Hosts that pictures may be fetched from: images.example.org, "*.example.org", "*"; default: data: URLs only."""
    share_prefixes: bool = False
    """Let different keys share cached prefixes: faster, but by time one could tell what others have asked."""
    device: str = "auto"
    """"auto" takes the first of cuda, cpu that is there."""
    dtype: Dtype = "auto"
    """"auto": as a run was trained; a folder in bfloat16 on a GPU, also while it is read, and in float32 on a CPU."""
    runs: str = "runs"
    """Folder that holds runs."""
    json: bool = False
    """Print one line of JSON when the server is ready, and nothing else on standard output."""


def serve_verb(arguments: list[str]) -> None:
    """Serve a run or a model folder behind the OpenAI API."""
    expected = "a run's name, or a folder of `perilune export`"
    name, rest = _positional(arguments, "RUN|FOLDER", expected, EXAMPLE, helps=True)
    _check_packages()
    from perilune.serve.limits import Limits
    from perilune.serve.sizing import EngineConfig

    @dataclass(kw_only=True)
    class Arguments:
        flags: Annotated[ServeFlags, tyro.conf.arg(name="")] = field(default_factory=ServeFlags)
        engine: Annotated[EngineConfig, tyro.conf.arg(name="")] = field(default_factory=EngineConfig)
        limits: Limits = field(default_factory=Limits)

    parsed = _parse(
        f"perilune serve {name}",
        "Serve a run or a model folder behind the OpenAI API, with a chat page.\n\n"
        f"example: perilune serve {name} --port 0 --max-sequences 64\n\n"
        f"example: PERILUNE_API_KEY=... perilune serve {name} --host 0.0.0.0 --limits.requests-per-minute 60",
        Arguments,
        rest,
    )
    flags, limits = parsed.flags, parsed.limits
    keys = _keys(flags)
    _check_place(flags, keys)
    fetch = _fetch(flags.image_hosts)
    folder = model_folder(name, flags.runs)
    _quiet_libraries()
    with _waiting(f"reading {folder}", quiet=flags.json):
        loaded = load(folder, device=flags.device, dtype=flags.dtype, name=flags.name, chat=flags.chat)
        engine = _engine(loaded, parsed.engine)
    with _waiting("recording CUDA graphs", quiet=flags.json or not loaded.model.embed_tokens.weight.is_cuda):
        engine.warm_up()
    from perilune.serve.api import ServerConfig
    from perilune.serve.async_engine import AsyncEngine
    from perilune.serve.server import serve
    from perilune.serve.web import web_routes

    served = AsyncEngine(engine)
    config = ServerConfig(
        keys=keys,
        limits=limits,
        host=flags.host,
        max_length=engine.max_length,
        chat=loaded.is_chat,
        takes_pictures=loaded.model.config.vision is not None,
        share_prefixes=flags.share_prefixes,
        template=loaded.template,
        processor=loaded.processor,
        fetch=fetch,
        load_weights=_weights_from_folders(served, loaded.model) if keys.admin is not None else None,
        routes=web_routes() if flags.page else (),
    )
    facts = _facts(loaded, engine, keys)
    ending = _Ending(seconds=limits.drain_seconds, speaks=not flags.json)

    def ready(url: str) -> None:
        ending.listen()
        _announce(facts | {"url": url}, flags)

    with closing(loaded):
        serve(served, loaded.tokenizer, loaded.name, config, port=flags.port, on_ready=ready)
    ending.over()


def _check_packages() -> None:
    if missing := missing_packages():
        raise UserError(missing)


def missing_packages() -> str | None:
    """Why no model can be served here: all that is missing at once, and not one after the other; None: nothing is."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"serving a model needs {', '.join(missing)}: pip install 'perilune[train,serve]'" if missing else None


# ---------------------------------------------------------------------------------------------------------------------
# The model


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model and all that is needed to serve it."""

    name: str
    model: "Decoder"
    tokenizer: "Tokenizer"
    processor: "ProcessorConfig"
    template: "FolderTemplate | None"
    """None: Kimi's."""
    is_chat: bool

    def close(self) -> None:
        """End the process in which a stranger's template runs."""
        if self.template is not None:
            self.template.close()


ADDRESS = re.compile(r"[\w.-]+:\d{1,5}(/.*)?")
"""HOST:PORT, without what makes it an address."""


def model_folder(name: str, runs: str) -> Path:
    """A run by its name, or any folder that holds a run or a model."""
    for folder in (Path(runs) / name, Path(name)):
        if (folder / "config.json").exists():
            return folder
    if Path(name).is_dir():
        raise UserError(f"{name!r} holds no config.json: expected a run, or a folder of `perilune export` or `import`")
    known = sorted(path.parent.name for path in Path(runs).glob("*/config.json"))
    if ADDRESS.fullmatch(name):
        raise UserError(f"there is no run or folder {name!r}; an address begins with its scheme: http://{name}")
    listed = f"; runs in {runs!r}: {', '.join(known)}" if known else f"; {runs!r} holds no runs: `perilune train nano`"
    raise UserError(f"there is no run or folder {name!r}{_nearest(name, known)}{listed}")


def load(
    folder: Path, *, device: str = "auto", dtype: Dtype = "auto", name: str | None = None, chat: bool | None = None
) -> Loaded:
    """Read a run or a model folder; one clear error where it is neither, or incomplete."""
    from perilune.train.trainer import pick_device

    place = pick_device(device, "--device")
    if _is_model_folder(folder):
        loaded = _load_folder(folder, place, folder_dtype(dtype, place.type))
    else:
        loaded = _load_run(folder, place)
        if dtype != "auto":
            loaded.model.set_compute_dtype(dtype)
    return Loaded(
        name=name or loaded.name,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        processor=loaded.processor,
        template=loaded.template,
        is_chat=loaded.is_chat if chat is None else chat,
    )


def _is_model_folder(folder: Path) -> bool:
    """Public configs name their type; the config of a run does not."""
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def folder_dtype(dtype: Dtype, device_type: str) -> Literal["float32", "bfloat16"]:
    """What a model folder is read in."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device_type == "cuda" else "float32"


def _load_run(folder: Path, device: Any) -> Loaded:
    from perilune.data.images import ProcessorConfig
    from perilune.data.media import PATCH_SIZE
    from perilune.hub.opened import is_chat_run
    from perilune.train.run_folder import load_run

    model, tokenizer, config = load_run(folder, device=device)
    chat = config.data.chat
    processor = ProcessorConfig() if chat is None else chat.processor
    if config.data.vision is not None:
        most = max(width * height for width, height in config.data.vision.scenes.sizes) // PATCH_SIZE**2
        processor = ProcessorConfig(max_patches=most, max_patches_per_frame=most)
    name = folder.resolve().name
    is_chat = is_chat_run(folder)
    return Loaded(name=name, model=model, tokenizer=tokenizer, processor=processor, template=None, is_chat=is_chat)


def _load_folder(folder: Path, device: Any, dtype: Literal["float32", "bfloat16"]) -> Loaded:
    from perilune.data.chat_folder_template import FolderTemplate
    from perilune.hub import open_folder

    opened = open_folder(folder, device=device, dtype=dtype)
    source = opened.chat_template
    return Loaded(
        name=opened.name,
        model=opened.model,
        tokenizer=opened.tokenizer,
        processor=opened.processor,
        template=None if source is None else FolderTemplate(source, name=str(folder)),
        is_chat=opened.is_chat,
    )


def _engine(loaded: Loaded, config: "EngineConfig") -> "Engine":
    from perilune.serve.engine import Engine

    return Engine(loaded.model, loaded.tokenizer, config)


def _weights_from_folders(engine: "AsyncEngine", model: "Decoder") -> "LoadWeights":
    """What POST /admin/weights does: safetensors of an exported folder, checked against the model that is served."""
    from perilune import hub
    from perilune.model import Decoder

    def read(path: str) -> "Decoder":
        fresh = Decoder(model.config)
        hub.load_folder(fresh, path)
        return fresh

    async def load_weights(path: str, version: int | None) -> int:
        fresh = await asyncio.to_thread(read, path)
        version = int(getattr(engine.stats(), "weight_version", 0)) + 1 if version is None else version
        await engine.load_weights(fresh, version)
        return version

    return load_weights


# ---------------------------------------------------------------------------------------------------------------------
# Keys, address, port


def _keys(flags: ServeFlags) -> "Keys":
    from perilune.serve.keys import Keys

    api = _keys_in_file(flags.api_keys, "--api-keys") + _keys_in_environment(flags.api_key_env)
    admin = _keys_in_file(flags.admin_key, "--admin-key") + _keys_in_environment(flags.admin_key_env)
    if len(admin) > 1:
        raise UserError(f"there are {len(admin)} admin keys (--admin-key, {flags.admin_key_env}), expected one")
    return Keys(api=tuple(dict.fromkeys(api)), admin=admin[0] if admin else None)


def _keys_in_file(name: str | None, flag: str) -> list[str]:
    if name is None:
        return []
    path = Path(name).expanduser()
    try:
        if path.stat().st_size > MOST_KEY_BYTES:
            raise UserError(f"the file that {flag} names is larger than {MOST_KEY_BYTES:,} bytes: is it the right one?")
        lines = path.read_text(encoding="utf-8").splitlines()
        others = path.stat().st_mode & 0o077
    except (OSError, ValueError) as error:  # what was given may be the key itself: it is not repeated
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(
            f"the file that {flag} names cannot be read ({reason}); it takes the name of a file, never a key"
        ) from None
    found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not found:
        raise UserError(f"{flag} {str(path)!r} holds no key: write one on a line of its own")
    if others:
        print(f"perilune: other users may read {str(path)!r}: chmod 600 closes it", file=sys.stderr)
    return found


def _keys_in_environment(name: str) -> list[str]:
    value = os.environ.get(name, "").strip() if name else ""
    return [value] if value else []


def _check_place(flags: ServeFlags, keys: "Keys") -> None:
    """What would fail after minutes of loading fails here."""
    from perilune.serve.keys import check_address, is_loopback
    from perilune.serve.server import listener

    if not 0 <= flags.port <= 65535:
        raise UserError(f"--port is {flags.port}, expected 0 (any that is free) to 65535")
    if keys.is_open and not is_loopback(flags.host):
        raise UserError(
            f"--host {flags.host} can be reached from other machines, so it needs an API key: --api-keys FILE, or the "
            f"variable {flags.api_key_env}"
        )
    check_address(flags.host, keys)
    try:
        listener(flags.host, flags.port).close()
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "--port 0 takes a free one" if flags.port else "is --host an address of this machine?"
        raise UserError(f"cannot listen on {flags.host} port {flags.port} ({reason}): {advice}") from None


def _fetch(hosts: tuple[str, ...]) -> "Fetch | None":
    """What fetches pictures, from public addresses only."""
    if not hosts:
        return None
    from perilune.public_web import NetworkPolicy
    from perilune.serve.image_urls import image_fetcher

    try:
        return image_fetcher(NetworkPolicy(allow=None if "*" in hosts else hosts))
    except ValueError as error:
        raise UserError(f"--image-hosts: {error}") from None


# ---------------------------------------------------------------------------------------------------------------------
# What the person sees


def _facts(loaded: Loaded, engine: "Engine", keys: "Keys") -> dict[str, Any]:
    """The start-up summary, as values that fit into JSON."""
    from perilune.model.paged import bytes_per_page, bytes_per_slot

    model, config = loaded.model, engine.config
    num_pages = config.num_pages or 0
    return {
        "model": loaded.name,
        "parameters": model.num_parameters(),
        "dtype": model.config.compute_dtype,
        "device": str(model.embed_tokens.weight.device),
        "chat": loaded.is_chat,
        "pictures": model.config.vision is not None,
        "cache_bytes_per_token": bytes_per_page(model.config, config.page_size) // config.page_size,
        "state_bytes_per_sequence": bytes_per_slot(model.config),
        "cache_tokens": num_pages * config.page_size,
        "max_sequences": config.max_sequences,
        "max_length": engine.max_length,
        "deterministic": config.deterministic,
        "api_keys": len(keys.api),
        "admin_key": keys.admin is not None,
    }


def _announce(facts: dict[str, Any], flags: ServeFlags) -> None:
    if flags.json:
        print(json.dumps(facts), flush=True)
        return
    if not sys.stdout.isatty():
        print(f"serving {facts['model']} at {facts['url']}/v1", flush=True)
        return
    reads = "text and pictures" if facts["pictures"] else "text"
    kind = "a chat model" if facts["chat"] else "a base model: it continues text and was not trained to answer"
    mode = ", deterministic" if facts["deterministic"] else ""
    count = facts["api_keys"]
    keys = f"{count} API key{'s' if count > 1 else ''}" if count else "none needed: only this machine can ask"
    rows = {
        "model": f"{facts['model']}, {facts['parameters']:,} parameters in {facts['dtype']} on {facts['device']}{mode}",
        "": f"{kind}; reads {reads}",
        "cache": f"{facts['cache_bytes_per_token']:,} bytes a token, "
        f"{_bytes(facts['state_bytes_per_sequence'])} a sequence",
        "room": f"{facts['cache_tokens']:,} tokens, {facts['max_sequences']} sequences at once, each at most "
        f"{facts['max_length']:,} tokens",
        "keys": f"{keys}; {'an' if facts['admin_key'] else 'no'} admin key",
        "API": f"{facts['url']}/v1",
        "chat": f"{facts['url']}/" if flags.page else f"perilune chat {facts['url']}",
    }
    for name, text in rows.items():
        print(f"{name:<7}{text}")
    print("Ctrl-C stops it", flush=True)


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


@dataclass
class _Ending:
    """Says what happens after Ctrl-C. The server's own handlers do it: these only speak before they are called."""

    seconds: float
    speaks: bool
    asked: list[int] = field(default_factory=list)

    def listen(self) -> None:
        """From when the server has put its handlers in place."""
        for each in (signal.SIGINT, signal.SIGTERM):
            act = signal.getsignal(each)
            if callable(act):
                signal.signal(each, lambda number, frame, act=act: (self._heard(number), act(number, frame)))

    def _heard(self, number: int) -> None:
        self.asked.append(number)
        if self.is_forced:
            logging.disable(logging.CRITICAL)  # every request that is cut off now would be told about
        if self.speaks and len(self.asked) == 1:
            text = f"no new requests; those under way have {self.seconds:g} s to finish, Ctrl-C again ends them at once"
            print(f"\nperilune: {text}", file=sys.stderr, flush=True)

    @property
    def is_forced(self) -> bool:
        """A second signal, and that a Ctrl-C: the server does not wait."""
        return len(self.asked) > 1 and self.asked[-1] == signal.SIGINT

    def over(self) -> None:
        if self.speaks:
            print(f"perilune: stopped{', requests under way were cut' * self.is_forced}", file=sys.stderr, flush=True)
        if self.is_forced:
            raise SystemExit(130)


@contextmanager
def _waiting(text: str, *, quiet: bool) -> Iterator[None]:
    """A sign of life while a model is read, on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text, spinner="line"):
        yield


def _quiet_libraries() -> None:
    """What goes wrong later is told in lines of its own, with the time."""
    warnings.filterwarnings("ignore", module=r"(torch|triton)\b")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# For `perilune chat`


@contextmanager
def served_inside(name: str, *, runs: str, device: str, sequences: int = 1) -> Iterator[tuple[str, str]]:
    """A run or folder behind an address of this machine and a key that nobody else has: (address, key). `sequences`:
    how many answers it writes at a time."""
    _check_packages()
    folder = model_folder(name, runs)
    from perilune.serve.api import ServerConfig
    from perilune.serve.async_engine import AsyncEngine
    from perilune.serve.keys import Keys
    from perilune.serve.limits import Limits
    from perilune.serve.server import Server
    from perilune.serve.sizing import EngineConfig

    _quiet_libraries()
    with _waiting(f"reading {folder}", quiet=False):
        loaded = load(folder, device=device)
        engine = _engine(loaded, EngineConfig(max_sequences=sequences, num_snapshots=4, memory_gib=1.0))
    key = secrets.token_urlsafe(32)
    config = ServerConfig(
        keys=Keys(api=(key,)),
        limits=Limits(drain_seconds=0.5),
        max_length=engine.max_length,
        chat=loaded.is_chat,
        takes_pictures=loaded.model.config.vision is not None,
        template=loaded.template,
        processor=loaded.processor,
    )
    with closing(loaded), Server(AsyncEngine(engine), loaded.tokenizer, loaded.name, config) as url:
        yield url, key
