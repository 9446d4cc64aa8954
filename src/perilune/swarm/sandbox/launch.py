"""The first program inside a sandbox: it gives up every right that is left and becomes the program it was asked to run.

Runs as `python -I -S launch.pyc FD` behind bubblewrap, imports nothing of this package. FD is a socket to the runtime:
    launch  -> runtime   "ready"
    runtime -> launch    4 bytes of length, then a job (marshal)
    launch  -> runtime   "layer NAME TEXT" for each layer in force, then one of: end of file (the program runs),
                         "refused TEXT" (a layer could not be put in force), "failed CODE TEXT" (no such program)

Waiting for the job means that the runtime has put every limit in place before the first foreign instruction, and that a
runtime which died meanwhile leaves nothing behind: the socket ends and so does this.

Started by root, bubblewrap makes no user namespace, because a user namespace made by root keeps the rights of root's
files, /proc/sys/kernel/core_pattern among them. Here the user becomes `nobody` for the host too, and the workspace is
mounted again so that its owner on disk is `nobody` inside (an idmapped mount).
"""

import _signal  # pyrefly: ignore[missing-import]
import ctypes
import marshal
import os
import resource
import sys
import time

# No typing, json or socket here: each would take longer to import than the rest of this program to run.

LIBC = ctypes.CDLL(None, use_errno=True)

# System calls newer than libc's wrappers; their numbers are the same on every processor.
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
CLONE_NEWUSER = 0x10000000
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, MOVE_MOUNT_FROM_DESCRIPTOR, MOUNT_ATTR_IDMAP = 1, 4, 0x00100000

# Landlock access rights over files, by the version of its interface that brought them.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, IOCTL_DEVICE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 15
FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: IOCTL_DEVICE}
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | (1 << 14) | IOCTL_DEVICE  # the others have a meaning on folders only
SCOPED = 0b11  # abstract unix sockets and signals stay inside; version 6


class Refused(Exception):
    """A layer could not be put in force. The text says which one and why."""


def system_call(number: int, *arguments: object) -> int:
    """The call's result; OSError on failure."""
    result = LIBC.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def control_process(option: int, *values: int) -> None:
    if LIBC.prctl(option, *(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4])) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


# Landlock ------------------------------------------------------------------------------------------------------------


def landlock_version() -> int:
    """The version of the kernel's Landlock interface; 0 when there is none."""
    try:
        return system_call(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def confine_files(writable: list[str]) -> str:
    """Reading and executing beneath the sandbox's root, writing beneath `writable` alone. Says what is in force."""
    version = landlock_version()
    if version == 0:
        return ""
    handled = sum(rights for since, rights in FILE_RIGHTS.items() if since <= version)
    attributes = (ctypes.c_uint64 * 3)(handled, 0, SCOPED if version >= 6 else 0)
    size = 24 if version >= 6 else 8
    rules = system_call(LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))

    def allow(path: str, rights: int) -> None:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            rights &= ON_FILES
        rule = (rights & handled).to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
        system_call(LANDLOCK_ADD, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint32(0))
        os.close(place)

    allow("/", EXECUTE | READ_FILE | READ_DIR)
    allow("/dev", READ_FILE | READ_DIR | WRITE_FILE | IOCTL_DEVICE)
    for path in writable:
        allow(path, handled)
    system_call(LANDLOCK_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0))
    os.close(rules)
    return f"version {version}"


# Root gives itself up ------------------------------------------------------------------------------------------------


def user_namespace(uids: str, gids: str) -> int:
    """A descriptor of a new user namespace with these maps, kept alive by nothing else."""
    made_read, made_write = os.pipe()
    end_read, end_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end_write)
        if LIBC.unshare(CLONE_NEWUSER) == 0:
            os.write(made_write, b"1")
        os.close(made_write)
        os.read(end_read, 1)
        os._exit(0)
    try:
        os.close(made_write)
        if not os.read(made_read, 1):
            raise OSError("no user namespace for an idmapped mount")
        write(f"/proc/{child}/uid_map", uids)
        write(f"/proc/{child}/gid_map", gids)
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for descriptor in (made_read, end_read, end_write):
            os.close(descriptor)
        os.waitpid(child, 0)


def show_owner_as(target: str, inside: int) -> None:
    """Mount `target` over itself so that its owner on disk is the user `inside`, in both directions."""
    status = os.stat(target)
    if status.st_uid == inside and status.st_gid == inside:
        return
    namespace = user_namespace(f"{status.st_uid} {inside} 1", f"{status.st_gid} {inside} 1")
    try:
        flags = ctypes.c_uint(OPEN_TREE_CLONE | os.O_CLOEXEC | AT_RECURSIVE)
        tree = system_call(OPEN_TREE, ctypes.c_int(AT_FDCWD), target.encode(), flags)
        attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_IDMAP, 0, 0, namespace)
        how = ctypes.c_uint(AT_EMPTY_PATH | AT_RECURSIVE)
        system_call(MOUNT_SETATTR, ctypes.c_int(tree), b"", how, attributes, ctypes.c_size_t(32))
        where = ctypes.c_uint(MOVE_MOUNT_FROM_DESCRIPTOR)
        system_call(MOVE_MOUNT, ctypes.c_int(tree), b"", ctypes.c_int(AT_FDCWD), target.encode(), where)
        os.close(tree)
    finally:
        os.close(namespace)


def take_workspace(job: dict) -> int:
    """The user to become: `nobody` over an idmapped workspace, or the workspace's owner where that cannot be."""
    for target in job["mounts"]:
        try:
            show_owner_as(target, job["uid"])
        except OSError:
            continue  # a further mount: its permissions decide
    try:
        show_owner_as(job["workspace"], job["uid"])
        return job["uid"]
    except OSError as problem:
        owner = os.stat(job["workspace"]).st_uid
        if owner != 0:
            return owner
        raise Refused(
            f"the workspace belongs to root and its file system has no idmapped mounts ({problem}); "
            f"run as an ordinary user, or give it away: chown -R {job['uid']} WORKSPACE"
        ) from problem


def drop_capabilities() -> None:
    """None of them can be gained again by executing a file."""
    for capability in range(64):
        try:
            control_process(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # one past the last that this kernel knows


def become(uid: int) -> str:
    """Leave root for good, then make a user namespace of one's own, in which processes are counted per sandbox."""
    drop_capabilities()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (uid, uid, uid):
        raise Refused(f"the user did not become {uid}")
    control_process(PR_SET_DUMPABLE, 1)  # else /proc/self, with the maps to be written, belongs to root
    return "made after leaving root" if leave_namespace(uid) else ""


def leave_namespace(uid: int) -> bool:
    """Into a user namespace of one's own, without a right over anything in the one before.

    The first process inside has no filter and no Landlock. It must not be one of our own kind: whoever may trace it
    may write into its memory, through /proc/1/mem and without any call that the filter knows.
    """
    if LIBC.unshare(CLONE_NEWUSER) != 0:
        return False
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{uid} {uid} 1")
    write("/proc/self/gid_map", f"{uid} {uid} 1")
    drop_capabilities()  # a new namespace begins with all of them
    return True


# The program ---------------------------------------------------------------------------------------------------------


def write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, name)
        _, most = resource.getrlimit(kind)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        # A second more than the soft limit, so that SIGXCPU comes before SIGKILL.
        resource.setrlimit(kind, (value, value + 1 if name == "RLIMIT_CPU" and most > value else value))


def filter_calls(program: bytes) -> None:
    instructions = ctypes.create_string_buffer(program, len(program))
    head = (ctypes.c_uint64 * 2)(len(program) // 8, ctypes.addressof(instructions))
    control_process(PR_SET_SECCOMP, 2, ctypes.addressof(head))


def check_identity(places: list[tuple[str, int, int]]) -> None:
    """What is mounted must be what was opened: a folder swapped for a link in between would show another place."""
    for target, device, inode in places:
        status = os.stat(target)
        if (status.st_dev, status.st_ino) != (device, inode):
            raise Refused(f"{target!r} is not the file or folder that it was when the sandbox was opened")


def confine(job: dict) -> dict[str, str]:
    """Every layer, in an order in which none forbids the next. Returns what is in force."""
    check_identity(job["identities"])
    layers = {"user": f"uid {os.getuid()}", "user namespace": "made by bubblewrap"}
    limits = dict(job["rlimits"])
    write("/proc/self/oom_score_adj", "1000")  # the machine runs out of memory: this goes first
    os.nice(5)  # whoever watches and serves many of these goes first
    if os.getuid() == 0:
        uid = take_workspace(job)
        layers["user namespace"] = become(uid)
        layers["user"] = f"uid {uid}, also on the host"
        if not layers["user namespace"]:
            del limits["RLIMIT_NPROC"]  # it would count the processes of all sandboxes together
    elif leave_namespace(os.getuid()):
        layers["user namespace"] = "made by bubblewrap, and another inside"
    control_process(PR_SET_NO_NEW_PRIVS, 1)
    os.umask(0o022)
    set_limits(limits)
    layers["landlock"] = confine_files(job["writable"])
    if job["filter"]:
        filter_calls(job["filter"])
        layers["seccomp"] = f"{len(job['filter']) // 8} instructions"
    return layers


def wait_for_first_process() -> None:
    """Until bubblewrap's first process has bound its life to that of the outer one and sleeps, waiting for us.

    It does so after starting us. A runtime killed before would take the outer process along, but not that one.
    """
    for _ in range(5000):
        with open("/proc/1/stat", "rb") as file:
            if file.read().rpartition(b")")[2].split()[0] == b"S":
                return
        time.sleep(0.001)
    os._exit(1)


def read_exactly(source: int, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = os.read(source, count - len(parts))
        if not part:
            os._exit(1)  # the runtime is gone
        parts += part
    return parts


def execute(argv: list[str], environment: dict[str, str]) -> None:
    # Python ignores these two, and a new program would inherit that.
    _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
    _signal.signal(_signal.SIGXFSZ, _signal.SIG_DFL)
    if "/" in argv[0]:
        os.execve(argv[0], argv, environment)
    failure: OSError = FileNotFoundError(2, os.strerror(2))
    for folder in environment.get("PATH", "").split(":"):
        try:
            os.execve(f"{folder or '.'}/{argv[0]}", argv, environment)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as problem:  # there, but no program: another of the same name may be one
            failure = problem
    raise failure


def main() -> None:
    control = int(sys.argv[1])
    os.set_inheritable(control, False)
    # The descriptors that bubblewrap was given are ours now; none may reach the program.
    os.closerange(3, control)
    os.closerange(control + 1, max(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    wait_for_first_process()
    os.write(control, b"ready\n")
    job = marshal.loads(read_exactly(control, int.from_bytes(read_exactly(control, 4), "big")))
    try:
        layers = confine(job)
    except (OSError, Refused, ValueError) as problem:
        os.write(control, f"refused {type(problem).__name__}: {problem}\n".encode())
        os._exit(1)
    os.write(control, "".join(f"layer {name}\t{text}\n" for name, text in layers.items() if text).encode())
    try:
        os.chdir(job["cwd"])
    except OSError as problem:
        os.write(control, f"failed 126 cwd {job['cwd']!r}: {problem.strerror}\n".encode())
        os._exit(126)
    try:
        execute(job["argv"], job["env"])
    except OSError as problem:
        code = 127 if isinstance(problem, FileNotFoundError) else 126
        os.write(control, f"failed {code} {job['argv'][0]!r}: {problem.strerror}\n".encode())
        os._exit(code)


if __name__ == "__main__":
    main()
