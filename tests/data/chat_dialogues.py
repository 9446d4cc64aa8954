"""What the tests of the chat format say to it: tricky texts, messages, schemas, and replies as token ids."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from perilune.data.chat import Attachment, ChatMessage
from perilune.data.media import Media
from perilune.data.tokenizer import SPECIAL_TOKENS, StreamDecoder, Tokenizer

TOKENIZER = Tokenizer.train(
    ["the quick brown fox asks functions.search:0 and reads the answer", "namespace functions { type search = any; }"],
    340,
)

# Texts near the things that break templates: names of special tokens, whole and in halves, jinja, JSON, odd spaces.
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
        st.sampled_from(SPECIAL_TOKENS),
        st.sampled_from(
            ["<|im_", "end|>", "{{ 1 }}", "{% raw %}", '{"a": "b"}', "\n\n", " \t", "\u2028", "é", "👩‍🚀", "\\", "'"]
        ),
    ),
    max_size=4,
).map("".join)

CALLS = st.builds(
    lambda id, name, arguments: {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}},
    st.one_of(st.just("functions.search:0"), TEXTS),
    st.sampled_from(["search", "now"]),
    st.one_of(st.just('{"q":  "x"}'), TEXTS),
)
PARTS = st.lists(
    st.one_of(
        TEXTS.map(lambda text: {"type": "text", "text": text}),
        st.just({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}),
    ),
    max_size=4,
)
NAMES = st.one_of(st.none(), st.sampled_from(["bob", "im_end", "<|im_end|>"]))


def _named(message: dict[str, Any], name: str | None) -> dict[str, Any]:
    return message if name is None else message | {"name": name}


MESSAGES = st.one_of(
    st.builds(lambda text, name: _named({"role": "system", "content": text}, name), TEXTS, NAMES),
    st.builds(lambda text, name: _named({"role": "user", "content": text}, name), TEXTS, NAMES),
    st.builds(lambda parts: {"role": "user", "content": parts}, PARTS),
    st.builds(lambda parts: {"role": "tool", "tool_call_id": "functions.search:0", "content": parts}, PARTS),
    st.builds(lambda id, text: {"role": "tool", "tool_call_id": id, "content": text}, TEXTS, TEXTS),
    st.builds(
        lambda text, reasoning, calls, name: _named(
            {"role": "assistant", "content": text}
            | ({} if reasoning is None else {"reasoning_content": reasoning})
            | ({"tool_calls": calls} if calls else {}),
            name,
        ),
        st.one_of(st.none(), TEXTS),
        st.one_of(st.none(), TEXTS),
        st.lists(CALLS, max_size=2),
        NAMES,
    ),
)
DIALOGUES = st.lists(MESSAGES, min_size=1, max_size=6)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def picture(shade: int = 0, *, height: int = 2, width: int = 2) -> Media:
    pixels = np.full((height * width, 3, 14, 14), shade, dtype=np.uint8)
    return Media(pixels=pixels, grid=(1, height, width))


def pictures_of(messages: tuple[ChatMessage, ...]) -> list[Attachment]:
    """One picture for each place that has one."""
    return [picture(len(part.source) % 256) for message in messages for part in message.media]


@dataclass(frozen=True)
class Piece:
    text: str = ""
    special: str | None = None


def pieces_of(ids: list[int]) -> list[Piece]:
    """Token ids as a stream tells them: text, or a special token by name."""
    decoder = StreamDecoder(TOKENIZER, skip_special=True)
    found = []
    for token in ids:
        text = decoder.push(token)
        found += [Piece(text=text)] if text else []
        name = TOKENIZER.special_name(token)
        found += [Piece(special=name)] if name is not None else []
    rest = decoder.finish()
    return found + ([Piece(text=rest)] if rest else [])
