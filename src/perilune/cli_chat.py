"""`perilune chat [RUN|FOLDER|URL]`: a chat in the terminal, or one question through a pipe.

A run or folder is served inside this process, on this machine alone and behind a key that nobody else has; then it is
spoken to as any other OpenAI-compatible server is. A terminal is never given control characters that a model or a
server wrote. In a pipe, standard input is the question, standard output the answer and nothing else.
"""

import json
import os
import shlex
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from perilune.chat_client import Answer, ChatError, Conversation, Endpoint, Part, picture_url
from perilune.cli import UserError, _nearest, _parse, _print_json

DEFAULT_URL = "http://127.0.0.1:8000"
ENDLESS_TOKENS = 256
"""Longest answer of a model that was not trained to end one."""
COMMANDS = {
    "/image PATH": "send a picture with the next message; several are allowed",
    "/system TEXT": "set the system prompt; without a text, show it",
    "/again": "ask the last question once more",
    "/reset": "forget the conversation",
    "/save FILE": "write the conversation as Markdown, or as JSON to a file that ends in .json",
    "/help": "this list",
    "/quit": "leave; so does Ctrl-D",
}
HELP_LINES = [
    *(f"  {name:<14} {text}" for name, text in COMMANDS.items()),
    '  A line that ends in \\ goes on in the next. """ begins a text of many lines and ends it.',
    "  Ctrl-C stops an answer, not the chat. // at the beginning sends a line that starts with /.",
]


@dataclass(kw_only=True)
class ChatFlags:
    model: str | None = None
    """Name of the model at the server; default: the first it offers."""
    api_key_env: str = "PERILUNE_API_KEY"
    """Environment variable that holds the server's key. Keys are never taken as arguments."""
    system: str = ""
    """System prompt."""
    image: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A picture (PNG, JPEG, WebP, GIF) for the first message; several are allowed."""
    raw: bool = False
    """Continue each text instead of answering: for base models."""
    thinking: bool = True
    """Let the model reason before it answers."""
    temperature: float | None = None
    """0 is greedy; default: the server's."""
    top_p: float | None = None
    max_tokens: int | None = None
    """Longest answer; default: the server's, and 256 for a base model, which does not end by itself."""
    seed: int | None = None
    device: str = "auto"
    """Where a run or folder is computed; "auto" takes the first of cuda, cpu that is there."""
    runs: str = "runs"
    """Folder that holds runs."""
    json: bool = False
    """In a pipe: print text, reasoning, calls and usage as JSON."""


def chat_verb(arguments: list[str]) -> None:
    """Chat with a run, a folder or a server, in the terminal or through a pipe."""
    named = bool(arguments) and not arguments[0].startswith("-")
    target, rest = (arguments[0], arguments[1:]) if named else (DEFAULT_URL, arguments)
    flags = _parse(
        f"perilune chat {target if named else '[RUN|FOLDER|URL]'}",
        "Chat with a run, an exported folder or any OpenAI-compatible server.\n\n"
        f"Without a name it looks for a server at {DEFAULT_URL}, where `perilune serve` listens.\n\n"
        "example: perilune chat nano\n\nexample: perilune chat https://example.org/v1 --model NAME\n\n"
        'example: echo "What is this?" | perilune chat nano --image picture.png',
        ChatFlags,
        rest,
    )
    try:
        with ExitStack() as stack:
            if flags.json and sys.stdin.isatty():
                raise UserError("--json is for pipes: echo QUESTION | perilune chat ... --json")
            if flags.raw and flags.image:
                raise UserError("--raw continues text alone: leave out --image")
            pictures = [picture_url(path) for path in flags.image]
            conversation, is_base = _connect(target, flags, stack)
            if sys.stdin.isatty():
                Terminal(conversation, pictures=pictures, is_base=is_base, is_elsewhere="://" in target).run()
            else:
                _one_question(conversation, pictures, as_json=flags.json, is_base=is_base)
    except ChatError as error:
        hint = "; start one with `perilune serve RUN`, or name a run: `perilune chat RUN`" if not named else ""
        raise UserError(f"{one_line(str(error))}{hint if 'no server answers' in str(error) else ''}") from None


def _connect(target: str, flags: ChatFlags, stack: ExitStack) -> tuple[Conversation, bool]:
    """A conversation with what was named, and whether it is known to be a base model."""
    if "://" in target:
        endpoint = Endpoint.at(target, key=os.environ.get(flags.api_key_env) or None)
    else:
        from perilune.cli_serve import served_inside

        address, key = stack.enter_context(served_inside(target, runs=flags.runs, device=flags.device))
        endpoint = Endpoint.at(address, key=key)
    models = {each["id"]: each for each in endpoint.models()}
    if not models:
        raise ChatError(f"the server at {endpoint.url} offers no model")
    if flags.model is not None and flags.model not in models:
        raise UserError(f"the server has no model {flags.model!r}{_nearest(flags.model, models)}: {', '.join(models)}")
    name = flags.model or next(iter(models))
    sampling = {key: getattr(flags, key) for key in ("temperature", "top_p", "max_tokens", "seed")}
    is_base = models[name].get("chat") is False
    if flags.max_tokens is None and (flags.raw or is_base):
        sampling["max_tokens"] = ENDLESS_TOKENS
    sampling = {key: value for key, value in sampling.items() if value is not None}
    if not flags.thinking:
        sampling["chat_template_kwargs"] = {"thinking": False}
    conversation = Conversation(endpoint=endpoint, model=name, system=flags.system, sampling=sampling, raw=flags.raw)
    return conversation, is_base


BASE = "is a base model: it was trained to continue text, not to answer"


def _one_question(conversation: Conversation, pictures: list[str], *, as_json: bool, is_base: bool) -> None:
    """Standard input is the question, standard output the answer."""
    question = sys.stdin.read()
    if not conversation.raw:
        question = question.strip()
    if not question and not pictures:
        raise UserError("standard input is empty: expected a question (echo QUESTION | perilune chat ...)")
    if is_base and not conversation.raw:
        print(f"perilune: {conversation.model!r} {BASE}; --raw does that", file=sys.stderr)
    for part in conversation.ask(question, pictures):
        if part.kind == "answer" and not as_json:
            print(part.text, end="", flush=True)
    answer = conversation.last
    if as_json:
        _print_json(
            {
                "model": conversation.model,
                "text": answer.text,
                "reasoning": answer.reasoning,
                "tool_calls": answer.calls,
                "finish_reason": answer.finish_reason,
                "usage": answer.usage,
            }
        )
        return
    print("" if answer.text.endswith("\n") else "\n", end="", flush=True)
    for call in answer.calls:
        name, arguments = one_line(call["name"]), one_line(call["arguments"])
        print(f"perilune: the model calls the tool {name} with {arguments}; here are no tools", file=sys.stderr)
    if answer.finish_reason == "length":
        cut = "answer was cut" if answer.text else "model was still reasoning when it was cut"
        print(f"perilune: the {cut}; --max-tokens allows a longer one", file=sys.stderr)
    elif not answer.text.strip() and not answer.calls:
        print("perilune: the answer is empty: the model ended its turn at once", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# The terminal


DIM, BOLD, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"


@dataclass
class Terminal:
    """A chat between a person and a server; `read` and `write` are the terminal, or a test."""

    conversation: Conversation
    pictures: list[str] = field(default_factory=list)
    """For the next message."""
    is_base: bool = False
    is_elsewhere: bool = True
    """Whether the model is not in this process."""
    read: Callable[[str], str] = input
    write: Callable[[str], None] = lambda text: print(text, end="", flush=True)
    colour: bool = field(default_factory=lambda: sys.stdout.isatty() and "NO_COLOR" not in os.environ)

    def run(self) -> None:
        """Until the person leaves."""
        _prepare_editing(self.read)
        name = one_line(self.conversation.model)
        place = f" at {self.conversation.endpoint.url}" if self.is_elsewhere else ""
        self._note(f"{name}{place}; /help lists what can be done, Ctrl-D leaves")
        if self.is_base and not self.conversation.raw:
            self._note(f"{name} {BASE}; start with --raw to let it continue yours")
        while True:
            try:
                text = self._message()
            except EOFError:
                self.write("\n")
                return
            except KeyboardInterrupt:
                self.write("\n")
                self._note("Ctrl-D or /quit leaves the chat")
                continue
            if text.strip() == "/quit":
                return
            self._handle(text)

    def _handle(self, text: str) -> None:
        try:
            if text.startswith("/") and not text.startswith("//"):
                self._command(text)
            elif text.strip() or self.pictures:
                pictures, self.pictures = self.pictures, []
                self._answer(text.removeprefix("/") if text.startswith("//") else text, pictures)
        except (ChatError, OSError) as error:
            self._note(one_line(str(error)), mark="!")

    def _message(self) -> str:
        """One message: a line, several joined by a backslash, or a block between triple quotes."""
        line = self.read(self._styled("> ", BOLD, prompt=True))
        if line.strip() == '"""':
            block = []
            while (line := self.read("")).strip() != '"""':
                block.append(line)
            return "\n".join(block)
        lines = [line]
        while lines[-1].endswith("\\") and not lines[0].startswith("/"):
            lines[-1] = lines[-1][:-1]
            lines.append(self.read(self._styled(". ", DIM, prompt=True)))
        return "\n".join(lines)

    # Answers ---------------------------------------------------------------------------------------------------------

    def _answer(self, text: str, pictures: list[str]) -> None:
        began = time.perf_counter()
        parts = self.conversation.ask(text, pictures)
        kind = None
        stopped = False
        try:
            for part in parts:
                self._show(part, kind)
                kind = part.kind
        except KeyboardInterrupt:
            stopped = True
        except ChatError as error:
            if kind is None:
                self.pictures = pictures + self.pictures  # nothing arrived: the message was not taken
            self.write(f"{self._reset(kind)}\n" if kind else "")
            self._note(one_line(str(error)), mark="!")
            return
        finally:
            parts.close()  # pyrefly: ignore[missing-attribute]
        self.write(f"{self._reset(kind)}\n" if kind else "")
        self._note(_facts(self.conversation.last, time.perf_counter() - began, stopped=stopped))

    def _show(self, part: Part, before: str | None) -> None:
        if part.kind != before or part.begins:
            self.write(self._reset(before) + ("\n" if before is not None else ""))
            if part.kind != "answer" and self.colour:
                self.write(DIM)
            if part.kind == "reasoning" and not self.colour:
                self.write("(reasoning) ")
        opening = "calls the tool " if part.begins else ""
        self.write(f"{opening}{printable(part.text)}{' ' if part.begins else ''}")

    def _reset(self, kind: str | None) -> str:
        return PLAIN if self.colour and kind not in (None, "answer") else ""

    # Commands --------------------------------------------------------------------------------------------------------

    def _command(self, text: str) -> None:
        name, _, argument = text.strip().partition(" ")
        argument = argument.strip()
        known = {each.partition(" ")[0] for each in COMMANDS}
        if name not in known:
            self._note(f"there is no {one_line(name)}{_nearest(name, known)}; /help lists what there is", mark="!")
        elif name == "/help":
            self.write("\n".join(HELP_LINES) + "\n")
        elif name == "/reset":
            self.conversation.messages.clear()
            self.pictures.clear()
            self._note("the conversation is forgotten")
        elif name == "/system":
            self._system(argument)
        elif name == "/image":
            self._image(argument)
        elif name == "/save":
            self._note(f"written to {one_line(str(save(self.conversation, argument)))}")
        elif name == "/again":
            self._again()

    def _system(self, argument: str) -> None:
        if argument:
            self.conversation.system = argument
        set_to = one_line(self.conversation.system)
        self._note(f"system prompt: {set_to}" if set_to else "there is no system prompt: /system TEXT sets one")

    def _image(self, argument: str) -> None:
        if self.conversation.raw:
            raise ChatError("--raw continues text alone: pictures need a chat")
        if not argument:
            raise ChatError("/image needs the path of a picture")
        self.pictures.append(picture_url(_path(argument)))
        count = len(self.pictures)
        self._note(f"{count} picture{'s' if count > 1 else ''} for the next message")

    def _again(self) -> None:
        question = self.conversation.forget_last()
        if question is None:
            raise ChatError("there is no question yet")
        content = question["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        text = "".join(part.get("text", "") for part in parts)
        self._answer(text, [part["image_url"]["url"] for part in parts if part["type"] == "image_url"])

    # Words -----------------------------------------------------------------------------------------------------------

    def _note(self, text: str, mark: str = "") -> None:
        if text:
            self.write(self._styled(f"{mark and mark + ' '}{text}", BOLD if mark else DIM) + "\n")

    def _styled(self, text: str, style: str, *, prompt: bool = False) -> str:
        if not self.colour:
            return text
        # The bytes around a style tell the line editor that it takes no room.
        begin, end = ("\x01", "\x02") if prompt else ("", "")
        return f"{begin}{style}{end}{text}{begin}{PLAIN}{end}"


def _facts(answer: Answer, seconds: float, *, stopped: bool) -> str:
    facts = ["stopped"] if stopped else []
    if answer.finish_reason == "length":
        facts.append("cut at the longest allowed answer (--max-tokens)")
    if answer.calls:
        facts.append("waits for a tool, which this chat does not have")
    tokens = answer.usage.get("completion_tokens")
    if isinstance(tokens, int) and tokens > 0:
        facts.append(f"{tokens} tokens, {tokens / max(seconds, 1e-9):.1f} a second")
    elif not stopped and not (answer.text or answer.calls):
        facts.append("the answer is empty")
    return f"({'; '.join(facts)})" if facts else ""


def _prepare_editing(read: Callable[[str], str]) -> None:
    if read is not input:
        return
    try:
        import readline
    except ImportError:  # no line editor on this system: lines are read as they are
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted text of many lines is one message
    readline.set_auto_history(True)


def _path(argument: str) -> str:
    """A path as typed or as a file manager drops it: perhaps quoted, perhaps with escaped blanks."""
    if Path(argument).expanduser().exists():
        return argument
    try:
        words = shlex.split(argument)
    except ValueError:
        return argument
    return words[0] if len(words) == 1 else argument


def save(conversation: Conversation, name: str) -> Path:
    """The conversation in a new file."""
    if not name:
        raise ChatError("/save needs the name of a file: /save chat.md or /save chat.json")
    path = Path(_path(name)).expanduser()
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    messages = system + conversation.messages
    if not conversation.messages:
        raise ChatError("there is nothing to save yet")
    as_json = path.suffix.lower() == ".json"
    content = (
        json.dumps(messages, indent=2, ensure_ascii=False) + "\n" if as_json else "\n".join(_as_markdown(messages))
    )
    try:
        with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(content)
    except FileExistsError:
        raise ChatError(f"{str(path)!r} is already there: choose another name") from None
    return path


def _as_markdown(messages: list[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        yield f"## {message['role']}\n"
        yield from (f"{part['text']}\n" if part["type"] == "text" else "(a picture)\n" for part in parts)


def printable(text: str) -> str:
    """A stranger's text for a terminal: characters that control it or turn the reading order are shown, not obeyed."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    if character in "\u200c\u200d\ufe0f\u00ad":  # joiners that writing systems and emoji need
        return character
    if character == "\r":
        return ""
    return character.encode("unicode_escape", "surrogatepass").decode()


def one_line(text: str) -> str:
    return " ".join(printable(text).split())


__all__ = ["ChatFlags", "Terminal", "chat_verb", "one_line", "printable", "save"]
