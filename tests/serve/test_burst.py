"""Bursts: several tokens to a step, for answers that nobody looks into before they are over."""

from dataclasses import replace

import pytest
import torch

from perilune.serve.engine import Engine
from perilune.serve.request import Output, Request, SamplingParams
from perilune.serve.sampler import Sampler, SamplerRow
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
    text,
    tokens,
)

BURST = replace(SMALL, burst=4)
PROMPT = tuple((11 * n + 5) % 250 for n in range(21))
PROMPTS = tuple(PROMPT[:length] for length in (3, 9, 14, 21))
WAYS = pytest.mark.parametrize(
    ("asynchronous", "padded"), ((False, False), (True, False), (False, True), (True, True))
)  # fmt: skip


def whole(name: str, prompt: tuple[int, ...], **params: object) -> Request:
    return replace(ask(name, prompt, **params), whole=True)


def many(**params: object) -> list[Request]:
    return [whole(str(n), prompt, seed=n, **params) for n, prompt in enumerate(PROMPTS)]


def _ids(top: tuple[tuple[int, float], ...]) -> list[int]:
    return [token for token, _ in top]


def burst_engine(
    variant: str = "hybrid", *, asynchronous: bool = False, padded: bool = False, **fields: object
) -> Engine:
    return make_engine(tiny.model(variant), replace(BURST, asynchronous=asynchronous, **fields), padded=padded)


@WAYS
@pytest.mark.parametrize("variant", ("hybrid", "mla"))
def test_a_burst_samples_what_single_steps_do_in_fewer_of_them(variant: str, asynchronous: bool, padded: bool) -> None:
    requests = many(max_tokens=13, ignore_eos=True, logprobs=2)
    engine = burst_engine(variant, asynchronous=asynchronous, padded=padded)
    single = burst_engine(variant, burst=1)
    found, one_by_one = answers(engine, *requests), answers(single, *requests)
    for request in requests:
        (output,) = found[request.request_id]
        assert list(output.token_ids) == generated(tiny.model(variant), request)
        exact = log_probs(tiny.model(variant), request, list(output.token_ids))[len(request.prompt) - 1 :]
        for scored, token, row in zip(output.logprobs, output.token_ids, exact):
            assert scored.token_id == token and abs(scored.logprob - float(row[token])) < 1e-9
        (other,) = one_by_one[request.request_id]
        assert [_ids(scored.top) for scored in output.logprobs] == [_ids(scored.top) for scored in other.logprobs]
    assert engine.stats().steps + 6 < single.stats().steps
    assert engine.stats().sampled_tokens == single.stats().sampled_tokens == 13 * len(requests)
    check_nothing_is_held(engine)


@WAYS
@pytest.mark.parametrize("place", range(9))
def test_nothing_follows_a_stop_id_wherever_in_a_burst_it_comes(place: int, asynchronous: bool, padded: bool) -> None:
    engine = burst_engine(asynchronous=asynchronous, padded=padded)
    plain = tokens(answers(engine, whole("a", PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True))["a"])
    stop = plain.index(plain[place])
    others = many(max_tokens=10)
    stopped = whole("b", PROMPT, temperature=0.0, max_tokens=12, stop_ids=frozenset({plain[place]}), ignore_eos=True)
    found = answers(engine, stopped, *others)
    assert tokens(found["b"]) == plain[: stop + 1]
    assert found["b"][-1].finish_reason == "stop" and found["b"][-1].stop_match == plain[stop]
    assert text(found["b"]) == tiny.tokenizer().decode(plain[:stop])
    for request in others:
        assert tokens(found[request.request_id]) == generated(tiny.model(), request)
    # The next turn takes over what was computed before the stop, and nothing of what came after it.
    after = (*PROMPT, *plain[: stop + 1], 7, 8, 9)
    following = whole("next", after, temperature=0.0, max_tokens=5)
    (output,) = answers(engine, following)["next"]
    assert list(output.token_ids) == generated(tiny.model(), following)
    assert output.num_cached >= 20
    check_nothing_is_held(engine)


@WAYS
def test_answers_of_any_length_end_together_in_bursts(asynchronous: bool, padded: bool) -> None:
    engine = burst_engine(asynchronous=asynchronous, padded=padded)
    requests = [
        whole(str(n), PROMPTS[n % 4], seed=n, max_tokens=1 + n, presence_penalty=0.5, min_tokens=min(1 + n, 3))
        for n in range(11)
    ]
    found = answers(engine, *requests)
    alone = burst_engine(burst=1)
    for request in requests:
        assert tokens(found[request.request_id]) == tokens(answers(alone, request)[request.request_id])
    check_nothing_is_held(engine)


@WAYS
def test_who_streams_is_told_every_token_and_nobody_bursts_then(asynchronous: bool, padded: bool) -> None:
    engine = burst_engine(asynchronous=asynchronous, padded=padded)
    streamed = ask("streamed", PROMPT, seed=9, max_tokens=9, ignore_eos=True)
    found = answers(engine, streamed, *many(max_tokens=14))
    assert [len(output.token_ids) for output in found["streamed"]] == [1] * 9
    assert tokens(found["streamed"]) == generated(tiny.model(), streamed)
    for request in many(max_tokens=14):
        assert tokens(found[request.request_id]) == generated(tiny.model(), request)


@WAYS
def test_new_weights_come_between_bursts(asynchronous: bool, padded: bool) -> None:
    versions = {0: tiny.model(seed=0), 7: tiny.model(seed=1)}
    config = replace(BURST, asynchronous=asynchronous)
    engine = make_engine(tiny.fresh_model(seed=0), config, padded=padded)
    requests = many(max_tokens=16, ignore_eos=True, logprobs=0)
    for request in requests:
        engine.add(request)
    found: dict[str, list[Output]] = {}
    for _ in range(8):
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
        if engine.stats().sampled_tokens > 12:
            break
    engine.load_weights(versions[7], version=7)
    for name, outputs in finish(engine).items():
        found.setdefault(name, []).extend(outputs)
    for request in requests:
        outputs = found[request.request_id]
        assert [output.weight_version for output in outputs] == [0, 7]
        exact = {version: log_probs(model, request, tokens(outputs)) for version, model in versions.items()}
        place = len(request.prompt) - 1
        for output in outputs:
            for scored in output.logprobs:
                assert abs(scored.logprob - float(exact[output.weight_version][place][scored.token_id])) < 1e-9
                place += 1
    check_nothing_is_held(engine)


@WAYS
@pytest.mark.parametrize("number", (0, 2))
def test_logits_that_are_not_numbers_in_a_burst_fail_only_their_request(
    number: int, asynchronous: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = burst_engine("mla", asynchronous=asynchronous, padded=padded)
    run, broken_rounds = engine._runner.run, []

    def broken(plan: object, late: object = None, *, number: int = 0) -> torch.Tensor:
        logits = run(plan, late, number=number).clone()  # pyrefly: ignore
        names = [share.request_id for share in plan.shares]  # pyrefly: ignore
        if plan.rounds > 1 and number == wanted and "broken" in names:  # pyrefly: ignore
            logits[names.index("broken")] = float("nan")
            broken_rounds.append(number)
        return logits

    wanted = number
    monkeypatch.setattr(engine._runner, "run", broken)
    found = answers(engine, whole("broken", PROMPT, max_tokens=16, ignore_eos=True), *many(max_tokens=12))
    assert broken_rounds
    assert found["broken"][-1].finish_reason == "error" and "NaN" in (found["broken"][-1].error or "")
    for request in many(max_tokens=12):
        assert tokens(found[request.request_id]) == generated(tiny.model("mla"), request)
    check_nothing_is_held(engine)


@WAYS
@pytest.mark.parametrize("length", (5, 9, 20, 21))
def test_the_last_token_of_a_prompt_is_no_part_of_a_burst(length: int, asynchronous: bool, padded: bool) -> None:
    """Prompts are cut at the last border of pages; a prompt of one token more has a decode for its last."""
    engine = burst_engine(asynchronous=asynchronous, padded=padded)
    answers(engine, whole("before", PROMPT[:7], seed=5, max_tokens=9, ignore_eos=True))
    scored = whole("scored", PROMPT[:length], seed=1, max_tokens=9, ignore_eos=True, prompt_logprobs=0)
    beside = whole("beside", PROMPT[3:20], seed=2, max_tokens=9, ignore_eos=True)
    found = answers(engine, scored, beside)
    for request in (scored, beside):
        assert tokens(found[request.request_id]) == generated(tiny.model(), request)
    scores = found["scored"][0].prompt_logprobs
    assert scores is not None and len(scores) == length
    check_nothing_is_held(engine)


@WAYS
@pytest.mark.parametrize("before", (0, 4, 8))
def test_a_prompt_may_end_with_a_picture(before: int, asynchronous: bool, padded: bool) -> None:
    engine = burst_engine("pictures", asynchronous=asynchronous, padded=padded)
    answers(engine, whole("before", PROMPT[:7], seed=5, max_tokens=9, ignore_eos=True))
    prompt, media = tiny.prompt_with_pictures(PROMPT[:before], (1,))
    prompt = prompt[: max(picture.end for picture in media)]
    request = replace(whole("shown", prompt, seed=1, max_tokens=9, ignore_eos=True), media=media)
    assert tokens(answers(engine, request)["shown"]) == generated(tiny.model("pictures"), request)
    check_nothing_is_held(engine)


def planned_rounds(engine: Engine) -> list[int]:
    """Those of every step from now on."""
    rounds, plan = [], engine._scheduler.plan

    def noted() -> object:
        found = plan()
        if found is not None:
            rounds.append(found.rounds)
        return found

    engine._scheduler.plan = noted  # pyrefly: ignore
    return rounds


@WAYS
@pytest.mark.parametrize("is_read", (False, True), ids=("whole", "streamed"))
def test_one_that_comes_late_waits_for_a_burst_unless_somebody_reads_it(
    is_read: bool, asynchronous: bool, padded: bool
) -> None:
    """Somebody new comes before every step, as replies of many episodes do."""
    engine = burst_engine(asynchronous=asynchronous, padded=padded, max_sequences=20, token_budget=64, num_pages=400)
    early = [whole(f"early {n}", (n, n, n), seed=n, max_tokens=40, ignore_eos=True) for n in range(12)]
    late = [replace(ask(f"late {n}", (9, n, n), seed=n, max_tokens=2), whole=not is_read) for n in range(8)]
    for request in early:
        engine.add(request)
    found = {}
    for _ in range(4):
        assert not engine.step()
    rounds = planned_rounds(engine)
    for request in late:
        engine.add(request)
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    assert rounds == ([1] * 8 if is_read else [1, 4] * 4 if rounds[0] == 1 else [4, 1] * 4)
    for name, outputs in finish(engine).items():
        found.setdefault(name, []).extend(outputs)
    for request in (*early, *late):
        assert tokens(found[request.request_id]) == generated(tiny.model(), request)
    check_nothing_is_held(engine)


def test_who_waits_for_pages_keeps_nobody_from_bursts() -> None:
    engine = burst_engine("mla", num_pages=44, max_sequences=5, token_budget=40)
    rounds = planned_rounds(engine)
    requests = [whole(str(n), (n, *PROMPT, n, n), seed=n, max_tokens=18, ignore_eos=True) for n in range(5)]
    found = answers(engine, *requests)
    assert engine.stats().preemptions and rounds.count(4) > 4, rounds
    for request in requests:
        assert tokens(found[request.request_id]) == generated(tiny.model("mla"), request)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
@pytest.mark.parametrize(
    "how",
    ({}, {"temperature": 0.0}, {"temperature": 0.6, "top_p": 0.8}, {"top_k": 7, "min_p": 0.01}, {"logprobs": None}),
    ids=("plain", "greedy", "top_p", "top_k", "no_logprobs"),
)
@pytest.mark.parametrize("vocab_size", (300, 5000))
def test_a_padded_draw_is_that_of_every_row(vocab_size: int, how: dict[str, object], device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    padded = Sampler(vocab_size, (3, 4, 5), device, use_graphs=True)
    plain = Sampler(vocab_size, (3, 4, 5), device, use_graphs=False)
    params = SamplingParams(**{"logprobs": 0, **how})
    for count in (24, 24, 9, 1, 24):
        logits = torch.randn(count, vocab_size, generator=generator).mul(3)
        logits[0, 7] = float("nan") if count > 1 else 0.0
        logits = logits.to(device)
        found = []
        for sampler in (padded, plain):
            rows = [SamplerRow(params, seed=n, prompt=(1, 2)) for n in range(count)]
            sampled = sampler.sample(logits, rows, often=True)
            assert [row.index for row in rows] == [1] * count
            assert sampled.token_ids.tolist() == sampled.host().token_ids
            found.append(sampled.host())
        assert found[0].token_ids == found[1].token_ids and found[0].problems == found[1].problems
        assert found[0].tokens() == found[1].tokens()
        for mine, other in zip(found[0].logprobs, found[1].logprobs):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                assert mine.token_id == other.token_id and mine.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert padded._graphs is not None and len(padded._graphs._recordings) == 3


@WAYS
def test_out_of_pages_nobody_bursts_and_all_end(asynchronous: bool, padded: bool) -> None:
    engine = burst_engine(asynchronous=asynchronous, padded=padded, num_pages=16, max_length=60)
    requests = many(max_tokens=24, ignore_eos=True)
    found = answers(engine, *requests)
    assert engine.stats().preemptions > 0
    for request in requests:
        assert tokens(found[request.request_id]) == generated(tiny.model(), request)
    check_nothing_is_held(engine)


def test_a_burst_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="burst is 5, expected at most 4: the size of a page"):
        replace(SMALL, burst=5)
    with pytest.raises(ValueError, match="burst is 0"):
        replace(SMALL, burst=0)
    with pytest.raises(ValueError, match="deterministic steps wait"):
        replace(SMALL, page_size=64, snapshot_interval=64, token_budget=80, deterministic=True, burst=2)
