"""The client of the terminal chat: what it sends, what it makes of answers, and what it says when things go wrong."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from perilune.chat_client import Answer, ChatError, Conversation, Endpoint, Part, picture_url
from perilune.chat_client import _take as take
from tests.serve.web.scripted_chat import Script, ScriptedChat, serving, text
from tests.serve.web.visiting import PICTURE


@pytest.fixture
def chat() -> ScriptedChat:
    return ScriptedChat()


@pytest.fixture
def url(chat: ScriptedChat) -> Iterator[str]:
    with serving(chat.app()) as url:
        yield url


def conversation(url: str, **options: object) -> Conversation:
    return Conversation(endpoint=Endpoint.at(url), model="moon-1", **options)  # pyrefly: ignore


@pytest.mark.parametrize(
    "typed, base",
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1"),
        ("https://example.org/api/openai/v1", "https://example.org/api/openai/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_an_address_is_taken_as_people_write_it(typed: str, base: str) -> None:
    assert Endpoint.at(typed).url == base


@pytest.mark.parametrize("typed", ["file:///etc/passwd", "http://", "ftp://x", "http://a:b@c/", "http://x:99999", "x"])
def test_what_is_no_address_is_refused(typed: str) -> None:
    with pytest.raises(ChatError):
        Endpoint.at(typed)


def test_a_key_is_sent_and_never_shown(chat: ScriptedChat, url: str) -> None:
    chat.key = "moon-key"
    endpoint = Endpoint.at(url, key="moon-key")
    assert [each["id"] for each in endpoint.models()] == ["moon-1"] and "moon-key" not in repr(endpoint)
    with pytest.raises(ChatError, match="asks for a key"):
        Endpoint.at(url).models()
    with pytest.raises(ChatError, match="did not accept the key"):
        Endpoint.at(url, key="other").models()


def test_parts_arrive_in_order_and_the_conversation_grows(chat: ScriptedChat, url: str) -> None:
    call = {"index": 0, "id": "functions.look:0", "function": {"name": "look", "arguments": "{"}}
    more = {"index": 0, "function": {"arguments": "}"}}
    deltas = (
        {"reasoning_content": "Hm."},
        {"content": "Yes"},
        {"content": "."},
        {"tool_calls": [call]},
        {"tool_calls": [more]},
    )
    chat.scripts.append(Script(deltas=deltas, finish="tool_calls"))
    talk = conversation(url, system="Be kind.", sampling={"temperature": 0.5})
    parts = list(talk.ask("One?", ["data:image/png;base64,AA=="]))
    assert parts == [
        Part(kind="reasoning", text="Hm."),
        Part(kind="answer", text="Yes"),
        Part(kind="answer", text="."),
        Part(kind="call", text="look", begins=True),
        Part(kind="call", text="{"),
        Part(kind="call", text="}"),
    ]
    assert talk.last.calls == [{"id": "functions.look:0", "name": "look", "arguments": "{}"}]
    assert talk.last.finish_reason == "tool_calls" and talk.last.usage["completion_tokens"] == 5
    list(talk.ask("Two?"))
    second = chat.bodies[1]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert second["temperature"] == 0.5 and second["stream"]
    assert [(each["role"], each["content"]) for each in second["messages"]] == [
        ("system", "Be kind."),
        ("user", [picture, {"type": "text", "text": "One?"}]),
        ("assistant", "Yes."),
        ("user", "Two?"),
    ]  # fmt: skip


def test_raw_continues_one_text_alone(chat: ScriptedChat, url: str) -> None:
    chat.scripts.append(text("b", "c"))
    talk = conversation(url, raw=True)
    assert "".join(part.text for part in talk.ask("a")) == "bc"
    list(talk.ask("d"))
    assert [(each["path"], each["prompt"]) for each in chat.bodies] == [
        ("/v1/completions", "a"),
        ("/v1/completions", "d"),
    ]


def test_leaving_an_answer_ends_the_request_and_keeps_what_arrived(chat: ScriptedChat, url: str) -> None:
    chat.scripts.append(text("Half", " of it", ending="hang"))
    talk = conversation(url)
    for part in talk.ask("Go"):
        if part.text == " of it":
            break
    assert [each["content"] for each in talk.messages] == ["Go", "Half of it"]
    left = threading.Event()
    for _ in range(300):
        if chat.abandoned:
            break
        left.wait(0.05)
    assert chat.abandoned == 1


def test_an_empty_answer_is_not_sent_along(chat: ScriptedChat, url: str) -> None:
    chat.scripts.append(Script(deltas=({"reasoning_content": "Hm."},)))
    talk = conversation(url)
    list(talk.ask("One"))
    list(talk.ask("Two"))
    assert [each["content"] for each in chat.bodies[1]["messages"]] == ["One", "Two"]


@pytest.mark.parametrize(
    "script, said, kept",
    [
        (text("Half", ending="cut"), "before", 2),
        (text("Half", ending="unfinished"), "ended before it was complete", 2),
        (text("Half", ending="error"), "the server stopped: the engine died", 2),
        (text("Half", ending="garbage"), "not the OpenAI format", 2),
        (Script(status=429, message="full", headers={"Retry-After": "7"}), "busy, it asks to wait 7 s: full", 0),
        (Script(status=400, message="temperature is 9"), "answered 400: temperature is 9", 0),
        (Script(status=404, message="no such model"), "no such model", 0),
        (Script(status=302, headers={"Location": "http://127.0.0.1:1/"}), "answered 302", 0),
    ],
)
def test_what_goes_wrong_is_one_error_and_only_what_arrived_is_kept(
    chat: ScriptedChat, url: str, script: Script, said: str, kept: int
) -> None:
    chat.scripts.append(script)
    talk = conversation(url)
    with pytest.raises(ChatError, match=said):
        list(talk.ask("Go"))
    assert len(talk.messages) == kept


def test_nobody_there_and_somebody_else_there_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 5\r\n\r\nhello"

        def serve_once() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve_once, daemon=True)
        thread.start()
        with pytest.raises(ChatError, match="did not answer in the OpenAI format"):
            Endpoint.at(f"http://127.0.0.1:{port}").models()
        thread.join(30)
    with pytest.raises(ChatError, match="no server answers at .* \\(connection refused\\)"):
        Endpoint.at(f"http://127.0.0.1:{port}").models()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["choices", "delta", "content", "tool_calls", "index", "function", "name", "arguments", "usage",
                         "finish_reason", "text", "reasoning_content", "id"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@hypothesis.given(st.lists(st.dictionaries(st.sampled_from(["choices", "usage"]), JSON, max_size=2), max_size=6))
def test_events_of_any_shape_give_parts_or_one_clear_error(events: list[dict[str, object]]) -> None:
    answer = Answer()
    with contextlib.suppress(ChatError):
        for event in events:
            for part in take(answer, event):
                assert isinstance(part.text, str)


def test_pictures_become_data_addresses_and_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    assert picture_url(tmp_path / "a.png").startswith("data:image/png;base64,iVBOR")
    for name, content in (("b.png", b"<svg>"), ("c.webp", b"RIFF____AVI "), ("d.gif", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ChatError, match="not a PNG, JPEG, WebP or GIF"):
            picture_url(tmp_path / name)
    with pytest.raises(ChatError, match="cannot be read"):
        picture_url(tmp_path)
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ChatError, match="expected at most"):
        picture_url(tmp_path / "large.png")
