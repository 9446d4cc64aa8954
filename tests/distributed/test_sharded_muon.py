"""Distributed MuonClip against one process, on worlds of one to four ranks. One world runs all scenarios once."""

from functools import cache
from typing import Any

import pytest
import torch

from perilune.optim import stacks
from tests.distributed.decoder_runs import OPTIONS, largest_change_error, one_process, smallest_change_cosine
from tests.distributed.gloo import run
from tests.distributed.sharded_scenarios import every_scenario

pytestmark = pytest.mark.distributed
WORLDS = (1, 2, 3, 4)
# Ranks sum gradients in another order; Newton-Schulz multiplies a difference of 1e-7 by up to 485, five times over.
CLOSE = 1e-3


@cache
def ranks_of(world: int) -> list[dict[str, Any]]:
    return run(world, every_scenario)


@cache
def reference() -> dict[str, Any]:
    return one_process()


@pytest.fixture(params=WORLDS, ids=lambda world: f"world{world}")
def world(request) -> int:
    return request.param


def matrices_only(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in weights.items() if tensor.ndim >= 2}


def cosine_of_matrices(weights: dict[str, torch.Tensor]) -> tuple[float, str]:
    expected = reference()
    return smallest_change_cosine(weights, {**expected, "weights": matrices_only(expected["weights"])})


def test_the_reference_clips_heads_so_that_clipping_on_shards_is_seen():
    assert reference()["clipped"] > 0 and OPTIONS["qk_clip_tau"] is not None


def test_five_steps_on_fsdp_shards_change_every_tensor_as_one_process_does(world):
    for rank in ranks_of(world):
        error, name = largest_change_error(rank["fsdp"]["weights"], reference())
        assert error < CLOSE, name
        assert rank["fsdp"]["clipped"] == reference()["clipped"]


def test_a_bfloat16_payload_keeps_the_direction_of_every_matrix(world):
    for scenario in ("fsdp_bf16", "ddp_bf16"):
        cosine, name = cosine_of_matrices(ranks_of(world)[-1][scenario]["weights"])
        assert cosine >= 0.99, (scenario, name)


def test_some_rank_of_four_has_no_rows_of_some_matrix():
    assert max(rank["fsdp"]["empty_shards"] for rank in ranks_of(4)) > 0


def test_replicated_weights_get_the_bits_of_one_process_when_matrices_are_orthogonalised_alone(world, monkeypatch):
    """Bit for bit: momentum, AdamW, the gradient norm, QK-Clip, the exchange in float32. Not bit for bit: stacks.
    Owners stack other matrices together than one process does, and batched products round by the size of the batch; so
    here both sides use stacks of one. Nor would sums over ranks be: here all ranks compute the whole gradient."""
    monkeypatch.setattr(stacks, "STACK_ELEMENTS", 1)
    expected = one_process()["weights"]
    for rank in ranks_of(world):
        different = [name for name, tensor in rank["ddp_alone"]["weights"].items() if not tensor.equal(expected[name])]
        assert not different


@pytest.mark.parametrize("scenario", ["ddp_alone", "ddp_bf16", "reduced_to_owners"])
def test_replicas_stay_equal_bit_for_bit(world, scenario):
    first, *others = (rank[scenario]["weights"] for rank in ranks_of(world))
    for other in others:
        assert all(other[name].equal(tensor) for name, tensor in first.items())


def test_gradients_reduced_to_owners_equal_one_process(world):
    error, name = largest_change_error(ranks_of(world)[0]["reduced_to_owners"]["weights"], reference())
    assert error < CLOSE, name


def test_experts_sharded_by_rows_equal_one_process():
    result = ranks_of(2)[0]["expert_rows"]
    error, name = largest_change_error(result["weights"], reference())
    assert error < CLOSE, name
    # The down projections are cut now; of gate and up each rank happens to have one whole.
    assert result["exchanged"] > ranks_of(2)[0]["fsdp"]["exchanged"]


def test_hybrid_shards_equal_one_process_and_their_replicas_each_other():
    for scenario in ("hsdp", "hsdp_bf16"):
        ranks = [rank[scenario] for rank in ranks_of(4)]
        if scenario == "hsdp":
            error, name = largest_change_error(ranks[0]["weights"], reference())
            assert error < CLOSE, name
        assert cosine_of_matrices(ranks[0]["weights"])[0] >= 0.99
        for one, other in ((0, 2), (1, 3)):
            local = ranks[one]["local"]
            assert all(ranks[other]["local"][name].equal(tensor) for name, tensor in local.items())


def test_two_all_to_alls_a_bucket_and_one_small_all_reduce_each_for_norm_and_maxima(world):
    for rank in ranks_of(world):
        for scenario in ("fsdp", "fsdp_bf16", "fsdp_one_bucket"):
            result = rank[scenario]
            clipping, stepping = result["counted"]
            buckets = result["kinds"].count("exchanged")
            if world == 1:
                assert not clipping.calls and set(stepping.calls) <= {"all_reduce"}
                continue
            assert buckets >= 1 if scenario == "fsdp_one_bucket" else buckets >= 2
            assert clipping.calls == {"all_reduce": 1}
            # In finish_step: the norm with the counts, the maxima with the flags, and two routers by themselves.
            assert stepping.calls == {"all_to_all_single": 2 * buckets, "all_reduce": 4}
        if world > 1:
            assert rank["fsdp_one_bucket"]["kinds"].count("exchanged") == 1


def test_one_all_gather_a_bucket_returns_the_updates_of_replicated_matrices(world):
    for rank in ranks_of(world):
        calls, buckets = rank["ddp_bf16"]["counted"].calls, rank["ddp_bf16"]["num_buckets"]
        assert buckets == (0 if world == 1 else calls["all_gather"]) and "all_to_all_single" not in calls
        assert world == 1 or buckets >= 2


def test_bytes_stay_below_twice_the_parameters_in_bfloat16(world):
    ranks = ranks_of(world)
    sent = sum(rank["fsdp_bf16"]["counted"][1].bytes.get("all_to_all_single", 0) for rank in ranks)
    one = ranks[0]["fsdp_bf16"]
    assert sent <= 2 * (2 * one["exchanged"]) * (world - 1) / world
    assert one["exchanged"] <= one["muon_elements"]
    assert sent > 0 or world == 1


def test_momentum_is_spread_over_the_ranks_in_both_modes(world):
    for scenario in ("fsdp", "ddp_alone"):
        elements = [rank[scenario]["state_elements"] for rank in ranks_of(world)]
        assert sum(elements) == ranks_of(world)[0][scenario]["muon_elements"]
        assert world == 1 or max(elements) < sum(elements)


def test_a_gradient_on_some_ranks_counts_as_zero_on_the_others_and_none_at_all_moves_nothing(world):
    for rank in ranks_of(world):
        result = rank["none_gradients"]
        for name, expected in result["expected"].items():
            torch.testing.assert_close(result["weights"][name], expected, rtol=1e-5, atol=1e-5)
        assert result["weights"]["n"].equal(result["start"]["n"])
        assert not result["weights"]["experts"].equal(result["start"]["experts"])


def test_head_blocks_of_tensor_parallel_ranks_are_orthogonalised_at_home(world):
    for rank in ranks_of(world):
        result = rank["heads"]
        for name, expected in result["expected"].items():
            torch.testing.assert_close(result["weights"][name], expected, rtol=1e-5, atol=1e-5)
        assert result["counted"].calls == ({} if world == 1 else {"all_reduce": 1})


def test_blocks_that_cross_shards_columns_and_short_matrices_equal_one_process(world):
    for rank in ranks_of(world):
        result = rank["odd"]
        for name, expected in result["expected"].items():
            torch.testing.assert_close(result["weights"][name], expected, rtol=1e-5, atol=1e-5)
            assert not expected.equal(result["start"][name])


def test_data_times_tensor_parallel_shards_equal_one_process():
    for rank in ranks_of(4):
        result = rank["fsdp_tp"]
        for name, expected in result["expected"].items():
            torch.testing.assert_close(result["weights"][name], expected, rtol=1e-5, atol=1e-5)
            assert not expected.equal(result["start"][name])
        assert result["norms"][::2] == pytest.approx(result["norms"][1::2], rel=1e-5)
