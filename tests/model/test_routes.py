"""Experts recorded and taken again: against the definition in float64, in packed rows, in every kind of forward."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from perilune.model import Decoder, MixtureOfExperts, MoEConfig
from perilune.model.deterministic import TILE
from perilune.model.routes import Recorded, Replayed, bytes_per_token, new_book, num_expert_layers
from tests.model.small_models import BASE, MOE, build, random_tokens, relative_error

CONFIG = replace(BASE, moe=replace(MOE, num_experts=8))


def experts_layer(config: MoEConfig) -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(16, config).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def written_out(layer: MixtureOfExperts, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert: the given experts, weighed by the scores of this router."""
    config, rows = layer.config, []
    for token, chosen in zip(x.flatten(0, 1), given, strict=True):
        scores = torch.sigmoid(layer.gate.weight @ token)
        total = scores[chosen].sum() + 1e-20 if config.moe_renormalize else 1.0
        y = layer.shared_experts(token) if layer.shared_experts is not None else torch.zeros_like(token)
        for expert in chosen:
            gate, up = (layer.experts.gate_up_proj[expert] @ token).chunk(2)
            weight = config.routed_scaling_factor * scores[expert] / total
            y = y + weight * (layer.experts.down_proj[expert] @ (F.silu(gate) * up))
        rows.append(y)
    return torch.stack(rows).view_as(x)


def random_routes(config, num_tokens: int, seed: int = 0) -> torch.Tensor:
    """[layers, tokens, k], each token's experts all different."""
    book = new_book(config, num_tokens)
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(*book.shape[:2], config.moe.num_experts, generator=generator).argsort(-1)
    return order[..., : book.shape[2]].to(book.dtype)


def recorded(model: Decoder, tokens: torch.Tensor, **packing) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden states, book) of one plain forward."""
    book = new_book(model.config, tokens.numel())
    routes = Recorded(book=book, rows=torch.arange(tokens.numel()))
    with torch.no_grad():
        return model.hidden(tokens, routes=routes, **packing), book


@pytest.mark.parametrize("config", [MOE, replace(MOE, moe_renormalize=False, num_shared_experts=0)])
def test_replay_equals_the_definition_with_gradients_through_the_scores_of_the_given_experts(config) -> None:
    layer = experts_layer(config)
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    given = torch.rand(10, 4).argsort(-1)[:, :2]
    assert (given.sort().values != layer.gate(x.flatten(0, 1))[1].sort().values).any()  # it would choose otherwise
    routes = Replayed(book=given.to(torch.uint8))
    ours = torch.autograd.grad(layer(x, routes).square().sum(), [x, *layer.parameters()])
    theirs = torch.autograd.grad(written_out(layer, x, given).square().sum(), [x, *layer.parameters()])
    assert ours[1].abs().max() > 0  # the router learns
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b) < 1e-11


def test_replayed_experts_are_counted_as_load_once_also_when_computed_again() -> None:
    layer = experts_layer(MOE)
    x = torch.randn(1, 6, 16, dtype=torch.float64, requires_grad=True)
    routes = Replayed(book=torch.tensor([[0, 3]] * 6))
    checkpoint(layer, x, routes, use_reentrant=False).sum().backward()
    assert layer.gate.counts.tolist() == [6, 0, 0, 6]


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_a_forward_recorded_gives_the_same_hidden_states_when_its_biases_have_moved(deterministic: bool) -> None:
    model = build(CONFIG).eval()
    model.deterministic = deterministic
    tokens = random_tokens(model, 1, 2 * TILE + 7)
    hidden, book = recorded(model, tokens)
    with torch.no_grad():
        for layer in model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias += torch.linspace(1.0, 0.0, 8)  # selects, never weighs
        replayed = model.hidden(tokens, routes=Replayed(book=book))
        assert torch.equal(replayed, hidden)
        assert relative_error(model.hidden(tokens), hidden) > 0.05


@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_documents_are_recorded_and_replayed_as_if_alone(deterministic: bool) -> None:
    model = build(CONFIG).eval()
    model.deterministic = deterministic
    parts = [random_tokens(model, 1, length, seed=length) for length in (9, TILE + 3, 1)]
    books = [recorded(model, part)[1] for part in parts]
    borders = torch.tensor([0, 9, TILE + 12, TILE + 13], dtype=torch.int32)
    packed, book = recorded(model, torch.cat(parts, dim=1), cu_seqlens=borders)
    assert torch.equal(book, torch.cat(books, dim=1))
    given = [random_routes(CONFIG, part.shape[1], seed=n) for n, part in enumerate(parts)]
    with torch.no_grad():
        alone = [model.hidden(part, routes=Replayed(book=own)) for part, own in zip(parts, given)]
        routes = Replayed(book=torch.cat(given, dim=1))
        together = model.hidden(torch.cat(parts, dim=1), cu_seqlens=borders, routes=routes)
    assert relative_error(together, torch.cat(alone, dim=1)) < 1e-10
    assert relative_error(together, packed) > 0.05


def test_deterministic_and_usual_forward_agree_on_replayed_routes() -> None:
    model = build(CONFIG).eval()
    tokens, book = random_tokens(model, 1, TILE + 5), random_routes(CONFIG, TILE + 5)
    with torch.no_grad():
        usual = model.hidden(tokens, routes=Replayed(book=book))
        model.deterministic = True
        assert relative_error(model.hidden(tokens, routes=Replayed(book=book)), usual) < 1e-10


def test_a_book_is_as_narrow_as_its_experts_allow() -> None:
    wide = replace(CONFIG, moe=replace(MOE, num_experts=300))
    assert new_book(CONFIG, 3).dtype == torch.uint8 and new_book(wide, 3).dtype == torch.int16
    assert num_expert_layers(CONFIG) == 3
    assert (bytes_per_token(CONFIG), bytes_per_token(wide), bytes_per_token(BASE)) == (6, 12, 0)


def test_a_book_of_another_shape_is_refused() -> None:
    model, tokens = build(CONFIG), torch.zeros(1, 4, dtype=torch.long)
    for book in (new_book(CONFIG, 5), new_book(CONFIG, 4)[1:], new_book(CONFIG, 4)[..., :1]):
        with pytest.raises(ValueError, match="expected 3 layers of experts, 4 tokens and 2 experts per token"):
            model.hidden(tokens, routes=Replayed(book=book))
    with pytest.raises(ValueError, match="dense"):
        new_book(BASE, 4)
