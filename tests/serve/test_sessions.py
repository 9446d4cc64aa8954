"""Token in, token out: what a session serves is what it served before plus what is new."""

import json
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from perilune.data.chat import (
    Attachment,
    Segment,
    encode,
    generation_prompt,
    parse_messages,
    parse_tools,
    render,
    render_message,
    text_of,
)
from perilune.data.chat_folder_template import BUILT_IN, FolderTemplate
from perilune.data.chat_parser import ChatParser, Parsed
from perilune.data.media import Media
from perilune.serve.sessions import MAX_REPLIES, SessionLimits, SessionPrompt, Sessions
from perilune.serve.text_stream import TextStream
from tests.data.chat_dialogues import TOKENIZER, TOOLS, picture, pieces_of

NUM_DIALOGUES = 1000
SPECIAL = TOKENIZER.special_ids
WORDS = ["yes", " no", "\n", "é", "👩‍🚀", "<|im_end|>", "</think>", '"', "42", " the quick", "{", "functions.now:0"]


def words(rng: random.Random, low: int = 0, high: int = 4) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


def parsed(ids: Sequence[int], *, thinking: bool = True) -> Parsed:
    parser = ChatParser(thinking=thinking)
    for piece in pieces_of(list(ids)):
        parser.push(piece)
    return parser.finish()


def loosely(rng: random.Random, text: str) -> list[int]:
    """Ids of a text as a model may sample them: not the ones the tokenizer would choose."""
    if rng.random() < 0.5:
        return TOKENIZER.encode(text)
    return [token for byte in text for token in TOKENIZER.encode(byte)]


def reply_ids(rng: random.Random, *, thinking: bool) -> list[int]:
    """What a model wrote: reasoning, content, calls; sometimes with marks left out, cut, or not ended."""
    ids: list[int] = []
    if thinking:
        ids += loosely(rng, words(rng))
        ids += [SPECIAL["</think>"]] if rng.random() < 0.9 else []
    ids += loosely(rng, words(rng))
    if rng.random() < 0.5:
        ids.append(SPECIAL["<|tool_calls_section_begin|>"])
        for index in range(rng.randint(1, 3)):
            name = rng.choice(["search", "now", "a:b"])
            ids.append(SPECIAL["<|tool_call_begin|>"])
            ids += loosely(rng, rng.choice([f"functions.{name}:{index}", name, f" functions.{name}:{index}\n"]))
            ids.append(SPECIAL["<|tool_call_argument_begin|>"])
            ids += loosely(rng, rng.choice(['{"q":  "é", "a": 1}', "{}", '{"q": ', words(rng)]))
            ids.append(SPECIAL["<|tool_call_end|>"])
        ids.append(SPECIAL["<|tool_calls_section_end|>"])
    ids.append(SPECIAL[rng.choice(["<|im_end|>"] * 9 + ["[EOS]"])])
    return ids[: rng.randint(0, len(ids))] if rng.random() < 0.25 else ids


@dataclass
class Client:
    """Sends its whole history each turn, as an OpenAI client does."""

    rng: random.Random
    history: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[Attachment] = field(default_factory=list)

    def ask(self) -> None:
        rng = self.rng
        last = self.history[-1] if self.history else {}
        for call in last.get("tool_calls") or ():
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": self._content()})
        if not last.get("tool_calls") or rng.random() < 0.3:
            self.history.append({"role": "user", "content": self._content()})

    def _content(self) -> Any:
        if self.rng.random() < 0.7:
            return words(self.rng, 1)
        parts: list[dict[str, Any]] = []
        for _ in range(self.rng.randint(1, 3)):
            if self.rng.random() < 0.5:
                parts.append({"type": "text", "text": words(self.rng)})
            else:
                parts.append({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}})
                width = self.rng.choice([2, 4])
                self.pictures.append(picture(self.rng.randrange(256), width=width))
        return parts

    def hear(self, reply: Parsed) -> None:
        plain = reply.message.plain()
        plain.setdefault("content", None)
        if self.rng.random() < 0.5:
            plain.pop("reasoning_content", None)
        for call in plain.get("tool_calls") or ():
            try:  # some clients parse arguments and write them anew
                value = json.loads(call["function"]["arguments"])
                if self.rng.random() < 0.5:
                    call["function"]["arguments"] = json.dumps(value, separators=(",", ":"))
            except ValueError:
                pass
        self.history.append(json.loads(json.dumps(plain)))


def full(client: Client, *, tools: Any, thinking: bool) -> list[int]:
    segments = render(parse_messages(client.history), parse_tools(tools), thinking=thinking)
    return encode(TOKENIZER, segments, client.pictures).tokens


def check_pictures(prompt: SessionPrompt, pictures: Sequence[Attachment]) -> None:
    assert list(prompt.media) == list(pictures)
    pads = [index for index, token in enumerate(prompt.tokens) if token == SPECIAL["<|media_pad|>"]]
    runs = [start + n for start, item in zip(prompt.starts, prompt.media) for n in range(item.num_tokens)]
    assert pads == runs


def test_a_thousand_random_dialogues_only_ever_add_to_what_was_served() -> None:
    sessions = Sessions(TOKENIZER)
    num_continued = num_cut = num_pictures = 0
    for number in range(NUM_DIALOGUES):
        rng = random.Random(number)
        client = Client(rng)
        tools = rng.choice([None, TOOLS])
        served: list[int] | None = None
        closing: tuple[str, ...] = ()
        for _ in range(rng.randint(2, 5)):
            known_messages, known_pictures = len(client.history), len(client.pictures)
            client.ask()
            thinking = rng.random() < 0.7
            prompt = sessions.prompt(
                messages=parse_messages(client.history),
                tools=parse_tools(tools),
                attachments=client.pictures,
                thinking=thinking,
                owner="key",
                session_id=f"dialogue {number}",
            )
            if served is None:
                assert not prompt.continued and prompt.tokens == full(client, tools=tools, thinking=thinking)
            else:
                new = parse_messages(client.history)[known_messages:]
                added = [Segment(text=name, kind="special") for name in closing]
                added += [segment for message in new for segment in render_message(message)]
                added += generation_prompt(thinking=thinking)
                new_ids = encode(TOKENIZER, added, client.pictures[known_pictures:]).tokens
                assert prompt.continued and prompt.reason is None
                assert prompt.tokens == served + new_ids
                assert prompt.num_kept == len(served)
                num_continued += 1
                num_cut += bool(closing)
            check_pictures(prompt, client.pictures)
            num_pictures += bool(client.pictures)
            completion = reply_ids(rng, thinking=thinking)
            reply = parsed(completion, thinking=thinking)
            assert sessions.record(prompt, completion, reply)
            served, closing = prompt.tokens + completion, reply.closing
            client.hear(reply)
    # The generator makes what the contract is about.
    assert num_continued > 2000 and num_cut > 400 and num_pictures > 400


def test_a_prompt_after_a_known_one_is_the_prompt_without_it() -> None:
    num_with_pictures = 0
    for number in range(150):
        rng = random.Random(number)
        client, before = Client(rng), None
        alone, told = Sessions(TOKENIZER), Sessions(TOKENIZER)
        tools = parse_tools(rng.choice([None, TOOLS]))
        for _ in range(rng.randint(2, 5)):
            client.ask()
            given: dict[str, Any] = {"messages": parse_messages(client.history), "tools": tools, "session_id": "a"}
            given |= {"attachments": client.pictures, "thinking": rng.random() < 0.7}
            prompt, before = alone.prompt(**given), told.prompt(**given, after=before)
            assert vars(prompt) == vars(before)
            completion = reply_ids(rng, thinking=given["thinking"])
            reply = parsed(completion, thinking=given["thinking"])
            assert alone.record(prompt, completion, reply) and told.record(before, completion, reply)
            client.hear(reply)
        num_with_pictures += bool(client.pictures)
    assert num_with_pictures > 30


def test_tools_that_are_another_tuple_are_looked_at_again() -> None:
    sessions = Sessions(TOKENIZER)
    asked = {"messages": parse_messages([{"role": "user", "content": "hi"}]), "session_id": "a"}
    prompt = sessions.prompt(tools=parse_tools(TOOLS), **asked)
    sessions.record(prompt, TOKENIZER.encode("x"), parsed(TOKENIZER.encode("x")))
    assert sessions.prompt(tools=parse_tools(TOOLS), **asked).continued
    fewer = sessions.prompt(tools=parse_tools(TOOLS[:1]), **asked)
    assert not fewer.continued and fewer.reason == "tools differ from the previous turn's"
    growing = list(parse_tools(TOOLS[:1]))
    first = sessions.prompt(tools=growing, **asked)
    growing.append(parse_tools(TOOLS)[1])
    assert sessions.prompt(tools=growing, **asked).tools != first.tools


def test_well_formed_replies_read_as_the_template_with_all_reasoning_kept() -> None:
    sessions = Sessions(TOKENIZER)
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    for text in ("think</think>one<|im_end|>", "why</think>two<|im_end|>", "</think>three<|im_end|>"):
        prompt = sessions.prompt(messages=parse_messages(history), owner="k", session_id="s")
        completion = TOKENIZER.encode(text, allow_special=True)
        reply = parsed(completion)
        sessions.record(prompt, completion, reply)
        history += [reply.message.plain(), {"role": "user", "content": "next"}]
    prompt = sessions.prompt(messages=parse_messages(history), owner="k", session_id="s")
    assert prompt.continued
    assert TOKENIZER.decode(prompt.tokens) == text_of(render(parse_messages(history), preserve_thinking=True))
    assert "<think>why</think>two" in TOKENIZER.decode(prompt.tokens)


# --- what does not continue -------------------------------------------------------------------------------------------

ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
CALL = (
    "r</think>c<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
)
SAID = {
    "role": "assistant",
    "content": "c",
    "reasoning_content": "r",
    "tool_calls": [{"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "functions.f:0", "content": "x"}


def edited(message: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return json.loads(json.dumps(message)) | changes


def called(id: str, arguments: str) -> list[dict[str, Any]]:
    return [{"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}]


def begun(**options: Any) -> Sessions:
    sessions = Sessions(TOKENIZER, **options)
    prompt = sessions.prompt(messages=parse_messages(ASKED), tools=parse_tools(TOOLS), owner="k", session_id="s")
    completion = TOKENIZER.encode(CALL, allow_special=True)
    assert sessions.record(prompt, completion, parsed(completion))
    return sessions


@pytest.mark.parametrize(
    "history, reason",
    [
        ([ASKED[0], edited(ASKED[1], content="Q"), SAID, RESULT], "messages[1] differs"),
        ([edited(ASKED[0], content="S"), ASKED[1], SAID, RESULT], "messages[0] differs"),
        ([edited(ASKED[0], name="n"), ASKED[1], SAID, RESULT], "messages[0] differs"),
        ([ASKED[1], SAID, RESULT], "messages[0] differs"),
        ([*ASKED, RESULT], "messages[2] is not a reply"),
        ([*ASKED, edited(SAID, content="C"), RESULT], "messages[2] is not a reply"),
        ([*ASKED, edited(SAID, reasoning_content="R"), RESULT], "messages[2] is not a reply"),
        ([*ASKED, edited(SAID, tool_calls=called("functions.f:1", '{"a": 1}')), RESULT], "messages[2] is not a reply"),
        ([*ASKED, edited(SAID, tool_calls=called("functions.f:0", '{"a": 2}')), RESULT], "messages[2] is not a reply"),
        ([*ASKED, edited(SAID, tool_calls=called("functions.f:0", '{"a":1.0}')), RESULT], "messages[2] is not a reply"),
        ([*ASKED, edited(SAID, tool_calls=[]), RESULT], "messages[2] is not a reply"),
        (ASKED[:1], "messages are fewer"),
    ],
)  # fmt: skip
def test_an_edited_history_is_rendered_in_full_and_says_why(history: list[dict[str, Any]], reason: str) -> None:
    messages, tools = parse_messages(history), parse_tools(TOOLS)
    prompt = begun().prompt(messages=messages, tools=tools, owner="k", session_id="s")
    assert not prompt.continued and prompt.num_kept == 0
    assert prompt.reason is not None and prompt.reason.startswith(reason)
    assert prompt.tokens == encode(TOKENIZER, render(messages, tools)).tokens


def test_what_is_only_written_otherwise_continues() -> None:
    tools = parse_tools(TOOLS)
    exact = begun().prompt(messages=parse_messages([*ASKED, SAID, RESULT]), tools=tools, owner="k", session_id="s")
    assert exact.continued
    without = {key: value for key, value in SAID.items() if key != "reasoning_content"}
    for said in (
        without,
        edited(SAID, content=[{"type": "text", "text": "c"}]),
        edited(SAID, tool_calls=called("functions.f:0", '{"a":1}')),
        edited(SAID, refusal=None),
    ):
        prompt = begun().prompt(messages=parse_messages([*ASKED, said, RESULT]), tools=tools, owner="k", session_id="s")
        assert prompt.continued and prompt.tokens == exact.tokens


def test_reasoning_that_a_client_leaves_out_once_may_come_back_later() -> None:
    sessions, tools = begun(), parse_tools(TOOLS)
    without = {key: value for key, value in SAID.items() if key != "reasoning_content"}
    prompt = sessions.prompt(messages=parse_messages([*ASKED, without, RESULT]), tools=tools, owner="k", session_id="s")
    completion = TOKENIZER.encode("</think>done<|im_end|>", allow_special=True)
    sessions.record(prompt, completion, parsed(completion))
    end = [{"role": "assistant", "content": "done"}, {"role": "user", "content": "thanks"}]
    for said in (SAID, without):
        history = parse_messages([*ASKED, said, RESULT, *end])
        assert sessions.prompt(messages=history, tools=tools, owner="k", session_id="s").continued


def test_other_tools_are_a_full_render() -> None:
    messages = parse_messages([*ASKED, SAID, RESULT])
    prompt = begun().prompt(messages=messages, tools=parse_tools(TOOLS[:1]), owner="k", session_id="s")
    assert not prompt.continued and prompt.reason == "tools differ from the previous turn's"


def test_asking_again_gives_the_same_ids_and_any_of_the_replies_continues() -> None:
    sessions, tools = begun(), parse_tools(TOOLS)
    again = sessions.prompt(messages=parse_messages(ASKED), tools=tools, owner="k", session_id="s")
    assert again.continued and again.tokens == encode(TOKENIZER, render(parse_messages(ASKED), tools)).tokens
    for text in ("</think>other<|im_end|>", "</think>third"):
        completion = TOKENIZER.encode(text, allow_special=True)
        sessions.record(again, completion, parsed(completion))
    for said, text in ((SAID, CALL), ({"role": "assistant", "content": "other"}, "</think>other<|im_end|>")):
        prompt = sessions.prompt(
            messages=parse_messages([*ASKED, said, RESULT]), tools=tools, owner="k", session_id="s"
        )
        kept = again.tokens + TOKENIZER.encode(text, allow_special=True)
        assert prompt.continued and prompt.tokens[: len(kept)] == kept
    instant = sessions.prompt(messages=parse_messages(ASKED), tools=tools, thinking=False, owner="k", session_id="s")
    assert not instant.continued and "thinking" in str(instant.reason)


def test_a_picture_is_known_by_its_pixels() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://same/address"}}
    asked = [{"role": "user", "content": [image]}]
    history = parse_messages([*asked, {"role": "assistant", "content": "a"}, {"role": "user", "content": [image]}])

    def next_prompt(*pictures: Media) -> SessionPrompt:
        sessions = Sessions(TOKENIZER)
        shown = [picture(1, width=4)]
        prompt = sessions.prompt(messages=parse_messages(asked), attachments=shown, owner="k", session_id="s")
        completion = TOKENIZER.encode("</think>a<|im_end|>", allow_special=True)
        sessions.record(prompt, completion, parsed(completion))
        return sessions.prompt(messages=history, attachments=pictures, owner="k", session_id="s")

    assert next_prompt(picture(1, width=4), picture(9)).continued
    for first in (picture(2, width=4), picture(1, height=4), picture(1)):
        prompt = next_prompt(first, picture(9))
        assert not prompt.continued and prompt.reason == "messages[0] differs from the previous turn's"
        check_pictures(prompt, [first, prompt.media[1]])


@pytest.mark.parametrize("stop", [" quick", "<|im_end|>", "</think>", "<|tool_call_end|>"])
def test_a_stop_that_cuts_the_text_does_not_cut_the_ids(stop: str) -> None:
    text = "r</think>the quick<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}"
    completion: list[int] = []
    stream, parser, sessions = TextStream(TOKENIZER, stop=(stop,)), ChatParser(), Sessions(TOKENIZER)
    for token_id in TOKENIZER.encode(
        f"{text}<|tool_call_end|><|tool_calls_section_end|><|im_end|>", allow_special=True
    ):
        completion.append(token_id)
        for piece in stream.push(token_id):
            parser.push(piece)
        if stream.matched is not None:
            break
    assert stream.matched == stop
    prompt = sessions.prompt(messages=parse_messages(ASKED), owner="k", session_id="s")
    reply = parser.finish()
    sessions.record(prompt, completion, reply)
    history = parse_messages([*ASKED, reply.message.plain(), RESULT])
    following = sessions.prompt(messages=history, owner="k", session_id="s")
    after = TOKENIZER.decode(following.tokens[len(prompt.tokens) + len(completion) :])
    closing = {"<|im_end|>": "", "<|tool_call_end|>": "<|tool_calls_section_end|><|im_end|>"}.get(stop, "<|im_end|>")
    assert following.continued and after.startswith(f"{closing}<|im_system|>tool<|im_middle|>")


def test_without_a_session_nothing_is_remembered() -> None:
    sessions = Sessions(TOKENIZER)
    prompt = sessions.prompt(messages=parse_messages(ASKED))
    assert not prompt.continued and not sessions.record(prompt, [1], parsed([1])) and len(sessions) == 0


def test_a_folder_template_continues_too_where_it_can() -> None:
    ours = BUILT_IN.read_text(encoding="utf-8")
    for source, continues in ((ours, True), ("{{ messages | length }}<|im_end|>", False)):
        with FolderTemplate(source) as template:
            sessions, tools = begun(template=template), parse_tools(TOOLS)
            messages = parse_messages([*ASKED, SAID, RESULT])
            prompt = sessions.prompt(messages=messages, tools=tools, owner="k", session_id="s")
        assert prompt.continued is continues
        if continues:
            own = begun().prompt(messages=messages, tools=tools, owner="k", session_id="s")
            assert prompt.tokens == own.tokens
        else:
            assert prompt.reason == "the chat template changes earlier turns"


# --- bounds -----------------------------------------------------------------------------------------------------------


def turn(sessions: Sessions, owner: str, session_id: str, *, length: int = 1) -> SessionPrompt:
    prompt = sessions.prompt(messages=parse_messages(ASKED), owner=owner, session_id=session_id)
    completion = [65] * length + [SPECIAL["<|im_end|>"]]
    sessions.record(prompt, completion, parsed(completion))
    return prompt


def test_no_key_sees_the_sessions_of_another() -> None:
    sessions = begun()
    messages, tools = parse_messages([*ASKED, SAID, RESULT]), parse_tools(TOOLS)
    stranger = sessions.prompt(messages=messages, tools=tools, owner="other", session_id="s")
    assert not stranger.continued and stranger.reason == "the session is new, or was dropped since"
    assert not sessions.forget(owner="other", session_id="s")
    assert sessions.prompt(messages=messages, tools=tools, owner="k", session_id="s").continued
    assert sessions.forget(owner="k", session_id="s") and len(sessions) == sessions.num_bytes == 0


def test_idle_sessions_are_dropped_and_used_ones_are_not() -> None:
    now = [0.0]
    sessions = Sessions(TOKENIZER, limits=SessionLimits(max_idle_seconds=10), clock=lambda: now[0])
    turn(sessions, "k", "idle")
    turn(sessions, "k", "used")
    turn(sessions, "k", "read")
    now[0] = 8
    assert turn(sessions, "k", "used").continued
    sessions.prompt(messages=parse_messages(ASKED), owner="k", session_id="read")  # its reply takes long
    now[0] = 16
    assert turn(sessions, "k", "used").continued
    assert turn(sessions, "k", "read").continued
    assert len(sessions) == 2
    assert not turn(sessions, "k", "idle").continued


def test_too_many_of_one_owner_cost_that_owner_alone() -> None:
    sessions = Sessions(TOKENIZER, limits=SessionLimits(max_sessions=5, max_sessions_per_owner=2))
    turn(sessions, "quiet", "first")
    for number in range(20):
        turn(sessions, "busy", str(number))
    assert len(sessions) == 3
    assert turn(sessions, "quiet", "first").continued
    assert turn(sessions, "busy", "19").continued
    assert not turn(sessions, "busy", "17").continued


def test_a_session_larger_than_the_store_is_not_kept() -> None:
    sessions = Sessions(TOKENIZER, limits=SessionLimits(max_bytes=20_000))
    for number in range(20):
        turn(sessions, "k", str(number))
    small = len(sessions)
    assert 5 < small < 20 and sessions.num_bytes <= 20_000
    prompt = sessions.prompt(messages=parse_messages(ASKED), owner="k", session_id="large")
    assert not sessions.record(prompt, [65] * 10_000, parsed([65]))
    assert sessions.num_bytes <= 20_000


def test_replies_to_one_prompt_are_bounded() -> None:
    sessions = Sessions(TOKENIZER)
    prompt = turn(sessions, "k", "s")
    before = sessions.num_bytes
    for number in range(MAX_REPLIES * 2):
        completion = [*TOKENIZER.encode(f"{number:04}"), SPECIAL["<|im_end|>"]]
        sessions.record(prompt, completion, parsed(completion))
    assert sessions.num_bytes - before < MAX_REPLIES * 400


@pytest.mark.parametrize("field", ["max_sessions", "max_sessions_per_owner", "max_bytes", "max_idle_seconds"])
def test_a_limit_that_is_not_positive_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 0, expected"):
        SessionLimits(**{field: 0})  # pyrefly: ignore


class Bounds(RuleBasedStateMachine):
    """Any order of turns, waits and removals keeps every bound, and the count of bytes is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.limits = SessionLimits(max_sessions=4, max_sessions_per_owner=3, max_bytes=6000, max_idle_seconds=50)
        self.sessions = Sessions(TOKENIZER, limits=self.limits, clock=lambda: self.now)

    owners, names = st.sampled_from(["a", "b", "c"]), st.sampled_from(["1", "2", "3", "4"])

    @rule(owner=owners, name=names, length=st.integers(0, 900))
    def turns(self, owner: str, name: str, length: int) -> None:
        turn(self.sessions, owner, name, length=length)

    @rule(owner=owners, name=names)
    def forgets(self, owner: str, name: str) -> None:
        self.sessions.forget(owner=owner, session_id=name)

    @rule(seconds=st.integers(0, 40))
    def waits(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def bounds_hold(self) -> None:
        kept = self.sessions._sessions
        assert len(kept) <= self.limits.max_sessions
        assert max((sum(place[0] == owner for place in kept) for owner in "abc"), default=0) <= 3
        assert self.sessions.num_bytes == sum(session.num_bytes for session in kept.values()) <= 6000


TestBounds = Bounds.TestCase
TestBounds.settings = settings(max_examples=40, stateful_step_count=30)


def test_threads_may_share_the_store() -> None:
    sessions = Sessions(TOKENIZER, limits=SessionLimits(max_sessions=6, max_bytes=8000))
    failures: list[BaseException] = []

    def work(owner: str) -> None:
        try:
            for number in range(60):
                turn(sessions, owner, str(number % 4))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(owner,)) for owner in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(sessions) <= 6
    assert sessions.num_bytes == sum(session.num_bytes for session in sessions._sessions.values())


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30), st.booleans())
@settings(max_examples=100)
def test_any_completion_whatever_it_holds_is_continued(completion: list[int], thinking: bool) -> None:
    sessions = Sessions(TOKENIZER)
    prompt = sessions.prompt(messages=parse_messages(ASKED), thinking=thinking, owner="k", session_id="s")
    reply = parsed(completion, thinking=thinking)
    sessions.record(prompt, completion, reply)
    plain = json.loads(json.dumps(reply.message.plain()))
    history = parse_messages([*ASKED, plain, {"role": "user", "content": "next"}])
    following = sessions.prompt(messages=history, thinking=thinking, owner="k", session_id="s")
    assert following.continued
    assert following.tokens[: len(prompt.tokens) + len(completion)] == prompt.tokens + completion
    if reply.closing:
        assert following.tokens[following.num_kept] == SPECIAL[reply.closing[0]]


def test_what_a_model_wrote_after_its_end_is_ended_anew() -> None:
    end, text = SPECIAL["<|im_end|>"], TOKENIZER.encode(" and so on")
    for completion, closing in (([*text, end], []), ([end, *text], [end]), ([*text, end, *text], [end]), (text, [end])):
        sessions = Sessions(TOKENIZER)
        history: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        first = sessions.prompt(messages=parse_messages(history), thinking=False, session_id="a")
        reply = parsed(completion, thinking=False)
        sessions.record(first, completion, reply)
        history += [reply.message.plain(), {"role": "user", "content": "go on"}]
        then = sessions.prompt(messages=parse_messages(history), thinking=False, session_id="a")
        added = [segment for message in parse_messages(history[2:]) for segment in render_message(message)]
        new = encode(TOKENIZER, [*added, *generation_prompt(thinking=False)]).tokens
        assert then.continued and then.tokens == [*first.tokens, *completion, *closing, *new]
