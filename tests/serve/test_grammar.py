"""Constrained answers are in their language whatever is drawn, and no grammar a stranger sends holds up the others."""

import gc
import json
import random
import re
import shutil
import threading
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest
import torch

from perilune.serve import grammar as grammar_module
from perilune.serve.grammar import (
    Grammar,
    GrammarCompiler,
    GrammarError,
    GrammarLimits,
    GrammarState,
    json_literal,
    regex_literal,
)
from perilune.serve.request import QueueFull, RequestError, SamplingParams
from perilune.serve.sampler import Sampler, SamplerRow
from tests.serve.tiny import tokenizer

TOKENIZER = tokenizer()
VOCAB = TOKENIZER.vocab_size
EOS, IM_END = TOKENIZER.eos_id, TOKENIZER.special_ids["<|im_end|>"]
STOPS = frozenset({EOS, IM_END})

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", "🌒"]}, "maxItems": 3},
        "parent": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "parent"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOKENIZER, GrammarLimits(seconds=20, workers=1))
    yield compiler
    compiler.close()


def allowed(state: GrammarState, vocab_size: int = VOCAB) -> list[int]:
    mask = state.mask(vocab_size)
    assert mask is not None and mask.dtype == np.int32 and mask.shape == (-(-vocab_size // 32),)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:vocab_size]).tolist()


def random_answer(state: GrammarState, seed: int, most: int = 2000) -> str:
    """Draw allowed tokens until nothing can follow; end where that is possible, to come to an end at all."""
    draws, ids = random.Random(seed), []
    while not state.is_finished:
        choices = allowed(state)
        assert len(ids) < most
        if ids and EOS in choices and draws.random() < 0.3:
            break
        text = [token for token in choices if token not in STOPS]
        if not text:
            break
        ids.append(draws.choice(text))
        assert state.accept(ids[-1])
    return TOKENIZER.decode(ids)


def spell(state: GrammarState, text: str) -> None:
    for byte in text.encode():
        token = next(token for token in range(VOCAB) if TOKENIZER.token_bytes(token) == bytes([byte]))
        assert token in allowed(state) and state.accept(token)


# --- the language -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_any_draw_from_a_json_schema_is_json_that_it_admits(compiler: GrammarCompiler, seed: int) -> None:
    text = random_answer(compiler.start(Grammar.json_schema(PERSON), STOPS), seed)
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("seed", range(5))
def test_json_object_gives_an_object(compiler: GrammarCompiler, seed: int) -> None:
    # Short keys and values: any JSON object may be as long as it likes.
    state = compiler.start(Grammar.json_object(), STOPS)
    spell(state, '{"k": [1, {"x": "é🌒"}, null], "s":' + ["1", '""', "{}", "[]", "true"][seed] + "}")
    assert allowed(state) == sorted(STOPS) and state.is_finished


@pytest.mark.parametrize("pattern", ["[ab]{2,4}c?", r"\d{4}-\d{2}-\d{2}", "(yes|no|vielleicht schön)", "a/b", "", "é+"])
def test_any_draw_from_a_regular_expression_matches_it_as_a_whole(compiler: GrammarCompiler, pattern: str) -> None:
    for seed in range(5):
        text = random_answer(compiler.start(Grammar.regex(pattern), STOPS), seed)
        assert re.fullmatch(pattern, text, re.ASCII)


def test_a_stop_id_is_allowed_where_the_text_may_end_and_alone_where_it_must(compiler: GrammarCompiler) -> None:
    state = compiler.start(Grammar.regex("ab?"), STOPS)
    assert not STOPS & set(allowed(state)) and not state.is_finished
    spell(state, "a")
    assert set(allowed(state)) > STOPS and not state.is_finished
    spell(state, "b")
    assert set(allowed(state)) == STOPS and state.is_finished
    assert state.accept(EOS) and state.is_finished and state.error is None


def test_a_stop_id_ends_it_before_the_longest_text(compiler: GrammarCompiler) -> None:
    state = compiler.start(Grammar.regex("a*"), STOPS)
    spell(state, "aa")
    assert state.accept(IM_END) and state.is_finished


def test_special_and_unused_tokens_are_never_part_of_a_text(compiler: GrammarCompiler) -> None:
    state = compiler.start(Grammar.regex(r"(.|\n)*"), frozenset({EOS}))
    bytes_per_token = TOKENIZER.bytes_per_token
    assert [token for token in allowed(state) if not bytes_per_token[token]] == [EOS]
    assert sum(bytes_per_token[token] > 0 for token in allowed(state)) > 100
    # A text may still spell the name of one.
    spell(state, "<|im_end|>")
    assert EOS in allowed(state)


def test_a_lark_grammar_may_name_special_tokens_by_id(compiler: GrammarCompiler) -> None:
    think = TOKENIZER.special_ids["</think>"]
    schema = json_literal({"type": "array", "items": {"type": "boolean"}})
    thought, answer = regex_literal(r"(.|\n)*"), f"({schema} | {regex_literal('a/[/' + chr(10) + ']')})"
    state = compiler.start(Grammar.lark(f"start: {thought} <[{think}]> {answer}"), STOPS)
    spell(state, "hm\n")
    assert think in allowed(state) and not STOPS & set(allowed(state))
    assert state.accept(think)
    other = compiler.start(Grammar.lark(f"start: {answer}"), STOPS)
    spell(state, "[\n  true]")
    spell(other, "a/\n")
    assert state.is_finished and other.is_finished


def test_no_token_of_bytes_can_pass_for_a_special_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library writes special token 256 as the byte 0xFF and [256], which a vocabulary might hold by chance."""

    class Vocabulary:
        vocab_size = 258

        def token_bytes(self, token_id: int) -> bytes:
            return bytes([token_id]) if token_id < 256 else [b"", b"\xff[256]"][token_id - 256]

    monkeypatch.setattr(GrammarCompiler, "_tried", lambda self, grammar: None)
    state = GrammarCompiler(Vocabulary()).start(Grammar.lark('start: <[256]> "a"'), frozenset())
    assert allowed(state, 256 + 2) == [256]


@pytest.mark.parametrize("vocab_size", [VOCAB - 20, VOCAB, VOCAB + 1, VOCAB + 200])
def test_masks_fit_models_with_smaller_and_larger_vocabularies(compiler: GrammarCompiler, vocab_size: int) -> None:
    state = compiler.start(Grammar.regex("a*"), frozenset({EOS, VOCAB + 150}))
    stops = {stop for stop in (EOS, VOCAB + 150) if stop < vocab_size}
    assert {token for token in allowed(state, vocab_size) if token > 255} - stops == set()
    assert stops <= set(allowed(state, vocab_size))


def test_the_model_chooses_the_tokens_of_text_that_must_come(compiler: GrammarCompiler) -> None:
    """A search for the one encoding of it would take as long as that text is."""
    state = compiler.start(Grammar.regex(" the moon(a{1000}){1000}"), STOPS)
    spellings = [token for token in range(VOCAB) if (text := TOKENIZER.token_bytes(token)) and b" the".startswith(text)]
    assert allowed(state) == spellings and len(spellings) > 1


def test_states_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    first, second = (compiler.start(Grammar.regex("ab"), STOPS) for _ in range(2))
    spell(first, "ab")
    assert first.is_finished and not second.is_finished
    spell(second, "a")


def test_a_token_outside_the_language_fails_the_state_and_says_so(compiler: GrammarCompiler) -> None:
    state = compiler.start(Grammar.regex("ab"), STOPS)
    assert not state.accept(TOKENIZER.encode("z")[0])
    assert state.mask(VOCAB) is None and not state.is_finished
    assert state.error is not None and state.error.startswith("the grammar failed: ") and len(state.error) < 400


# --- in the sampler ---------------------------------------------------------------------------------------------------


def test_constrained_and_free_rows_share_a_batch(compiler: GrammarCompiler) -> None:
    """`min_tokens` does not hold up the end of a grammar; a failed grammar is the problem of its own row."""
    vocab_size = VOCAB + 5
    failed = compiler.start(Grammar.regex("ab"), STOPS)
    failed.accept(TOKENIZER.encode("z")[0])
    states = [compiler.start(Grammar.json_schema(PERSON), STOPS), None, compiler.start(Grammar.regex("ab"), STOPS)]
    params = SamplingParams(temperature=1.5, max_tokens=2000, min_tokens=2000)
    rows = [SamplerRow(params, seed=n, stop_ids=STOPS, grammar=state) for n, state in enumerate([*states, failed])]
    free = SamplerRow(params, seed=1, stop_ids=STOPS)
    sampler, answers = Sampler(vocab_size, range(VOCAB, vocab_size)), [[], [], [], []]
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(vocab_size, generator=generator, dtype=torch.float64)
    while not states[0].is_finished:
        sampled = sampler.sample(logits_V.expand(4, -1), rows).host()
        assert sampled.problems[:3] == [None] * 3 and "the grammar failed" in (sampled.problems[3] or "")
        assert sampled.token_ids[1] == sampler.sample(logits_V[None], [free]).host().token_ids[0]
        for answer, token, row in zip(answers, sampled.token_ids, rows):
            answer.append(token)
            if row.grammar is not None and row.grammar is not failed:
                assert row.grammar.accept(token)
    jsonschema.validate(json.loads(TOKENIZER.decode(answers[0])), PERSON)
    assert TOKENIZER.decode(answers[2][:2]) == "ab" and set(answers[2][2:]) <= STOPS and len(answers[2]) > 2


# --- strangers --------------------------------------------------------------------------------------------------------


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def references(depth: int) -> dict:
    """Each step refers to the next one twice: 2**depth if they were copied."""
    steps = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(depth)}
    return {"$defs": steps | {f"d{depth}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


NASTY = {
    "self": Grammar.json_schema({"$ref": "#"}),
    "circle": Grammar.json_schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "references": Grammar.json_schema(references(40)),
    "recursive": Grammar.json_schema(
        {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}
    ),
    "nested": Grammar.json_schema(nested(900)),
    "enum": Grammar.json_schema({"enum": [f"value {n}" for n in range(40_000)]}),
    "product": Grammar.json_schema(
        {"allOf": [{"anyOf": [{"required": [f"{n}{m}"]} for m in range(9)]} for n in range(9)]}
    ),
    "properties": Grammar.json_schema({"properties": {f"p{n}": {"type": "string"} for n in range(20_000)}}),
    "long": Grammar.json_schema({"type": "string", "minLength": 10**9}),
    "many": Grammar.json_schema({"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}}),
    "remote": Grammar.json_schema({"$ref": "http://127.0.0.1:9/schema.json"}),
    "file": Grammar.json_schema({"$ref": "file:///etc/passwd"}),
    "pattern": Grammar.json_schema({"type": "string", "pattern": "^(((a{99}){99}){99}){99}$"}),
    "options": Grammar.json_schema({"type": "object", "x-guidance": {"whitespace_pattern": "((a{99}){99}){99}"}}),
    "unknown": Grammar.json_schema({"type": "strange"}),
    "parentheses": Grammar.regex("(" * 50_000 + ")" * 50_000),
    "repeats": Grammar.regex("(((a{100}){100}){100}){100}"),
    "exponential": Grammar.regex("(a|b)*a(a|b){500}"),
    "alternatives": Grammar.regex("|".join(f"(a|b)*a(a|b){{{n}}}" for n in range(60))),
    "optional": Grammar.regex("(a?){4000}a{4000}"),
    "catastrophic": Grammar.regex("(x+x+)+y"),
    "unicode": Grammar.regex(r"(?i)\p{L}{5000}\p{N}{5000}"),
    "literal": Grammar.regex("a" * 500_000),
    "broken": Grammar.regex("(?<=a)["),
    "lark": Grammar.lark("start: start start | start"),
}


@pytest.mark.parametrize("name", NASTY)
def test_nasty_grammars_are_refused_with_a_reason_or_work(compiler: GrammarCompiler, name: str) -> None:
    """No time is asserted: a compiler or a mask that hangs fails by the time limit of the test."""
    try:
        state = compiler.start(NASTY[name], STOPS)
    except GrammarError as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert refusal.field == "grammar" and "cannot be used: " in str(refusal) and len(str(refusal)) < 400
        return
    draws = random.Random(0)
    for _ in range(60):
        if state.is_finished or state.mask(VOCAB) is None:
            break
        state.accept(draws.choice(allowed(state)))


def test_what_takes_too_long_is_refused_and_the_next_grammar_is_compiled() -> None:
    """This one takes llguidance minutes, with all of its own limits in force."""
    compiler = GrammarCompiler(TOKENIZER, GrammarLimits(seconds=0.3, workers=1))
    endless = Grammar.json_schema({"type": "integer", "multipleOf": 99_999_989})
    with pytest.raises(GrammarError, match="more than 0.3 s of computing"):
        compiler.compile(endless)
    assert compiler._idle == []
    with pytest.raises(GrammarError, match="more than 0.3 s of computing"):
        compiler.start(endless, STOPS)  # from the cache: no worker was started for it
    assert compiler._idle == []
    compiler.compile(Grammar.regex("a"))
    assert len(compiler._idle) == 1
    compiler.close()


def test_what_needs_too_much_memory_is_refused_and_the_next_grammar_is_compiled() -> None:
    compiler = GrammarCompiler(TOKENIZER, GrammarLimits(seconds=60, memory_bytes=40 << 20, workers=1))
    with pytest.raises(GrammarError, match="too much memory"):
        compiler.compile(Grammar.regex("a" * 1_000_000))
    compiler.compile(Grammar.regex("a"))
    compiler.close()


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: Grammar.json_schema("{"), "not JSON"),
        (lambda: Grammar.json_schema("[" * 100_000), "not JSON"),
        (lambda: Grammar.json_schema("[1]"), r"is \[1\], expected an object"),
        (lambda: Grammar.json_schema({"minimum": float("nan")}), "cannot be written as JSON"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "cannot be written as JSON"),
        (lambda: Grammar.regex("\ud800"), "half a character at position 0"),
        (lambda: Grammar.regex("a" * (1 << 20) + "b"), "1,048,577 bytes, expected at most 1,048,576"),
        (lambda: Grammar.regex(None), "is NoneType, expected a text"),  # pyrefly: ignore
        (lambda: Grammar("xml", "<a/>"), "kind is 'xml', expected one of json_schema, regex, lark"),  # pyrefly: ignore
    ],
)
def test_what_is_no_grammar_at_all_is_refused_at_once(make, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        make()


def test_the_reason_is_the_one_that_helps(compiler: GrammarCompiler) -> None:
    reasons = {
        Grammar.regex("(?<=a)b"): "the regular expression cannot be used: look-around",
        Grammar.regex("("): "the regular expression cannot be used: unclosed group",
        Grammar.json_schema({"$ref": "#/x"}): "the JSON schema cannot be used: Pointer '/x' does not exist",
        Grammar.json_schema({"$ref": "#"}): "the JSON schema cannot be used: no text can satisfy it",
        Grammar.json_schema({"not": {}}): 'the JSON schema cannot be used: Unimplemented keys: ["not"]',
    }
    for grammar, reason in reasons.items():
        with pytest.raises(RequestError) as caught:
            compiler.compile(grammar)
        assert str(caught.value).startswith(reason)


# --- the cache --------------------------------------------------------------------------------------------------------


def test_each_grammar_is_compiled_once_until_it_is_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def tried(self: GrammarCompiler, grammar: Grammar) -> str | None:
        asked.append(grammar.source)
        return "no" if grammar.source == "refused" else None

    monkeypatch.setattr(GrammarCompiler, "_tried", tried)
    compiler = GrammarCompiler(TOKENIZER, GrammarLimits(cached=2))
    compiler.compile(Grammar.regex("a"))
    for _ in range(2):
        with pytest.raises(GrammarError, match="cannot be used: no"):
            compiler.compile(Grammar.regex("refused"))
    compiler.compile(Grammar.regex("a"))
    assert asked == ["a", "refused"]
    compiler.compile(Grammar.regex("b"))
    compiler.compile(Grammar.regex("a"))
    assert asked == ["a", "refused", "b"]
    with pytest.raises(GrammarError):
        compiler.compile(Grammar.regex("refused"))
    assert asked == ["a", "refused", "b", "refused"]
    assert Grammar.json_schema('{"type": "object"}') == Grammar.json_schema({"type": "object"}) == Grammar.json_object()


def test_many_threads_asking_at_once_wait_for_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    together, asked = threading.Barrier(4), []

    def tried(self: GrammarCompiler, grammar: Grammar) -> None:
        asked.append(grammar)

    monkeypatch.setattr(GrammarCompiler, "_tried", tried)
    compiler = GrammarCompiler(TOKENIZER)
    found: list[list[int]] = []

    def ask() -> None:
        together.wait()
        state = compiler.start(Grammar.regex("ab"), STOPS)
        found.append(allowed(state))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1 and len(found) == 4 and all(each == found[0] for each in found)


def test_grammars_that_take_long_cannot_take_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, leave = threading.Semaphore(0), threading.Event()

    class Slow:
        def __init__(self, setup: dict) -> None: ...

        def ask(self, grammar: Grammar) -> None:
            arrived.release()
            leave.wait()

        def end(self) -> None: ...

    monkeypatch.setattr(grammar_module, "_Worker", Slow)
    compiler = GrammarCompiler(TOKENIZER, GrammarLimits(workers=1, waiting=1))
    threads = [threading.Thread(target=compiler.compile, args=(Grammar.regex(text),)) for text in "ab"]
    threads[0].start()
    assert arrived.acquire(timeout=60)
    threads[1].start()
    while compiler._under_way < 2:
        leave.wait(0.01)
    with pytest.raises(QueueFull, match="2 grammars are being compiled"):
        compiler.compile(Grammar.regex("c"))
    leave.set()
    for thread in threads:
        thread.join()
    for text in "abc":
        compiler.compile(Grammar.regex(text))


def test_a_worker_that_cannot_start_is_no_fault_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TOKENIZER)
    with monkeypatch.context() as patched:
        patched.setattr(grammar_module.sys, "executable", shutil.which("false"))
        with pytest.raises(RuntimeError, match="does not start"):
            compiler.compile(Grammar.regex("a"))
    compiler.compile(Grammar.regex("a"))
    compiler.close()


def test_workers_end_with_the_compiler() -> None:
    compiler = GrammarCompiler(TOKENIZER)
    compiler.compile(Grammar.regex("a"))
    (worker,) = compiler._idle
    process = worker._process
    assert process.poll() is None
    del compiler, worker
    gc.collect()
    assert process.poll() is not None


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GrammarError, match=r"perilune\[serve\]"):
        GrammarCompiler(TOKENIZER)


def test_limits_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="seconds is 0, expected a number above 0"):
        GrammarLimits(seconds=0)
