"""One run of reinforcement learning as one typed config, and what is checked before anything starts.

    config = RLRunConfig(name="sums", environments=EnvironmentsConfig(arithmetic=Arithmetic(digits=1)))

The environments that are not None are trained in together, taking turns. A run folder keeps its config as rl.json; it
also has the config.json of an ordinary run, so that every verb that opens a run opens this one.
"""

import asyncio
import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from perilune.data.chat import parse_message, parse_tools
from perilune.data.chat_rows import ChatDataConfig
from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder
from perilune.rl.environment import Environment, EpisodeOver, Message
from perilune.rl.environments.arithmetic import Arithmetic
from perilune.rl.environments.black_box import BlackBox
from perilune.rl.environments.calculator import Calculator
from perilune.rl.environments.code import Code
from perilune.rl.environments.copying import Copying
from perilune.rl.environments.drawing import Drawing
from perilune.rl.environments.gathering import Gathering
from perilune.rl.environments.logic import Logic
from perilune.rl.environments.looking import Looking
from perilune.rl.environments.tool_use import ToolUse
from perilune.rl.environments.wide_search import WideSearch
from perilune.rl.environments.word_problems import WordProblems
from perilune.rl.evaluation import EvaluationConfig
from perilune.rl.loop import RLConfig
from perilune.rl.talk import attachment
from perilune.serve.sessions import Sessions
from perilune.train.config_file import from_plain, to_plain

PROBED_TASKS = 4
"""Tasks of each environment whose prompts are measured before a run starts."""
PROBE_SECONDS = 5.0


class RLRunError(ValueError):
    """A run that cannot begin or go on; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentsConfig:
    """Those that are not None are trained in, each with its own settings."""

    copying: Copying | None = None
    arithmetic: Arithmetic | None = None
    word_problems: WordProblems | None = None
    logic: Logic | None = None
    calculator: Calculator | None = None
    code: Code | None = None
    tool_use: ToolUse | None = None
    drawing: Drawing | None = None
    looking: Looking | None = None
    gathering: Gathering | None = None
    wide_search: WideSearch | None = None
    black_box: BlackBox | None = None

    def chosen(self) -> dict[str, Environment]:
        found = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {name: environment for name, environment in found.items() if environment is not None}

    def letters(self) -> str | None:
        """Those of copying, by itself or by an agent; None where something else is trained, alone or too."""
        if len(self.chosen()) != 1:
            return None
        copying = self.copying if self.black_box is None else self.black_box.copying
        return None if copying is None else copying.letters


@dataclass(frozen=True, kw_only=True)
class RLRunConfig:
    name: str
    start_from: str = ""
    """Run or model folder whose weights it begins with; empty: the recipe makes a tiny model."""
    environments: EnvironmentsConfig
    rl: Annotated[RLConfig, tyro.conf.arg(name="")] = field(default_factory=RLConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    ptx: ChatDataConfig = field(default_factory=ChatDataConfig)
    """Dialogues whose loss is added, by learner.ptx_weight, so that they are not unlearnt."""
    makes_model: bool = False
    """Without start_from: make and teach a tiny model."""
    device: str = "auto"
    engine_share: float = 0.4
    """Of a GPU's free memory for the pages of engines, unless engine.memory_gib says how much: the learner needs the
    rest. Less where several runs share a card."""

    def __post_init__(self) -> None:
        if not 0 < self.engine_share < 1:
            raise ValueError(f"engine_share is {self.engine_share!r}, expected above 0 and below 1")
        if not self.name or self.name.startswith(".") or "/" in self.name or "\\" in self.name:
            raise ValueError(f"name is {self.name!r}, expected a folder name without slashes or a leading dot")


# ---------------------------------------------------------------------------------------------------------------------
# JSON


def plain_config(config: RLRunConfig) -> dict[str, Any]:
    """JSON; what an environment only remembers (names with a leading underscore) is no setting."""
    return _settings(to_plain(config))


def _settings(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _settings(entry) for name, entry in value.items() if not name.startswith("_")}
    return [_settings(entry) for entry in value] if isinstance(value, list) else value


def read_config(path: Path) -> RLRunConfig:
    try:
        return from_plain(RLRunConfig, json.loads(path.read_text(encoding="utf-8")), path.name)
    except FileNotFoundError as error:
        raise RLRunError(
            f"{str(path.parent)!r} holds no run of reinforcement learning: it has no {path.name}"
        ) from error  # fmt: skip
    except (ValueError, TypeError) as error:
        raise RLRunError(f"{str(path)!r} is not the config of such a run: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def check(config: RLRunConfig, environments: Mapping[str, Environment]) -> None:
    """What can be said without a model; RLRunError names the first thing that does not fit."""
    if not environments:
        raise RLRunError("no environment is set: give one, as --set 'environments.arithmetic={}'")
    if not config.start_from and not config.makes_model:
        raise RLRunError("this recipe starts from a trained model: give --from RUN or --from FOLDER")
    is_taught = config.environments.letters() is not None or tuple(environments) == ("gathering",)
    if not config.start_from and not is_taught:
        raise RLRunError(
            "the tiny model that a recipe makes knows only copying or gathering, and the run has "
            f"{', '.join(environments)}: give --from RUN or --from FOLDER"
        )
    if unknown := sorted(set(config.evaluation.tasks_of) - set(environments)):
        raise RLRunError(f"evaluation.tasks_of has {unknown[0]!r}, expected one of {', '.join(environments)}")
    has_workers = any(getattr(each, "uses_asides", False) for each in environments.values())
    if config.rl.parl is not None and not has_workers:
        raise RLRunError(
            f"parl is set, and {', '.join(environments)} has no workers: train in wide_search or gathering, or leave "
            "parl out"
        )
    if config.ptx.sources and not config.rl.learner.ptx_weight:
        raise RLRunError("ptx.sources is set but learner.ptx_weight is 0: give it a weight, --learner.ptx-weight 0.1")
    if config.rl.learner.ptx_weight and not config.ptx.sources:
        raise RLRunError(
            f"learner.ptx_weight is {config.rl.learner.ptx_weight!r} but ptx.sources is empty: give a file of "
            "dialogues, --ptx.sources chats.jsonl"
        )
    files = {f"environments.{name}.source": getattr(each, "source", "") for name, each in environments.items()}
    for field_name, path in [*files.items(), *(("ptx.sources", source) for source in config.ptx.sources)]:
        if path and not Path(path).exists():
            raise RLRunError(
                f"{field_name} is {path!r}, which does not exist: give a file that does, by a path that counts from "
                f"{str(Path.cwd())!r} or from /"
            )
    _check_black_box(config)
    if config.rl.rollout.talk.temperature != 1.0:
        raise RLRunError(
            f"rollout.talk.temperature is {config.rl.rollout.talk.temperature!r}, expected 1.0: what is trained on is "
            "sampled there, and evaluation is greedy by itself"
        )


def _check_black_box(config: RLRunConfig) -> None:
    agent, limit = config.environments.black_box, config.rl.rollout.episode_seconds
    if agent is None:
        return
    if importlib.util.find_spec("uvicorn") is None:
        raise RLRunError("black_box needs the extra 'serve': pip install 'perilune[serve]'")
    if agent.command and shutil.which(agent.command[0]) is None:
        raise RLRunError(
            f"black_box.command begins with {agent.command[0]!r}, which is no program: give its path, as "
            "--environments.black-box.command python my_agent.py"
        )
    if agent.seconds >= limit:
        raise RLRunError(
            f"black_box.seconds is {agent.seconds:g}, expected less than rollout.episode_seconds, {limit:g}: an agent "
            "out of time is judged, an episode out of time is lost"
        )


def needs_sight(environment: Environment) -> bool:
    """Whether its prompts hold pictures."""
    return isinstance(environment, Looking) or (isinstance(environment, Drawing) and environment.ask != "words")


def check_model(
    config: RLRunConfig, environments: Mapping[str, Environment], model: Decoder, tokenizer: Tokenizer
) -> dict[str, int]:
    """Tokens of the longest first prompt of each environment; RLRunError where model and run do not fit."""
    if config.rl.learner.routing_replay and model.config.moe is None:
        raise RLRunError(
            f"learner.routing_replay is True, and the model of {config.start_from or config.name!r} has no experts: "
            "leave it off"
        )
    for name, environment in environments.items():
        if needs_sight(environment) and model.config.vision is None:
            control = ", or take the same task in words, drawing_text" if name == "drawing" else ""
            raise RLRunError(
                f"{name} shows pictures, and the model of {config.start_from or config.name!r} has no vision tower: "
                f"start from one that has, such as a run of nano or vision_small{control}"
            )
    longest = {
        name: max(prompt_length(environment, number, tokenizer, config.rl) for number in range(PROBED_TASKS))
        for name, environment in environments.items()
    }
    limit = _limit(config.rl)
    for name, length in longest.items():
        wanted = length + config.rl.rollout.talk.max_tokens
        if limit is not None and wanted > limit:
            raise RLRunError(
                f"{name}: a prompt of {length:,} tokens and rollout.talk.max_tokens="
                f"{config.rl.rollout.talk.max_tokens:,} need {wanted:,}, and the engine holds {limit:,}: raise "
                "engine.max_length or num_pages, or lower rollout.talk.max_tokens"
            )
    return longest


def _limit(config: RLConfig) -> int | None:
    """Tokens of one episode that the engine holds, as far as the config says; None: what memory gives."""
    engine = config.engine
    pages = None if engine.num_pages is None else engine.num_pages * engine.page_size
    return min((size for size in (engine.max_length, pages) if size is not None), default=None)


class _FirstPrompt:
    """A talk that ends where the policy would be asked for the first time."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.tools: Sequence[Mapping[str, Any]] = ()

    def add(self, *messages: Message) -> None:
        self.messages += messages

    async def ask(
        self, *, tools: Sequence[Mapping[str, Any]] = (), max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Message:
        self.tools = tools
        raise EpisodeOver

    def aside(self, name: str) -> "_FirstPrompt":
        return _FirstPrompt()

    def note(self, *events: Mapping[str, Any]) -> None: ...


def prompt_length(environment: Environment, number: int, tokenizer: Tokenizer, config: RLConfig) -> int:
    """Tokens of the first prompt of a task; 0 where task or episode fail before it: that is counted in the run."""
    talk, processor = _FirstPrompt(), config.rollout.talk.processor

    async def play() -> None:
        async with asyncio.timeout(min(PROBE_SECONDS, config.rollout.episode_seconds)):
            await environment.episode(environment.task(number, "train"), talk)

    try:
        asyncio.run(play())
    except EpisodeOver:
        pass
    except (Exception, SystemExit, asyncio.CancelledError):
        return 0
    parsed = [parse_message(message, path=f"messages[{index}]") for index, message in enumerate(talk.messages)]
    attachments = [attachment(part.kind, part.source, processor) for each in parsed for part in each.media]
    prompt = Sessions(tokenizer).prompt(
        messages=parsed,
        tools=parse_tools(list(talk.tools)),
        attachments=attachments,
        thinking=config.rollout.talk.thinking,
    )
    return len(prompt.tokens)
