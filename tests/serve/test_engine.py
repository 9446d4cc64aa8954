"""What the engine promises beside equal tokens: refusals, stops, log-probs, fan-out, failures that stay alone."""

from dataclasses import replace

import pytest
import torch

from perilune.serve.answer import Answer
from perilune.serve.engine import Engine, EngineConfig
from perilune.serve.job import Job
from perilune.serve.request import Output, QueueFull, Request, RequestError, SamplingParams, TokenLogprob
from perilune.serve.sampler import SamplerRow
from tests.serve import tiny
from tests.serve.engines import (
    SMALL,
    answers,
    ask,
    check_nothing_is_held,
    finish,
    generated,
    log_probs,
    make_engine,
    media_of,
    text,
    tokens,
)

PROMPT = tuple((11 * n * n + 5 * n) % 250 for n in range(1, 22))
OTHERS = tuple(tuple((13 * n * k + n) % 250 for n in range(1, 6 + 3 * k)) for k in range(1, 6))
BOTH_WAYS = pytest.mark.parametrize("asynchronous", (False, True))


def crowd(**params: object) -> list[Request]:
    return [ask(f"other{n}", prompt, seed=n, **params) for n, prompt in enumerate(OTHERS)]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_, field, words",
    [
        (ask("a", (1, 2, 999)), "prompt", "prompt holds 999, expected ids in [0, 325)"),
        (ask("a", (1, 2, -1)), "prompt", "prompt holds -1"),
        (ask("a", (1, 2), logit_bias={325: 1.0}), "logit_bias", "logit_bias holds 325"),
        (ask("a", (1,) * 100, max_tokens=100), "max_tokens", "100 tokens and max_tokens is 100, expected at most 160"),
        (ask("a", (1,) * 160), "prompt", "expected at most 160 together"),
        (ask("a", (1, tiny.tokenizer().special_ids["<|media_pad|>"])), "media", "1 <|media_pad|>"),
    ],
)
def test_what_can_never_run_is_refused_with_the_reason(request_: Request, field: str, words: str) -> None:
    engine = make_engine(tiny.model())
    with pytest.raises(RequestError) as refused:
        engine.add(request_)
    assert refused.value.field == field and words in str(refused.value)
    assert not engine.has_work


def test_pictures_for_a_model_without_a_tower_are_refused() -> None:
    prompt, media = tiny.prompt_with_pictures((1,), (0,))
    with pytest.raises(RequestError, match="the model sees none"):
        make_engine(tiny.model()).add(Request(request_id="a", prompt=prompt, media=media))


def test_pads_and_pictures_must_be_at_the_same_places() -> None:
    engine = make_engine(tiny.model("pictures"))
    prompt, media = tiny.prompt_with_pictures((1, 2), (0,))
    moved = (*prompt[:-3], 5, prompt[-2], prompt[-1])
    for wrong, pictures in ((moved, media), (prompt, ()), ((*prompt, prompt[media[0].start]), media)):
        with pytest.raises(RequestError, match="expected every pad to belong to a picture"):
            engine.add(Request(request_id="a", prompt=wrong, media=pictures))
    with pytest.raises(RequestError, match="needs uint8"):
        replace(media[0], grid=(1, 2, 2))


def test_the_longest_request_that_is_not_refused_runs() -> None:
    engine = make_engine(tiny.model("mla"), replace(SMALL, num_pages=8))
    outputs = answers(engine, ask("a", PROMPT, max_tokens=32 - len(PROMPT), ignore_eos=True))["a"]
    assert len(tokens(outputs)) == 32 - len(PROMPT)


def test_a_name_is_refused_only_while_it_is_under_way() -> None:
    engine = make_engine(tiny.model("mla"))
    engine.add(ask("a", PROMPT))
    with pytest.raises(RequestError, match="already under way"):
        engine.add(ask("a", PROMPT))
    finish(engine)
    engine.add(ask("a", PROMPT))


def test_more_than_the_queue_holds_is_refused_until_there_is_room() -> None:
    engine = make_engine(tiny.model("mla"), replace(SMALL, max_queue=2))
    engine.add(ask("a", PROMPT))
    engine.add(ask("b", PROMPT))
    with pytest.raises(QueueFull, match="2 requests wait"):
        engine.add(ask("c", PROMPT))
    engine.step()
    engine.add(ask("c", PROMPT))


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"token_budget": 4, "max_sequences": 4}, "token_budget is 4, expected at least max_sequences=4"),
        ({"page_size": 0}, "page_size is 0"),
        ({"snapshot_interval": 100}, "snapshot_interval is 100, expected a multiple of page_size=64"),
        ({"deterministic": True, "page_size": 32, "snapshot_interval": 32}, "page_size is 32, expected a multiple"),
        ({"deterministic": True, "asynchronous": True}, "asynchronous is True, expected False or None"),
        ({"num_snapshots": -1}, "num_snapshots is -1"),
        ({"memory_gib": 0.0}, "memory_gib is 0.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        EngineConfig(**fields)  # pyrefly: ignore
    assert words in str(refused.value)


def test_a_length_that_the_pages_do_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="max_length is 1000, but 40 pages of 4 tokens hold 160"):
        make_engine(tiny.model(), replace(SMALL, max_length=1000))


def test_memory_decides_how_many_pages_there_are() -> None:
    small, large = (
        make_engine(tiny.model("mla"), replace(SMALL, num_pages=None, memory_gib=gib, max_length=16)).config
        for gib in (1e-5, 1e-4)
    )
    assert small.num_pages is not None and large.num_pages is not None and 0 < small.num_pages < large.num_pages
    with pytest.raises(ValueError, match="hold no page"):
        make_engine(tiny.model(), replace(SMALL, num_pages=None, memory_gib=1e-6))


# --- how an answer ends -----------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_stop_ids_end_the_tokens_and_are_no_text(asynchronous: bool) -> None:
    engine = make_engine(tiny.model(), replace(SMALL, asynchronous=asynchronous))
    plain = tokens(answers(engine, ask("a", PROMPT, temperature=0.0))["a"])
    outputs = answers(engine, ask("b", PROMPT, temperature=0.0, stop_ids=frozenset({plain[3]})))["b"]
    stop = plain.index(plain[3])
    assert tokens(outputs) == plain[: stop + 1]
    assert outputs[-1].finish_reason == "stop" and outputs[-1].stop_match == plain[stop]
    assert text(outputs) == tiny.tokenizer().decode(plain[:stop])


@BOTH_WAYS
def test_stop_strings_cut_the_text(asynchronous: bool) -> None:
    engine = make_engine(tiny.model(), replace(SMALL, asynchronous=asynchronous))
    whole = text(answers(engine, ask("a", PROMPT, seed=1, max_tokens=20))["a"])
    stop = whole[6:8]
    outputs = answers(engine, ask("b", PROMPT, seed=1, max_tokens=20, stop=(stop,)))["b"]
    assert text(outputs) == whole[: whole.index(stop)]
    assert outputs[-1].finish_reason == "stop" and outputs[-1].stop_match == stop


def test_no_stop_comes_before_min_tokens_and_no_end_with_ignore_eos() -> None:
    engine, eos = make_engine(tiny.model()), tiny.tokenizer().eos_id
    push = {"logit_bias": {eos: 100.0}, "temperature": 0.0}
    found = answers(
        engine,
        ask("at once", PROMPT, **push),
        ask("later", PROMPT, min_tokens=4, **push),
        ask("never", PROMPT, ignore_eos=True, **push),
    )
    assert tokens(found["at once"]) == [eos] and found["at once"][-1].stop_match == eos
    assert len(tokens(found["later"])) == 5 and tokens(found["later"])[-1] == eos
    assert tokens(found["never"]) == [eos] * 8 and found["never"][-1].finish_reason == "length"


def test_ids_without_meaning_are_never_sampled() -> None:
    special = tiny.tokenizer().special_ids
    wanted = {id_: 100.0 for id_ in (special["<|media_pad|>"], special["<|reserved_3|>"], 322, special["[PAD]"])}
    outputs = answers(make_engine(tiny.model()), ask("a", PROMPT, logit_bias=wanted, seed=0))["a"]
    assert not set(tokens(outputs)) & set(wanted)


def test_a_seed_that_nobody_gave_is_reported_and_gives_the_same_again() -> None:
    engine = make_engine(tiny.model())
    first = answers(engine, ask("a", PROMPT, max_tokens=12))["a"]
    again = answers(engine, ask("b", PROMPT, max_tokens=12, seed=first[0].seed))["b"]
    assert tokens(first) == tokens(again)


# --- log-probs --------------------------------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("variant", ("hybrid", "mla", "kda", "block_attnres", "pictures"))
def test_float32_logprobs_agree_with_a_full_forward(variant: str, asynchronous: bool) -> None:
    """Of the tokens and of the prompt, with others in the batch, chunks, and a prefix from the cache."""
    model = tiny.model(variant, "float32")
    engine = make_engine(model, replace(SMALL, asynchronous=asynchronous))
    pictures = (0, 1) if variant == "pictures" else ()
    prompt, media = tiny.prompt_with_pictures(PROMPT, pictures)
    asked = [
        replace(ask("warm", prompt, seed=5), media=media),
        replace(ask("scored", prompt, seed=6, logprobs=3, prompt_logprobs=2, temperature=0.7), media=media),
        replace(ask("cached", prompt, seed=7, logprobs=0), media=media),
    ]
    found = answers(engine, asked[0]) | answers(engine, *asked[1:], *crowd(logprobs=1))
    assert found["cached"][0].num_cached > 0 and found["scored"][0].num_cached == 0
    for request in (*asked[1:], *crowd(logprobs=1)):
        outputs = found[request.request_id]
        exact = log_probs(model, request, tokens(outputs))
        logprobs = [each for output in outputs for each in output.logprobs]
        assert [each.token_id for each in logprobs] == tokens(outputs)
        for position, each in enumerate(logprobs, start=len(request.prompt) - 1):
            assert abs(each.logprob - float(exact[position, each.token_id])) < 1e-4
            assert len(each.top) == request.params.logprobs
            for token, logprob in each.top:
                assert abs(logprob - float(exact[position, token])) < 1e-4
    scores = found["scored"][0].prompt_logprobs
    assert scores is not None and len(scores) == len(prompt) and scores[0] is None
    exact = log_probs(model, asked[1], [])
    for position, each in enumerate(scores[1:]):
        assert each is not None and each.token_id == prompt[position + 1] and len(each.top) == 2
        assert abs(each.logprob - float(exact[position, each.token_id])) < 1e-4
    assert all(output.prompt_logprobs is None for output in found["scored"][1:])


def test_a_prompt_can_be_scored_without_an_answer() -> None:
    engine = make_engine(tiny.model())
    (output,) = answers(engine, ask("a", PROMPT, max_tokens=0, prompt_logprobs=0))["a"]
    assert output.finish_reason == "length" and not output.token_ids
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)


def test_prompt_scores_survive_a_preemption() -> None:
    """The pages are so few that the scored request is pre-empted in the middle."""
    request = ask("scored", OTHERS[4], max_tokens=8, seed=1, prompt_logprobs=0)
    alone = answers(make_engine(tiny.model()), request)["scored"]
    engine = make_engine(tiny.model(), replace(SMALL, num_pages=16, token_budget=8))
    found = answers(engine, *[replace(each, priority=-1) for each in crowd(max_tokens=20, ignore_eos=True)], request)
    assert engine.stats().preemptions > 0
    assert tokens(found["scored"]) == tokens(alone)
    got, wanted = found["scored"][0].prompt_logprobs, alone[0].prompt_logprobs
    assert got is not None and wanted is not None and len(got) == len(wanted) == len(request.prompt)


def test_scores_that_are_known_are_not_counted_twice() -> None:
    request = ask("a", PROMPT, prompt_logprobs=0)
    job = Job(request_id="a", tokens=list(PROMPT), num_prompt=len(PROMPT), max_tokens=1, scores_prompt=True)
    answer = Answer(request, job, SamplerRow(request.params, seed=0), tiny.tokenizer())
    scores = [TokenLogprob(token_id=token, logprob=-1.0) for token in PROMPT[1:]]
    answer.scored(1, scores[:7])
    answer.scored(1, scores[:11])  # again from the beginning, after a pre-emption
    answer.scored(12, scores[11:])
    assert answer.prompt_alone(0).prompt_logprobs == (None, *scores)


# --- other requests ---------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_penalties_and_bias_give_the_same_alone_and_in_a_crowd(asynchronous: bool) -> None:
    """The crowd has so few pages that requests are pre-empted and computed again."""
    params = {
        "max_tokens": 14,
        "seed": 3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "logit_bias": {5: 2.0, 9: -3.0},
        "min_p": 0.01,
        "ignore_eos": True,
    }
    alone = answers(make_engine(tiny.model()), ask("a", PROMPT, **params))["a"]
    plain = answers(make_engine(tiny.model()), ask("a", PROMPT, max_tokens=14, seed=3, ignore_eos=True))["a"]
    engine = make_engine(tiny.model(), replace(SMALL, num_pages=14, asynchronous=asynchronous))
    found = answers(engine, *crowd(max_tokens=16, ignore_eos=True), ask("a", PROMPT, **params))
    assert engine.stats().preemptions > 0
    assert tokens(found["a"]) == tokens(alone) != tokens(plain)
    check_nothing_is_held(engine)


@BOTH_WAYS
@pytest.mark.parametrize("variant", ("hybrid", "mla"))
def test_samples_of_one_prompt_share_its_computation(variant: str, asynchronous: bool) -> None:
    engine = make_engine(tiny.model(variant), replace(SMALL, asynchronous=asynchronous))
    found = answers(engine, *[ask(str(n), PROMPT, seed=n) for n in range(4)])
    assert [found[str(n)][0].num_cached for n in range(4)] == [0, 20, 20, 20]
    for n in range(4):
        assert tokens(found[str(n)]) == generated(tiny.model(variant), ask("a", PROMPT, seed=n))


def test_another_salt_shares_nothing() -> None:
    engine = make_engine(tiny.model())
    answers(engine, ask("a", PROMPT))
    found = answers(engine, replace(ask("b", PROMPT), salt="b"), ask("c", PROMPT))
    assert found["b"][0].num_cached == 0 and found["c"][0].num_cached == 20


def test_prefixes_with_other_pictures_share_only_what_is_before_them() -> None:
    engine = make_engine(tiny.model("pictures"))
    requests = []
    for name, pictures in (("a", (0, 1)), ("b", (0, 2)), ("c", (0, 1))):
        prompt, media = tiny.prompt_with_pictures(PROMPT[:5], pictures)
        requests.append(Request(request_id=name, prompt=(*prompt, 7, 8, 9), media=media, params=ask("x", (1,)).params))
    requests = [replace(each, params=replace(each.params, temperature=0.0)) for each in requests]
    for request in requests:
        outputs = answers(engine, request)[request.request_id]
        assert tokens(outputs) == generated(tiny.model("pictures"), request)
        assert media_of(request) is not None
    stats = engine.stats()
    assert 0 < stats.cached_tokens < stats.prompt_tokens


@BOTH_WAYS
def test_cancelling_at_any_moment_frees_everything_and_disturbs_nobody(asynchronous: bool) -> None:
    model = tiny.model("hybrid")
    wanted = generated(model, ask("stays", PROMPT, seed=2))
    for moment in range(0, 12, 3):
        engine = make_engine(model, replace(SMALL, num_pages=30, asynchronous=asynchronous))
        for request in (ask("stays", PROMPT, seed=2), *crowd()):
            engine.add(request)
        found: list[Output] = []
        for _ in range(moment):
            found += engine.step()
        for n in range(len(OTHERS)):
            engine.cancel(f"other{n}")
            engine.cancel(f"other{n}")
        engine.cancel("nobody")
        found += [output for outputs in finish(engine).values() for output in outputs]
        assert tokens([output for output in found if output.request_id == "stays"]) == wanted
        for n in range(len(OTHERS)):
            ends = [output.finish_reason for output in found if output.request_id == f"other{n}" and output.finished]
            assert len(ends) == 1
        check_nothing_is_held(engine)


def test_events_of_both_ways_of_scheduling_are_the_same() -> None:
    found = []
    for asynchronous in (False, True):
        engine = make_engine(tiny.model(), replace(SMALL, num_pages=24, asynchronous=asynchronous))
        requests = [ask("a", PROMPT, seed=1, logprobs=2, stop=("e",), max_tokens=20), *crowd(max_tokens=12, logprobs=0)]
        found.append(answers(engine, *requests))
    for name, outputs in found[0].items():
        late = found[1][name]
        assert tokens(outputs) == tokens(late) and text(outputs) == text(late)
        assert outputs[-1].finish_reason == late[-1].finish_reason
        pairs = zip([o.logprobs for o in outputs], [o.logprobs for o in late])
        assert all(abs(a[0].logprob - b[0].logprob) < 1e-9 for a, b in pairs if a)


# --- failures ---------------------------------------------------------------------------------------------------------


class Faulty:
    """A grammar that breaks when it is asked, or when it is told."""

    error = "the grammar failed: on purpose"
    is_finished = False

    def __init__(self, how: str) -> None:
        self.how = how

    def mask(self, vocab_size: int) -> object:
        if self.how == "raises in the mask":
            raise RuntimeError("on purpose")
        return None if self.how == "has no mask" else torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32).numpy()

    def accept(self, token: int) -> bool:
        if self.how == "raises when told":
            raise RuntimeError("on purpose")
        return self.how != "refuses"


@BOTH_WAYS
@pytest.mark.parametrize("how", ("raises in the mask", "has no mask", "raises when told", "refuses"))
def test_a_request_whose_grammar_breaks_fails_alone(how: str, asynchronous: bool) -> None:
    engine = make_engine(tiny.model("mla"), replace(SMALL, asynchronous=asynchronous))
    requests = [ask("broken", PROMPT, seed=1), *crowd(logprobs=0)]
    for request in requests:
        engine.add(request)
    engine._answers["broken"].row.grammar = Faulty(how)  # pyrefly: ignore
    engine._answers["broken"].job.waits = True
    found = finish(engine)
    last = found["broken"][-1]
    assert last.finish_reason == "error" and last.error is not None and "on purpose" in last.error
    for request in requests[1:]:
        assert tokens(found[request.request_id]) == generated(tiny.model("mla"), request)
        assert len([each for output in found[request.request_id] for each in output.logprobs]) > 0
    check_nothing_is_held(engine)
    assert answers(engine, ask("next", PROMPT, seed=1))["next"][-1].finish_reason == "length"


def test_logits_that_are_not_numbers_fail_only_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny.model("mla"))
    run = engine._runner.run

    def broken(plan: object, late: object = None) -> torch.Tensor:
        logits = run(plan, late).clone()  # pyrefly: ignore
        rows = [share.request_id for share in plan.shares if share.want != "none"]  # pyrefly: ignore
        for row, name in enumerate(rows):
            if name == "broken":
                logits[row] = float("nan")
        return logits

    monkeypatch.setattr(engine._runner, "run", broken)
    found = answers(engine, ask("broken", PROMPT), *crowd())
    assert found["broken"][-1].finish_reason == "error" and "NaN" in (found["broken"][-1].error or "")
    assert all(found[f"other{n}"][-1].finish_reason in ("stop", "length") for n in range(len(OTHERS)))


def test_a_failure_that_is_no_requests_fault_is_not_blamed_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows have counted their tokens when it comes: to sample them again would give others."""
    engine = make_engine(tiny.model("mla"))
    sample = engine._sampler.sample

    def broken(*arguments: object, **more: object) -> object:
        sample(*arguments, **more)  # pyrefly: ignore
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._sampler, "sample", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        answers(engine, ask("a", PROMPT[:2]))


@BOTH_WAYS
def test_after_a_failed_step_a_reset_engine_is_as_new(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny.model(), replace(SMALL, asynchronous=asynchronous))
    for request in crowd():
        engine.add(request)
    engine.step()
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            finish(engine)
        outputs = engine.reset("it broke")
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.probe()
        engine.reset("it broke")
    assert {output.request_id for output in outputs if output.error == "it broke"} == {
        request.request_id for request in crowd()
    }
    check_nothing_is_held(engine)
    engine.probe()
    request = ask("next", PROMPT, seed=4)
    assert tokens(answers(engine, request)["next"]) == generated(tiny.model(), request)


# --- weights ----------------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_every_logprob_is_that_of_the_weights_stamped_on_it(asynchronous: bool) -> None:
    versions = {0: tiny.model(seed=0), 7: tiny.model(seed=1)}
    engine = make_engine(tiny.fresh_model(seed=0), replace(SMALL, asynchronous=asynchronous))
    requests = [ask("a", PROMPT, seed=1, logprobs=0, max_tokens=10), *crowd(logprobs=0, max_tokens=10)]
    for request in requests:
        engine.add(request)
    found: dict[str, list[Output]] = {}
    for _ in range(6):
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    engine.load_weights(versions[7], version=7)
    for name, outputs in finish(engine).items():
        found.setdefault(name, []).extend(outputs)
    used = set()
    for request in requests:
        outputs = found[request.request_id]
        exact = {version: log_probs(model, request, tokens(outputs)) for version, model in versions.items()}
        for n, output in enumerate(outputs):
            used.add(output.weight_version)
            row = exact[output.weight_version][len(request.prompt) - 1 + n]
            assert abs(output.logprobs[0].logprob - float(row[output.token_ids[0]])) < 1e-9
    assert used == {0, 7} and engine.stats().weight_version == 7


def test_new_weights_take_nothing_from_the_cache_of_the_old() -> None:
    engine = make_engine(tiny.fresh_model(seed=0))
    answers(engine, ask("a", PROMPT, seed=1))
    engine.load_weights(tiny.model(seed=1).state_dict(), version=1)
    found = answers(engine, ask("b", PROMPT, seed=1))
    assert found["b"][0].num_cached == 0 and found["b"][0].weight_version == 1
    assert tokens(found["b"]) == generated(tiny.model(seed=1), ask("b", PROMPT, seed=1))
    assert answers(engine, ask("c", PROMPT, seed=1))["c"][0].num_cached == 20


def test_a_prompt_is_scored_by_one_version_of_the_weights() -> None:
    engine = make_engine(tiny.fresh_model(seed=0), replace(SMALL, token_budget=8))
    request = ask("a", PROMPT, seed=1, prompt_logprobs=0, max_tokens=1)
    engine.add(request)
    engine.step()
    engine.load_weights(tiny.model(seed=1), version=1)
    (output,) = finish(engine)["a"]
    exact = log_probs(tiny.model(seed=1), request, [])
    assert output.prompt_logprobs is not None
    for position, score in enumerate(output.prompt_logprobs[1:]):
        assert score is not None and abs(score.logprob - float(exact[position, score.token_id])) < 1e-9


def test_running_sequences_may_keep_what_they_have_under_new_weights() -> None:
    engine = make_engine(tiny.fresh_model(seed=0), replace(SMALL, token_budget=8))
    engine.add(ask("a", PROMPT, seed=1, prompt_logprobs=0, max_tokens=3))
    engine.step()
    engine.load_weights(tiny.model(seed=1), version=1, recompute=False)
    (first, *rest) = finish(engine)["a"]
    assert engine.stats().preemptions == 0
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == len(PROMPT)
    assert all(score is not None and score.token_id == PROMPT[n] for n, score in enumerate(first.prompt_logprobs) if n)


def test_what_was_said_before_a_failed_step_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny.model("mla"))
    engine.add(ask("a", PROMPT))
    engine.cancel("a")
    engine.add(ask("b", PROMPT))
    monkeypatch.setattr(engine._runner, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        engine.step()
    reasons = {output.request_id: output.finish_reason for output in engine.reset("it broke")}
    assert reasons == {"a": "cancelled", "b": "error"}


def test_weights_that_do_not_fit_change_nothing() -> None:
    engine: Engine = make_engine(tiny.fresh_model(seed=0))
    with pytest.raises(ValueError, match="lack"):
        engine.load_weights({}, version=1)
    assert tokens(answers(engine, ask("a", PROMPT, seed=1))["a"]) == generated(tiny.model(), ask("a", PROMPT, seed=1))
    assert engine.stats().weight_version == 0


def test_params_are_checked_when_they_are_made() -> None:
    for field, value in (
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("max_tokens", -1),
        ("seed", 2**63),
        ("logprobs", -1),
        ("stop", ("",)),
        ("logit_bias", {1: 101.0}),
        ("presence_penalty", 2.5),
        ("repetition_penalty", 0.0),
        ("top_k", True),
    ):
        with pytest.raises(RequestError) as refused:
            SamplingParams(**{field: value})  # pyrefly: ignore
        assert refused.value.field == field and field in str(refused.value)
