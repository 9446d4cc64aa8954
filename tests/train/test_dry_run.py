"""A dry run counts what a run would take: shards against arithmetic, collectives against the design, activations."""

import pytest

from perilune.hub import deepseek_v3, kimi_linear
from perilune.model import ModelConfig
from perilune.train.dry_run import DryRun, dry_run
from perilune.train.parallel import ParallelConfig
from tests.distributed.tiny_models import DENSE, HYBRID

FULL_LAYERS = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR_48B = {
    "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu", "num_experts": 256,
    "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
    "moe_renormalize": True, "routed_scaling_factor": 2.446, "num_expert_group": 1, "topk_group": 1,
    "linear_attn_config": {
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4, "full_attn_layers": FULL_LAYERS,
        "kda_layers": [layer for layer in range(1, 28) if layer not in FULL_LAYERS],
    },
}  # fmt: skip
KIMI_K2 = {
    "model_type": "kimi_k2", "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu",
    "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 50000.0, "rms_norm_eps": 1e-6,
}  # fmt: skip


def tiny(parallel: ParallelConfig, model=HYBRID, *, world_size=4, row_tokens=64, **options) -> DryRun:
    config = ModelConfig(**{**model, "compute_dtype": "bfloat16"})
    return dry_run(config, parallel, world_size=world_size, row_tokens=row_tokens, **options)


def calls(run: DryRun) -> dict[tuple[str, str], int]:
    return {(each.axis, each.operation): each.calls for each in run.stages[0].traffic}


def half(public: ModelConfig) -> ModelConfig:
    return ModelConfig(**{**vars(public), "compute_dtype": "bfloat16"})


def test_kimi_linear_48b_on_64_ranks_costs_what_arithmetic_says():
    config = half(kimi_linear.from_public(KIMI_LINEAR_48B))
    parallel = ParallelConfig(ep=8, recompute="full")
    run = dry_run(config, parallel, world_size=64, row_tokens=4096)
    assert run.num_parameters == pytest.approx(49.1e9, rel=0.01)
    # AdamW's part (the embeddings, mostly) costs 4 bytes more than the 14 of Muon's: 1.5 % of the parameters.
    assert run.state_bytes == pytest.approx(run.expected_state_bytes, rel=0.01)
    sent = {(each.axis, each.operation): each for each in run.stages[0].traffic}
    # 26 layers send 8 rows of 2304 a token, there and back, three times: forward, repeated forward, backward.
    exchanged = 26 * 6 * 4096 * 8 * 2304 * 2 * 7 / 8
    assert sent["ep", "all-to-all"].num_bytes == pytest.approx(exchanged, rel=0.01)
    experts = 26 * 256 * 3 * 1024 * 2304
    # Gathered in bfloat16 for the forward and for the backward, over the 8 ranks that have the same experts.
    assert sent["efsdp", "all-gather"].num_bytes == pytest.approx(2 * 2 * experts / 8 * 7 / 8, rel=0.01)
    assert sent["efsdp", "reduce-scatter"].num_bytes == pytest.approx(4 * experts / 8 * 7 / 8, rel=0.01)


@pytest.mark.long
def test_a_trillion_parameters_fit_256_ranks():
    config = half(deepseek_v3.from_public(KIMI_K2))
    parallel = ParallelConfig(pp=16, ep=16, recompute="full")
    run = dry_run(config, parallel, world_size=256, row_tokens=4096, micro_batches=32)
    assert run.num_parameters == pytest.approx(1.026e12, rel=0.01)
    assert run.state_bytes == pytest.approx(run.expected_state_bytes, rel=0.01)
    assert max(cost.total_bytes for cost in run.stages) < 80 * 2**30


def test_one_rank_sends_nothing_and_holds_everything():
    run = tiny(ParallelConfig(), world_size=1)
    (cost,) = run.stages
    assert cost.traffic == ()
    assert cost.parameter_bytes == 4 * run.num_parameters


def test_twice_the_ranks_hold_half_of_the_weights():
    two, four = (tiny(ParallelConfig(), world_size=ranks).stages[0].parameter_bytes for ranks in (2, 4))
    assert four == pytest.approx(two / 2, rel=0.01)


def test_dense_fsdp_gathers_each_group_twice_and_reduces_it_once():
    found = calls(tiny(ParallelConfig(), DENSE))
    # Four layers, embedding and head; root and head are not gathered again for the backward.
    assert found["fsdp", "reduce-scatter"] == 4 + 3
    assert found["fsdp", "all-gather"] == 2 * 4 + 2 + 1 + 1


def test_tensor_parallel_sends_one_sum_a_sublayer_each_way():
    run = tiny(ParallelConfig(tp=4), DENSE, row_tokens=128)
    (sums,) = [each for each in run.stages[0].traffic if each.axis == "tp"]
    # Eight sublayers; the activations dominate the gradients of what heads share.
    activations = 8 * 2 * 2 * 128 * 32 * 2 * 3 / 4
    assert sums.num_bytes >= activations
    assert tiny(ParallelConfig(tp=4), DENSE, row_tokens=256).stages[0].traffic_bytes > run.stages[0].traffic_bytes


@pytest.mark.parametrize("axis", ["tp", "ep", "cp"])
def test_every_axis_shows_in_the_traffic(axis):
    run = tiny(ParallelConfig(**{axis: 2}))
    assert axis in {each.axis for each in run.stages[0].traffic}


def test_recomputing_keeps_less():
    kept = [tiny(ParallelConfig(recompute=how)).stages[0].activation_bytes for how in ("none", "selective", "full")]
    assert kept[0] > kept[1] > kept[2] > 0


def test_context_parallel_halves_the_activations_of_a_rank():
    whole, half = (tiny(ParallelConfig(cp=ranks), row_tokens=512).stages[0].activation_bytes for ranks in (1, 2))
    assert half == pytest.approx(whole / 2, rel=0.25)


def test_early_stages_keep_more_micro_batches_and_send_the_stream_on():
    run = tiny(ParallelConfig(pp=4), micro_batches=8)
    assert [cost.in_flight for cost in run.stages] == [4, 3, 2, 1]
    sends = [each for cost in run.stages for each in cost.traffic if each.operation == "send"]
    # Blocks of four sublayers: the embedding or closed blocks, and the running sum.
    assert [send.calls for send in sends] == [2, 2, 3]
    assert sends[0].num_bytes == 2 * 64 * 32 * 2
    assert sum(cost.num_parameters for cost in run.stages) == tiny(ParallelConfig()).num_parameters


def test_the_table_names_every_axis_and_the_arithmetic():
    text = tiny(ParallelConfig(ep=2)).table()
    for words in ("4 ranks", "ep 2", "all-to-all", "14 bytes a parameter", "by hand"):
        assert words in text
