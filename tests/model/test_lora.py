"""Adapters: nothing changes at the start, only they learn, and merged they compute the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from perilune.model import Decoder, SamplingConfig, generate
from perilune.model.linear import Linear
from perilune.model.lora import (
    LoraConfig,
    LoraLinear,
    adapted_maps,
    add_adapters,
    has_adapters,
    load_adapters,
    merge_adapters,
    save_adapters,
)
from perilune.optim import MuonClip
from perilune.optim.matrices import Adam
from perilune.optim.plan import plan_parameters
from perilune.train.optimizer import OptimizerConfig, build_optimization
from tests.train.tiny_runs import MODEL, MOE

CONFIG = LoraConfig(rank=3, alpha=7.0)
TOKENS = torch.arange(24)[None] * 5 % 300
TARGETS = TOKENS.roll(-1, dims=1)
BORDERS = torch.tensor([0, 10, 24], dtype=torch.int32)


def decoder(**changes: object) -> Decoder:
    return Decoder(replace(MODEL, compute_dtype="float64", **changes), seed=3).double()


def adapted(model: Decoder, *, moved: bool = True) -> Decoder:
    add_adapters(model, CONFIG, seed=5)
    if moved:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for _, module in adapted_maps(model):
                module.lora_b.copy_(0.1 * torch.randn(module.lora_b.shape, generator=generator))
    return model


def loss(model: Decoder) -> torch.Tensor:
    return model.loss(TOKENS, TARGETS, BORDERS)


def test_before_the_first_step_a_model_with_adapters_is_the_model() -> None:
    assert torch.equal(loss(adapted(decoder(), moved=False)), loss(decoder()))


def test_merged_and_unmerged_models_agree_in_loss_and_gradients() -> None:
    apart, merged = adapted(decoder()), adapted(decoder())
    merge_adapters(merged)
    assert not has_adapters(merged) and has_adapters(apart)
    one, other = loss(apart), loss(merged)
    # float64, a few hundred products deep: 1e-10 leaves room for the order of sums, not for a wrong term.
    torch.testing.assert_close(one, other, rtol=1e-10, atol=0)
    assert not torch.isclose(one, loss(decoder()), rtol=1e-4), "the adapters do something"
    one.backward()
    other.backward()
    for name, module in adapted_maps(apart):
        weight = merged.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor) and weight.grad is not None
        # W' = W + scale B A, so dB = scale dW' A^T and dA = scale B^T dW'.
        scale = CONFIG.alpha / CONFIG.rank
        torch.testing.assert_close(module.lora_b.grad, scale * weight.grad @ module.lora_a.T, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(module.lora_a.grad, scale * module.lora_b.T @ weight.grad, rtol=1e-8, atol=1e-12)


def test_decoding_with_adapters_gives_the_logits_of_the_merged_model() -> None:
    apart, merged = adapted(decoder()).eval(), adapted(decoder()).eval()
    merge_adapters(merged)
    greedy = SamplingConfig(max_new_tokens=6, temperature=0.0, seed=0)
    assert list(generate(apart, [1, 2, 3], greedy)) == list(generate(merged, [1, 2, 3], greedy))


@pytest.mark.filterwarnings("error")
def test_only_adapters_learn_and_they_go_to_adamw_without_decay() -> None:
    model = adapted(decoder(moe=MOE)).train()
    planned = plan_parameters(model)
    assert {entry.name.rsplit(".", 1)[-1] for entry in planned} == {"lora_a", "lora_b"}
    assert all(entry.layout == Adam() for entry in planned)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimization = build_optimization(model, OptimizerConfig(lr=0.1))
    assert isinstance(optimization.optimizer, MuonClip) and optimization.clip is None
    loss(model).backward()
    optimization.step()
    model.after_optimizer_step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {entry.name for entry in planned}, "weights, norms and routing stay"
    merge_adapters(model)
    loss(model).backward()
    model.after_optimizer_step()
    state = model.state_dict()
    moved = [name for name in state if name.endswith("correction_bias") and not torch.equal(state[name], before[name])]
    assert moved and all(parameter.requires_grad for parameter in model.parameters()), "merged, all may learn again"


def test_adapters_are_the_same_for_the_same_seed_and_lie_where_they_are_wanted() -> None:
    first, second = adapted(decoder(), moved=False), adapted(decoder(), moved=False)
    pairs = list(zip(adapted_maps(first), adapted_maps(second), strict=True))
    assert pairs and all(torch.equal(one.lora_a, other.lora_a) for (_, one), (_, other) in pairs)
    assert not any("lm_head" in name for (name, _), _ in pairs)
    some = decoder()
    add_adapters(some, LoraConfig(rank=2, targets=("*.o_proj",)), seed=0)
    assert {name.rsplit(".", 1)[-1] for name, _ in adapted_maps(some)} == {"o_proj"}


def test_adapters_written_apart_come_back_exactly(tmp_path: Path) -> None:
    model, fresh = adapted(decoder()), adapted(decoder(), moved=False)
    save_adapters(model, tmp_path / "adapters", CONFIG)
    load_adapters(fresh, tmp_path / "adapters")
    assert torch.equal(loss(model), loss(fresh))
    other = decoder()
    add_adapters(other, LoraConfig(rank=2), seed=0)
    with pytest.raises(ValueError, match="other adapters"):
        load_adapters(other, tmp_path / "adapters")
    with pytest.raises(ValueError, match="no adapters"):
        save_adapters(decoder(), tmp_path / "none", CONFIG)


def test_a_merged_map_keeps_its_dtype_and_bias() -> None:
    base = Linear(4, 5, bias=True)
    module = LoraLinear(base, 2, 0.5)
    with torch.no_grad():
        module.lora_a.fill_(0.25)
        module.lora_b.fill_(0.5)
    x, plain = torch.randn(3, 4), module.merged()
    torch.testing.assert_close(module(x), plain(x))
    assert type(plain) is Linear and plain.weight.dtype == torch.float32 and plain.bias is not None


@pytest.mark.parametrize(
    "wrong, words", [({"rank": -1}, "lora.rank"), ({"alpha": -1.0}, "lora.alpha"), ({"targets": ()}, "lora.targets")]
)
def test_wrong_settings_name_the_field(wrong: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoraConfig(**wrong)


def test_targets_that_name_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="names no map"):
        add_adapters(decoder(), LoraConfig(rank=1, targets=("*.nothing",)), seed=0)
