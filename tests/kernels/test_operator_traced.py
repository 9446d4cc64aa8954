"""Eager calls go around the dispatcher, unless somebody watches what operators do."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from perilune.kernels.operator import is_traced, operator

calls = []


def forward(x: Tensor) -> Tensor:
    calls.append("forward")
    assert x.data_ptr()  # as a kernel needs it; a fake tensor has none
    return x * 2


def backward(dy: Tensor) -> Tensor:
    calls.append("backward")
    return dy * 2


double = operator(
    "test_double",
    forward=forward,
    backward=backward,
    fake_forward=torch.empty_like,
    fake_backward=torch.empty_like,
    save=lambda ctx, inputs, output: None,
    gradients=lambda ctx, backward, dy: backward(dy),
)


def test_fake_tensors_run_no_kernel():
    calls.clear()
    with FakeTensorMode() as mode:
        assert double(torch.randn(3)).shape == (3,)
    fake = mode.from_tensor(torch.randn(3))
    assert double(fake).shape == (3,)
    assert calls == []


def test_a_recorded_graph_holds_the_operator():
    graph = make_fx(lambda x: double(x) + 1)(torch.randn(3))
    assert "test_double" in graph.code
    x = torch.randn(3)
    assert torch.equal(graph(x), x * 2 + 1)


def test_plain_calls_and_parameters_are_not_traced():
    calls.clear()
    x = torch.nn.Parameter(torch.randn(3))
    assert not is_traced(x, None, 3, x.detach())
    double(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0)) and calls == ["forward", "backward"]
