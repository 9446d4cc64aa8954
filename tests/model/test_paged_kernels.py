"""Chunks of prompts through the kernels that a GPU would take, in Triton's interpreter: what plain torch gives."""

from functools import partial

import pytest
import torch
from torch import Tensor

import perilune.kernels.kda.triton
import perilune.model.kda
import perilune.model.mla
from perilune.kernels.gated_norm import gated_rms_norm
from perilune.kernels.kda import kda
from perilune.kernels.short_conv import short_conv
from perilune.kernels.triton_support import INTERPRETED
from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig
from perilune.model.kda import KimiDeltaAttention
from perilune.model.linear import side_by_side
from perilune.model.paged import StatePool
from perilune.model.side_by_side import lay_side_by_side
from tests.model.paged_sequences import Pool

CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    num_hidden_layers=2,
    layer_types=("kda", "mla"),
    kda=KDAConfig(num_heads=2, head_dim=16),
    mla=MLAConfig(num_attention_heads=2, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
    intermediate_size=48,
    residual="plain",
    initializer_range=0.1,
)


@torch.inference_mode()
def states(model: Decoder, prompts: list[tuple[int, ...]]) -> Tensor:
    """Of two sequences in three steps, chunks and decodes mixed; a chunk shorter than a window among them."""
    pool, found = Pool.of(model, prompts, page_size=16, seed=0), []
    for layer in pool.cache.layers:
        if isinstance(layer, StatePool):  # as it lies on a GPU
            object.__setattr__(layer, "conv", layer.conv.contiguous())
    for shares in ([(0, 70), (1, 20)], [(0, 1), (1, 14)], [(0, 17), (1, 2)], [(0, 2), (1, 1)]):
        runs = [pool.take(pool.sequences[index], count) for index, count in shares]
        found.append(model.step(pool.batch(runs), pool.cache))
    return torch.cat(found)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the kernels are tested there")
def test_chunks_through_the_gpu_kernels_equal_those_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(CONFIG, seed=0).eval()
    lay_side_by_side(model)  # so that what the kernels read are parts of wider rows, as in the runner
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(300, (length,), generator=generator).tolist()) for length in (90, 37)]

    def gated(layer: KimiDeltaAttention, o: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        normed = gated_rms_norm(o, gate, layer.o_norm.weight, layer.o_norm.eps, backend="triton")
        return normed.flatten(-2).to(dtype)

    right = states(model, prompts)
    monkeypatch.setattr(perilune.model.kda, "kda", partial(kda, backend="triton"))
    monkeypatch.setattr(perilune.model.kda, "short_conv", partial(short_conv, backend="triton"))
    monkeypatch.setattr(KimiDeltaAttention, "_gated", gated)
    # float32 in another order, over some dozens of tokens.
    torch.testing.assert_close(states(model, prompts), right, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the kernels are tested there")
@pytest.mark.parametrize("pieces", [False, True], ids=["whole sequences", "sequences in pieces"])
def test_chunks_that_move_their_slots_in_place_equal_those_of_plain_torch(
    pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Decoder(CONFIG, seed=0).eval()
    lay_side_by_side(model)
    generator = torch.Generator().manual_seed(2)
    prompts = [tuple(torch.randint(300, (length,), generator=generator).tolist()) for length in (90, 37)]
    right = states(model, prompts)
    calls = []
    at_slots = perilune.model.kda.kda_at_slots
    monkeypatch.setattr(perilune.model.kda, "takes_slots", lambda *tensors: True)
    monkeypatch.setattr(perilune.model.kda, "kda_at_slots", lambda *a, **b: (calls.append(1), at_slots(*a, **b))[1])
    if pieces:
        monkeypatch.setattr(perilune.kernels.kda.triton, "CHECKPOINT_EVERY", 1)
        monkeypatch.setattr(perilune.kernels.kda.triton._Call, "piece", lambda call: 1)
    torch.testing.assert_close(states(model, prompts), right, rtol=1e-4, atol=1e-4)
    assert len(calls) == 4


def test_chunks_attended_to_in_one_call_equal_one_call_each(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(CONFIG, seed=0).eval()
    generator = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(300, (length,), generator=generator).tolist()) for length in (90, 37)]
    right = states(model, prompts)
    calls = []
    of_runs = perilune.model.mla.attention_of_runs
    monkeypatch.setattr(perilune.model.mla, "takes_runs", lambda q, value_width: q.shape[-1] == value_width)
    monkeypatch.setattr(perilune.model.mla, "attention_of_runs", lambda *a, **b: (calls.append(1), of_runs(*a, **b))[1])
    torch.testing.assert_close(states(model, prompts), right, rtol=1e-4, atol=1e-4)
    assert len(calls) == 4
    monkeypatch.setattr("perilune.model.paged_batch.MOST_JOINED_KEYS", 4)  # more keys than that: each by itself
    torch.testing.assert_close(states(model, prompts), right, rtol=1e-4, atol=1e-4)
    assert len(calls) == 4


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the kernels are tested there")
def test_latents_written_by_one_kernel_equal_those_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(CONFIG, seed=0).eval()
    lay_side_by_side(model)
    torch.nn.init.uniform_(model.layers[1].self_attn.kv_a_layernorm.weight, 0.5, 2.0)
    generator = torch.Generator().manual_seed(4)
    prompts = [tuple(torch.randint(300, (length,), generator=generator).tolist()) for length in (90, 37)]
    right = states(model, prompts)
    calls = []
    monkeypatch.setattr(perilune.model.mla, "takes_triton", lambda x: calls.append(1) or True)
    torch.testing.assert_close(states(model, prompts), right, rtol=1e-5, atol=1e-5)
    assert len(calls) == 4


def test_products_of_weights_side_by_side_have_rows_that_begin_at_multiples_of_16() -> None:
    layer = Decoder(CONFIG, seed=0).layers[0].self_attn
    assert isinstance(layer, KimiDeltaAttention)
    x = torch.randn(1, 5, 32)
    with torch.no_grad():
        right = torch.cat([linear(x) for linear in layer.maps_of_input()], dim=-1)
        assert right.shape[-1] % 16  # else there is nothing to see
        assert side_by_side(x, *layer.maps_of_input()) is None
        lay_side_by_side(layer)
        found = side_by_side(x, *layer.maps_of_input())
    assert found is not None and found.stride(1) % 16 == 0
    torch.testing.assert_close(found, right)


def test_the_call_for_several_runs_fits_the_operator_of_torch() -> None:
    """Names, order and widths; what it computes is seen on a GPU (test_attention_continued.py)."""
    q, k, v = (torch.empty(length, 2, 24, dtype=torch.bfloat16, device="meta") for length in (7, 12, 12))
    borders = torch.empty(3, dtype=torch.int32, device="meta")
    o, *_ = torch.ops.aten._flash_attention_forward(q, k, v, borders, borders, 5, 8, 0.0, True, False, scale=0.2)
    assert o.shape == q.shape
