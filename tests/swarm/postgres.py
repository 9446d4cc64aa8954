"""A PostgreSQL server of one's own: in a temporary folder, on a Unix socket, as an ordinary user even for root.

    @pytest.mark.needs_tool("initdb")
    def test_something(postgres_dsn): ...

The fixture is known to all tests of this folder (conftest.py). The server listens on no port. All tests share it;
each uses runs with names of its own.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


def _ordinary_user() -> dict[str, Any]:
    """How to start a process that PostgreSQL accepts: it refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    pytest.skip("needs an ordinary user (postgres or nobody) to run a PostgreSQL server")


def _die_with_parent() -> None:
    """Tests that are killed leave no server behind (PR_SET_PDEATHSIG; Linux alone has it)."""
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


@pytest.fixture(scope="session")
def postgres_dsn(tool_path: Callable[[str], str]) -> Iterator[str]:
    """The address of a running server, ended with the session."""
    initdb, postgres = tool_path("initdb"), tool_path("postgres")
    user = _ordinary_user()
    # Not below pytest's folder, which other users cannot enter; short, as the path of a socket must be.
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": str(folder)}
    if user:
        os.chown(folder, user["user"], user["group"])
    options: dict[str, Any] = {"cwd": folder, "env": environment, "stderr": subprocess.STDOUT, **user}
    try:
        command = [initdb, "-D", "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
        made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, **options)
        assert made.returncode == 0, made.stdout
        command = [postgres, "-D", "data", "-k", str(folder), "-c", "listen_addresses="]
        command += ["-c", "fsync=off", "-c", "max_connections=100", "-c", "shared_buffers=16MB"]
        with open(folder / "log", "wb") as log:
            before = _die_with_parent if os.uname().sysname == "Linux" else None
            server = subprocess.Popen(command, stdout=log, preexec_fn=before, **options)
        try:
            for _ in range(600):
                if (folder / ".s.PGSQL.5432").exists() and "ready to accept" in (folder / "log").read_text():
                    break
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
            else:
                pytest.fail(f"PostgreSQL did not start: {(folder / 'log').read_text()}")
            yield f"postgresql://postgres@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
