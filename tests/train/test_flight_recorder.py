"""What is read out of a dump of PyTorch's flight recorder."""

from typing import Any

from perilune.train.flight_recorder import Operation, read

MEMBERS = {"0": (0, 1, 2), "4": (0, 2)}


def entry(number: int, group: tuple[str, str] = ("0", "default_pg"), **changes: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "process_group": list(group),
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[7, 3]],
        "input_dtypes": ["Float"],
        "is_p2p": False,
        "retired": True,
        "state": "completed",
        **changes,
    }


def test_what_has_not_ended_is_pending_and_all_that_began_is_counted():
    hung = entry(5, ("4", "mesh_fsdp"), retired=False, state="started", profiling_name="nccl:_all_gather_base")
    found = read({"entries": [entry(1), entry(2), entry(3, ("4", "mesh_fsdp")), hung]}, MEMBERS)
    expected = Operation(
        group="group 4 mesh_fsdp", members=(0, 2), name="_all_gather_base", number=5, sizes="7x3 Float"
    )
    assert found.pending == (expected,)
    assert str(expected) == "_all_gather_base of 7x3 Float (number 5 of group 4 mesh_fsdp)"
    assert found.begun == {("group 0 default_pg", (0, 1, 2)): 2, ("group 4 mesh_fsdp", (0, 2)): 5}
    assert found.has_come_to(expected)
    assert not read({"entries": [entry(4, ("4", "mesh_fsdp"))]}, MEMBERS).has_come_to(expected)
    assert not read({}, MEMBERS).has_come_to(expected)


def test_sends_and_receives_do_not_count_and_barriers_have_no_tensor():
    send = entry(9, is_p2p=True, retired=False, state="started")
    barrier = entry(2, input_sizes=[], input_dtypes=[], profiling_name="gloo:barrier", retired=False, state="scheduled")
    found = read({"entries": [entry(1), send, barrier]}, MEMBERS)
    assert [operation.name for operation in found.pending] == ["barrier"]
    assert found.begun == {("group 0 default_pg", (0, 1, 2)): 2}
