"""Launches of CUDA sources against a driver that is none."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from perilune.kernels import cuda_source

DEVICE = torch.device("cuda", 1)


class Driver:
    """Fails as the driver does where no device is current, or another one, and as it was told to."""

    def __init__(self, current: int | None, error: int = 0) -> None:
        self.current, self.error, self.launches = current, error, []

    def cuCtxGetCurrent(self, context) -> int:
        context._obj.value = None if self.current is None else 1000 + self.current
        return 0

    def cuDevicePrimaryCtxRetain(self, context, ordinal: int) -> int:
        context._obj.value = 1000 + ordinal
        return 0

    def cuCtxSetCurrent(self, context) -> int:
        self.current = context.value - 1000
        return 0

    def cuLaunchKernel(self, *given) -> int:
        if self.current is None:
            return cuda_source.NO_CONTEXT
        if self.current != DEVICE.index:
            return cuda_source.OTHER_CONTEXT
        *plain, extra = given
        size = ctypes.c_size_t.from_address(extra[3]).value  # of arguments that live as long as the call
        self.launches.append((*plain, ctypes.string_at(extra[1], size)))
        return self.error

    def cuGetErrorName(self, error: int, name) -> int:
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.fixture
def driver_with(monkeypatch):
    def install(current: int | None, error: int = 0) -> Driver:
        driver = Driver(current, error)

        class Device:
            """torch.cuda.device, which leaves a thread without context if it is the device that torch has in mind."""

            def __init__(self, device: torch.device) -> None:
                self.index = device.index

            def __enter__(self) -> None:
                self.before = driver.current
                if driver.current is not None:
                    driver.current = self.index

            def __exit__(self, *_) -> None:
                if self.before is not None:
                    driver.current = self.before

        monkeypatch.setattr(cuda_source, "driver", lambda: driver)
        monkeypatch.setattr(torch.cuda, "device", Device)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
        return driver

    return install


@pytest.mark.parametrize("current", [None, 0, 1])
def test_a_launch_reaches_its_device_from_any_thread_and_beside_any_other_device(driver_with, current):
    driver = driver_with(current)
    cuda_source.start("function", 5, 128, 1024, DEVICE, b"12345678")
    ((function, programs, _, _, threads, _, _, shared_memory, stream, _, arguments),) = driver.launches
    assert (function, programs, threads, shared_memory, stream.value) == ("function", 5, 128, 1024, 7)
    assert arguments == b"12345678"
    assert driver.current == (1 if current is None else current)


def test_a_launch_that_fails_says_how(driver_with):
    driver_with(1, error=1)
    with pytest.raises(RuntimeError, match="error 1 .* CUDA_ERROR_INVALID_VALUE"):
        cuda_source.start("function", 5, 128, 1024, DEVICE, b"12345678")
