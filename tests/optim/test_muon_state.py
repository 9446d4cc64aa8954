"""MuonClip's state: saving and loading anywhere in a run changes no bit of it."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from perilune.optim import Adam, MuonClip, Stacked
from tests.optim.small_attention import GroupedAttention


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.attention = GroupedAttention(8, 2, 2, 4)
        self.experts = nn.Parameter(torch.randn(2, 8, 8) * 0.1)
        self.norm = nn.LayerNorm(8)

    def logical_matrices(self):
        return {"experts": Stacked()}

    def forward(self, tokens: torch.Tensor, expert: int | None) -> torch.Tensor:
        x = self.norm(self.attention(self.embed(tokens)))
        return x if expert is None else x @ self.experts[expert]


def build() -> tuple[Model, MuonClip]:
    torch.manual_seed(3)
    model = Model()
    return model, MuonClip.for_model(model, lr=0.02, qk_clip_tau=0.05)


def train(model: Model, optimizer: MuonClip, step: int, expert: int | None) -> None:
    tokens = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(tokens, expert).square().mean().backward()
    optimizer.step()


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(model: Model, optimizer: MuonClip, other: Model, other_optimizer: MuonClip) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    mine, others = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert mine.keys() == others.keys()
    for number, entries in mine.items():
        assert entries.keys() == others[number].keys()
        assert all(torch.equal(value, others[number][key]) for key, value in entries.items())
    assert torch.equal(optimizer.qk_clip.ever_clipped, other_optimizer.qk_clip.ever_clipped)


# One run: which expert each step uses (None: experts get no gradient), or a save, a fresh process and a load.
EVENTS = st.lists(st.sampled_from([0, 1, None, "reload", "reload_dcp", "reload_flat"]), min_size=2, max_size=7)


@given(events=EVENTS)
def test_reloading_anywhere_changes_no_bit(events):
    steady_model, steady = build()
    model, optimizer = build()
    for step, event in enumerate(events):
        if not isinstance(event, str):
            train(steady_model, steady, step, event)
            train(model, optimizer, step, event)
            continue
        options = StateDictOptions(flatten_optimizer_state_dict=event == "reload_flat")
        saved = (
            optimizer.state_dict() if event == "reload" else get_optimizer_state_dict(model, optimizer, options=options)
        )
        statistics = optimizer.qk_clip.state_dict()
        saved, weights = through_a_file(saved), through_a_file(model.state_dict())
        model, optimizer = build()
        model.load_state_dict(weights)
        if event == "reload":
            optimizer.load_state_dict(saved)
        else:
            set_optimizer_state_dict(model, optimizer, saved, options=options)
            optimizer.qk_clip.load_state_dict(statistics)
    assert_same(model, optimizer, steady_model, steady)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
def test_a_copied_model_and_optimizer_step_bit_by_bit_like_the_original(duplicate):
    model, optimizer = build()
    for step in range(2):
        train(model, optimizer, step, step)
    model.attention.recorder.update(torch.tensor([3.0, 0.01]))  # in the middle of a step
    twin, twin_optimizer = duplicate((model, optimizer))
    assert twin_optimizer.table() == optimizer.table()
    for step in range(2, 5):
        train(model, optimizer, step, step % 2)
    original = copy.deepcopy(model.state_dict())
    for step in range(2, 5):
        train(twin, twin_optimizer, step, step % 2)
    assert_same(model, optimizer, twin, twin_optimizer)
    assert torch.equal(optimizer.qk_report.max_logits, twin_optimizer.qk_report.max_logits)
    # The copy has moved its own parameters only.
    assert all(torch.equal(value, original[name]) for name, value in model.state_dict().items())
    twin_optimizer.load_state_dict(optimizer.state_dict())


def test_every_parameter_has_state_from_the_start():
    # Parameters that never saw a gradient broke checkpoints elsewhere: entries must not depend on who got one.
    model, optimizer = build()
    fresh = get_optimizer_state_dict(model, optimizer)["state"]
    assert set(fresh) == {name for name, _ in model.named_parameters()}
    train(model, optimizer, 0, None)
    after = get_optimizer_state_dict(model, optimizer)["state"]
    assert {name: set(entries) for name, entries in after.items()} == {
        name: set(entries) for name, entries in fresh.items()
    }


def test_asking_for_the_state_takes_no_step():
    model, optimizer = build()
    before = copy.deepcopy(model.state_dict())
    model.attention.recorder.update(torch.tensor([5.0, 5.0]))
    get_optimizer_state_dict(model, optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_state_cleared_from_outside_starts_at_zero():
    model, optimizer = build()
    optimizer.state.clear()
    train(model, optimizer, 0, 0)
    twin, twin_optimizer = build()
    train(twin, twin_optimizer, 0, 0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name])


def test_float32_momentum_survives_loading_into_a_half_precision_model():
    # torch casts loaded state to the parameter's dtype; DeepSpeed crashed on the mix.
    model = nn.Linear(4, 4, bias=False).bfloat16()
    optimizer = MuonClip.for_model(model, lr=0.1, qk_clip_tau=None)
    model.weight.grad = torch.randn(4, 4).bfloat16()
    optimizer.step()
    saved = through_a_file(optimizer.state_dict())
    again = MuonClip.for_model(model, lr=0.1, qk_clip_tau=None)
    again.load_state_dict(saved)
    loaded, kept = again.state[model.weight]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"]
    assert loaded.dtype == torch.float32 and torch.equal(loaded, kept) and loaded.data_ptr() != kept.data_ptr()


def test_foreign_states_are_refused():
    model, optimizer = build()
    saved = optimizer.state_dict()
    summed = copy.deepcopy(saved)
    summed["param_groups"][0]["momentum_form"] = "sum"
    with pytest.raises(ValueError, match="momentum_form of the saved state is 'sum', expected 'average'"):
        optimizer.load_state_dict(summed)
    regrouped = MuonClip.for_model(model, lr=0.1, overrides={"experts": Adam()})
    with pytest.raises(ValueError, match=r"optimizer state has groups \{'muon': 3.*same overrides"):
        regrouped.load_state_dict(saved)
    reshaped = copy.deepcopy(saved)
    reshaped["state"][0]["momentum_buffer"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"momentum_buffer of '\S+' has shape \(2, 2\), expected"):
        optimizer.load_state_dict(reshaped)
    swapped = copy.deepcopy(saved)
    swapped["state"][0] = {"exp_avg": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=r"has entries \['exp_avg'\], expected \['momentum_buffer'\]"):
        optimizer.load_state_dict(swapped)
    plain = torch.optim.AdamW(model.parameters()).state_dict()
    with pytest.raises(ValueError, match="optimizer state has groups"):
        optimizer.load_state_dict(plain)
