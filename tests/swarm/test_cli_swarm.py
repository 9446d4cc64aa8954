"""`perilune swarm` as a person uses it: in a process of its own, in an empty folder, without a terminal."""

import gzip
import json
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from perilune.cli import main
from perilune.swarm.scripted import Behaviour, start_server


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PERILUNE_NANO", "")  # the scripted model, also where the released one is
    monkeypatch.chdir(tmp_path)
    return tmp_path


def perilune(*arguments: str, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "perilune", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)


def here(capsys, *arguments: str) -> tuple[int, str, str]:
    """The command in this process: its exit code, output and errors."""
    code = 0
    try:
        main(list(arguments))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    return code, *capsys.readouterr()


@contextmanager
def collector():
    """Takes what is sent to it, as an OpenTelemetry collector would."""
    taken: list[bytes] = []

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            taken.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Taker) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        received = SimpleNamespace(address=f"http://127.0.0.1:{server.server_port}", bodies=b"")
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()
            received.bodies = b"".join(taken)


def endpoint(server) -> list[str]:
    return ["--model", "scripted", "--base-url", server.base_url, "--api-key-env", ""]


def test_the_demonstration_answers_from_documents_and_says_that_its_model_is_scripted(place, capsys, monkeypatch):
    done = perilune("swarm", "demo")
    assert done.returncode == 0, done.stderr
    assert "scripted" in done.stdout.splitlines()[0] and "critical" in done.stderr
    answer = Path("runs/swarm/demo/answer.md").read_text()
    assert "Enceladus" in answer and "William Herschel" in answer and "## Sources" in answer
    linked = [part.split(")")[0] for part in answer.split("](artefacts/")[1:]]
    assert linked and all((Path("runs/swarm/demo/artefacts") / name).is_file() for name in linked)
    listed = json.loads(here(capsys, "swarm", "list", "--json")[1])
    assert [(each["run"], each["status"]) for each in listed] == [("runs/swarm/demo", "done")]
    code, exported, _ = here(capsys, "swarm", "audit", "demo", "--json")
    assert code == 0 and json.loads(exported.splitlines()[0])["sealed"] is True
    code, played, _ = here(capsys, "swarm", "replay", "demo")
    assert code == 0 and "fact checker" in played
    code, _, told = here(capsys, "swarm", "traces", "demo")
    assert code == 1 and "--token-ids" in told
    with collector() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.address)
        assert here(capsys, "swarm", "spans", "demo")[0] == 0
    assert b"invoke_agent researcher" in received.bodies and b"execute_tool assign_task" in received.bodies
    with sqlite3.connect("runs/swarm/demo/journal.sqlite") as database:
        changed = "cast(replace(cast(body AS text), 'Enceladus', 'Mimas') AS blob)"
        database.execute(f"UPDATE events SET body = {changed} WHERE kind = 'reply'")
    code, _, told = here(capsys, "swarm", "resume", "demo")
    assert code == 1 and "is not intact" in told
    code, _, told = here(capsys, "swarm", "audit", "demo", "--out", "audit.jsonl")
    assert code == 1 and "problems" in told
    assert json.loads(Path("audit.jsonl").read_text().splitlines()[0])["intact"] is False
    code, _, told = here(capsys, "swarm", "demo", "--quiet")  # replaces the run, says nothing on the way
    assert code == 0 and told == ""


def test_a_run_that_was_killed_goes_on_where_it_was(place):
    with start_server("swarm", {"agents": 5, "steps": 6, "tool": "list_files"}, Behaviour(latency=0.05)) as server:
        command = [sys.executable, "-m", "perilune", "swarm", "run", "Do it.", "--out", "run", "--quiet"]
        process = subprocess.Popen([*command, *endpoint(server)])
        deadline = time.monotonic() + 60
        while server.counts()["calls"] < 12:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        before = server.counts()["calls"]
        again = perilune("swarm", "resume", "run", "--json")
        assert again.returncode == 0, again.stderr
        found = json.loads(again.stdout)
        assert found["status"] == "done" and found["agents"] == 6 and found["steps"] == 3 + 5 * 7
        assert server.counts()["calls"] <= found["steps"] + 5, before
        repeated = perilune("swarm", "run", "Again.", "--out", "run", *endpoint(server))
        assert repeated.returncode == 1 and "holds a run already" in repeated.stderr


def test_interrupting_a_run_says_how_to_go_on(place):
    with start_server("swarm", {"agents": 3, "steps": 50, "tool": "list_files"}, Behaviour(latency=0.05)) as server:
        command = [sys.executable, "-m", "perilune", "swarm", "run", "Do it.", "--out", "run", "--quiet"]
        process = subprocess.Popen([*command, *endpoint(server)], stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while server.counts()["calls"] < 8:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130 and "perilune swarm resume run" in told


NOWHERE = ["--model", "m", "--base-url", "http://127.0.0.1:9/v1"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["swarm"], 2, "STEP is missing"),
        (["swarm", "rum"], 2, "did you mean 'run'"),
        (["swarm", "run", "x"], 1, "no model"),
        (["swarm", "run", "x", "--model", "m"], 1, "no endpoint"),
        (["swarm", "run", "x", *NOWHERE], 1, "OPENAI_API_KEY"),
        (["swarm", "run", "x", *NOWHERE, "--budget", "apples=1"], 1, "apples"),
        (["swarm", "run", "x", *NOWHERE, "--policy", "none.toml"], 1, "none.toml"),
        (["swarm", "resume", "nowhere"], 1, "no run in 'nowhere'"),
        (["swarm", "audit", "nowhere"], 1, "no run in 'nowhere'"),
        (["swarm", "demo", "--docs", "nowhere"], 1, "not a folder"),
    ],
)
def test_wrong_input_is_one_line_and_an_exit_code(place, capsys, monkeypatch, arguments, code, says):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "PERILUNE_MODEL"):
        monkeypatch.delenv(name, raising=False)
    found, _, told = here(capsys, *arguments)
    assert found == code and says in told and told.count("\n") == 1


def test_the_swarm_imports_no_torch():
    program = "import sys, perilune.swarm.session, perilune.cli_swarm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
