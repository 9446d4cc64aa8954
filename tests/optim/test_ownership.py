"""The plan of who orthogonalises what: balanced, bounded in traffic, the same everywhere; and its routes deliver."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from perilune.optim import ColumnBlocks, Layout, RowBlocks, Stacked, Whole
from perilune.optim.bucket_step import run_buckets
from perilune.optim.exchange import pack, route_bucket, unpack
from perilune.optim.matrices import blocks
from perilune.optim.ownership import (
    PlacedParameter,
    assign_owners,
    max_over_mean,
    newton_schulz_flops,
    plan_buckets,
    plan_ownership,
)
from perilune.optim.ownership_report import describe_plans, format_plans, place
from perilune.optim.published_shapes import ParameterShape, k2_shapes, moonlight_shapes
from perilune.optim.shards import Box, as_matrix, chunk_boxes, cut, matrix_boxes, num_elements, whole_box

LISTS = {"moonlight": moonlight_shapes, "k2": k2_shapes}
EMBEDDINGS = {"moonlight": 2 * 163840 * 2048, "k2": 2 * 163840 * 7168}


@pytest.mark.parametrize("name,billions", [("moonlight", 15.96), ("k2", 1026.4)])
def test_shape_lists_have_the_published_number_of_parameters(name, billions):
    count = sum(math.prod(entry.shape) for entry in LISTS[name]()) + EMBEDDINGS[name]
    assert round(count / 1e9, 2) == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize(
    "name,world,placement",
    [
        *(("moonlight", world, each) for world in (8, 24, 64, 96, 256) for each in ("replicated", "rows")),
        *(("k2", 8, "rows"), ("k2", 64, "replicated"), ("k2", 256, "replicated")),
    ],
)
def test_work_and_state_of_the_fullest_rank_are_within_15_percent_of_the_mean(name, world, placement):
    ownership = plan_ownership(place(LISTS[name](), world, placement), per_head=False)
    state = ownership.owned_elements() if placement == "replicated" else ownership.held_elements()
    assert max_over_mean(ownership.loads()) <= 1.15
    assert max_over_mean(state) <= 1.15
    assert sum(state) == sum(math.prod(entry.shape) for entry in LISTS[name]())


def test_the_report_of_k2_on_256_ranks_states_balance_and_traffic():
    (rows,) = describe_plans(k2_shapes(), world=256, placements=["rows"])
    assert rows.load_balance <= 1.15 and rows.state_balance <= 1.15
    parameter_bytes = 2 * rows.num_elements
    assert 256 * rows.mean_sent_bytes <= 2 * parameter_bytes * 255 / 256
    assert rows.max_sent_bytes <= 1.15 * rows.mean_sent_bytes
    table = format_plans([rows])
    assert "69,668" in table and f"{rows.load_balance:.3f}" in table and len(table.splitlines()) == 3


def test_whole_experts_do_not_travel():
    shapes = [ParameterShape(name="experts", shape=(8, 6, 5), layout=Stacked(row_sizes=(3, 3)))]
    ownership = plan_ownership(place(shapes, 4, "experts"), per_head=False)
    assert {matrix.kind for matrix in ownership.matrices} == {"home"}
    assert [matrix.owner for matrix in ownership.matrices] == [rank for rank in range(4) for _ in range(4)]


def test_head_blocks_that_are_whole_on_their_rank_do_not_travel_and_others_do():
    boxes = chunk_boxes((16, 7), 4)
    heads = PlacedParameter(name="q", shape=(16, 7), layout=RowBlocks((2,) * 8), boxes=boxes)
    assert {matrix.kind for matrix in plan_ownership([heads], per_head=True).matrices} == {"home"}
    assert {matrix.kind for matrix in plan_ownership([heads], per_head=False).matrices} == {"exchanged"}


def test_boxes_that_neither_tile_nor_repeat_are_refused_by_name():
    boxes = (((0, 3), (0, 2)), ((2, 4), (0, 2)))
    with pytest.raises(ValueError, match="'w' with shape"):
        plan_ownership([PlacedParameter(name="w", shape=(4, 2), layout=Whole(), boxes=boxes)], per_head=False)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60), st.integers(1, 9))
def test_without_restrictions_no_rank_exceeds_the_mean_by_more_than_one_matrix(costs, world):
    owners = assign_owners([float(cost) for cost in costs], [None] * len(costs), world)
    loads = [sum(cost for cost, owner in zip(costs, owners) if owner == rank) for rank in range(world)]
    assert max(loads) <= sum(costs) / world + max(costs)


def test_a_square_matrix_costs_thirty_cubes():
    assert newton_schulz_flops(10, 10) == 5 * 6 * 1000
    assert newton_schulz_flops(3, 8) == newton_schulz_flops(8, 3)


# ---------------------------------------------------------------------------------------------------------------------
# Any placement

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def layouts(draw) -> tuple[tuple[int, ...], Layout]:
    kind = draw(st.sampled_from(["whole", "rows", "fused", "columns", "stack", "gate_up"]))
    cuts, width = draw(sizes), draw(st.integers(1, 6))
    if kind == "whole":
        return (sum(cuts), width), Whole()
    if kind in ("rows", "fused"):
        return (sum(cuts), width), RowBlocks(cuts, fused=kind == "fused")
    if kind == "columns":
        return (width, sum(cuts)), ColumnBlocks(cuts)
    experts = draw(st.integers(1, 5))
    return (experts, sum(cuts), width), Stacked(row_sizes=cuts if kind == "gate_up" else ())


@st.composite
def placed_parameters(draw) -> tuple[list[PlacedParameter], bool]:
    """Sharded, replicated or both (HSDP, tensor times data parallel), on up to six ranks."""
    replicas, shards = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    world = replicas * shards
    parameters = []
    for number in range(draw(st.integers(1, 4))):
        shape, layout = draw(layouts())
        dim = draw(st.integers(0, len(shape) - 1))
        placement = draw(st.sampled_from(["flat", "hybrid", "replicated"]))
        boxes: tuple[Box, ...] = {
            "flat": chunk_boxes(shape, world, dim),
            "hybrid": chunk_boxes(shape, shards, dim) * replicas,
            "replicated": (whole_box(shape),) * world,
        }[placement]
        parameters.append(PlacedParameter(name=f"p{number}", shape=shape, layout=layout, boxes=boxes))
    return parameters, draw(st.booleans())


@given(layouts(), st.booleans())
def test_boxes_name_the_same_matrices_as_the_layout(case, per_head):
    shape, layout = case
    tensor = torch.arange(math.prod(shape)).view(shape)
    expected = list(blocks(tensor, layout, per_head=per_head))
    found = [as_matrix(cut(tensor, box, whole_box(shape))) for box in matrix_boxes(shape, layout, per_head=per_head)]
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


@settings(max_examples=200)
@given(placed_parameters(), st.integers(1, 60))
def test_buckets_hold_every_matrix_once_and_owners_hold_their_share(case, limit):
    parameters, per_head = case
    ownership = plan_ownership(parameters, per_head=per_head)
    assert ownership == plan_ownership(parameters, per_head=per_head)
    for matrix in ownership.matrices:
        held = torch.zeros(ownership.parameters[matrix.parameter].shape)
        cut(held, ownership.parameters[matrix.parameter].boxes[matrix.owner], whole_box(held.shape)).fill_(1)
        mine = int(cut(held, matrix.box, whole_box(held.shape)).sum())
        assert mine * ownership.world >= matrix.num_elements
        assert matrix.travels_in == (mine < matrix.num_elements)
    everything = list(range(len(ownership.matrices)))
    buckets = plan_buckets(ownership, everything, max_elements=limit)
    assert sorted(index for bucket in buckets for index in bucket) == everything
    for bucket in buckets:
        for rank in range(ownership.world):
            own = [ownership.matrices[index] for index in bucket if ownership.matrices[index].owner == rank]
            assert len(own) <= 1 or sum(matrix.num_elements for matrix in own) <= limit


@settings(max_examples=200)
@given(placed_parameters())
def test_routes_bring_whole_matrices_to_owners_and_their_updates_to_every_holder(case):
    """All ranks in one process: what each sends is put where the receiver expects it."""
    parameters, per_head = case
    ownership = plan_ownership(parameters, per_head=per_head)
    values = [torch.randn(parameter.shape) for parameter in parameters]
    ranks = range(ownership.world)
    for kind in ("home", "exchanged", "replicated"):
        chosen = [index for index, matrix in enumerate(ownership.matrices) if matrix.kind == kind]
        if not chosen:
            continue
        buckets = [route_bucket(ownership, chosen, rank) for rank in ranks]
        for rank in ranks:
            boxes = [ownership.matrices[index].box for index in chosen]
            held = [part for part in buckets[rank].held if num_elements(part.box)]
            expected = sum(
                num_elements(tuple((max(a, c), max(max(a, c), min(b, d))) for (a, b), (c, d) in zip(box, mine)))
                for index, box in zip(chosen, boxes)
                for mine in [parameters[ownership.matrices[index].parameter].boxes[rank]]
            )
            assert sum(part.num_elements for part in held) == expected
        if kind != "exchanged":
            continue
        for direction in ("gather", "scatter"):
            routes = [getattr(bucket, direction) for bucket in buckets]
            if any(route is None for route in routes):
                assert direction == "gather" and all(route is None for route in routes)
                continue
            for source in ranks:
                for target in ranks:
                    assert routes[source].sends[target] == routes[target].receives[source]
            for rank in ranks:
                _check_complete(ownership, buckets[rank], routes[rank], direction, values)


def test_the_replica_of_the_owner_sends_and_all_replicas_receive():
    boxes = chunk_boxes((8, 8), 2) * 2
    parameters = [PlacedParameter(name=f"w{n}", shape=(8, 8), layout=Whole(), boxes=boxes) for n in range(4)]
    ownership = plan_ownership(parameters, per_head=False)
    assert [matrix.owner for matrix in ownership.matrices] == [0, 1, 2, 3]
    for rank in range(4):
        bucket = route_bucket(ownership, range(4), rank)
        assert bucket.gather is not None and bucket.scatter is not None
        replica = {0, 1} if rank < 2 else {2, 3}
        assert {source for source, parts in enumerate(bucket.gather.receives) if parts} == replica
        assert all(bucket.scatter.sends)


def _check_complete(ownership, bucket, route, direction, values) -> None:
    received = [part for parts in route.receives for part in parts]
    if direction == "scatter":
        assert sorted(received, key=repr) == sorted(bucket.held, key=repr)
        return
    for index in bucket.owned:
        matrix = ownership.matrices[index]
        whole = values[matrix.parameter]
        assembled = torch.full_like(whole, math.nan)
        for part in received:
            if part.matrix == index:
                target = cut(assembled, part.box, whole_box(whole.shape))
                assert target.isnan().all(), "a part arrives twice"
                target.copy_(cut(whole, part.box, whole_box(whole.shape)))
        everything = whole_box(whole.shape)
        assert torch.equal(cut(assembled, matrix.box, everything), cut(whole, matrix.box, everything))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6), st.booleans())
@example(shapes=[], turned=False)
@example(shapes=[(0, 4), (3, 0)], turned=True)
def test_what_is_packed_is_unpacked(shapes, turned):
    tensors = [torch.randn(columns, rows).mT if turned else torch.randn(rows, columns) for rows, columns in shapes]
    buffer = pack(tensors, dtype=torch.float32, device=torch.device("cpu"))
    assert buffer.numel() == sum(tensor.numel() for tensor in tensors)
    assert all(torch.equal(view, tensor) for view, tensor in zip(unpack(buffer, shapes), tensors, strict=True))


class Recorded:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def __getattr__(self, phase):
        return lambda: self.log.append(f"{phase} {self.name}")


def test_the_next_bucket_is_under_way_while_one_is_orthogonalised():
    log: list[str] = []
    run_buckets([Recorded("home", log)], [Recorded(name, log) for name in "abc"])  # type: ignore[list-item]
    assert log == [
        "gather a", "gather home", "orthogonalize home", "apply home",
        "gather b", "orthogonalize a",
        "gather c", "orthogonalize b", "apply a",
        "orthogonalize c", "apply b", "apply c",
    ]  # fmt: skip
