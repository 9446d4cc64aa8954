"""The chat page in a real browser, against a server that plays a script."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.web.scripted_chat import Script, ScriptedChat, serving, text
from tests.serve.web.visiting import PICTURE, Visit

pytestmark = pytest.mark.needs_tool("chromium")


def test_an_answer_streams_in_with_reasoning_folded_and_calls_shown(
    chat: ScriptedChat, url: str, visit: Callable[..., Visit]
) -> None:
    call = {"index": 0, "id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": '{"a"'}}
    chat.scripts.append(
        Script(
            deltas=(
                {"role": "assistant", "content": ""},
                {"reasoning_content": "They want "},
                {"reasoning_content": "moons."},
                {"content": "**Europa** "},
                {"content": "and more"},
                {"tool_calls": [call]},
                {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
            ),
            finish="tool_calls",
        )
    )
    person = visit(url).greeted()
    person.say("Which moons?")
    person.answered()
    assert person.texts(".turn.user .words") == ["Which moons?"]
    assert person.texts(".turn.assistant .words") == ["Europa and more"]
    assert person.texts(".turn.assistant strong") == ["Europa"]
    assert not person.page.locator(".thoughts").is_visible()
    person.page.click("summary >> text=Reasoning")
    assert person.texts(".thoughts") == ["They want moons."]
    person.page.click("summary >> text=look")
    assert person.texts(".call pre") == ['{"a": 1}']
    assert "7 tokens" in person.texts(".foot")[0]
    person.check()


def test_a_conversation_carries_its_turns_and_settings(
    chat: ScriptedChat, url: str, visit: Callable[..., Visit]
) -> None:
    chat.scripts.extend([text("First."), text("Second."), text("Third.")])
    person = visit(url).greeted()
    person.say("One\nof two lines")
    person.answered()
    page = person.page
    page.click("#open-settings")
    page.fill("#temperature", "0.5")
    page.fill("#max-tokens", "77")
    page.fill("#system", "Be short.")
    page.uncheck("#thinking")
    page.click("#settings button")
    person.say("Two")
    person.answered(2)
    first, second = chat.bodies
    assert first["messages"] == [{"role": "user", "content": "One\nof two lines"}]
    assert {"temperature", "max_tokens", "chat_template_kwargs"}.isdisjoint(first)
    assert [(each["role"], each["content"]) for each in second["messages"]] == [
        ("system", "Be short."),
        ("user", "One\nof two lines"),
        ("assistant", "First."),
        ("user", "Two"),
    ]
    assert (second["temperature"], second["max_tokens"]) == (0.5, 77)
    assert second["chat_template_kwargs"] == {"thinking": False}
    page.click(".again >> visible=true")
    person.expect("document.querySelector('#log').innerText.includes('Third.')")
    assert chat.bodies[2] == second  # the answer it replaces is not part of the question
    page.click("#new")
    assert person.texts(".turn") == []
    person.say("Anew")
    person.answered()
    assert [each["content"] for each in chat.bodies[3]["messages"]] == ["Be short.", "Anew"]
    person.check()


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping_keeps_what_arrived_and_leaves_the_server(
    chat: ScriptedChat, url: str, visit: Callable[..., Visit], how: str
) -> None:
    chat.scripts.append(text("Half an ", "answer", ending="hang"))
    person = visit(url).greeted()
    person.say("Go on")
    person.expect("document.querySelector('#log').innerText.includes('Half an answer')")
    assert person.page.locator("#send").is_hidden()
    person.page.click("#stop") if how == "button" else person.page.keyboard.press("Escape")
    person.answered()
    assert "stopped" in person.texts(".foot")[0]
    assert person.page.locator("#send").is_visible()
    person.say("And now?")
    person.answered(2)
    assert [each["content"] for each in chat.bodies[1]["messages"]] == ["Go on", "Half an answer", "And now?"]
    person.page.wait_for_timeout(100)
    assert chat.abandoned == 1
    person.check()


def test_a_new_chat_begun_during_an_answer_knows_nothing_of_it(
    chat: ScriptedChat, url: str, visit: Callable[..., Visit]
) -> None:
    chat.scripts.append(text("Half an answer", ending="hang"))
    person = visit(url).greeted()
    person.say("Old")
    person.expect("document.querySelector('#log').innerText.includes('Half')")
    person.page.click("#new")
    person.say("New")
    person.answered()
    assert person.texts(".words") == ["New", "Yes."]
    assert [each["content"] for each in chat.bodies[1]["messages"]] == ["New"]
    person.check()


def test_an_answer_stopped_before_its_first_word_is_no_message(
    chat: ScriptedChat, url: str, visit: Callable[..., Visit]
) -> None:
    chat.scripts.append(Script(deltas=({"reasoning_content": "Hm."},), ending="hang"))
    person = visit(url).greeted()
    person.say("One")
    person.expect("document.querySelector('.thoughts')?.textContent === 'Hm.'")
    person.page.keyboard.press("Escape")
    person.answered()
    person.say("Two")
    person.answered(2)
    assert [each["content"] for each in chat.bodies[1]["messages"]] == ["One", "Two"]
    person.check()


@pytest.mark.parametrize("kind", ["drop", "paste", "choose"])
def test_pictures_are_shown_and_sent(chat: ScriptedChat, url: str, visit: Callable[..., Visit], kind: str) -> None:
    person = visit(url).greeted()
    page = person.page
    if kind == "choose":
        chosen: Any = [{"name": name, "mimeType": "image/png", "buffer": PICTURE} for name in ("a.png", "b.png")]
        page.set_input_files("#files", chosen)
    else:
        if kind == "drop":
            person.give_files("dragover", "#log", ("a.png", "image/png", PICTURE))
            assert page.locator("#drop").is_visible()
        target = "#log" if kind == "drop" else "#text"
        person.give_files(kind, target, ("a.png", "image/png", PICTURE), ("b.png", "image/png", PICTURE))
    page.get_by_role("button", name="Remove a.png").click()
    person.expect("document.querySelectorAll('#pictures img').length === 1")
    person.expect("document.querySelector('#pictures img').naturalWidth === 56")
    assert page.locator("#drop").is_hidden()
    person.say("What is it?")
    person.answered()
    assert page.locator("#pictures").is_hidden()
    assert page.locator(".turn.user img").get_attribute("alt") == "b.png"
    (image, words) = chat.bodies[0]["messages"][0]["content"]
    assert image["type"] == "image_url" and image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert words == {"type": "text", "text": "What is it?"}
    person.check()


def test_files_that_are_no_pictures_are_refused_in_words(url: str, visit: Callable[..., Visit]) -> None:
    person = visit(url).greeted()
    person.give_files("drop", "#log", ("a.svg", "image/svg+xml", b"<svg onload=alert(1)>"))
    person.expect("document.getElementById('refused').textContent.includes('a.svg is not a PNG')")
    person.give_files("drop", "#log", ("big.png", "image/png", (12 << 20) + 1))
    person.expect("document.getElementById('refused').textContent.includes('larger than 12 MB')")
    assert person.page.locator("#send").is_disabled()
    person.check()


def test_a_server_that_wants_a_key_is_given_it_and_the_key_stays_in_the_tab(
    chat: ScriptedChat, url: str, visit: Callable[..., Visit]
) -> None:
    chat.key = "moon-key-0123456789"
    person = visit(url)
    page = person.page
    person.expect("document.getElementById('settings').open")
    assert page.inner_text("#settings-title") == "This server needs a key"
    page.fill("#key", "wrong-key")
    page.press("#key", "Enter")
    person.expect("document.getElementById('key-problem').textContent.includes('did not accept')")
    page.fill("#key", chat.key)
    page.press("#key", "Enter")
    person.greeted()
    person.expect("document.getElementById('notice').hidden")
    person.say("Hello")
    person.answered()
    kept = page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]")
    assert chat.key in kept[0] and kept[1:] == ["{}", ""]
    assert chat.key not in page.content() and chat.key not in page.url
    page.reload()
    person.greeted()  # still there in this tab, and in no other
    other = visit(url)
    other.expect("document.getElementById('settings').open")
    person.check()


def test_a_key_that_ends_to_be_valid_is_asked_for_and_the_question_is_sent_again(
    chat: ScriptedChat, url: str, visit: Callable[..., Visit]
) -> None:
    person = visit(url).greeted()
    chat.key = "moon-key-0123456789"
    person.say("Hello?")
    person.expect("document.getElementById('settings').open")
    person.page.fill("#key", chat.key)
    person.page.press("#key", "Enter")
    person.answered()
    assert person.texts(".failure") == [] and [each["messages"] for each in chat.bodies] == [
        [{"role": "user", "content": "Hello?"}]
    ]


def test_a_busy_server_is_waited_for_and_asked_again(chat: ScriptedChat, url: str, visit: Callable[..., Visit]) -> None:
    chat.scripts.append(Script(status=429, message="the queue is full", headers={"Retry-After": "1"}))
    person = visit(url).greeted()
    person.say("Hello")
    person.expect("document.querySelector('.failure') !== null")
    assert "The server is busy: the queue is full" in person.texts(".failure")[0]
    person.page.get_by_role("button", name="Try again", exact=True).click()  # enabled when the second is over
    person.answered()
    assert person.texts(".failure") == []
    person.check()


@pytest.mark.parametrize(
    "script, said",
    [
        (text("Half", ending="cut"), "broke before the answer was complete"),
        (text("Half", ending="unfinished"), "ended before it was complete"),
        (text("Half", ending="error"), "The server stopped: the engine died"),
        (text("Half", ending="garbage"), "not the OpenAI format"),
        (Script(status=400, message="temperature is 9"), "The server answered: temperature is 9"),
        (Script(status=500, message=""), "The server answered: 500"),
    ],
)
def test_what_goes_wrong_is_said_and_can_be_tried_again(
    chat: ScriptedChat, url: str, visit: Callable[..., Visit], script: Script, said: str
) -> None:
    chat.scripts.extend([script, text("Whole.")])
    person = visit(url).greeted()
    person.say("Hello")
    person.expect(f"document.querySelector('.failure')?.textContent.includes({json.dumps(said)})")
    assert person.texts(".words") == (["Hello", "Half"] if script.deltas else ["Hello"])
    person.page.click(".failure button")
    person.answered()
    assert person.texts(".words") == ["Hello", "Whole."]
    assert [len(each["messages"]) for each in chat.bodies] == [1, 1]
    person.check()


def test_a_server_that_is_gone_is_noticed_and_found_again(visit: Callable[..., Visit]) -> None:
    first = ScriptedChat()
    with serving(first.app()) as url:
        person = visit(url).greeted()
    person.say("Anybody?")
    person.expect("document.querySelector('.failure')?.textContent.includes('cannot be reached')")
    with serving(first.app(), port=int(url.rpartition(":")[2].strip("/"))):
        person.page.click(".failure button")
        person.answered()
    assert person.texts(".words") == ["Anybody?", "Yes."]
    person.check()


def test_raw_mode_continues_each_text_alone_and_shows_it_as_it_is(
    chat: ScriptedChat, url: str, visit: Callable[..., Visit]
) -> None:
    chat.scripts.extend([text("import *not* emphasis\n", "  x = 1"), text("b")])
    person = visit(url).greeted()
    person.page.click("#open-settings")
    person.page.check("#raw")
    person.page.click("#settings button")
    person.say("from os ")
    person.answered()
    assert person.texts(".turn.assistant .words") == ["import *not* emphasis\n  x = 1"]
    person.say("a")
    person.answered(2)
    assert [(each["path"], each["prompt"]) for each in chat.bodies] == [
        ("/v1/completions", "from os "),
        ("/v1/completions", "a"),
    ]
    person.check()


def test_a_base_model_is_said_to_be_one_and_continues_text(
    chat: ScriptedChat, url: str, visit: Callable[..., Visit]
) -> None:
    chat.card = {"chat": False, "image_input": False}
    person = visit(url).greeted()
    assert "moon-1 is a base model" in person.page.inner_text("#hint")
    assert person.page.locator("#attach").is_hidden()
    person.say("Once upon")
    person.answered()
    assert (chat.bodies[0]["path"], chat.bodies[0]["prompt"]) == ("/v1/completions", "Once upon")
    assert chat.bodies[0]["max_tokens"] == 256  # it would not end by itself
    person.page.click("#open-settings")
    assert person.page.is_checked("#raw")
    person.page.uncheck("#raw")  # the person knows better
    person.page.click("#settings button")
    person.say("Hello")
    person.answered(2)
    assert chat.bodies[1]["path"] == "/v1/chat/completions"
    person.give_files("drop", "#log", ("a.png", "image/png", PICTURE))
    person.expect("document.getElementById('refused').textContent.includes('moon-1 reads no pictures')")
    person.check()


def test_one_of_several_models_can_be_chosen(chat: ScriptedChat, url: str, visit: Callable[..., Visit]) -> None:
    chat.models = ("moon-1", "moon-2")
    person = visit(url).greeted()
    person.page.select_option("#models", "moon-2")
    person.say("Hello")
    person.answered()
    assert chat.bodies[0]["model"] == "moon-2"
    person.check()


def test_the_keyboard_reaches_everything_and_a_narrow_page_does_not_scroll_sideways(
    chat: ScriptedChat, url: str, visit: Callable[..., Visit]
) -> None:
    wide = (
        "| a | b |\n|---|---|\n| " + "word " * 60 + "| " + "x" * 300 + " |\n\n```\n" + "y" * 500 + "\n```\n" + "z" * 900
    )
    chat.scripts.append(text(wide))
    person = visit(url, viewport={"width": 320, "height": 568}).greeted()
    page = person.page
    page.keyboard.type("Hello")  # the field has the focus from the start
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    person.answered()
    assert chat.bodies[0]["messages"][0]["content"] == "Hello\nthere"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(
        "document.getElementById('scroll').scrollWidth <= document.getElementById('scroll').clientWidth"
    )
    page.evaluate("document.body.focus(); document.activeElement.blur()")
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert {"new", "open-settings", "theme", "attach", "text", "Answer again"} <= reached
    unnamed = "[...document.querySelectorAll('button, input, textarea, select')]" + (
        ".filter((e) => !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length || e.hidden)).length"
    )
    assert page.evaluate(unnamed) == 0
    person.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_the_switch(url: str, visit: Callable[..., Visit], scheme: str) -> None:
    person = visit(url, color_scheme=scheme).greeted()
    light = "getComputedStyle(document.body).backgroundColor === 'rgb(246, 247, 249)'"
    assert person.page.evaluate(light) is (scheme == "light")
    person.page.click("#theme")
    assert person.page.evaluate(light) is (scheme == "dark")
    person.page.reload()
    assert person.page.evaluate(light) is (scheme == "dark")
    person.check()


def test_a_reader_who_scrolled_up_is_left_there(chat: ScriptedChat, url: str, visit: Callable[..., Visit]) -> None:
    chat.scripts.append(text(*(f"line {n}\n\n" for n in range(60)), ending="hang"))
    person = visit(url).greeted()
    person.say("Hello")
    person.expect("document.querySelector('#log').innerText.includes('line 30')")
    at_end = "((s) => s.scrollHeight - s.scrollTop - s.clientHeight < 90)(document.getElementById('scroll'))"
    person.expect("document.querySelector('#log').innerText.includes('line 59')")
    person.expect(at_end)
    person.page.click("#stop")
    person.answered()
    chat.scripts.append(text(*(f"more {n}\n\n" for n in range(60))))
    person.say("More")
    person.page.evaluate("document.getElementById('scroll').scrollTop = 0")
    person.answered(2)
    assert person.page.evaluate("document.getElementById('scroll').scrollTop") == 0
    person.check()
