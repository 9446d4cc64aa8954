"""Attention of a run of queries after cached keys: both paths against the definition."""

import pytest
import torch

from perilune.kernels.attention import attention
from perilune.kernels.attention.continued import (
    attention_in_pieces,
    attention_of_runs,
    continued_attention,
    takes_runs,
)


def inputs(queries: int, keys: int, *, device: str = "cpu", dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    shapes = ((1, queries, 3, 24), (1, keys, 3, 24), (1, keys, 3, 16))
    return (torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes)


@pytest.mark.parametrize("backend", ["plain", "tiled", None])
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 40), (7, 40), (40, 40), (130, 300)])
def test_every_path_computes_the_definition(queries: int, keys: int, backend: str | None) -> None:
    q, k, v = inputs(queries, keys)
    right, _, _ = attention(q, k, v, scale=0.3, backend="reference")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = continued_attention(q, k, v, scale=0.3, backend=backend)
        torch.testing.assert_close(found.clone(), right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("piece", [1, 7, 16, 300])
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 40), (7, 40), (40, 40), (33, 48), (130, 300)])
def test_keys_in_pieces_give_what_all_of_them_give(queries: int, keys: int, piece: int) -> None:
    q, k, v = inputs(queries, keys)
    right, _, _ = attention(q, k, v, scale=0.3, backend="reference")
    asked: list[tuple[int, int]] = []

    def piece_of(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append((start, stop))
        return k[:, start:stop], v[:, start:stop]

    found = attention_in_pieces(q, keys, piece_of, scale=0.3, piece=piece)
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
    assert sorted(place for start, stop in asked for place in range(start, stop)) == list(range(keys))
    assert max(stop - start for start, stop in asked) < piece + max(queries, 1)


def test_logits_far_apart_leave_no_nan_between_pieces() -> None:
    q, k, v = inputs(5, 60)
    k[:, 20:40] *= 1e4  # one piece has all the weight of some queries and none of others
    right, _, _ = attention(q, k, v, scale=1.0, backend="reference")
    found = attention_in_pieces(q, 60, lambda start, stop: (k[:, start:stop], v[:, start:stop]), scale=1.0, piece=10)
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, width, value_width", [(3, 24, 16), (4, 192, 128)])
@pytest.mark.parametrize("queries, keys, piece", [(7, 300, 64), (700, 5000, 1024), (1024, 4096, 1024)])
def test_pieces_on_cuda_stay_near_the_definition(
    queries: int, keys: int, piece: int, heads: int, width: int, value_width: int
) -> None:
    shapes = ((1, queries, heads, width), (1, keys, heads, width), (1, keys, heads, value_width))
    q, k, v = (torch.randn(shape, device="cuda").to(torch.bfloat16) for shape in shapes)
    scale = width**-0.5
    right, _, _ = attention(q.double(), k.double(), v.double(), scale=scale, backend="reference")
    for backend in (None, "flash", "plain"):
        found = attention_in_pieces(
            q, keys, lambda start, stop: (k[:, start:stop], v[:, start:stop]), scale=scale, piece=piece, backend=backend
        )
        # Weights, and the outputs of pieces, are rounded to 8 bits.
        assert (found.double() - right).norm() < 1e-2 * right.norm(), backend


@pytest.mark.gpu
@pytest.mark.parametrize("queries, keys", [(1, 40), (7, 40), (130, 300), (64, 4096)])
def test_half_precision_on_cuda_stays_near_the_definition(queries: int, keys: int) -> None:
    q, k, v = inputs(queries, keys, device="cuda", dtype=torch.bfloat16)
    right, _, _ = attention(q.double(), k.double(), v.double(), scale=0.3, backend="reference")
    found = continued_attention(q, k, v, scale=0.3)
    # Weights and outputs are rounded to 8 bits.
    assert (found.double() - right).norm() < 1e-2 * right.norm()


def test_more_queries_than_keys_are_refused() -> None:
    q, k, v = inputs(5, 4)
    with pytest.raises(ValueError, match="no more queries than keys"):
        continued_attention(q, k, v, scale=1.0)


def test_flash_attention_on_a_cpu_is_refused_with_the_reason() -> None:
    q, k, v = inputs(4, 5)
    with pytest.raises(ValueError, match="half precision"):
        continued_attention(q, k, v, scale=1.0, backend="flash")


RUNS = ((3, 3), (1, 9), (130, 300), (64, 64), (2, 40))
"""Queries and keys of each."""


def joined(runs: tuple[tuple[int, int], ...], *tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], dict]:
    counts = torch.tensor([(0, 0), *runs], device=tensors[0][0].device).cumsum(0).int()
    most_queries, most_keys = (max(each) for each in zip(*runs, strict=True))
    options = {"query_borders": counts[:, 0].contiguous(), "key_borders": counts[:, 1].contiguous()}
    return [torch.cat(parts, dim=1)[0] for parts in tensors], {
        **options, "most_queries": most_queries, "most_keys": most_keys, "scale": 0.3
    }  # fmt: skip


def test_runs_side_by_side_are_the_runs_one_by_one() -> None:
    q, k, v = map(list, zip(*(inputs(*run) for run in RUNS), strict=True))
    right = [attention(*run, scale=0.3, backend="reference")[0][0] for run in zip(q, k, v, strict=True)]
    together, options = joined(RUNS, q, k, v)
    torch.testing.assert_close(attention_of_runs(*together, **options), torch.cat(right), rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
def test_runs_side_by_side_on_cuda_stay_near_the_definition() -> None:
    q, k, _ = map(list, zip(*(inputs(*run, device="cuda", dtype=torch.bfloat16) for run in RUNS), strict=True))
    v = [torch.randn_like(keys) for keys in k]  # flash takes one width only
    assert takes_runs(q[0], v[0].shape[-1]) and not takes_runs(q[0], 16)
    (q_T, k_S, v_S), options = joined(RUNS, q, k, v)
    wide = torch.cat([torch.randn_like(v_S[..., :8]), v_S], dim=-1)  # values are the end of wider rows in MLA
    found = attention_of_runs(q_T, k_S, wide[..., 8:], **options).split([queries for queries, _ in RUNS])
    for run, o in zip(zip(q, k, v, strict=True), found, strict=True):
        right, _, _ = attention(*(x.double() for x in run), scale=0.3, backend="reference")
        assert (o.double() - right[0]).norm() < 1e-2 * right.norm()


PADDED_RUNS = ((3, 3), (0, 0), (70, 90), (0, 0), (40, 0))
"""Empty runs, and at the end queries without keys, as padded steps have them."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_empty_runs_and_runs_without_keys_leave_the_others_as_they_are(device: str) -> None:
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    q, k, _ = map(list, zip(*(inputs(*run, device=device, dtype=dtype) for run in PADDED_RUNS), strict=True))
    v = [torch.randn_like(keys) for keys in k]
    together, options = joined(PADDED_RUNS, q, k, v)
    # Keys behind the last border, and more room than a run needs.
    together[1:] = [torch.cat([each, torch.full_like(each[:5], 1e4)]) for each in together[1:]]
    options |= {"most_queries": 128, "most_keys": 256}
    found = attention_of_runs(*together, **options).split([queries for queries, _ in PADDED_RUNS])
    for run, o in zip(zip(q, k, v, strict=True), found, strict=True):
        if run[1].shape[1]:
            right, _, _ = attention(*(x.double() for x in run), scale=0.3, backend="reference")
            assert (o.double() - right[0]).norm() < (1e-10 if device == "cpu" else 1e-2) * right.norm()
        else:
            assert not o.any()
