"""oneDNN's products in training: as exact as MKL's, only where they are, and the switch is left as it was found."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.kernels import cpu_products
from perilune.kernels.cpu_products import fast_products


def precision() -> str:
    """Of torch itself, which refuses to tell when its switches contradict one another."""
    return torch.get_float32_matmul_precision()


def settings() -> tuple[str, ...]:
    return precision(), *settings_of_backends()


def settings_of_backends() -> tuple[str, str]:
    return torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a processor where oneDNN is ahead, and exact."""
    monkeypatch.setattr(cpu_products, "onednn_is_ahead", lambda: True)
    before = settings()
    yield
    assert settings() == before


def test_products_have_float32s_rounding_wherever_they_are_taken() -> None:
    if not cpu_products.onednn_is_ahead():
        with fast_products("cpu"):
            assert precision() == "highest"  # left alone: nothing else to see on this processor
    generator = torch.Generator().manual_seed(0)
    for m, k, n in ((7, 64, 33), (300, 256, 704), (1024, 704, 256)):
        a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
        a.requires_grad_(), b.requires_grad_()
        with fast_products("cpu"):
            product = a @ b
            product.backward(torch.ones_like(product))
        exact = a.detach().double() @ b.detach().double()
        ones = torch.ones(m, n, dtype=torch.float64)
        for found, wanted in (
            (product.detach(), exact), (a.grad, ones @ b.detach().double().T), (b.grad, a.detach().double().T @ ones),
        ):  # fmt: skip
            # A sum of k products rounds by at most k/2 epsilons of the sum of their sizes; bfloat16 by 2^-9 of each.
            assert found is not None
            error = (found.double() - wanted).norm() / wanted.norm()
            assert error < max(m, k, n) ** 0.5 * torch.finfo(torch.float32).eps * 4


def test_rounding_to_bfloat16_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.matmul
    assert cpu_products._is_exact()
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: exact(a.bfloat16().float(), b.bfloat16().float()))
    assert not cpu_products._is_exact()


def test_batched_products_that_round_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: exact(a.bfloat16().float(), b.bfloat16().float()))
    assert not cpu_products._is_exact()


@pytest.mark.usefixtures("switched")
def test_products_are_left_alone_elsewhere_and_where_bits_matter() -> None:
    for device, bits_matter in (("cuda", False), ("meta", False), ("cpu", True)):
        before = precision()
        with fast_products(device, bits_matter=bits_matter):
            assert precision() == before
    with fast_products(torch.device("cpu")):
        assert precision() == "medium"


@pytest.mark.usefixtures("switched")
def test_products_are_left_alone_where_what_was_set_cannot_be_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            precision()
        with fast_products("cpu"):
            assert settings_of_backends() == ("bf16", "none")
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with fast_products("cpu"):
        assert precision() == "highest"


@pytest.mark.usefixtures("switched")
def test_what_was_asked_for_before_comes_back() -> None:
    try:
        torch.set_float32_matmul_precision("high")
        before = settings()
        with fast_products("cpu"):
            assert precision() == "medium"
        assert settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.usefixtures("switched")
def test_an_exception_leaves_the_switch_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), fast_products("cpu"):
        raise ZeroDivisionError


def test_a_torch_without_the_switch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def missing() -> Iterator[None]:
        raise AttributeError("fp32_precision")
        yield

    monkeypatch.setattr(cpu_products, "by_onednn", missing)
    assert not cpu_products._is_exact()


@pytest.mark.usefixtures("switched")
@given(st.lists(st.sampled_from(["in", "out"]), max_size=24))
def test_the_switch_is_on_while_anybody_wants_it(steps: list[str]) -> None:
    before, entered = precision(), list[AbstractContextManager[None]]()
    for step in steps:
        if step == "in":
            entered.append(context := fast_products("cpu"))
            context.__enter__()
        elif entered:
            entered.pop(0).__exit__(None, None, None)  # those who came first leave first, as threads do
        assert precision() == ("medium" if entered else before)
    for context in entered:
        context.__exit__(None, None, None)
    assert precision() == before


@pytest.mark.usefixtures("switched")
def test_threads_side_by_side_leave_the_switch_as_it_was() -> None:
    begin, seen = threading.Barrier(4), list[str]()

    def work() -> None:
        begin.wait()
        for _ in range(200):
            with fast_products("cpu"):
                seen.append(precision())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["medium"] * 800
