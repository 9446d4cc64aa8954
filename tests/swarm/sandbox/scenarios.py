"""What is tried in sandboxes, as programs: `python -m tests.swarm.sandbox.scenarios NAME FOLDER` prints JSON.

Programs, because they must also run as another user, with an environment of their own and be killed. Standard library
only: that user may have no other Python than the system's.
"""

import asyncio
import base64
import codecs
import ctypes
import importlib.util
import json
import marshal
import os
import platform
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

from perilune.swarm.sandbox import Limits, Mount, bubblewrap, launch, layers, open_sandbox
from perilune.swarm.sandbox.accounting import find_trees, read_processes
from tests.swarm.sandbox import commands

PATIENCE = 30.0  # seconds until something that should be over counts as never over
ROOMY = Limits(wall_seconds=60, processes=40, memory_bytes=512 << 20, disk_bytes=64 << 20)


def fresh(folder: Path, name: str) -> Path:
    place = folder / name
    place.mkdir()
    return place


class Host:
    """Things outside that a sandbox must neither read, nor change, nor reach."""

    def __init__(self, folder: Path) -> None:
        self.token = "CANARY" + secrets.token_hex(8)
        self.outside = fresh(folder, "outside")
        self.secret = self.outside / "secret.txt"
        self.secret.write_text(self.token)
        self.secret.chmod(0o644)
        self.granted = fresh(folder, "granted")
        self.connections = 0
        self.servers = [
            socket.create_server(("127.0.0.1", 0)),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX),
        ]
        self.abstract = f"perilune-{self.token}"
        self.servers[1].bind(f"\0{self.abstract}")
        os.chdir(self.outside)
        self.servers[2].bind("socket")  # by a short name: that of a socket is at most 108 bytes
        self.servers[3].bind("../granted/socket")
        os.chmod("../granted/socket", 0o777)
        for server in self.servers:
            server.listen()
            threading.Thread(target=self._serve, args=(server,), daemon=True).start()
        self.process = subprocess.Popen(["sleep", "86400"], env={"TOKEN": self.token})
        os.environ["TOKEN"] = self.token

    def _serve(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            self.connections += 1
            connection.sendall(self.token.encode())
            connection.close()

    def spell(self, command: str) -> str:
        read = f"cat {self.secret}"
        return command.format(
            secret=self.secret,
            outside=self.outside,
            port=self.servers[0].getsockname()[1],
            pid=os.getpid(),
            abstract=self.abstract,
            b64=base64.b64encode(read.encode()).decode(),
            hex=f"import os; os.system({read!r})".encode().hex(),
            octal="".join(f"\\{byte:03o}" for byte in read.encode()),
            reverse=read[::-1],
            rot13=codecs.encode(read, "rot13"),
        )

    def damage(self) -> list[str]:
        found = sorted(path.name for path in self.outside.iterdir())
        damage = [] if found == ["secret.txt", "socket"] else [f"outside holds {found}"]
        if self.secret.read_text() != self.token:
            damage.append("the secret was changed")
        if self.process.poll() is not None:
            damage.append("a host process is gone")
        if self.connections:
            damage.append(f"{self.connections} connections")
        return damage


async def in_parallel(jobs, width=6):
    gate = asyncio.Semaphore(width)

    async def one(job):
        async with gate:
            return await job

    return await asyncio.gather(*map(one, jobs))


async def escapes(folder: Path) -> dict:
    """Every command, each in a workspace of its own; what it printed, and what became of the host."""
    host = Host(folder)
    granted = host.granted
    (granted / "known.txt").write_text("KNOWN" + host.token)

    async def attempt(number: int, text: str) -> list[str]:
        workspace = fresh(folder, f"w{number}")
        sandbox = open_sandbox(workspace, mounts=[Mount(source=granted, target="/mnt/granted")])
        done = await sandbox.run(["sh", "-c", host.spell(text)], limits=ROOMY)
        printed = done.stdout + done.stderr
        problems = [word for word in (host.token, "ESCAPED") if word.encode() in printed]
        for path in workspace.rglob("*"):
            if not path.is_symlink() and path.stat().st_mode & (stat.S_ISUID | stat.S_ISGID):
                problems.append(f"{path.name} is set-ID")
        return [f"{text}: {problem}" for problem in problems]

    texts = [*commands.READ, *commands.WRITE, *commands.CONNECT]
    # Those that only read share a sandbox by fours: starting one costs more than they do.
    reading = [
        "\n".join(f"({text}\n)" for text in commands.READ[at : at + 4]) for at in range(0, len(commands.READ), 4)
    ]
    alone = [*reading, *commands.WRITE, *commands.CONNECT]
    found = await in_parallel([attempt(number, text) for number, text in enumerate(alone)])
    # The same means of detection must see what was granted, or they prove nothing.
    control = open_sandbox(fresh(folder, "control"), mounts=[Mount(source=granted, target="/mnt/granted")])
    seen = await control.run(["cat", "/mnt/granted/known.txt"], limits=ROOMY)
    damage = host.damage()
    host.process.kill()
    return {
        "tried": len(texts),
        "escaped": [problem for problems in found for problem in problems] + damage,
        "detects": host.token.encode() in seen.stdout,
    }


async def calls(folder: Path) -> dict:
    """System calls that the filter refuses, made directly; which of them worked."""
    if platform.machine() != "x86_64":
        return {"worked": [], "tried": 0}
    sandbox = open_sandbox(fresh(folder, "work"))

    async def attempt(name: str, arguments: str) -> str | None:
        code = f"import ctypes, sys; sys.exit(0 if ctypes.CDLL(None).syscall({arguments}) == -1 else 77)"
        done = await sandbox.run(["python", "-c", code], limits=ROOMY)
        return name if done.exit_code == 77 else None

    worked = await in_parallel([attempt(*item) for item in commands.CALLS.items()])
    return {"worked": [name for name in worked if name], "tried": len(worked)}


async def view_from_inside(folder: Path) -> dict:
    """What an innocent program finds: user, processes, descriptors, environment, a writable workspace, Python."""
    os.environ["TOKEN"] = "not for you"
    workspace = fresh(folder, "work")
    (workspace / "given.txt").write_text("given")
    leak = os.open(folder, os.O_RDONLY)
    os.set_inheritable(leak, True)
    program = """
import json, os, sys, tempfile
open('/workspace/given.txt', 'a').write(' and changed')
os.mkdir('/workspace/made')
open('/workspace/made/new.txt', 'w').write('new')
with tempfile.NamedTemporaryFile() as scratch: scratch.write(b'x')
try: open('/proc/self/comm', 'w').close(); writes = True
except OSError: writes = False
print(json.dumps({
  'uids': os.getresuid(), 'gids': os.getresgid(), 'groups': os.getgroups(), 'environment': dict(os.environ),
  'processes': [int(name) for name in os.listdir('/proc') if name.isdecimal()], 'cwd': os.getcwd(),
  'descriptors': [int(name) for name in os.listdir('/proc/self/fd')], 'root': sorted(os.listdir('/')),
  'capabilities': [line.split()[1] for line in open('/proc/self/status') if line[:6] in ('CapEff', 'CapPrm', 'CapBnd')],
  'no_new_privileges': 'NoNewPrivs:\\t1' in open('/proc/self/status').read(),
  'writable_mounts': [line.split()[1] for line in open('/proc/mounts') if 'rw' in line.split()[3].split(',')],
  'writes_proc': writes, 'host_name': os.uname().nodename, 'etc': sorted(os.listdir('/etc')),
}))"""
    done = await open_sandbox(workspace).run(["python", "-c", program], env={"GIVEN": "yes"}, limits=ROOMY)
    os.close(leak)
    new = workspace / "made" / "new.txt"
    return {
        "landlock": any(layer.name == "landlock" and layer.active for layer in layers()),
        "exit_code": done.exit_code,
        "stderr": done.stderr.decode(),
        "inside": json.loads(done.stdout or "{}"),
        "given": (workspace / "given.txt").read_text(),
        "new": new.read_text() if new.exists() else None,
        "new_owner_is_folder_owner": new.exists() and new.stat().st_uid == workspace.stat().st_uid,
    }


async def first_process(folder: Path) -> dict:
    """Without Landlock, which hides it: may a program write into the memory of the process that has no filter?"""
    source = Path(launch.__file__).read_text()
    code = compile(source.replace("version = landlock_version()", "version = 0"), "launch", "exec", dont_inherit=True)
    bubblewrap.launcher_code = lambda: importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)
    program = """
try: print(open('/proc/1/maps').read()); open('/proc/1/mem', 'r+b')
except OSError as problem: print(problem.errno)"""
    run = await open_sandbox(fresh(folder, "work")).run(["python", "-c", program], limits=ROOMY)
    own = await open_sandbox(folder / "work").run(["python", "-c", program.replace("/1/", "/self/")], limits=ROOMY)
    return {"first": run.stdout.decode().strip(), "own": own.stdout.decode().strip()}


ABUSES = {
    "processes": "python -c \"\nimport os, time\nwhile True:\n  try: os.fork()\n"
                 "  except OSError: time.sleep(0.1)\"",
    "memory": "python -c \"\nimport time\nkept = []\nwhile True:\n"
              "  try: kept.append(bytearray(8 << 20))\n  except MemoryError: pass\n  time.sleep(0.01)\"",
    "disk": "i=0; while true; do head -c 4000000 /dev/zero > /workspace/f$i || true; i=$((i+1)); done",
    "output": "yes this never ends",
    "wall time": "sleep 1000 & sleep 1000",
    "cpu time": "while :; do :; done",
}  # fmt: skip
MORE_ABUSES = {
    "memory in many processes": ("memory", "for i in 1 2 3 4 5 6; do python -c \"x = bytearray(50 << 20); "
                                 "import time; time.sleep(60)\" & done; wait"),
    "memory in scratch files": ("memory", "head -c 100000000 /dev/zero > /tmp/a; "
                                "head -c 100000000 /dev/zero > /dev/shm/a; sleep 60"),
    "one large file": ("disk", "cat /dev/zero > /workspace/large; sleep 60"),
    "a file without a name": ("disk", "python -c \"\nimport os, time\nfor i in range(20):\n"
                              "  f = open('/workspace/gone', 'wb'); os.unlink('/workspace/gone')\n"
                              "  f.write(bytes(4 << 20)); f.flush(); os.dup(f.fileno())\ntime.sleep(60)\""),
    "errors without end": ("output", "yes >&2"),
    "memory in page tables": ("memory", "python -c \"\nimport mmap, time\n"
                              "m = mmap.mmap(-1, 160 << 30, flags=0x4022, prot=1)\n"
                              "for at in range(0, len(m), 2 << 20): m[at]\ntime.sleep(60)\""),
    "memory in sockets": ("memory", "for i in 1 2; do python -c \"\nimport socket, time\nkept = []\n"
                          "for i in range(500): kept += socket.socketpair()\n"
                          "for s in kept: s.setsockopt(1, 7, 1 << 20); s.setblocking(False); s.send(b'x' * 60000)\n"
                          "time.sleep(60)\" & done; wait"),
}  # fmt: skip


async def abuse(folder: Path, *, more: bool = False) -> dict:
    """Every abuse at once, beside programs that behave; why each was stopped, and what the others did."""
    limits = {
        "wall time": Limits(wall_seconds=1),
        "cpu time": Limits(cpu_seconds=0.5, wall_seconds=PATIENCE),
    }
    small = Limits(
        wall_seconds=PATIENCE, processes=30, memory_bytes=200 << 20, disk_bytes=24 << 20, output_bytes=100_000
    )
    larger_disk = Limits(wall_seconds=PATIENCE, memory_bytes=150 << 20, disk_bytes=120 << 20)
    tried = {name: (name, text, limits.get(name, small)) for name, text in ABUSES.items()}
    if more:
        tried = {
            name: (reason, text, larger_disk if "scratch" in name else small)
            for name, (reason, text) in MORE_ABUSES.items()
        }

    async def attempt(name: str, text: str, limit: Limits) -> dict:
        sandbox = open_sandbox(fresh(folder, f"{name} {more}"))
        done = await sandbox.run(["sh", "-c", text], limits=limit)
        longest = max(len(done.stdout), len(done.stderr))
        return {"stopped": done.stopped, "exit_code": done.exit_code, "kept": longest, "truncated": done.truncated}

    async def behave(number: int) -> bool:
        sandbox = open_sandbox(fresh(folder, f"behaves {number} {more}"))
        results = []
        for step in range(3):
            done = await sandbox.run(["sh", "-c", f"echo {step} >> log; cat log"], limits=ROOMY)
            results.append(done.stdout.split() == [str(n).encode() for n in range(step + 1)] and done.exit_code == 0)
        return all(results)

    names = list(tried)
    abusers = asyncio.gather(*(attempt(name, tried[name][1], tried[name][2]) for name in names))
    behaved = await asyncio.gather(*(behave(number) for number in range(4)))
    endings = dict(zip(names, await abusers))
    return {"expected": {name: tried[name][0] for name in names}, "endings": endings, "behaved": behaved}


async def more_abuse(folder: Path) -> dict:
    return await abuse(folder, more=True)


# Nothing is left -----------------------------------------------------------------------------------------------------


GRANDCHILD = "(sleep 86400 & setsid sleep 86400 & trap '' TERM INT HUP; echo started; sleep 86400)"


def adopt_orphans() -> None:
    """Processes whose parent dies become ours, so that every one that is left can be counted."""
    if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) != 0:
        raise OSError("PR_SET_CHILD_SUBREAPER")


def descendants() -> int:
    """How many living processes there are beneath this one; the dead are reaped on the way."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            break
    return len(find_trees([os.getpid()], read_processes())[os.getpid()]) - 1


def left_after_patience() -> int:
    until = time.monotonic() + PATIENCE
    while (left := descendants()) and time.monotonic() < until:
        time.sleep(0.05)
    return left


async def cancel(folder: Path, width: int = 20) -> dict:
    """Cancel runs that have grandchildren in sessions of their own; count what is left at once and later."""
    adopt_orphans()
    sandboxes = [open_sandbox(fresh(folder, f"w{number}")) for number in range(width)]
    tasks = [
        asyncio.create_task(box.run(["sh", "-c", f"{GRANDCHILD} > /workspace/log"], limits=ROOMY)) for box in sandboxes
    ]
    until = time.monotonic() + 2 * PATIENCE
    while time.monotonic() < until:
        if all((folder / f"w{number}" / "log").exists() for number in range(width)):
            break
        await asyncio.sleep(0.05)
    before = descendants()
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "before": before,
        "cancelled": sum(isinstance(result, asyncio.CancelledError) for result in results),
        "left": left_after_patience(),
    }


async def cancel_many(folder: Path) -> dict:
    return await cancel(folder, width=100)


async def cancel_early(folder: Path) -> dict:
    """Cancel at every stage of a start."""
    adopt_orphans()
    sandbox = open_sandbox(fresh(folder, "work"))
    outcomes = []
    for number in range(12):
        task = asyncio.create_task(sandbox.run(["sh", "-c", GRANDCHILD], limits=ROOMY))
        await asyncio.sleep(number * 0.004)
        task.cancel()
        outcomes += await asyncio.gather(task, return_exceptions=True)
    return {
        "cancelled": sum(isinstance(one, asyncio.CancelledError) for one in outcomes),
        "left": left_after_patience(),
    }


async def close(folder: Path) -> dict:
    """Close while runs are under way: they end as cancelled, and the sandbox runs nothing more."""
    adopt_orphans()
    sandbox = open_sandbox(fresh(folder, "work"))
    tasks = [asyncio.create_task(sandbox.run(["sh", "-c", GRANDCHILD], limits=ROOMY)) for _ in range(3)]
    await asyncio.sleep(0.2)
    await sandbox.close()
    stopped = [(await task).stopped for task in tasks]
    try:
        await sandbox.run(["true"], limits=ROOMY)
    except RuntimeError as problem:
        return {"stopped": stopped, "afterwards": str(problem), "left": left_after_patience()}
    return {"stopped": stopped, "afterwards": "ran", "left": left_after_patience()}


async def runtime(folder: Path) -> dict:
    """A runtime that is there to be killed."""
    sandboxes = [open_sandbox(fresh(folder, f"w{number}")) for number in range(4)]
    await asyncio.gather(*(box.run(["sh", "-c", f"{GRANDCHILD} > /workspace/log"], limits=ROOMY) for box in sandboxes))
    return {}


def kill_runtime(folder: Path, delays: tuple[float | None, ...] = (None, 0.15, 0.3)) -> dict:
    """SIGKILL a runtime when all its programs run (None) or some seconds after its start; count what is left."""
    adopt_orphans()
    before, left = [], []
    for number, delay in enumerate(delays):
        place = fresh(folder, f"r{number}")
        child = subprocess.Popen([sys.executable, "-m", __spec__.name, "runtime", str(place)])
        until = time.monotonic() + (2 * PATIENCE if delay is None else delay)
        while time.monotonic() < until and not (delay is None and len(list(place.glob("*/log"))) == 4):
            time.sleep(0.02)
        before.append(descendants())
        child.send_signal(signal.SIGKILL)
        child.wait()
        left.append(left_after_patience())
    return {"before": before, "left": left}


def kill_runtime_often(folder: Path) -> dict:
    return kill_runtime(folder, tuple(0.02 * number for number in range(30)))


async def many(folder: Path) -> dict:
    """A hundred at once."""
    sandboxes = [open_sandbox(fresh(folder, f"w{number}")) for number in range(100)]
    runs = (box.run(["sh", "-c", f"echo {n}"], limits=ROOMY) for n, box in enumerate(sandboxes))
    results = await asyncio.gather(*runs)
    return {"right": sum(done.stdout == f"{number}\n".encode() for number, done in enumerate(results))}


def main() -> None:
    name, folder = sys.argv[1:]
    scenario = globals()[name]
    result = scenario(Path(folder))
    if asyncio.iscoroutine(result):
        result = asyncio.run(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
