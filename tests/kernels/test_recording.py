"""Recordings of CUDA graphs in a process that goes on working."""

import gc

import pytest
import torch

from perilune.kernels.recording import no_collection, recording


def test_no_garbage_is_collected_inside_and_all_is_as_before_after_it() -> None:
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            pass
        assert not gc.isenabled()  # the outer one is not over
    assert gc.isenabled()
    with pytest.raises(ValueError, match="broke"), no_collection():
        raise ValueError("broke")
    assert gc.isenabled()


def test_who_collects_no_garbage_at_all_is_left_with_it() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.gpu
def test_an_old_graph_among_the_garbage_breaks_no_recording() -> None:
    """Graphs in cycles, and steps with enough objects for Python to collect many times over."""
    device = torch.device("cuda", torch.cuda.current_device())

    class Cycle:
        def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
            self.graph, self.itself = graph, self

    def recorded() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with recording(graph, device):
            torch.zeros(1, device=device)
            assert len([[number] for number in range(100_000)]) == 100_000
        return graph

    for _ in range(3):
        Cycle(recorded())
    recorded().replay()
    torch.cuda.synchronize()
