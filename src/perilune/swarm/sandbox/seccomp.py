"""The system-call filter, as classic BPF written by hand for x86_64 and aarch64.

Everything is allowed but what is listed here: calls that make namespaces, mounts, traces, kernel programs or memory
that nobody counts, sockets other than unix and internet ones, set-user-ID files, and every other ABI of the processor.
Where host folders are mounted unix sockets go too (pairs stay): a read-only mount does not stop a program from talking
to a socket that a host process left there, and a filter cannot see which one a program connects to. A refused call
fails with an error number that programs know how to live without; a call through another ABI kills.

A program is a sequence of 8-byte instructions over the kernel's `struct seccomp_data`:
    int nr; u32 arch; u64 instruction_pointer; u64 args[6];   (both processors are little-endian: low half first)
"""

import errno
import platform
import struct
from dataclasses import dataclass

ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
AT_NUMBER, AT_ARCH, AT_ARGUMENTS = 0, 4, 16
X32_BIT = 0x40000000

NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
SET_ID_BITS = 0o6000
CREATES = 0o100 | 0o20000000  # O_CREAT, __O_TMPFILE: the same bits on both processors
TERMINAL_INJECTION = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
UNIX, INTERNET = (1,), (2, 10)  # address families
SOCKET_LEVEL = 1
BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF and their forced forms
HUGE_PAGES = 0x40000  # MAP_HUGETLB: out of a pool of the whole machine, and in no count of memory
PERSONALITIES = (0, 0xFFFFFFFF)  # plain Linux, and the question which one it is

# name: (x86_64, aarch64); None where the processor has no such call.
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280), "chmod": (90, None),
    "chroot": (161, 51), "clock_adjtime": (305, 266), "clock_settime": (227, 112), "clone": (56, 220),
    "clone3": (435, 435), "creat": (85, None), "create_module": (174, None), "delete_module": (176, 106),
    "fallocate": (285, 47), "fanotify_init": (300, 262), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "finit_module": (313, 273), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fsopen": (430, 430), "fspick": (433, 433), "get_kernel_syms": (177, None), "init_module": (175, 105),
    "io_setup": (206, 0), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_uring_setup": (425, 425),
    "ioctl": (16, 29), "ioperm": (173, None), "iopl": (172, None), "kcmp": (312, 272), "kexec_file_load": (320, 294),
    "kexec_load": (246, 104), "keyctl": (250, 219), "lookup_dcookie": (212, 18), "mbind": (237, 235),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "migrate_pages": (256, 238), "mkdir": (83, None),
    "mkdirat": (258, 34), "mknod": (133, None), "mknodat": (259, 33), "mmap": (9, 222), "modify_ldt": (154, None),
    "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429), "move_pages": (279, 239),
    "msgget": (68, 186), "name_to_handle_at": (303, 264), "nfsservctl": (180, 42), "open": (2, None),
    "open_by_handle_at": (304, 265), "open_tree": (428, 428), "open_tree_attr": (467, 467), "openat": (257, 56),
    "openat2": (437, 437), "perf_event_open": (298, 241), "personality": (135, 92), "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41), "process_madvise": (440, 440), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "ptrace": (101, 117), "query_module": (178, None), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "reboot": (169, 142), "request_key": (249, 218), "semget": (64, 190),
    "set_mempolicy": (238, 237), "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268),
    "setsockopt": (54, 208), "settimeofday": (164, 170), "shmget": (29, 194), "socket": (41, 198),
    "socketpair": (53, 199), "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116), "umount2": (166, 39),
    "unshare": (272, 97), "uselib": (134, None), "userfaultfd": (323, 282), "vhangup": (153, 58), "vmsplice": (278, 75),
}  # fmt: skip

# Refused whatever their arguments. "Not there" where a program then takes an older way, "not permitted" elsewhere.
NOT_THERE = {
    "clone3": errno.ENOSYS,  # its flags lie behind a pointer that a filter cannot follow; libc goes back to clone
    "openat2": errno.ENOSYS,  # so does its mode, which could make a set-user-ID file
    "fchmodat2": errno.ENOSYS,
    "memfd_create": errno.ENOSYS,  # memory without a mapping or a file system: nothing would count it
    "memfd_secret": errno.ENOSYS,
    "shmget": errno.ENOSYS,
    "semget": errno.ENOSYS,  # gigabytes of the kernel's memory by default
    "msgget": errno.ENOSYS,
    "vmsplice": errno.ENOSYS,  # memory that lives on in a pipe when its process has let go of it
    "io_setup": errno.ENOSYS,  # out of a small supply of the whole machine
    "io_uring_setup": errno.ENOSYS,  # does in the kernel what this filter refuses
    "io_uring_enter": errno.ENOSYS,
    "io_uring_register": errno.ENOSYS,
    "fallocate": errno.EOPNOTSUPP,  # takes disk space without writing; libc writes zeros instead
}
FILTERED = {"chmod", "clone", "creat", "fchmod", "fchmodat", "ioctl", "mkdir", "mkdirat", "mknod", "mknodat", "mmap",
            "open", "openat", "personality", "setsockopt", "socket", "socketpair"}  # fmt: skip
REFUSED = {name: errno.EPERM for name in NUMBERS if name not in FILTERED} | NOT_THERE
# Which argument is the mode of a new or changed file.
MODES = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "creat": 1, "mkdir": 1, "mkdirat": 2, "mknod": 1, "mknodat": 2}
# Which arguments are flags and mode; the mode counts only when the flags create a file.
OPENS = {"open": (1, 2), "openat": (2, 3)}


@dataclass(frozen=True, kw_only=True)
class Processor:
    audit_arch: int
    column: int


PROCESSORS = {
    "x86_64": Processor(audit_arch=0xC000003E, column=0),
    "aarch64": Processor(audit_arch=0xC00000B7, column=1),
}


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, operand)


def _give(verdict: int) -> bytes:
    return _step(RETURN, verdict)


def _fail(error: int) -> bytes:
    return _give(ERRNO | error)


def _argument(index: int) -> bytes:
    """Load the low half of an argument. The kernel reads no more of the ones that are checked here."""
    return _step(LOAD, AT_ARGUMENTS + 8 * index)


def _when(number: int, steps: list[bytes]) -> list[bytes]:
    """`steps` for one system call; each such block ends in a verdict, so nothing after it needs the number again."""
    return [_step(JUMP_EQUAL, number, 0, len(steps)), *steps]


def _one_of(argument: int, allowed: tuple[int, ...], error: int) -> list[bytes]:
    checks = [_step(JUMP_EQUAL, value, len(allowed) - place) for place, value in enumerate(allowed)]
    return [_argument(argument), *checks, _fail(error), _give(ALLOW)]


def _none_of(argument: int, refused: tuple[int, ...]) -> list[bytes]:
    checks = [_step(JUMP_EQUAL, value, len(refused) - place) for place, value in enumerate(refused)]
    return [_argument(argument), *checks, _give(ALLOW), _fail(errno.EPERM)]


def _without_bits(argument: int, bits: int) -> list[bytes]:
    return [_argument(argument), _step(JUMP_ANY_BIT, bits, 0, 1), _fail(errno.EPERM), _give(ALLOW)]


def _pretend(level: int, names: tuple[int, ...]) -> list[bytes]:
    """Options of a socket that are taken and change nothing: a program that asks for more buffer lives with less."""
    checks = [_step(JUMP_EQUAL, name, len(names) - place) for place, name in enumerate(names)]
    within = [_argument(2), *checks, _give(ALLOW), _fail(0)]
    return [_argument(1), _step(JUMP_EQUAL, level, 1), _give(ALLOW), *within]


def build_filter(machine: str | None = None, *, unix_sockets: bool = True) -> bytes | None:
    """The program for a processor by its `uname -m` name (default: this one), or None for one that is not known."""
    machine = machine or platform.machine()
    processor = PROCESSORS.get({"arm64": "aarch64", "amd64": "x86_64"}.get(machine.lower(), machine))
    if processor is None:
        return None

    def number(name: str) -> int | None:
        return NUMBERS[name][processor.column]

    program = [_step(LOAD, AT_ARCH), _step(JUMP_EQUAL, processor.audit_arch, 1), _give(KILL_PROCESS)]
    program += [_step(LOAD, AT_NUMBER)]
    if processor is PROCESSORS["x86_64"]:
        program += [_step(JUMP_AT_LEAST, X32_BIT, 0, 1), _give(KILL_PROCESS)]
    blocks = {name: [_fail(error)] for name, error in REFUSED.items()}
    blocks |= {name: _without_bits(argument, SET_ID_BITS) for name, argument in MODES.items()}
    blocks |= {
        name: [_argument(flags), _step(JUMP_ANY_BIT, CREATES, 1, 0), _give(ALLOW), *_without_bits(mode, SET_ID_BITS)]
        for name, (flags, mode) in OPENS.items()
    }
    blocks["clone"] = _without_bits(0, NEW_NAMESPACES)
    blocks["socket"] = _one_of(0, (*UNIX, *INTERNET) if unix_sockets else INTERNET, errno.EAFNOSUPPORT)
    blocks["socketpair"] = _one_of(0, UNIX, errno.EAFNOSUPPORT)
    # Without these the buffer of a socket has the system's default size, which the supervisor reckons with.
    blocks["setsockopt"] = _pretend(SOCKET_LEVEL, BUFFER_SIZES)
    blocks["mmap"] = _without_bits(3, HUGE_PAGES)
    blocks["personality"] = _one_of(0, PERSONALITIES, errno.EPERM)
    blocks["ioctl"] = _none_of(1, TERMINAL_INJECTION)
    for name, steps in blocks.items():
        if (call := number(name)) is not None:
            program += _when(call, steps)
    return b"".join([*program, _give(ALLOW)])
