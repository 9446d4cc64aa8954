"""One decay per head: the same recurrence with equal numbers in all channels, trained as one parameter."""

from dataclasses import replace

import pytest
import torch

from perilune import hub
from perilune.kernels.kda import kda
from perilune.kernels.triton_support import why_not_triton
from perilune.model import KDAConfig, KimiDeltaAttention
from perilune.model.documents import Packing
from tests.model.small_models import BASE, build, relative_error

HEAD = KDAConfig(num_heads=2, head_dim=8, decay="head")


def twins(gate_lower_bound: float | None) -> tuple[KimiDeltaAttention, KimiDeltaAttention]:
    """A layer with one decay a head, and a layer with one per channel that was given the same numbers."""
    torch.manual_seed(0)
    one = KimiDeltaAttention(32, replace(HEAD, gate_lower_bound=gate_lower_bound)).double()
    many = KimiDeltaAttention(32, replace(HEAD, decay="channel", gate_lower_bound=gate_lower_bound)).double()
    state = dict(one.state_dict())
    for name in ("f_b_proj.weight", "dt_bias"):
        state[name] = state[name].repeat_interleave(8, dim=0)
    many.load_state_dict(state)
    return one, many


@pytest.mark.parametrize("bound", [None, -5.0])
def test_it_equals_the_decay_per_channel_with_equal_channels_and_sums_their_gradients(bound: float | None) -> None:
    one, many = twins(bound)
    x = torch.randn(1, 30, 32, dtype=torch.float64)
    borders = Packing(cu_seqlens=torch.tensor([0, 11, 30]))
    outputs = [layer(x, borders) for layer in (one, many)]
    assert relative_error(*outputs) < 1e-12
    for output in outputs:
        output.square().sum().backward()
    wide = dict(many.named_parameters())
    for name, parameter in one.named_parameters():
        expected = wide[name].grad
        if expected.shape != parameter.shape:
            expected = expected.unflatten(0, (2, 8)).sum(1)
        assert relative_error(parameter.grad, expected) < 1e-10, name


def test_it_is_the_reference_recurrence_with_a_scalar_gate() -> None:
    """S <- exp(g_t) S for a number g_t per head, written out."""
    one, _ = twins(None)
    x = torch.randn(1, 12, 32, dtype=torch.float64)
    inputs = one._inputs(x, None, None)
    heads = (1, 12, 2, 8)
    q, k, v = (part.view(heads) for part in (inputs.q, inputs.k, inputs.v))
    raw = one.f_b_proj(one.f_a_proj(x))
    g = -one.A_log.exp() * torch.nn.functional.softplus(raw + one.dt_bias)
    assert g.shape == (1, 12, 2)
    expected, _ = kda(q, k, v, g[..., None].expand(heads), inputs.beta.sigmoid(), qk_l2norm=True, backend="reference")
    found, _ = kda(
        q, k, v, inputs.gate_input.view(heads), inputs.beta, gate=one.gate(), qk_l2norm=True, beta_max=1.0,
        backend="chunked",
    )  # fmt: skip
    assert relative_error(found, expected) < 1e-12


def test_it_has_as_many_decays_as_heads_and_is_not_exported_as_kimi_linear(tmp_path) -> None:
    layer = KimiDeltaAttention(32, HEAD)
    assert layer.dt_bias.shape == (2,) and layer.f_b_proj.weight.shape == (2, 8)
    model = build(replace(BASE, kda=HEAD, compute_dtype="float32"))
    with pytest.raises(hub.FormatError, match="kda.decay='head', and Kimi-Linear has 'channel'"):
        hub.save_pretrained(model, tmp_path / "out", target="kimi_linear")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="kda.decay is 'token'"):
        KDAConfig(decay="token")  # type: ignore[arg-type]


@pytest.mark.skipif(why_not_triton(torch.empty(0)) is not None, reason="Triton cannot run")
@pytest.mark.parametrize("changes", [{}, {"decay": "channel", "short_conv_kernel_size": 1}], ids=["head", "no_conv"])
def test_the_fused_inputs_know_these_arms(changes: dict) -> None:
    layer = KimiDeltaAttention(32, replace(HEAD, **changes))
    x = torch.randn(1, 20, 32, requires_grad=True)
    borders = torch.tensor([0, 7, 20], dtype=torch.int32)
    results = []
    for inputs in (layer._inputs_at_once, layer._inputs):
        found = inputs(x, borders, None)
        parts = [found.q, found.k, found.v, found.gate_input, found.beta, found.output_gate]
        total = sum((part * torch.arange(part.shape[-1])).sum() for part in parts)
        weights = [parameter for name, parameter in layer.named_parameters() if "o_" not in name]
        used = [*torch.autograd.grad(total, [x, *weights], allow_unused=True)]
        results.append([*parts, *used])
    assert results[0][3].shape == (1, 20, 16)
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
