"""The residual path of a decoding step on CUDA, in Triton's interpreter: what the usual one gives, read by read."""

from dataclasses import replace

import pytest
import torch

import perilune.model.decode_stream
from perilune.kernels.attnres import few_rows
from perilune.model.decode_stream import decode_stream
from perilune.model.linear import RMSNorm
from perilune.model.residual import AttentionResidual, attnres_stream
from tests.model.paged_sequences import Pool
from tests.model.small_models import BASE, build, random_tokens


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the kernel, which on a CPU only tests do."""
    monkeypatch.setattr(perilune.model.decode_stream, "fused_block_takes", lambda source, num_sources: True)


@pytest.mark.parametrize("sublayers, block", [(4, 2), (6, 4), (5, 3), (2, 4), (3, 1), (20, 18), (15, 15)])
def test_reads_and_writes_are_those_of_the_usual_stream(on_cpu: None, sublayers: int, block: int) -> None:
    width, generator = 16, torch.Generator().manual_seed(sublayers)
    sites = [AttentionResidual(width, eps=1e-5) for _ in range(sublayers + 1)]
    norms = [RMSNorm(width, eps=1e-5) for _ in sites]
    embedding, *outputs = torch.randn(sublayers + 1, 1, 3, width, generator=generator)
    with torch.no_grad():
        for site in sites:
            site.query.normal_(generator=generator)
            site.gain.uniform_(0.5, 2.0, generator=generator)
        usual = attnres_stream(embedding, sites, block_sublayers=block, fused=False)
        few = decode_stream(embedding, sites, block_sublayers=block)
        assert few is not None
        for number, norm in enumerate(norms):
            right, usual = usual.read(norm)
            found, few = few.read(norm)
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
            if number < sublayers:
                usual, few = usual.write(outputs[number]), few.write(outputs[number])


def test_a_step_of_decodes_takes_it_and_gives_the_same_states(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(BASE, residual="block_attnres", block_sublayers=4, compute_dtype="float32")
    model = build(config).float().eval()
    for site in model._sites:
        torch.nn.init.normal_(site.query, std=0.3)
    prompts = [tuple(random_tokens(model, length, seed=length).tolist()) for length in (6, 9)]

    def states() -> torch.Tensor:
        pool = Pool.of(model, prompts, page_size=4, seed=0)
        model.step(pool.batch([pool.take(sequence, 5) for sequence in pool.sequences]), pool.cache)
        return model.step(pool.batch([pool.take(sequence, 1) for sequence in pool.sequences]), pool.cache)

    reads = []

    def counted(name: str) -> None:
        read = getattr(few_rows, name)
        monkeypatch.setattr(few_rows, name, lambda *args, **more: (reads.append(name), read(*args, **more))[1])

    counted("open_few_rows")
    counted("merge_few_rows")
    with torch.no_grad():
        found = states()
        # One launch each, and of the decodes alone: chunks take the two phases of training.
        assert reads == [*(["open_few_rows"] + ["merge_few_rows"] * 3) * 2, "merge_few_rows"]
        monkeypatch.setattr(perilune.model.decode_stream, "fused_block_takes", lambda source, num_sources: False)
        right = states()
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_training_and_many_tokens_keep_the_usual_stream(on_cpu: None) -> None:
    sites = [AttentionResidual(8) for _ in range(5)]
    assert decode_stream(torch.zeros(1, 2, 8), sites, block_sublayers=2) is None  # gradients are wanted
    with torch.no_grad():
        assert decode_stream(torch.zeros(1, 2, 8), sites, block_sublayers=2) is not None
        assert decode_stream(torch.zeros(1, 600, 8), sites, block_sublayers=2) is None
