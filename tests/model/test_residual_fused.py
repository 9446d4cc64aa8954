"""The fused residual path in a whole network, in Triton's interpreter: the same numbers as the plain torch path."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import perilune.kernels.norm
import perilune.model.residual
from perilune.model import Decoder
from perilune.model.linear import Linear, RMSNorm
from perilune.model.residual import AttentionResidual, Stream, attnres_stream, plain_stream
from tests.model.small_models import BASE, build, random_tokens, relative_error

# The same float32 operations, which a compiler may only contract.
RTOL = 1e-5


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to have streams opened from then on take the kernels, which on CPU they do only in tests."""

    def switch() -> None:
        monkeypatch.setattr(perilune.model.residual, "fused_block_takes", lambda source, num_sources: True)
        monkeypatch.setattr(perilune.model.residual.attnres_stream, "__kwdefaults__", {"fused": True})
        monkeypatch.setattr(perilune.kernels.norm, "takes_triton", lambda x, backend=None: True)
        monkeypatch.setattr(perilune.model.residual, "takes_triton", lambda x, backend=None: True)

    return switch


@pytest.mark.parametrize("residual, block", [("plain", 1), ("attnres", 1), ("block_attnres", 2), ("block_attnres", 3)])
def test_fused_decoder_is_as_close_to_float64_as_the_plain_torch_path(
    fused: Callable[[], None], residual: str, block: int
) -> None:
    config = replace(BASE, num_hidden_layers=2, residual=residual, block_sublayers=block)
    tokens = random_tokens(build(config), 1, 5)

    def loss_and_gradients(dtype: torch.dtype) -> list[Tensor]:
        model = build(config).to(dtype)
        model.set_compute_dtype("float64" if dtype == torch.float64 else "float32")
        loss = model.loss(tokens, tokens.roll(1, dims=1))
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    exact, torch_path = loss_and_gradients(torch.float64), loss_and_gradients(torch.float32)
    fused()

    def error(results: list[Tensor]) -> float:
        relative = [relative_error(mine, right) for mine, right in zip(results, exact, strict=True) if right.any()]
        return sum(x**2 for x in relative) ** 0.5

    # Both are float32 roundings of the same numbers in another order: equal errors up to luck.
    assert error(loss_and_gradients(torch.float32)) <= 3 * error(torch_path)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps=1e-5)
        self.linear = Linear(width, width)

    def forward(self, stream: Stream) -> Stream:
        h, stream = stream.read(self.norm)
        return stream.write(torch.tanh(self.linear(h)))


def network(width: int = 8, layers: int = 3) -> tuple[nn.ModuleList, RMSNorm, list[AttentionResidual]]:
    torch.manual_seed(0)
    sites = [AttentionResidual(width, eps=1e-5) for _ in range(layers + 1)]
    for site in sites:
        nn.init.normal_(site.query)
    return nn.ModuleList(Layer(width) for _ in range(layers)), RMSNorm(width, eps=1e-5), sites


@pytest.mark.parametrize("whole", [True, False], ids=["one_graph", "a_graph_per_layer"])
def test_fused_stream_compiles_without_a_break_also_layer_by_layer(fused: Callable[[], None], whole: bool) -> None:
    fused()
    layers, norm, sites = network()
    parameters = [*layers.parameters(), *norm.parameters(), *(p for site in sites for p in site.parameters())]
    embedding = torch.randn(3, 8)

    def run(calls: list[Callable[[Stream], Stream]]) -> Tensor:
        stream = attnres_stream(embedding, sites, block_sublayers=2)
        for call in calls:
            stream = call(stream)
        return stream.read(norm)[0]

    expected = run(list(layers))
    if whole:
        output = torch.compile(run, fullgraph=True, backend="aot_eager")(list(layers))
    else:
        output = run([torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in layers])
    assert relative_error(output, expected) < RTOL
    ours = torch.autograd.grad(output.square().sum(), parameters)
    for mine, right in zip(ours, torch.autograd.grad(expected.square().sum(), parameters), strict=True):
        assert (mine - right).norm() <= RTOL * max(1.0, right.norm())


def test_fused_stream_is_read_through_a_norm_only(fused: Callable[[], None]) -> None:
    fused()
    with pytest.raises(ValueError, match="norm"):
        plain_stream(torch.zeros(2, 4)).read()


def test_frozen_embedding_and_no_grad_give_the_same_values(fused: Callable[[], None]) -> None:
    fused()
    config = replace(BASE, num_hidden_layers=3, residual="block_attnres", block_sublayers=2, compute_dtype="float32")
    model: Decoder = build(config).float()
    tokens = random_tokens(model, 1, 4)
    expected = model(tokens)
    model.requires_grad_(False)
    assert torch.equal(model(tokens), expected)
    with torch.no_grad():
        assert torch.equal(model(tokens), expected)
