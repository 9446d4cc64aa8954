"""The system-call filter, run in a small interpreter of its instructions for both processors."""

import errno
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.swarm.sandbox import seccomp
from perilune.swarm.sandbox.seccomp import ALLOW, KILL_PROCESS, NUMBERS, PROCESSORS, build_filter

MACHINES = sorted(PROCESSORS)


def judge(machine: str, number: int, *arguments: int, arch: int | None = None, unix_sockets: bool = True) -> int:
    """What the filter says to a call: the semantics of classic BPF, as the kernel runs it."""
    padded = (*arguments, *[0] * (6 - len(arguments)))
    arch = PROCESSORS[machine].audit_arch if arch is None else arch
    data = struct.pack("<iIQ6Q", struct.unpack("<i", struct.pack("<I", number))[0], arch, 0, *padded)
    program = build_filter(machine, unix_sockets=unix_sockets)
    assert program is not None and len(program) % 8 == 0
    steps = list(struct.iter_unpack("<HBBI", program))
    place = accumulator = 0
    while True:
        code, if_true, if_false, operand = steps[place]
        place += 1
        if code == seccomp.LOAD:
            accumulator = struct.unpack_from("<I", data, operand)[0]
        elif code == seccomp.RETURN:
            return operand
        else:
            taken = {
                seccomp.JUMP_EQUAL: accumulator == operand,
                seccomp.JUMP_AT_LEAST: accumulator >= operand,
                seccomp.JUMP_ANY_BIT: bool(accumulator & operand),
            }[code]
            place += if_true if taken else if_false


def number_of(machine: str, name: str) -> int:
    number = NUMBERS[name][PROCESSORS[machine].column]
    if number is None:
        pytest.skip(f"{machine} has no {name}")
    return number


def refusal(error: int) -> int:
    return seccomp.ERRNO | error


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", sorted(seccomp.REFUSED))
def test_a_refused_call_fails_whatever_its_arguments(machine: str, name: str) -> None:
    number = NUMBERS[name][PROCESSORS[machine].column]
    if number is not None:
        for arguments in ((), (1, 2, 3, 4, 5, 6), (2**64 - 1,) * 6):
            assert judge(machine, number, *arguments) == refusal(seccomp.REFUSED[name])


def test_the_dangerous_calls_are_among_the_refused() -> None:
    assert set(seccomp.REFUSED) >= {
        "ptrace", "mount", "umount2", "pivot_root", "keyctl", "add_key", "bpf", "userfaultfd", "perf_event_open",
        "kexec_load", "kexec_file_load", "io_uring_setup", "unshare", "setns", "clone3", "init_module",
        "process_vm_readv", "open_by_handle_at", "reboot", "swapon", "mount_setattr", "move_mount",
        "fsopen", "open_tree", "pidfd_getfd", "semget", "msgget", "vmsplice", "io_setup",
    }  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_every_other_abi_is_killed(machine: str) -> None:
    assert judge(machine, 0, arch=0x40000003) == KILL_PROCESS  # 32-bit x86
    assert judge(machine, 0, arch=0x40000028) == KILL_PROCESS  # 32-bit ARM
    assert judge("x86_64", seccomp.X32_BIT | 39) == KILL_PROCESS
    assert judge("x86_64", 0xFFFFFFFF) == KILL_PROCESS


@pytest.mark.parametrize("machine", MACHINES)
@given(flags=st.integers(0, 2**64 - 1))
def test_a_clone_makes_processes_but_no_namespaces(machine: str, flags: int) -> None:
    namespaces = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
    expected = refusal(errno.EPERM) if flags & namespaces else ALLOW
    assert judge(machine, number_of(machine, "clone"), flags) == expected


@pytest.mark.parametrize("machine", MACHINES)
@given(family=st.integers(0, 60))
def test_sockets_are_unix_or_internet(machine: str, family: int) -> None:
    expected = ALLOW if family in (1, 2, 10) else refusal(errno.EAFNOSUPPORT)
    assert judge(machine, number_of(machine, "socket"), family, 1, 0) == expected
    expected = ALLOW if family == 1 else refusal(errno.EAFNOSUPPORT)
    assert judge(machine, number_of(machine, "socketpair"), family, 1, 0) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_beside_mounts_there_are_pairs_but_no_other_unix_sockets(machine: str) -> None:
    socket = number_of(machine, "socket")
    assert judge(machine, socket, 1, 1, 0, unix_sockets=False) == refusal(errno.EAFNOSUPPORT)
    assert [judge(machine, socket, family, 1, 0, unix_sockets=False) for family in (2, 10)] == [ALLOW] * 2
    assert judge(machine, number_of(machine, "socketpair"), 1, 1, 0, unix_sockets=False) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@given(level=st.sampled_from([0, 1, 2, 6, 2**32 + 1]), option=st.integers(0, 40))
def test_the_size_of_a_buffer_is_set_only_in_appearance(machine: str, level: int, option: int) -> None:
    pretends = level & 0xFFFFFFFF == 1 and option in (7, 8, 32, 33)  # the kernel takes the low half alone
    assert judge(machine, number_of(machine, "setsockopt"), 3, level, option) == (refusal(0) if pretends else ALLOW)


@pytest.mark.parametrize("machine", MACHINES)
@given(flags=st.integers(0, 2**32 - 1))
def test_no_memory_comes_out_of_the_pool_of_huge_pages(machine: str, flags: int) -> None:
    expected = refusal(errno.EPERM) if flags & 0x40000 else ALLOW
    assert judge(machine, number_of(machine, "mmap"), 0, 4096, 3, flags) == expected


@pytest.mark.parametrize("machine", MACHINES)
@given(flags=st.integers(0, 2**32 - 1), mode=st.integers(0, 0o7777))
def test_no_file_becomes_set_id(machine: str, flags: int, mode: int) -> None:
    verdict = refusal(errno.EPERM) if mode & 0o6000 else ALLOW
    for name, place in seccomp.MODES.items():
        if (number := NUMBERS[name][PROCESSORS[machine].column]) is not None:
            assert judge(machine, number, *[7] * place, mode) == verdict
    creates = flags & (0o100 | 0o20000000)
    assert judge(machine, number_of(machine, "openat"), 3, 0, flags, mode) == (verdict if creates else ALLOW)
    assert judge("x86_64", 2, 0, flags, mode) == (verdict if creates else ALLOW)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_terminal_takes_no_input_from_a_program(machine: str) -> None:
    ioctl = number_of(machine, "ioctl")
    assert [judge(machine, ioctl, 0, request) for request in (0x5412, 0x541C)] == [refusal(errno.EPERM)] * 2
    assert judge(machine, ioctl, 0, 0x5413) == ALLOW  # the size of a window


@pytest.mark.parametrize("machine", MACHINES)
def test_everything_else_is_allowed(machine: str) -> None:
    listed = {numbers[PROCESSORS[machine].column] for numbers in NUMBERS.values()}
    assert all(judge(machine, number) == ALLOW for number in range(500) if number not in listed)


def test_an_unknown_processor_has_no_filter() -> None:
    assert build_filter("riscv64") is None
    assert build_filter("arm64") == build_filter("aarch64") != build_filter("x86_64")


@pytest.mark.parametrize(
    "header,column",
    [("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 0), ("/usr/include/asm-generic/unistd.h", 1)],
)
def test_numbers_are_those_of_the_kernel(header: str, column: int) -> None:
    if not Path(header).exists():
        pytest.skip(f"needs {header} (make system-deps)")
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
    for name, numbers in NUMBERS.items():
        if name in defined:  # an older header lacks the newest calls
            assert numbers[column] == int(defined[name]), name
