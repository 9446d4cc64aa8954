"""Contracts of recorded steps, with recordings that run the same code every time: what a CPU can show."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.model import Decoder, RopeConfig
from perilune.optim.heads import HeldMaxima, MaxLogitRecorder
from perilune.optim.qk_clip import find_heads
from perilune.train import checkpoint, graphed, load_run, train, trainer
from perilune.train.batches import MicroBatch
from perilune.train.graphed import GraphedBackward, padded_documents
from perilune.train.step import backward, forward_backward
from tests.train.test_trainer import final_tensors, records, started, untimed
from tests.train.tiny_runs import MODEL, MOE, tiny_run

MODELS = {
    "kda and mla": MODEL,
    "mla with positions": replace(MODEL, layer_types=("mla", "mla"), mla=replace(MODEL.mla, rope=RopeConfig())),
    "block attention residuals": replace(MODEL, residual="block_attnres"),
    "scalars": replace(MODEL, residual="scalars", tie_word_embeddings=True),
}
TOKENS = 48


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


class Replays:
    """In the place of CUDA graphs. A replay writes memory, and Python sees none of it: no new tensor in a recorder."""

    def __init__(self, model):
        self.recorded = self.replayed = 0
        self.recorders = [heads.recorder for heads in find_heads(model).values()]

    def __call__(self, compute):
        self.recorded += 1
        result = torch.zeros((), dtype=torch.float64)

        def replay():
            self.replayed += 1
            held = [dict(vars(recorder)) for recorder in self.recorders]
            result.copy_(compute())
            for recorder, attributes in zip(self.recorders, held, strict=True):
                vars(recorder).update(attributes)
            return result

        return replay


def recorded(model):
    record = Replays(model)
    return GraphedBackward(model, record=record), record


def batch_of(borders, seed=0, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(MODEL.vocab_size, (1, tokens + 1), generator=generator)
    targets = numbers[:, 1:].clone()
    targets[:, [border - 1 for border in borders]] = -100
    return MicroBatch(
        tokens_BT=numbers[:, :-1].contiguous(),
        targets_BT=targets,
        cu_seqlens=torch.tensor([0, *borders, tokens], dtype=torch.int32),
        num_targets=int((targets != -100).sum()),
        num_bytes=tokens,
    )


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name]
        assert (value is None) == (other is None), name
        assert value is None or torch.equal(value, other), name


# ---------------------------------------------------------------------------------------------------------------------
# Borders that are filled up


@pytest.mark.parametrize("name", MODELS)
def test_empty_documents_at_the_end_change_no_loss_no_gradient_and_no_maximum(name):
    found = []
    for empty in (0, 13):
        model = Decoder(replace(MODELS[name], compute_dtype="float64"), seed=3).train()
        batch = batch_of([5, 6, 40])
        filled = torch.cat([batch.cu_seqlens, batch.cu_seqlens.new_full((empty,), TOKENS)])
        loss = backward(model, replace(batch, cu_seqlens=filled), batch.num_targets)
        found.append({**gradients(model), "loss": loss, "maxima": model.max_logits()})
    same(*found)


@given(st.integers(1, 20_000))
def test_documents_are_filled_up_to_a_few_sizes_and_by_little(count):
    padded = padded_documents(count)
    assert count <= padded <= max(count + 15, math.ceil(1.25 * count)) and padded < 2 * count
    assert padded_documents(padded) == padded


def test_there_are_four_sizes_to_an_octave():
    assert len({padded_documents(count) for count in range(513, 1025)}) == 4


# ---------------------------------------------------------------------------------------------------------------------
# A step with recordings is the step without


def steps_of(model, steps, step):
    """Losses, gradients and maxima of every step, gradients and maxima forgotten in between."""
    found = []
    for batches in steps:
        targets = sum(batch.num_targets for batch in batches)
        sums = step(model, batches, targets)
        found.append({**gradients(model), "sums": sums, "maxima": model.max_logits()})
        model.zero_grad(set_to_none=True)
        for layer in model.layers:
            if layer.kind == "mla":
                layer.self_attn.max_logit.reset()
    return found


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.lists(st.integers(1, TOKENS - 1), min_size=8, max_size=20, unique=True).map(sorted),
                st.sampled_from([TOKENS, TOKENS + 16]),
            ),
            min_size=1,
            max_size=3,
        ),
        min_size=3,
        max_size=6,
    )
)
@settings(max_examples=12)
def test_any_steps_of_any_micro_batches_give_the_same_bits_as_without(steps):
    batches = [
        [batch_of(borders, seed=17 * number + place, tokens=tokens) for place, (borders, tokens) in enumerate(step)]
        for number, step in enumerate(steps)
    ]
    plain, model = (Decoder(MODEL, seed=3).train() for _ in range(2))
    graphs, _ = recorded(model)
    theirs = steps_of(plain, batches, forward_backward)
    ours = steps_of(model, batches, lambda *step: forward_backward(*step, graphed=graphs))
    for mine, other in zip(ours, theirs, strict=True):
        same(mine, other)


def test_a_shape_is_recorded_after_two_micro_batches_and_replayed_from_then_on():
    graphs, record = recorded(Decoder(MODEL, seed=3).train())
    seen = []
    for number in range(5):
        list(graphs([batch_of([5 + number])], 40))
        seen.append((record.recorded, record.replayed, len(graphs), graphs.gradients_stay))
    assert seen == [(0, 0, 0, False), (0, 0, 0, False), (1, 1, 1, True), (1, 2, 1, True), (1, 3, 1, True)]


def test_gradients_stay_where_they_are_and_add_up_until_they_are_forgotten():
    model = Decoder(MODEL, seed=3).train()
    graphs, _ = recorded(model)
    batch = batch_of([7])
    places = []
    for _ in range(5):
        list(graphs([batch], 40))
        places.append([p.grad.data_ptr() for p in model.parameters()])
        once = gradients(model)
        model.zero_grad(set_to_none=True)
    assert places[2] == places[3] == places[4]
    list(graphs([batch], 40))
    list(graphs([batch], 40))
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, 2 * once[name]), name


def test_the_losses_of_a_step_are_tensors_of_their_own():
    graphs, _ = recorded(Decoder(MODEL, seed=3).train())
    batches = [batch_of([7]), batch_of([9], seed=1)]
    first, *_, last = ([float(loss) for loss in list(graphs(batches, 40))] for _ in range(3))
    assert first == last and first[0] != first[1]


def test_a_parameter_without_a_gradient_stays_without():
    model = Decoder(MODEL, seed=3).train()
    frozen = model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    graphs, _ = recorded(model)
    for _ in range(4):
        list(graphs([batch_of([7])], 40))
        assert frozen.grad is None
    assert all(p.grad is not None for p in model.parameters() if p is not frozen)


def test_a_step_that_cannot_be_recorded_goes_on_without_and_says_so_once():
    said = []

    def refuse(compute):
        """Launches everything and runs nothing: memory is as before, and what Python holds is not computed."""
        held = [parameter.grad for parameter in model.parameters()]
        held += [place for recorder in recorders for place in (recorder.value, recorder.exact)]
        before = [tensor.clone() for tensor in held]
        compute()
        for tensor, value in zip(held, before, strict=True):
            tensor.copy_(value)
        for recorder in recorders:
            recorder.value = recorder.exact = torch.full_like(recorder.value, math.inf)
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    plain, model = (Decoder(MODEL, seed=3).train() for _ in range(2))
    # The third micro-batch is the second of its step: gradients and maxima of the one before are there.
    steps = [[batch_of([9])], [batch_of([9], seed=1), batch_of([3, 4], seed=2)], [batch_of([5], seed=4)]]
    recorders = [heads.recorder for heads in find_heads(model).values()]
    graphs = GraphedBackward(model, record=refuse, say=said.append)
    ours = steps_of(model, steps, lambda *step: forward_backward(*step, graphed=graphs))
    for mine, other in zip(ours, steps_of(plain, steps, forward_backward), strict=True):
        same(mine, other)
    assert len(said) == 1 and "not permitted" in said[0] and "more lines" not in said[0]
    assert not graphs.gradients_stay and len(graphs) == 0


def test_micro_batches_of_ever_new_shapes_run_without_a_recording(monkeypatch):
    monkeypatch.setattr(graphed, "MOST_RECORDINGS", 2)
    graphs, record = recorded(Decoder(MODEL, seed=3).train())
    for tokens in (20, 24, 28, 32) * 4:
        list(graphs([batch_of([7], tokens=tokens)], 40))
    assert record.recorded == 2


# ---------------------------------------------------------------------------------------------------------------------
# Maxima in memory that stays


@given(st.lists(st.sampled_from(["seen", "bound", "nan", "reset", "take", "keep"]), max_size=12))
def test_held_maxima_are_those_of_a_recorder_alone(actions):
    alone, held = MaxLogitRecorder(2), MaxLogitRecorder(2)
    memory = HeldMaxima([held])
    for number, action in enumerate(actions):
        if action == "take":
            memory.take()
        elif action == "keep" and held.has_seen:
            memory.keep()
        elif action == "reset":
            alone.reset()
            held.reset()
        elif action in ("seen", "bound", "nan"):
            value = torch.tensor([math.nan if action == "nan" else math.sin(number), float(number)])
            for recorder in (alone, held):
                recorder.update(value, torch.tensor([action == "bound", False]))
    if alone.has_seen:
        torch.testing.assert_close(held.value, alone.value, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(held.exact, alone.exact, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def recorded_runs(monkeypatch):
    """From now on runs record their steps; returns what they recorded with, one after the other."""
    records = []

    def of_run(run):
        graphs, record = recorded(run.model)
        records.append(record)
        return graphs

    monkeypatch.setattr(graphed, "of_run", of_run)
    return records


@pytest.mark.parametrize("kind", ["muonclip", "adamw"])
def test_a_recorded_run_has_the_bits_of_one_that_is_not(cache, tmp_path, monkeypatch, kind):
    how = {"optimizer": {"kind": kind, "qk_clip_tau": 1e-3}, "trainer": {"steps": 8, "global_batch_rows": 6}}
    train(tiny_run(cache, name="plain", **how), runs_folder=tmp_path, quiet=True)
    recordings = recorded_runs(monkeypatch)
    train(tiny_run(cache, name="graphed", **how), runs_folder=tmp_path, quiet=True)
    assert recordings[0].replayed > 8
    assert untimed(tmp_path / "graphed") == untimed(tmp_path / "plain")
    assert sum(each["clipped_heads"] for each in records(tmp_path / "graphed", "train")) > 0
    same(final_tensors(tmp_path / "graphed"), final_tensors(tmp_path / "plain"))


def test_a_recorded_run_resumes_to_the_same_bits(cache, tmp_path, monkeypatch):
    train(tiny_run(cache, name="plain", trainer={"steps": 8}), runs_folder=tmp_path, quiet=True)
    recordings = recorded_runs(monkeypatch)
    config = tiny_run(cache, name="resumed", trainer={"steps": 8})

    def stop(phase):
        if phase == "step:validated" and not stopped:
            stopped.append(phase)
            raise KeyboardInterrupt

    stopped: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        train(config, runs_folder=tmp_path, quiet=True, on_phase=stop)
    train(config, runs_folder=tmp_path, quiet=True, resume=True)
    assert all(record.replayed for record in recordings) and len(recordings) == 2
    same(final_tensors(tmp_path / "resumed"), final_tensors(tmp_path / "plain"))


def test_a_skipped_step_leaves_nothing_behind_in_a_recorded_run(cache, tmp_path, monkeypatch):
    real = trainer.forward_backward

    def broken_once(count):
        calls = iter(range(100))

        def step(model, batches, num_targets, **how):
            sums = real(model, batches, num_targets, **how)
            if next(calls) == count:
                model.embed_tokens.weight.grad[0, 0] = math.nan
            return sums

        return step

    recordings = []
    for name in ("plain", "graphed"):
        monkeypatch.setattr(trainer, "forward_backward", broken_once(5))
        train(tiny_run(cache, name=name, trainer={"steps": 8}), runs_folder=tmp_path, quiet=True)
        recordings = recorded_runs(monkeypatch) if name == "plain" else recordings
    assert recordings[0].replayed > 8
    assert untimed(tmp_path / "graphed") == untimed(tmp_path / "plain")
    assert records(tmp_path / "graphed", "train")[-1]["skipped"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# When steps are not recorded

CUDA = torch.device("cuda")
BF16 = {"precision": "bf16", "device": "cpu"}


def reason(cache, tmp_path, device=CUDA, prepare=lambda model: None, **changes):
    changes["trainer"] = {**BF16, **changes.get("trainer", {})}
    with started(tiny_run(cache, **changes), tmp_path) as run:
        prepare(run.model)
        return graphed.why_not(run.config, run.model, run.data, device)


def test_a_small_text_run_on_a_gpu_is_recorded(cache, tmp_path):
    assert reason(cache, tmp_path) is None


REFUSED = {
    "cpu": {"device": torch.device("cpu")},
    "is False": {"trainer": {"cuda_graphs": False}},
    "float32": {"trainer": {"precision": "float32"}},
    "compile": {"trainer": {"compile": True}},
    "experts": {"model": {"moe": MOE}},
    "recompute": {"parallel": {"recompute": "full"}},
    "pictures": {"trainer": {"decoupled_vision": True}},
    "deterministic": {"prepare": lambda model: setattr(model, "deterministic", True)},
    "hooks": {"prepare": lambda model: model.layers[0].mlp.register_forward_hook(lambda *_: None)},
    "large": {"trainer": {"micro_batch_rows": 2**20}},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_recorded_is_named(cache, tmp_path, word):
    assert word in reason(cache, tmp_path, **REFUSED[word])


def test_large_micro_batches_are_recorded_when_somebody_asks(cache, tmp_path):
    assert reason(cache, tmp_path, trainer={"micro_batch_rows": 2**20, "cuda_graphs": True}) is None


def test_a_gradient_hook_is_a_hook(cache, tmp_path):
    def watch(model):
        model.norm.weight.register_post_accumulate_grad_hook(lambda parameter: None)

    assert "hooks" in reason(cache, tmp_path, prepare=watch)


def test_who_asks_for_graphs_on_a_cpu_is_told_and_trains_all_the_same(cache, tmp_path, capsys):
    config = tiny_run(cache, trainer={"steps": 1, "cuda_graphs": True})
    train(config, runs_folder=tmp_path)
    assert "not recorded: it runs on cpu" in " ".join(capsys.readouterr().err.split())
    assert load_run(tmp_path / "tiny")[2].trainer.cuda_graphs is True
    assert checkpoint.find(tmp_path / "tiny" / "checkpoints") is not None
