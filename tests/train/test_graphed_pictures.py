"""Recorded steps with pictures: the language model replays, the vision tower looks as ever, and no bit changes."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data import FusionConfig
from perilune.model import Decoder, MediaInput, VisionConfig
from perilune.train import graphed, train, trainer
from perilune.train.batches import MicroBatch
from perilune.train.graphed import GraphedBackward
from perilune.train.step import forward_backward
from tests.train.test_graphed import BF16, CUDA, MODELS, Replays, batch_of, gradients, same, steps_of
from tests.train.test_steps_ahead import in_background
from tests.train.test_trainer import final_tensors, untimed
from tests.train.test_vision_runs import started, vision_run
from tests.train.tiny_runs import MODEL

TOWER = VisionConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, pos_emb_height=2, pos_emb_width=2
)
SEEING = replace(MODEL, vision=TOWER)
GRIDS = ((1, 2, 2), (1, 2, 4), (4, 2, 2), (2, 4, 4))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def seeing(seed: int = 3) -> Decoder:
    return Decoder(SEEING, seed=seed).train()


def shown(batch: MicroBatch, grids, seed: int = 0) -> MicroBatch:
    """The micro-batch with pictures of these grids in its first tokens; none: as it is."""
    if not grids:
        return batch
    generator = torch.Generator().manual_seed(seed)
    patches, tokens = sum(map(math.prod, grids)), sum(h * w // 4 for _, h, w in grids)
    pixels = torch.randint(256, (patches, 3, 14, 14), generator=generator, dtype=torch.uint8)
    media = MediaInput(positions=torch.arange(3, 3 + tokens), pixels=pixels, grids=tuple(grids))
    return replace(batch, media=media)


def recorded(model: Decoder) -> tuple[GraphedBackward, Replays]:
    record = Replays(model)
    return GraphedBackward(model, record=record, pictures=True), record


batches_of_a_step = st.lists(
    st.tuples(
        st.lists(st.integers(1, 47), min_size=8, max_size=14, unique=True).map(sorted),
        st.lists(st.sampled_from(GRIDS), max_size=4),
    ),
    min_size=1,
    max_size=3,
)


@given(st.lists(batches_of_a_step, min_size=3, max_size=6))
@settings(max_examples=15)
def test_any_steps_with_any_pictures_give_the_same_bits_as_without(steps):
    batches = [
        [
            shown(batch_of(borders, seed=17 * number + place), grids, seed=number + place)
            for place, (borders, grids) in enumerate(step)
        ]
        for number, step in enumerate(steps)
    ]
    plain, model = seeing(), seeing()
    graphs, _ = recorded(model)
    theirs = steps_of(plain, batches, forward_backward)
    ours = steps_of(model, batches, lambda *step: forward_backward(*step, graphed=graphs))
    for mine, other in zip(ours, theirs, strict=True):
        same(mine, other)


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_that_is_recorded_is_recorded_with_pictures(name):
    config = replace(MODELS[name], vision=TOWER)
    plain, model = (Decoder(config, seed=3).train() for _ in range(2))
    graphs, record = recorded(model)
    steps = [[batch_of([9]), shown(batch_of([5], seed=number), GRIDS, seed=number)] for number in range(4)]
    ours = steps_of(model, steps, lambda *step: forward_backward(*step, graphed=graphs))
    for mine, other in zip(ours, steps_of(plain, steps, forward_backward), strict=True):
        same(mine, other)
    assert record.replayed == 4


def test_pictures_that_fill_up_to_the_same_size_share_a_recording():
    graphs, record = recorded(seeing())
    for number in range(6):
        list(graphs([shown(batch_of([9]), GRIDS[:2] * (1 + number % 2), seed=number)], 40))
    assert record.recorded == 2 and record.replayed == 2, "3 features fill up to 4, 6 to 8"
    for number in range(4):
        list(graphs([shown(batch_of([9]), (GRIDS[0],) * (5 + number), seed=number)], 40))
    assert record.recorded == 2 and record.replayed == 6


def test_all_gradients_stay_in_steps_with_pictures_and_only_there():
    model = seeing()
    graphs, _ = recorded(model)
    text, pictures = batch_of([7]), shown(batch_of([9], seed=1), GRIDS)
    stays, places = [], []
    for number in range(8):
        list(graphs([text] if number in (4, 6) else [text, pictures, pictures], 40))
        stays.append(graphs.gradients_stay)
        places.append([None if p.grad is None else p.grad.data_ptr() for p in model.parameters()])
        assert (model.mm_projector.proj[0].weight.grad is None) == (number in (4, 6))
        model.zero_grad(set_to_none=True)
    assert stays == [False, True, True, True, False, True, False, True]
    assert places[1] == places[2] == places[3] == places[5] == places[7]


def test_a_step_of_text_leaves_the_tower_alone_also_when_the_first_recording_had_pictures():
    model = seeing()
    graphs, record = recorded(model)
    list(graphs([shown(batch_of([9], seed=seed), GRIDS, seed=seed) for seed in range(3)], 40))
    assert record.recorded == 1
    model.zero_grad(set_to_none=True)
    list(graphs([batch_of([7])], 40))
    assert all(parameter.grad is None for parameter in model.vision_tower.parameters())


def test_before_pictures_enter_a_run_that_will_have_some_its_gradients_are_not_called_still():
    """The optimizer would record a step without the tower, and then not find its gradients where they were."""
    model = seeing()
    graphs, record = recorded(model)
    for _ in range(4):
        list(graphs([batch_of([7])], 40))
        assert not graphs.gradients_stay
        model.zero_grad(set_to_none=True)
    assert record.replayed == 2


def test_a_run_without_pictures_holds_its_gradients_whether_or_not_its_model_could_see():
    graphs = GraphedBackward(seeing(), record=lambda compute: compute)
    for _ in range(3):
        list(graphs([batch_of([7])], 40))
    assert graphs.gradients_stay


def test_a_tower_that_does_not_learn_gets_no_gradient():
    plain, model = seeing(), seeing()
    for each in (plain, model):
        each.vision_tower.requires_grad_(False)
        each.mm_projector.requires_grad_(False)
    graphs, record = recorded(model)
    batch = shown(batch_of([7]), GRIDS)
    for _ in range(4):
        assert torch.equal(forward_backward(model, [batch], 40, graphed=graphs), forward_backward(plain, [batch], 40))
        same(gradients(model), gradients(plain))
        plain.zero_grad(set_to_none=True)
        model.zero_grad(set_to_none=True)
    assert record.replayed == 2


def test_pictures_of_a_step_that_cannot_be_recorded_are_learnt_from_once():
    said: list[str] = []

    def refuse(compute):
        raise RuntimeError("operation not permitted when stream is capturing")

    plain, model = seeing(), seeing()
    steps = [[batch_of([9]), shown(batch_of([5], seed=number), GRIDS, seed=number)] for number in range(4)]
    graphs = GraphedBackward(model, record=refuse, pictures=True, say=said.append)
    ours = steps_of(model, steps, lambda *step: forward_backward(*step, graphed=graphs))
    for mine, other in zip(ours, steps_of(plain, steps, forward_backward), strict=True):
        same(mine, other)
    assert len(said) == 1 and not graphs.gradients_stay


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def recorded_runs(monkeypatch) -> list[Replays]:
    records: list[Replays] = []

    def of_run(run):
        graphs, record = recorded(run.model)
        records.append(record)
        return graphs

    monkeypatch.setattr(graphed, "of_run", of_run)
    return records


@pytest.mark.parametrize(
    "fusion", [FusionConfig(share=0.25), FusionConfig(share=0.5, start=0.5)], ids=["early", "late"]
)
def test_a_recorded_run_with_pictures_has_the_bits_of_one_that_is_not(cache, tmp_path, monkeypatch, fusion):
    def run(name):
        config = vision_run(cache, name=name, pictures={"fusion": fusion, "samples": 2}, trainer={"steps": 10})
        train(config, runs_folder=tmp_path, quiet=True)

    run("plain")
    recordings = recorded_runs(monkeypatch)
    run("graphed")
    assert recordings[0].replayed > 8
    assert untimed(tmp_path / "graphed") == untimed(tmp_path / "plain")
    same(final_tensors(tmp_path / "graphed"), final_tensors(tmp_path / "plain"))


def test_a_run_that_packs_pictures_ahead_has_the_bits_of_one_that_does_not(cache, tmp_path, monkeypatch):
    train(vision_run(cache, name="plain"), runs_folder=tmp_path, quiet=True)
    in_background(monkeypatch)
    train(vision_run(cache, name="ahead", pictures={"workers": 1}), runs_folder=tmp_path, quiet=True)
    assert untimed(tmp_path / "ahead") == untimed(tmp_path / "plain")


def test_on_a_gpu_a_run_with_pictures_is_recorded_unless_its_tower_runs_apart(cache, tmp_path):
    reasons = []
    for decoupled in (False, True):
        config = vision_run(cache, trainer={**BF16, "decoupled_vision": decoupled})
        with started(config, tmp_path / str(decoupled)) as run:
            reasons.append(graphed.why_not(run.config, run.model, run.data, CUDA))
            assert trainer.reads_ahead(replace(run, device=CUDA)) and not trainer.reads_ahead(run)
    assert reasons[0] is None and "decoupled_vision" in reasons[1]
