"""`perilune chat`: in a terminal, and through a pipe."""

import fcntl
import io
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perilune.chat_client import Conversation, Endpoint
from perilune.cli import UserError
from perilune.cli_chat import Terminal, chat_verb, one_line, printable
from tests.serve.web.scripted_chat import SECONDS, Script, ScriptedChat, serving, text
from tests.serve.web.visiting import PICTURE


@pytest.fixture
def chat() -> ScriptedChat:
    return ScriptedChat()


@pytest.fixture
def url(chat: ScriptedChat) -> Iterator[str]:
    with serving(chat.app()) as url:
        yield url


@pytest.fixture
def ask(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """`ask("question", "--flag")` gives what a pipe gets: standard output and standard error."""

    def run(question: str, *flags: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(question))
        chat_verb([url, *flags])
        told = capsys.readouterr()
        return told.out, told.err

    return run


def typed(url: str, *lines: str, is_base: bool = False, **options: object) -> str:
    """What a terminal shows when a person types these lines and leaves."""
    shown: list[str] = []
    left = iter(lines)

    def read(prompt: str) -> str:
        shown.append(prompt)
        try:
            line = next(left)
        except StopIteration:
            raise EOFError from None
        shown.append(line + "\n")
        return line

    conversation = Conversation(endpoint=Endpoint.at(url), model="moon-1", **options)  # pyrefly: ignore
    Terminal(conversation, is_base=is_base, read=read, write=shown.append, colour=False).run()
    return "".join(shown)


# Through a pipe -------------------------------------------------------------------------------------------------------


def test_a_pipe_gets_the_answer_and_nothing_else(chat: ScriptedChat, ask: Callable[..., tuple[str, str]]) -> None:
    chat.scripts.append(Script(deltas=({"reasoning_content": "Hm."}, {"content": "An "}, {"content": "answer."})))
    assert ask("A question?\n", "--temperature", "0", "--no-thinking") == ("An answer.\n", "")
    body = chat.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "A question?"}] and body["temperature"] == 0
    assert body["chat_template_kwargs"] == {"thinking": False}


def test_json_holds_all_of_the_answer(chat: ScriptedChat, ask: Callable[..., tuple[str, str]]) -> None:
    chat.scripts.append(Script(deltas=({"reasoning_content": "Hm."}, {"content": "Yes."}), finish="length"))
    found = json.loads(ask("So?", "--json")[0])
    assert (found["text"], found["reasoning"], found["finish_reason"]) == ("Yes.", "Hm.", "length")


def test_a_pipe_is_told_when_an_answer_was_cut(chat: ScriptedChat, ask: Callable[..., tuple[str, str]]) -> None:
    chat.scripts.append(text("Half", finish="length"))
    out, err = ask("So?")
    assert out == "Half\n" and "--max-tokens" in err


def test_a_pipe_is_told_when_an_answer_is_empty(chat: ScriptedChat, ask: Callable[..., tuple[str, str]]) -> None:
    chat.scripts.append(text(""))
    out, err = ask("So?")
    assert out == "\n" and "the answer is empty" in err


def test_a_base_model_is_told_about_and_raw_sends_the_text_as_it_is(
    chat: ScriptedChat, ask: Callable[..., tuple[str, str]]
) -> None:
    chat.card = {"chat": False}
    assert "is a base model" in ask("Once")[1] and "--raw" in ask("Once")[1]
    chat.bodies.clear()
    assert ask("  Once upon ", "--raw")[1] == ""
    assert (chat.bodies[0]["prompt"], chat.bodies[0]["max_tokens"]) == ("  Once upon ", 256)


def test_pictures_go_with_the_question(chat: ScriptedChat, ask: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    ask("What is it?", "--image", str(tmp_path / "a.png"))
    assert chat.bodies[0]["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")


@pytest.mark.parametrize(
    "question, flags, said",
    [
        ("", (), "standard input is empty"),
        ("x", ("--model", "moon-2"), "did you mean 'moon-1'"),
        ("x", ("--image", "none.png"), "cannot be read"),
        ("x", ("--image", "a.png", "--raw"), "leave out --image"),
    ],
)
def test_wrong_input_is_one_line(
    ask: Callable[..., tuple[str, str]], question: str, flags: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        ask(question, *flags)
    assert "\n" not in str(caught.value)


def test_a_server_that_refuses_or_is_not_there_is_one_line(
    chat: ScriptedChat, ask: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat.scripts.append(Script(status=400, message="bad\nthing \x1b[31m"))
    with pytest.raises(UserError) as caught:
        ask("x")
    assert str(caught.value) == r"the server answered 400: bad thing \x1b[31m"
    chat.key = "a-key"
    with pytest.raises(UserError, match="asks for a key"):
        ask("x")
    monkeypatch.setenv("OTHER_KEY", "a-key")
    assert ask("x", "--api-key-env", "OTHER_KEY")[0] == "Yes.\n"
    with pytest.raises(UserError, match="no server answers"):
        chat_verb(["http://127.0.0.1:1"])
    monkeypatch.setattr("perilune.cli_chat.DEFAULT_URL", "http://127.0.0.1:1")
    with pytest.raises(UserError, match="perilune serve RUN"):
        chat_verb([])


# In a terminal --------------------------------------------------------------------------------------------------------


def test_a_conversation_in_the_terminal(chat: ScriptedChat, url: str, tmp_path: Path) -> None:
    (tmp_path / "a picture.png").write_bytes(PICTURE)
    chat.scripts.extend([Script(deltas=({"reasoning_content": "Hm."}, {"content": "First."})), text("Second.")])
    shown = typed(
        url,
        "/system Be short.",
        f"/image '{tmp_path}/a picture.png'",
        "one \\",
        "more",
        '"""',
        "a block",
        "",
        "of lines",
        '"""',
        "//not a command",
    )
    assert "(reasoning) Hm.\nFirst.\n" in shown and "Second.\n(1 tokens" in shown and "1 picture for the next" in shown
    contents = [[each["content"] for each in body["messages"]] for body in chat.bodies]
    assert contents[0][0] == "Be short." and contents[0][1][1] == {"type": "text", "text": "one \nmore"}
    assert contents[1][2:] == ["First.", "a block\n\nof lines"] and contents[2][-1] == "/not a command"


def test_reset_again_and_save(chat: ScriptedChat, url: str, tmp_path: Path) -> None:
    chat.scripts.extend([text("First."), text("Second."), text("Third.")])
    shown = typed(
        url, "/again", "Hello", "/again", f"/save {tmp_path}/chat.md", f"/save {tmp_path}/chat.md",
        f"/save {tmp_path}/chat.json", "/reset", "/save x.md", "Anew", "/quit", "never sent",
    )  # fmt: skip
    assert "no question yet" in shown and "already there" in shown and "nothing to save" in shown
    assert [len(body["messages"]) for body in chat.bodies] == [1, 1, 1]
    assert (tmp_path / "chat.md").read_text() == "## user\n\nHello\n\n## assistant\n\nSecond.\n"
    assert json.loads((tmp_path / "chat.json").read_text())[1] == {"role": "assistant", "content": "Second."}
    assert "never sent" not in shown


def test_what_fails_leaves_the_chat_and_its_pictures(chat: ScriptedChat, url: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    chat.scripts.extend([Script(status=429, message="full"), text("Seen.")])
    shown = typed(url, f"/image {tmp_path}/a.png", "What is it?", "What is it?", "/imag x", "/image none.png", "/image")
    assert "! the server is busy: full" in shown and "Seen." in shown and "did you mean '/image'?" in shown
    assert [len(body["messages"]) for body in chat.bodies] == [1, 1]
    assert all(isinstance(body["messages"][0]["content"], list) for body in chat.bodies)


def test_a_base_model_is_told_about_at_the_start(url: str) -> None:
    assert "moon-1 is a base model" in typed(url, is_base=True) and "--raw" in typed(url, is_base=True)
    assert "base model" not in typed(url, is_base=True, raw=True) and "base model" not in typed(url)


def test_a_stranger_s_text_gives_a_terminal_no_orders(chat: ScriptedChat, url: str) -> None:
    chat.models = ("moon\x1b[1m",)
    chat.scripts.append(
        Script(
            deltas=(
                {"reasoning_content": "\x1b]0;title\x07"},
                {"content": "a\x1b[31mb\x9bc\u202ed\re\tf\ng"},
                {"tool_calls": [{"index": 0, "function": {"name": "\x1bN", "arguments": "\x1bA"}}]},
            )
        )
    )
    shown = typed(url, "Hello")
    assert not {"\x1b", "\x9b", "\x07", "\u202e", "\r"} & set(shown)
    assert r"a\x1b[31mb\x9bc\u202ede" in shown and "\tf\ng" in shown
    assert printable("né 猫 👩‍🚀\n") == "né 猫 👩‍🚀\n" and one_line(" a\n b ") == "a b"


class Screen:
    """`perilune chat` in a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        code = "import sys; from perilune.cli_chat import chat_verb; chat_verb(sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "INPUTRC": os.devnull},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C becomes a signal
        )
        os.close(theirs)
        self.shown = ""

    def expect(self, wanted: str, *, again: str = "") -> None:
        """Wait for a text; `again` is typed every second until it comes."""
        deadline = time.monotonic() + SECONDS
        while wanted not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._ours], [], [], 1.0)[0]:
                self.shown += os.read(self._ours, 4096).decode(errors="replace")
            else:
                self.type(again)
        self.shown = self.shown.partition(wanted)[2]

    def ready(self) -> None:
        """Once the line editor waits: what is typed before may be lost."""
        self.expect("> ")

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_control_c_stops_the_answer_and_not_the_chat(chat: ScriptedChat, url: str) -> None:
    chat.scripts.append(Script(deltas=({"reasoning_content": "Hm."}, {"content": "Half an answer"}), ending="hang"))
    screen = Screen(url)
    try:
        screen.expect("/help")
        screen.ready()
        screen.type("Go on\r")
        screen.expect("\x1b[2mHm.\x1b[0m")  # reasoning is dimmed
        screen.expect("Half an answer")
        screen.type("\x03")
        screen.expect("(stopped)")
        screen.ready()
        screen.type("\x1b[200~two\rlines\x1b[201~")  # pasted
        screen.type("\r")
        screen.expect("Yes.")
        screen.ready()
        # A signal in the instant between prompt and waiting is only noticed with the next key.
        screen.type("\x03")
        screen.expect("Ctrl-D or /quit leaves", again="\x03")
        screen.ready()
        screen.type("\x04")
        assert screen.process.wait(SECONDS) == 0
    finally:
        screen.close()
    assert [each["content"].replace("\r", "\n") for each in chat.bodies[1]["messages"]] == [
        "Go on",
        "Half an answer",
        "two\nlines",
    ]
