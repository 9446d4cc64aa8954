"""The tower on CUDA: as on the CPU in float32, and all items of a batch in one attention kernel in half precision."""

from dataclasses import replace

import pytest
import torch

from perilune.model import vision
from perilune.model.vision import SIZES, MoonViT3D
from tests.model.small_models import relative_error

MIXED = ((1, 4, 6), (4, 2, 4), (1, 2, 12), (1, 16, 16), (2, 8, 2), (1, 4, 6), (3, 10, 6))
PATCHES = sum(frames * height * width for frames, height, width in MIXED)


def tower_and_pixels(head_dim: int = 32) -> tuple[MoonViT3D, torch.Tensor]:
    torch.manual_seed(0)
    config = replace(SIZES["mini"], num_hidden_layers=2, hidden_size=4 * head_dim)
    return MoonViT3D(config), torch.randn(PATCHES, 3, 14, 14)


@pytest.mark.gpu
def test_features_and_gradients_on_cuda_equal_those_on_cpu() -> None:
    tower, pixels = tower_and_pixels()
    expected = tower(pixels, MIXED)
    expected.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in tower.named_parameters()}
    tower.zero_grad(set_to_none=True)
    found = tower.cuda()(pixels.cuda(), MIXED)
    found.square().sum().backward()
    assert relative_error(found.cpu(), expected) < 1e-5
    for name, parameter in tower.named_parameters():
        assert relative_error(parameter.grad.cpu(), gradients[name]) < 1e-3, name


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 72])
def test_one_kernel_for_all_lengths_equals_one_for_each(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tower, pixels = tower_and_pixels(head_dim)
    tower, pixels = tower.cuda(), pixels.cuda().bfloat16()
    results = []
    for several in (True, False):
        monkeypatch.setattr(vision, "takes_several_lengths", lambda x, dim, several=several: several)
        tower.zero_grad(set_to_none=True)
        features = tower(pixels, MIXED)
        features.float().square().sum().backward()
        results.append((features, [parameter.grad.clone() for parameter in tower.parameters()]))
    (together, ours), (apart, theirs) = results
    # Rounded to eight bits in another order, over two blocks.
    assert relative_error(together.float(), apart.float()) < 0.02
    assert relative_error(torch.cat([x.flatten() for x in ours]), torch.cat([x.flatten() for x in theirs])) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_host_never_waits_for_the_device(dtype: torch.dtype) -> None:
    tower, pixels = tower_and_pixels()
    tower, pixels = tower.cuda(), pixels.cuda().to(dtype)
    tower(pixels, MIXED).float().sum().backward()  # tables are made on the first use of a shape
    torch.cuda.set_sync_debug_mode("error")
    try:
        tower(pixels, MIXED).float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
