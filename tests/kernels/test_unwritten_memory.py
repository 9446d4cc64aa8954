"""No kernel of a training step depends on memory that nobody wrote, or touches what lies beside its tensors."""

from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from perilune.kernels import kda as kda_package
from perilune.kernels.attention import attention
from perilune.kernels.cross_entropy import linear_cross_entropy_sum
from perilune.kernels.embedding import embed
from perilune.kernels.gated_norm import gated_rms_norm
from perilune.kernels.norm import add_rms_norm, rms_norm
from perilune.kernels.swiglu import swiglu
from perilune.kernels.triton_support import INTERPRETED
from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig, decoder, head, linear, residual
from perilune.model import kda as kda_layer
from perilune.model import mla as mla_layer
from tests.kernels.test_attnres_triton import Network, gradients
from tests.kernels.unwritten import Fences, fenced_memory

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 (set where no GPU is)")


def small_model(**settings) -> ModelConfig:
    """A row of a KDA layer's product is 3 * 32 + 2 * 16 + 2 numbers, in memory of rows of 144."""
    return ModelConfig(
        **{
            "vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "layer_types": ("kda", "mla"),
            "kda": KDAConfig(num_heads=2, head_dim=16), "intermediate_size": 40,
            "mla": MLAConfig(
                num_attention_heads=2, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
            ),
            "residual": "block_attnres", "block_sublayers": 3,
        } | settings
    )  # fmt: skip


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths of a GPU, in Triton's interpreter: products of stacked weights, fused residuals, all kernels."""
    for module in (linear, kda_layer, mla_layer):
        monkeypatch.setattr(module, "takes_one_product", lambda *tensors: True)
    monkeypatch.setattr(residual, "fused_block_takes", lambda source, num_sources: True)
    monkeypatch.setattr(residual, "takes_triton", lambda x: True)
    monkeypatch.setattr(residual, "rms_norm", partial(rms_norm, backend="triton"))
    monkeypatch.setattr(residual, "add_rms_norm", partial(add_rms_norm, backend="triton"))
    monkeypatch.setattr(linear, "rms_norm", partial(rms_norm, backend="triton"))
    monkeypatch.setattr(linear, "swiglu", partial(swiglu, backend="triton"))
    monkeypatch.setattr(kda_package, "_choose_backend", lambda *arguments: "triton")
    monkeypatch.setattr(mla_layer, "attention", partial(attention, backend="triton"))
    monkeypatch.setattr(decoder, "embed", partial(embed, backend="triton"))
    monkeypatch.setattr(head, "linear_cross_entropy_sum", partial(linear_cross_entropy_sum, backend="triton"))
    monkeypatch.setattr(kda_layer.KimiDeltaAttention, "_gated", _gated)


def _gated(layer, o: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    return gated_rms_norm(o, gate, layer.o_norm.weight, layer.o_norm.eps, backend="triton").flatten(-2).to(dtype)


def step(config: ModelConfig, borders: list[int], fences: Fences) -> dict[str, Tensor]:
    """Loss and gradients of a micro-batch, everything between fences."""
    model = Decoder(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # queries of Attention Residuals begin at zero
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            parameter.data = fences.around(parameter)
    tokens = torch.randint(config.vocab_size, (1, borders[-1] + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, [border - 1 for border in borders[1:]]] = -100
    places = (tokens[:, :-1], targets, torch.tensor(borders, dtype=torch.int32))
    loss = model.loss(*(fences.around(x) for x in places))
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def check(config: ModelConfig, borders: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with fenced_memory(monkeypatch) as fences:
        found = step(config, borders, fences)
    assert len(fences) > 100
    assert not [name for name, value in found.items() if not value.isfinite().all()]
    assert not fences.broken()


def test_a_step_reads_no_memory_that_nobody_wrote_and_writes_beside_none(as_on_a_gpu, monkeypatch) -> None:
    """A document of one token, one of more than a chunk, and two empty ones."""
    check(small_model(), [0, 1, 67, 67, 67], monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"num_hidden_layers": 4, "layer_types": None, "block_sublayers": 4},
        {"num_hidden_layers": 4, "layer_types": None, "block_sublayers": 2, "tie_word_embeddings": True},
        {"residual": "plain"},
        {"residual": "attnres"},
    ],
)
def test_steps_of_other_models_do_not_either(as_on_a_gpu, monkeypatch, settings: dict) -> None:
    check(small_model(**settings), [0, 1, 2, 66, 70, 150], monkeypatch)


@pytest.mark.parametrize(
    ("width", "tokens", "sublayers", "block"), [(24, 17, 5, 2), (100, 3, 9, 4), (384, 2, 4, 8), (8, 5, 3, 1)]
)
def test_blocks_of_residuals_do_not_either(monkeypatch, width: int, tokens: int, sublayers: int, block: int) -> None:
    with fenced_memory(monkeypatch) as fences:
        network = Network(width, (tokens,), sublayers, block, torch.float32)
        found = gradients([network.fused()], network.parameters)
    assert len(fences) > 20
    assert all(gradient.isfinite().all() for gradient in found)
    assert not fences.broken()


def test_a_read_of_unwritten_memory_and_a_write_beside_a_tensor_are_found(monkeypatch) -> None:
    with fenced_memory(monkeypatch) as fences:
        x = torch.empty(3)
        x[:2] = 1.0
        assert (x * 0).sum().isnan() and torch.zeros(2, 2).eq(0).all()
        assert torch.empty(2, dtype=torch.int32).eq(2**31 - 1).all()
        assert not fences.broken()
        x.as_strided((4,), (1,))[3] = 1.0
    assert fences.broken() == [3]
