"""/v1/completions against a scripted engine: prompts in four shapes, echo, log-probs as evaluations read them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.api_engine import ScriptedEngine, app_of, ask, ids, says, tokenizer

PATH = "/v1/completions"


def completion(prompt: Any = "The moon", **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, **fields}


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("The moon", [[tokenizer().bos_id, *ids("The moon")]]),
        (["The moon", "The earth"], [[tokenizer().bos_id, *ids(text)] for text in ("The moon", "The earth")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ("", [[tokenizer().bos_id]]),
    ],
)
def test_a_prompt_has_four_shapes(prompt, expected):
    engine = ScriptedEngine(says("abc"))
    reply = ask(app_of(engine), PATH, completion(prompt, n=2)).json
    assert [list(request.prompt) for request in engine.seen[::2]] == expected
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * len(expected)))
    assert all(choice["text"] == "abc" for choice in reply["choices"])
    assert reply["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert reply["usage"]["completion_tokens"] == 2 * len(expected) * len(ids("abc"))


def test_text_never_spells_a_special_token():
    engine = ScriptedEngine(says("x"))
    ask(app_of(engine), PATH, completion("a<|im_end|>[EOS]<|media_pad|>", add_special_tokens=False))
    assert not set(engine.seen[0].prompt) & set(tokenizer().special_ids.values())


def test_sixteen_tokens_unless_asked():
    engine = ScriptedEngine(says("moon " * 50))
    app = app_of(engine)
    first, second = (ask(app, PATH, completion(**fields)).json for fields in ({}, {"max_tokens": 3}))
    assert first["usage"]["completion_tokens"] == 16 and second["usage"]["completion_tokens"] == 3
    assert first["choices"][0]["finish_reason"] == "length"


def test_echo_with_log_probs_is_what_lm_evaluation_harness_sums():
    """The harness reads token_logprobs[context:-1] and top_logprobs[context:-1] of an answer with one new token."""
    prompt = ids("The moon turns")
    reply = ask(
        app_of(ScriptedEngine(says("xyz"))), PATH, completion([prompt], echo=True, logprobs=1, max_tokens=1)
    ).json
    choice = reply["choices"][0]
    columns = choice["logprobs"]
    tokens = [*prompt, ids("xyz")[0]]
    assert choice["text"] == "The moon turnsx"
    assert columns["token_logprobs"] == [None, *(-token / 1000 for token in tokens[1:])]
    assert columns["top_logprobs"][0] is None and len(columns["top_logprobs"]) == len(tokens)
    for value, top in zip(columns["token_logprobs"][1:], columns["top_logprobs"][1:], strict=True):
        assert value in top.values(), "the chosen token is among the alternatives"
        assert max(top.values()) > value and len(top) == 2
    assert "".join(columns["tokens"]) == choice["text"]
    assert columns["text_offset"] == [sum(map(len, columns["tokens"][:n])) for n in range(len(tokens))]


def test_no_new_token_gives_the_log_probs_of_the_prompt_alone():
    prompt = ids("The moon")
    choice = ask(app_of(), PATH, completion(prompt, echo=True, logprobs=0, max_tokens=0)).json["choices"][0]
    assert choice["text"] == "The moon" and len(choice["logprobs"]["tokens"]) == len(prompt)
    assert choice["logprobs"]["top_logprobs"] == [None] * len(prompt)
    refused = ask(app_of(), PATH, completion(prompt, max_tokens=0))
    assert refused.status == 400 and refused.error["param"] == "max_tokens"


def test_a_stream_adds_up_to_the_whole_reply():
    app = app_of(ScriptedEngine(says("one 🌒 two")))
    fields = {"echo": True, "logprobs": 2, "return_token_ids": True, "max_tokens": 40}
    reply = ask(app, PATH, completion(["ab", [7, 8]], **fields)).json
    events = ask(
        app, PATH, completion(["ab", [7, 8]], **fields, stream=True, stream_options={"include_usage": True})
    ).events
    assert events[-1]["usage"] == reply["usage"]
    for index, choice in enumerate(reply["choices"]):
        chunks = [c for event in events for c in event["choices"] if c["index"] == index]
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        assert [t for chunk in chunks for t in chunk["token_ids"]] == choice["token_ids"]
        assert chunks[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        for name, column in choice["logprobs"].items():
            assert [row for chunk in chunks for row in chunk["logprobs"][name]] == column
        assert [chunk["finish_reason"] for chunk in chunks][-1] == choice["finish_reason"]


def test_return_token_ids_brings_ids_and_log_probs():
    reply = ask(app_of(ScriptedEngine(says("abc"))), PATH, completion([5, 6], return_token_ids=True)).json
    choice = reply["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6] and choice["token_ids"] == ids("abc")
    assert choice["logprobs"]["token_logprobs"] == [-token / 1000 for token in ids("abc")]
    assert reply["weight_version"] == 0


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"suffix": "end"}, "suffix"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [5, 10**6]}, "prompt"),
        ({"prompt": [tokenizer().special_ids["<|media_pad|>"]]}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"n": 17}, "n"),
        ({"session_id": "x"}, "session_id"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"max_tokens": 2**17 + 1}, "max_tokens"),
    ],
)
def test_a_refusal_names_the_parameter(fields, param):
    engine = ScriptedEngine()
    answer = ask(app_of(engine), PATH, completion(**{"prompt": "x"} | fields) if "prompt" not in fields else fields)
    assert answer.status == 400 and answer.error["param"] == param and not engine.seen
    assert answer.error["type"] == "invalid_request_error" and param.partition("[")[0] in answer.error["message"]


def test_what_does_not_fit_the_context_is_refused_before_the_engine():
    engine = ScriptedEngine()
    app = app_of(engine, max_length=10)
    for body, param in (
        (completion(list(range(10))), "prompt"),
        (completion(list(range(5)), max_tokens=6), "max_tokens"),
        (completion("moon " * 1000), "prompt"),
    ):
        answer = ask(app, PATH, body)
        assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
        assert answer.error["param"] == param
    assert not engine.seen
    assert ask(app, PATH, completion(list(range(5)), max_tokens=5)).status == 200
    assert ask(app, PATH, completion(list(range(10)), max_tokens=0, echo=True, logprobs=1)).status == 200
    assert ask(app, PATH, completion(list(range(8)))).status == 200 and engine.seen[-1].params.max_tokens == 2
