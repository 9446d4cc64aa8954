"""The page on the real server: what the browser sends is what the application takes, and the other way round."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from perilune.serve.api import ServerConfig
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine
from perilune.serve.keys import Keys
from perilune.serve.limits import Limits
from perilune.serve.server import Server
from perilune.serve.sizing import EngineConfig
from perilune.serve.web import web_routes
from tests.serve import tiny
from tests.serve.api_engine import MODEL, ScriptedEngine, endless, says, tokenizer
from tests.serve.web.visiting import PICTURE, Visit

pytestmark = pytest.mark.needs_tool("chromium")
KEY = "a-key-of-the-tests-0123"


@contextmanager
def served(engine: ScriptedEngine, **options: Any) -> Iterator[str]:
    limits = options.pop("limits", None) or Limits(drain_seconds=0.2)
    with Server(engine, tokenizer(), MODEL, ServerConfig(routes=web_routes(), limits=limits, **options)) as url:
        yield f"{url}/"


def test_a_chat_with_reasoning_and_a_picture(visit: Callable[..., Visit]) -> None:
    engine = ScriptedEngine()
    with served(engine, takes_pictures=True) as url:
        person = visit(url).greeted()
        assert person.page.inner_text("#model") == MODEL
        person.give_files("drop", "#log", ("a.png", "image/png", PICTURE))
        person.expect("document.querySelectorAll('#pictures img').length === 1")
        person.say("What is it?")
        person.answered()
        assert person.texts(".turn.assistant .words") == ["Hello, world!"]
        person.page.click("summary >> text=Reasoning")
        assert person.texts(".thoughts") == ["The moon."]
        assert [len(request.media) for request in engine.seen] == [1]
        person.say("And now?")
        person.answered(2)
        person.check()


def test_a_tiny_model_looks_at_a_picture_through_the_whole_way(visit: Callable[..., Visit]) -> None:
    engine = AsyncEngine(Engine(tiny.fresh_model("pictures", "float32"), tiny.tokenizer(), EngineConfig(num_pages=64)))
    config = ServerConfig(routes=web_routes(), takes_pictures=True, limits=Limits(drain_seconds=0.2))
    with Server(engine, tiny.tokenizer(), MODEL, config) as url:
        person = visit(f"{url}/").greeted()
        person.page.click("#open-settings")
        person.page.fill("#max-tokens", "8")
        person.page.click("#settings button")
        person.give_files("paste", "#text", ("a.png", "image/png", PICTURE))
        person.expect("document.querySelectorAll('#pictures img').length === 1")
        person.say("What is it?")
        person.answered()
        assert person.texts(".failure") == [] and "tokens" in person.texts(".foot")[0]
        person.check()


def test_tool_calls_are_shown(visit: Callable[..., Visit]) -> None:
    call = ("<|tool_call_begin|>", "functions.look:0", "<|tool_call_argument_begin|>", '{"a": 1}', "<|tool_call_end|>")
    script = says("</think>", "So.", "<|tool_calls_section_begin|>", *call, "<|tool_calls_section_end|>", "<|im_end|>")
    with served(ScriptedEngine(script=script)) as url:
        person = visit(url).greeted()
        person.say("Look")
        person.answered()
        assert person.texts(".turn.assistant .words") == ["So."]
        person.page.click("summary >> text=Calls the tool look")
        assert person.texts(".call pre") == ['{"a": 1}']
        assert "waits for a tool" in person.texts(".foot")[0]
        person.check()


def test_leaving_an_answer_frees_its_place_in_the_engine(visit: Callable[..., Visit]) -> None:
    engine = ScriptedEngine(script=endless, pace=0.01)
    with served(engine) as url:
        person = visit(url).greeted()
        person.say("Go")
        person.expect("document.querySelector('.thoughts').textContent.length > 20")
        person.page.click("#stop")
        person.answered()
        person.expect("true")
        for _ in range(500):
            if engine.cancelled:
                break
            person.page.wait_for_timeout(10)
        assert len(engine.cancelled) == 1 and not engine.running
        person.check()


def test_keys_and_limits_of_the_server_reach_the_person(visit: Callable[..., Visit]) -> None:
    limits = Limits(requests_per_minute=1, drain_seconds=0.2)
    with served(ScriptedEngine(), keys=Keys(api=(KEY,)), limits=limits) as url:
        person = visit(url)
        person.expect("document.getElementById('settings').open")
        person.page.fill("#key", KEY)
        person.page.press("#key", "Enter")
        person.greeted()
        person.say("One")
        person.answered()
        person.say("Two")
        person.expect("document.querySelector('.failure')?.textContent.includes('1 requests per minute')")
        assert person.page.locator(".failure button").is_disabled()
        person.check()


def test_a_base_model_and_the_settings_of_the_page_are_understood(visit: Callable[..., Visit]) -> None:
    engine = ScriptedEngine(script=says("moon"))
    with served(engine, chat=False) as url:
        person = visit(url).greeted()
        assert "is a base model" in person.page.inner_text("#hint")
        person.page.click("#open-settings")
        person.page.fill("#temperature", "0")
        person.page.fill("#max-tokens", "5")
        person.page.uncheck("#thinking")
        person.page.click("#settings button")
        person.say("The ")
        person.answered()
        assert person.texts(".turn.assistant .words") == ["moon"]
        person.page.click("#open-settings")
        person.page.uncheck("#raw")
        person.page.click("#settings button")
        person.say("Hello")
        person.answered(2)
        assert [(each.params.temperature, each.params.max_tokens) for each in engine.seen] == [(0.0, 5), (0.0, 5)]
        person.check()
