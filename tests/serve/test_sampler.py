"""The batched sampler against one row at a time, slow definitions in plain Python, and model.generate."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.model import SamplingConfig, generate, sampling
from perilune.serve import sampler as sampler_module
from perilune.serve.request import SamplingParams, TokenLogprob
from perilune.serve.sampler import HostSampled, Sampler, SamplerRow, _Batch, score_prompt
from tests.serve.tiny import model

VOCAB = 11
STOPS = frozenset({3, 7})

params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.just(8),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 4, 40]),
    min_p=st.sampled_from([0.0, 0.2]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 3), st.floats(-100, 100), max_size=3),
    min_tokens=st.sampled_from([0, 0, 3]),
    logprobs=st.sampled_from([None, 0, 2, 20]),
)


def logits_of(sequence: int, index: int) -> Tensor:
    """Those of a made-up model: a pure function of which sequence it is and how far it has come."""
    generator = torch.Generator().manual_seed(1000 * sequence + index)
    return 3 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)


def row_of(sequence: int, params: SamplingParams, generated: tuple[int, ...] = ()) -> SamplerRow:
    return SamplerRow(params, seed=sequence, prompt=(1, 2, 2, sequence % VOCAB), generated=generated, stop_ids=STOPS)


def alone(sequence: int, params: SamplingParams, forbidden: set[int], length: int) -> list[tuple]:
    sampler, row = Sampler(VOCAB, forbidden), row_of(sequence, params)
    return [entry(sampler.sample(logits_of(sequence, n)[None], [row]).host(), 0) for n in range(length)]


def entry(sampled: HostSampled, n: int) -> tuple:
    """What can be compared exactly; the order of a device's sums shows only in the last digits of a log-prob."""
    logprob = sampled.logprobs[n]
    rounded = None if logprob is None else [(token, round(x, 9)) for token, x in (_chosen(logprob), *logprob.top)]
    return sampled.token_ids[n], sampled.problems[n], rounded


def _chosen(logprob: TokenLogprob) -> tuple[int, float]:
    return logprob.token_id, logprob.logprob


def expected_logits(
    logits: list[float], params: SamplingParams, prompt: list[int], generated: list[int], forbidden: set[int]
) -> list[float]:
    counts, changed = Counter(generated), []
    for token, x in enumerate(logits):
        if token in counts or token in prompt:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * counts[token] + params.presence_penalty * (token in counts)
        x += params.logit_bias.get(token, 0.0)
        stopped = token in STOPS and len(generated) < params.min_tokens
        changed.append(-math.inf if token in forbidden or stopped else x)
    return changed


@settings(max_examples=60)
@given(data=st.data())
def test_a_sequence_gives_the_same_tokens_and_log_probs_in_any_batch(data: st.DataObject) -> None:
    """Sequences come, go and pause at random; each is compared with itself alone."""
    all_params = data.draw(st.lists(params_strategy, min_size=1, max_size=5))
    forbidden = data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=3))
    sampler, rows = Sampler(VOCAB, forbidden), [row_of(n, params) for n, params in enumerate(all_params)]
    found: list[list[tuple]] = [[] for _ in rows]
    for _ in range(data.draw(st.integers(1, 8))):
        batch = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True))
        logits = torch.stack([logits_of(n, rows[n].index) for n in batch]) if batch else torch.zeros(0, VOCAB)
        before = logits.clone()
        sampled = sampler.sample(logits, [rows[n] for n in batch]).host()
        assert torch.equal(logits, before)
        for place, n in enumerate(batch):
            found[n].append(entry(sampled, place))
    for n, params in enumerate(all_params):
        assert found[n] == alone(n, params, forbidden, len(found[n]))


@settings(max_examples=150)
@given(params=params_strategy, forbidden=st.sets(st.integers(0, VOCAB - 1), max_size=3), sequence=st.integers(0, 50))
def test_penalties_bias_and_bans_are_those_of_the_definition(
    params: SamplingParams, forbidden: set[int], sequence: int
) -> None:
    sampler, row = Sampler(VOCAB, forbidden), row_of(sequence, params)
    generated: list[int] = []
    for n in range(5):
        logits = logits_of(sequence, n)
        want = expected_logits(logits.tolist(), params, [1, 2, 2, sequence % VOCAB], generated, forbidden)
        changed, _ = sampler._changed(logits[None], _Batch([row], VOCAB))
        assert changed[0].tolist() == pytest.approx(want, abs=1e-9)
        sampled = sampler.sample(logits[None], [row]).host()
        assert sampled.problems == [None] and want[sampled.token_ids[0]] > -math.inf
        if params.temperature == 0:
            assert want[sampled.token_ids[0]] == pytest.approx(max(want), abs=1e-9)
        generated += sampled.token_ids
    # A row made after a pre-emption, from what is known of the sequence, goes on as the first one did.
    again = row_of(sequence, params, tuple(generated))
    logits = logits_of(sequence, 5)[None]
    assert sampler.sample(logits, [again]).host() == sampler.sample(logits, [row]).host()


@pytest.mark.parametrize("settings_", [{"temperature": 0.0}, {"temperature": 1.2}, {"top_p": 0.8, "top_k": 9}])
def test_tokens_equal_those_of_generate(settings_: dict) -> None:
    decoder = model("hybrid")
    config = SamplingConfig(**{"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 12, "seed": 5, **settings_})
    forbidden, prompt = [0, 5, 320, 321, 322, 323, 324], [1, 2, 3]
    want = list(generate(decoder, prompt, config, forbidden=forbidden))
    params = SamplingParams(max_tokens=12, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k)
    sampler, rows = Sampler(decoder.config.vocab_size, forbidden), [SamplerRow(params, seed=seed) for seed in (8, 5)]
    tokens = list(prompt)
    for _ in range(12):
        with torch.no_grad():
            logits = decoder.eval()(torch.tensor([tokens]))[0, -1]
        tokens.append(sampler.sample(torch.stack([logits * 0.5, logits]), rows).host().token_ids[1])
    assert tokens[3:] == want


def test_greedy_batches_take_the_largest_logit_without_weighing_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a greedy batch was weighed")

    monkeypatch.setattr(sampling, "_drawn", never)
    rows = [row_of(n, SamplingParams(temperature=0.0)) for n in range(4)]
    logits = torch.stack([logits_of(n, 0) for n in range(4)])
    assert Sampler(VOCAB).sample(logits, rows).host().token_ids == logits.argmax(-1).tolist()


def test_a_broken_row_has_its_reason_and_the_others_their_tokens() -> None:
    params = SamplingParams(temperature=1.0, logprobs=1)
    logits = torch.stack([logits_of(n, 0) for n in range(4)])
    logits[1, 4] = math.nan
    logits[2] = -math.inf
    sampled = Sampler(VOCAB).sample(logits, [row_of(n, params) for n in range(4)]).host()
    assert [problem is None for problem in sampled.problems] == [True, False, False, True]
    assert "NaN" in (sampled.problems[1] or "") and "every token is banned" in (sampled.problems[2] or "")
    assert sampled.token_ids[1:3] == [0, 0] and sampled.logprobs[1:3] == [None, None]
    for n in (0, 3):
        assert entry(sampled, n) == alone(n, params, set(), 1)[0]


def test_log_probs_are_those_of_the_model_before_any_change() -> None:
    params = SamplingParams(temperature=0.3, top_k=1, logit_bias={4: 100.0}, repetition_penalty=1.8, logprobs=3)
    rows = [row_of(0, params), row_of(1, replace(params, logprobs=0)), row_of(2, replace(params, logprobs=None))]
    logits = torch.stack([logits_of(n, 0) for n in range(3)])
    sampled = Sampler(VOCAB, [9]).sample(logits, rows).host()
    want = logits.log_softmax(-1)
    first, second, third = sampled.logprobs
    assert first is not None and second is not None and third is None
    assert sampled.token_ids == [4, 4, 4] and first.token_id == 4
    assert first.logprob == pytest.approx(want[0, 4].item(), abs=1e-12)
    assert [token for token, _ in first.top] == want[0].topk(3).indices.tolist()
    assert [logprob for _, logprob in first.top] == pytest.approx(want[0].topk(3).values.tolist(), abs=1e-12)
    assert second == TokenLogprob(token_id=4, logprob=pytest.approx(want[1, 4].item(), abs=1e-12))


@pytest.mark.parametrize("elements", [1, 3 * VOCAB, 1 << 26])
def test_prompt_log_probs_predict_the_tokens_that_follow(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "SCORED_ELEMENTS", elements)
    logits, targets = torch.stack([logits_of(9, n) for n in range(7)]), [4, 0, 10, 3, 3, 2, 1]
    found, want = score_prompt(logits, targets, 2)(), logits.log_softmax(-1)
    assert [each.token_id for each in found] == targets
    assert [each.logprob for each in found] == pytest.approx([want[n, t].item() for n, t in enumerate(targets)])
    assert [[token for token, _ in each.top] for each in found] == want.topk(2).indices.tolist()
    assert score_prompt(logits[:0], [], 2)() == []
    with pytest.raises(ValueError, match="7 rows of logits predict 2 tokens"):
        score_prompt(logits, [1, 2], 0)


def test_float32_logits_give_log_probs_to_single_precision() -> None:
    logits = torch.stack([logits_of(n, 0) for n in range(2)]).float()
    rows = [row_of(n, SamplingParams(logprobs=1)) for n in range(2)]
    sampled = Sampler(VOCAB).sample(logits, rows).host()
    for n, each in enumerate(sampled.logprobs):
        assert each is not None
        want = logits[n].double().log_softmax(-1)[each.token_id].item()
        assert each.logprob == pytest.approx(want, abs=16 * torch.finfo(torch.float32).eps * max(1, abs(want)))


def test_wrong_shapes_and_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 10\), expected \[1, 11\]"):
        Sampler(VOCAB).sample(torch.zeros(1, 10), [row_of(0, SamplingParams())])
    with pytest.raises(ValueError, match="all 11 tokens are forbidden"):
        Sampler(VOCAB, range(VOCAB))
    with pytest.raises(ValueError, match=r"forbidden holds 11, expected ids in \[0, 11\)"):
        Sampler(VOCAB, [11])


@pytest.mark.gpu
def test_on_cuda_the_tokens_are_those_of_the_cpu_and_nothing_waits_for_the_device() -> None:
    choices = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, logprobs=3),
        SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.2),
        SamplingParams(temperature=1.2, top_k=50, min_p=0.01, logit_bias={5: 3.0}, min_tokens=3, max_tokens=9),
        SamplingParams(temperature=1.0, top_k=3000, top_p=0.7, frequency_penalty=0.2),
    ]
    vocab_size, found = 50_021, []
    logits = 3 * torch.randn(
        6, len(choices), vocab_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    for device in ("cpu", "cuda"):
        sampler = Sampler(vocab_size, [0, 9], device)
        rows = [SamplerRow(params, seed=n, prompt=(1, 2), stop_ids=STOPS) for n, params in enumerate(choices)]
        on_device = logits.to(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps = [sampler.sample(on_device[n], rows) for n in range(len(logits))]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append([[entry(step.host(), n) for n in range(len(choices))] for step in steps])
    assert found[0] == found[1]
