"""MuonClip against torch.optim: Muon with match_rms_adamw on plain matrices, AdamW on the rest."""

import copy

import pytest
import torch
from torch import nn

from perilune.optim import Adam, MuonClip, Whole

SHAPES = [(64, 32), (32, 64), (32, 64), (48, 48), (1, 16), (16, 1), (33, 17)]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_muon_equals_torch_muon(nesterov, scale):
    ours = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
    theirs = copy.deepcopy(ours)
    # A bare parameter is nobody's Linear weight: name it a matrix.
    options = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.95, "nesterov": nesterov}
    mine = MuonClip.for_model(
        ours, qk_clip_tau=None, orthogonalize_dtype=torch.bfloat16, overrides={"*": Whole()}, **options
    )
    torch_muon = torch.optim.Muon(theirs.parameters(), adjust_lr_fn="match_rms_adamw", **options)
    for _ in range(5):
        for one, two in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one) * scale
            two.grad = one.grad.clone()
        mine.step()
        torch_muon.step()
    for one, two in zip(ours, theirs, strict=True):
        # Acceptance bar: 1e-6. The arithmetic is the same operation by operation.
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
        assert torch.equal(mine.state[one]["momentum_buffer"], torch_muon.state[two]["momentum_buffer"])


@pytest.mark.parametrize("decay", [True, False])
def test_the_rest_equals_torch_adamw(decay):
    ours = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in [(5, 3), (4,), (), (2, 3, 4)]])
    theirs = copy.deepcopy(ours)
    mine = MuonClip.for_model(
        ours, lr=1e-2, weight_decay=0.1, qk_clip_tau=None, overrides={"*": Adam(weight_decay=decay)}
    )
    torch_adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1 if decay else 0.0)
    for step in range(6):
        for number, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            missing = step % 3 == 1 and number == 1  # each parameter counts its own steps
            one.grad = None if missing else torch.randn_like(one)
            two.grad = None if missing else one.grad.clone()
        mine.step()
        torch_adamw.step()
    for one, two in zip(ours, theirs, strict=True):
        # Same formula; foreach and single-tensor code may round the last bit of each of 6 steps differently.
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
        assert {key: value.dtype for key, value in mine.state[one].items()} == {
            key: value.dtype for key, value in torch_adamw.state[two].items()
        }
