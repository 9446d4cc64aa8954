"""The runner on CUDA: graphs against steps without them, and both against the CPU."""

import random
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from perilune.model import Decoder, MLAConfig, ModelConfig, MoEConfig
from perilune.model.rope import RopeConfig
from perilune.serve import mixed_graphs
from perilune.serve.engine import EngineConfig
from perilune.serve.plan import Share, StepPlan
from perilune.serve.runner import Runner
from tests.serve import tiny
from tests.serve.engines import answers, ask, make_engine
from tests.serve.engines import tokens as tokens_of

PAGE = 16
BASE = ModelConfig(
    vocab_size=512,
    hidden_size=128,
    mla=MLAConfig(num_attention_heads=4, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
    initializer_range=0.05,
)
CONFIGS = {
    "block_attnres": BASE,
    "plain": replace(BASE, residual="plain"),
    "experts": replace(BASE, moe=MoEConfig(num_experts=8, moe_intermediate_size=64)),
}


def served(model: Decoder, sequences: list[tuple[int, ...]], *, use_graphs: bool, prompt: int = 40) -> Tensor:
    """Logits after every decoded token [steps, sequences, vocabulary]; prompts come in two chunks."""
    each = -(-len(sequences[0]) // PAGE)
    runner = Runner(
        model, num_pages=each * len(sequences), page_size=PAGE, num_slots=len(sequences) + 1,
        max_sequences=len(sequences), device=model.embed_tokens.weight.device, use_graphs=use_graphs,
    )  # fmt: skip

    def step(start: int, end: int) -> Tensor:
        return runner.run(
            StepPlan(
                shares=tuple(
                    Share(
                        request_id=str(index),
                        start=start,
                        tokens=tokens[start:end],
                        slot=index,
                        want="last",
                        samples=True,
                        pages=tuple(index * each + page for page in range(-(-end // PAGE))),
                    )
                    for index, tokens in enumerate(sequences)
                )
            )
        )

    step(0, prompt // 2)
    step(prompt // 2, prompt)
    return torch.stack([step(at, at + 1) for at in range(prompt, len(sequences[0]))])


def random_sequences(count: int, length: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(512, (length,), generator=generator).tolist()) for _ in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_graphs_give_the_logits_of_steps_without_them(name: str) -> None:
    sequences = random_sequences(3, 70)  # a bucket of 3; pages grow while graphs replay
    config = replace(CONFIGS[name], compute_dtype="bfloat16")
    plain = served(Decoder(config, seed=0).cuda(), sequences, use_graphs=False)
    graphs = served(Decoder(config, seed=0).cuda(), sequences, use_graphs=True)
    # The number of shares in which attention is split depends on the width of the page table.
    torch.testing.assert_close(graphs, plain, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_float32_on_cuda_equals_float32_on_cpu(name: str) -> None:
    sequences = random_sequences(2, 60)
    cpu = served(Decoder(CONFIGS[name], seed=0), sequences, use_graphs=False)
    cuda = served(Decoder(CONFIGS[name], seed=0).cuda(), sequences, use_graphs=True).cpu()
    assert (cuda.log_softmax(-1) - cpu.log_softmax(-1)).abs().max() < 1e-3


@pytest.mark.gpu
def test_new_weights_are_read_by_graphs_that_were_recorded_before() -> None:
    config = replace(BASE, compute_dtype="bfloat16")
    sequences = random_sequences(1, 45)
    model = Decoder(config, seed=0).cuda()
    runner = Runner(model, num_pages=4, page_size=PAGE, num_slots=2, max_sequences=1)
    tokens = sequences[0]

    def decode(start: int) -> Tensor:
        runner.clear_state(0)
        common = {"request_id": "a", "pages": (0, 1, 2), "slot": 0, "want": "last", "samples": True}
        runner.run(StepPlan(shares=(Share(start=0, tokens=tokens[:start], **common),)))
        return runner.run(StepPlan(shares=(Share(start=start, tokens=tokens[start : start + 1], **common),)))

    before = decode(40)
    other = Decoder(config, seed=1).cuda()
    runner.load_weights(other)
    after = decode(40)
    right = other.eval()(torch.tensor([tokens[:41]], device="cuda"))[0, -1:]
    torch.testing.assert_close(after, right, rtol=5e-2, atol=5e-2)
    assert not torch.allclose(after, before, rtol=5e-2, atol=5e-2)


# Steps with chunks ----------------------------------------------------------------------------------------------------

MIXED = {
    **CONFIGS,
    "rope": replace(BASE, mla=replace(BASE.mla, rope=RopeConfig())),
    "kda": replace(BASE, layer_types=("kda",) * BASE.num_hidden_layers),
    "mla": replace(BASE, layer_types=("mla",) * BASE.num_hidden_layers),
}
PLACES = 6
LONGEST = 160


@dataclass
class Load:
    """Sequences that go on by chunks and by single tokens, in steps of at most 64 tokens of chunks: few buckets."""

    chosen: random.Random = field(default_factory=lambda: random.Random(0))
    done: list[int] = field(default_factory=lambda: [0] * PLACES)

    def steps(self, count: int) -> Iterator[tuple[list[int], StepPlan]]:
        """(slots that begin anew, plan)"""
        for number in range(count):
            room, shares, begin = 64, [], []
            for place in self.chosen.sample(range(PLACES), self.chosen.randint(2, PLACES)):
                length = self.chosen.choice([1, 1, self.chosen.randint(2, 40)])
                if self.done[place] + length > LONGEST:
                    self.done[place] = 0
                if self.done[place] == 0:
                    begin.append(place)
                    length = self.chosen.randint(2, 20)
                length = 1 if length > room or number % 5 == 4 else length  # every fifth: decodes alone
                room -= length
                shares.append(self._share(place, length))
            yield begin, StepPlan(shares=tuple(sorted(shares, key=lambda share: len(share.tokens) > 1)))

    def _share(self, place: int, length: int) -> Share:
        start = self.done[place]
        self.done[place] += length
        each = LONGEST // PAGE
        return Share(
            request_id=str(place),
            start=start,
            tokens=tuple(self.chosen.randrange(512) for _ in range(length)),
            slot=place,
            want="last",
            samples=True,
            pages=tuple(each * place + page for page in range(-(-(start + length) // PAGE))),
        )


def mixed_runner(model: Decoder, **options) -> Runner:
    return Runner(
        model, num_pages=PLACES * LONGEST // PAGE, page_size=PAGE, num_slots=PLACES, max_sequences=PLACES,
        token_budget=64, **options,
    )  # fmt: skip


def apart(one: Runner, other: Runner, count: int = 40) -> Tensor:
    """[rows]: how far the logits of two runners are apart, relative to their norm, over steps of one load."""
    found = []
    for begin, plan in Load().steps(count):
        for runner in (one, other):
            for slot in begin:
                runner.clear_state(slot)
        ours, right = one.run(plan), other.run(plan)
        found.append((ours - right).norm(dim=-1) / right.norm(dim=-1))
    return torch.cat(found).cpu()


def replays(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step with chunks from now on is replayed."""
    assert runner._mixed_graphs is not None
    seen, run = [], runner._mixed_graphs.run

    def counting(*a, **b) -> Tensor | None:
        rows = run(*a, **b)
        seen.append(rows is not None)
        return rows

    monkeypatch.setattr(runner._mixed_graphs, "run", counting)
    return seen


def check_noise(errors: Tensor, name: str) -> None:
    """bfloat16 keeps 8 bits, over some dozens of sums; now and then a token near a tie meets another expert. Numbers of
    another sequence, or of another step, would put most rows apart by as much as they are long."""
    assert errors.isfinite().all()
    assert errors.median() < 0.03, errors
    assert name == "experts" or errors.max() < 0.1, errors


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXED)
def test_replayed_steps_with_chunks_give_the_logits_of_steps_without_graphs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many steps of a few buckets in turn, with other borders each time, and steps of decodes alone between them."""
    config = replace(MIXED[name], compute_dtype="bfloat16")
    graphs = mixed_runner(Decoder(config, seed=0).cuda())
    plain = mixed_runner(Decoder(config, seed=0).cuda(), use_graphs=False)
    seen = replays(graphs, monkeypatch)
    check_noise(apart(graphs, plain), name)
    assert sum(seen) > len(seen) // 2
    assert 1 <= len(graphs._mixed_graphs) <= 3


@pytest.mark.gpu
def test_usual_steps_are_recorded_ahead_and_change_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(BASE, compute_dtype="bfloat16")
    graphs = mixed_runner(Decoder(config, seed=0).cuda())
    plain = mixed_runner(Decoder(config, seed=0).cuda(), use_graphs=False)
    check_noise(apart(graphs, plain, 10), "before")
    load = Load(done=[100] * PLACES)
    plan = StepPlan(shares=tuple(load._share(place, 1) for place in range(PLACES)))
    for runner in (graphs, plain):
        for slot in range(PLACES):
            runner.clear_state(slot)
    before = graphs.run(plan)
    for slot in range(PLACES):
        graphs.clear_state(slot)
    recorded = graphs.record_usual_steps()
    assert recorded == len(graphs._graphs) + len(graphs._mixed_graphs) > 2
    assert torch.equal(graphs.run(plan), before)
    seen = replays(graphs, monkeypatch)
    check_noise(apart(graphs, plain), "after")
    assert all(seen)
    assert len(graphs._graphs) + len(graphs._mixed_graphs) == recorded


@pytest.mark.gpu
def test_recordings_that_give_way_to_others_leave_the_rest_right(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(BASE, compute_dtype="bfloat16")
    graphs = mixed_runner(Decoder(config, seed=0).cuda())
    plain = mixed_runner(Decoder(config, seed=0).cuda(), use_graphs=False)
    graphs._mixed_graphs._most_recordings = 1
    graphs._mixed_graphs.run_buckets = (1, 8)  # of which one after the other is asked for
    made, recorded = [], mixed_graphs.recorded
    monkeypatch.setattr(mixed_graphs, "recorded", lambda *a, **b: (made.append(1), recorded(*a, **b))[1])
    check_noise(apart(graphs, plain), "one recording at a time")
    assert len(made) > 1 and len(graphs._mixed_graphs) == 1


@pytest.mark.gpu
def test_new_weights_are_read_by_recorded_steps_with_chunks() -> None:
    config = replace(BASE, compute_dtype="bfloat16")
    graphs = mixed_runner(Decoder(config, seed=0).cuda())
    for begin, plan in Load().steps(20):  # records
        for slot in begin:
            graphs.clear_state(slot)
        graphs.run(plan)
    graphs.load_weights(Decoder(config, seed=1).cuda())
    plain = mixed_runner(Decoder(config, seed=1).cuda(), use_graphs=False)
    check_noise(apart(graphs, plain, 20), "new weights")


@pytest.mark.gpu
@pytest.mark.parametrize("record_routes", [False, True])
def test_a_replayed_step_with_chunks_makes_nobody_wait(record_routes: bool) -> None:
    config = replace(CONFIGS["experts"], compute_dtype="bfloat16")
    runner = mixed_runner(Decoder(config, seed=0).cuda(), record_routes=record_routes)
    load = Load()
    load.done = [20] * PLACES
    plan = StepPlan(shares=(load._share(0, 1), load._share(1, 1), load._share(2, 30), load._share(3, 9)))
    for _ in range(2):
        runner.run(plan)  # records
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.run(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if runner.routes is not None:
        routes = runner.routes.gather(plan.shares[2].pages, 20, 50).flatten(0, 1).tolist()
        assert all(len(set(chosen)) == len(chosen) for chosen in routes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["kda", "hybrid"])
def test_an_engine_under_load_gives_the_same_greedy_tokens_with_graphs_and_without(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where ties are rare. Attention to several chunks at once takes half precision: a hybrid model in
    float32 replays its decodes only."""
    kinds = {"layer_types": ("kda",) * BASE.num_hidden_layers} if name == "kda" else {}
    model = replace(BASE, vocab_size=tiny.BASE.vocab_size, initializer_range=0.2, **kinds)
    config = EngineConfig(
        page_size=16, num_pages=200, max_sequences=6, token_budget=80, num_snapshots=6, snapshot_interval=64
    )
    trunk = tuple((7 * n * n + 3 * n) % 250 for n in range(1, 400))
    asked = [ask(str(n), trunk[n : 30 * n % 170 + n + 3], temperature=0.0, max_tokens=10 + n) for n in range(16)]
    said = {}
    for use_graphs in (True, False):
        engine = make_engine(Decoder(model, seed=0).cuda(), config)
        seen = []
        if use_graphs and name == "kda":
            seen = replays(engine._runner, monkeypatch)
        elif use_graphs:
            assert engine._runner._mixed_graphs is None
        else:
            engine._runner = Runner(
                engine._model, num_pages=200, page_size=16, max_sequences=6, use_graphs=False,
                num_slots=engine._scheduler.states.num_slots,
            )  # fmt: skip
        found = answers(engine, *asked)
        said[use_graphs] = {request: tokens_of(outputs) for request, outputs in found.items()}
        assert name != "kda" or not use_graphs or any(seen)
    assert said[True] == said[False]


@pytest.mark.gpu
def test_engines_in_two_threads_record_beside_each_other() -> None:
    """A policy and its frozen workers, both new: what one launches ends up in no recording of the other."""
    config = replace(BASE, compute_dtype="bfloat16")
    models = [Decoder(config, seed=seed).cuda() for seed in (0, 1)]
    errors: list[Tensor] = []

    def compare(model: Decoder) -> None:
        for _ in range(4):  # more recordings in all than PyTorch has streams
            other = Decoder(config, seed=0)
            other.load_state_dict(model.state_dict())
            one, plain = mixed_runner(model), mixed_runner(other.cuda(), use_graphs=False)
            one.record_usual_steps()
            errors.append(apart(one, plain, 20))

    with warnings.catch_warnings(record=True) as seen, ThreadPoolExecutor(2) as pool:
        warnings.simplefilter("always")
        list(pool.map(compare, models))
    assert not [str(each.message) for each in seen if "CUDA graphs" in str(each.message)]
    check_noise(torch.cat(errors), "two threads")
