"""The view's server: who gets in, what it answers, and that nobody who watches slows the swarm."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune.swarm.journal.sqlite import SQLiteJournal
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.view import connection, feed
from perilune.swarm.view.controls import ApprovalRequest
from perilune.swarm.view.inbox import Inbox
from perilune.swarm.view.server import View
from tests.swarm.view.example_run import BEGAN, MemoryJournal, Told, ended, started, tell_example
from tests.swarm.view.serving import SECONDS, Live, live_view


@pytest.fixture(scope="module")
def finished() -> Iterator[Live]:
    journal = MemoryJournal()
    tell_example(journal, agents=12)
    with live_view(journal) as live:
        yield live


@pytest.fixture
def live() -> Iterator[Live]:
    with live_view(MemoryJournal(clock=time.time)) as live:
        yield live


# Who gets in ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/api/state", "/api/feed", "/api/agent/main", "/api/artefact/00", "/api/nothing"])
def test_nothing_under_api_answers_without_the_token(finished: Live, path: str) -> None:
    assert finished.ask(path, X_Perilune_Token=None).status == 401
    assert finished.ask(path, X_Perilune_Token="wrong").status == 403
    assert finished.ask(path, X_Perilune_Token=finished.token[:-1]).status == 403
    assert finished.ask(f"{path}?token={finished.token}", X_Perilune_Token=None).status == 401


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/state"])
@pytest.mark.parametrize("host", [None, "evil.example", "127.0.0.1", "localhost:1", "127.0.0.1.evil.example:{port}"])
def test_another_host_name_is_refused(finished: Live, path: str, host: str | None) -> None:
    named = None if host is None else host.replace("{port}", str(finished.view.port))
    assert finished.ask(path, Host=named).status in (400, 421)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1"])
def test_requests_from_other_pages_are_refused(finished: Live, origin: str) -> None:
    origin = origin.replace("{port}", str(finished.view.port))
    assert finished.ask("/api/state", Origin=origin).status == 403
    body = {"agent": "main"}
    assert finished.ask("/api/cancel", "POST", body, Origin=origin).status == 403
    assert finished.ask("/api/cancel", "POST", body, Sec_Fetch_Site="cross-site").status == 403
    assert finished.controls.done == []


def test_the_own_page_gets_in_under_both_names(finished: Live) -> None:
    port = finished.view.port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert finished.ask("/api/state", Host=host, Origin=f"http://{host}").status == 200


def test_every_answer_carries_the_policy(finished: Live) -> None:
    for path, status in (
        ("/", 200),
        ("/static/app.js", 200),
        ("/api/state", 200),
        ("/none", 404),
        ("/api/agent/x", 404),
    ):
        answer = finished.ask(path)
        assert answer.status == status
        headers = {name.lower(): value for name, value in answer.headers.items()}
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        assert "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert "access-control-allow-origin" not in headers and "server" not in headers


def test_it_listens_on_loopback_alone_and_the_token_is_in_the_fragment(finished: Live) -> None:
    address, fragment = finished.url.split("#")
    assert address == f"http://127.0.0.1:{finished.view.port}/" and len(fragment) > 40
    own = socket.gethostbyname(socket.gethostname())
    if not own.startswith("127."):
        with pytest.raises(OSError):
            socket.create_connection((own, finished.view.port), timeout=2)


@pytest.mark.parametrize("path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd"])
def test_static_files_are_those_of_the_folder(finished: Live, path: str) -> None:
    assert finished.ask(path).status == 404


# What it answers -----------------------------------------------------------------------------------------------------


def test_the_state_of_a_moment_is_that_of_its_events(finished: Live) -> None:
    whole = finished.ask("/api/state").json
    assert whole["run"]["status"] == "done" and len(whole["agents"]) == 13 and whole["all_bars"]
    for until in (2600, 9000, 1300, 10**9):
        state = finished.ask(f"/api/state?until={until}").json
        expected = [event.index for event in finished.journal.all if round((event.time - BEGAN) * 1000) <= until]
        assert state["index"] == expected[-1] and "all_bars" not in state
    assert finished.ask("/api/state?until=-5").status == 400


def test_the_past_of_a_run_that_goes_on_grows_with_it(live: Live) -> None:
    for number in range(3):
        told = Told()
        told.add(0, f"main/{number}", "started", started(str(number), None, 0))
        live.commit(*row(told))
        assert live.ask(f"/api/state?until={10**9 + number}").json["index"] == number


def test_a_transcript_has_the_calls_with_their_outcomes(finished: Live) -> None:
    page = finished.ask("/api/agent/main%2Ffact-checker-1.2").json
    assert page["agent"]["name"] == "fact checker 2"
    kinds = [entry["kind"] for entry in page["entries"]]
    assert kinds[0] == "started" and kinds[-1] == "finished" and len(kinds) == page["agent"]["length"]
    replies = [entry for entry in page["entries"] if entry["kind"] == "reply"]
    assert all(call["outcome"]["status"] in ("ok", "error") for reply in replies for call in reply["calls"])
    part = finished.ask("/api/agent/main/fact-checker-1.2?start=1&end=3").json
    assert part["entries"] == page["entries"][1:3]
    assert finished.ask("/api/agent/main/nobody").status == 404


def test_artefacts_are_plain_text_to_save(finished: Live) -> None:
    sha256 = finished.ask("/api/state").json["run"]["answer"]["sha256"]
    answer = finished.ask(f"/api/artefact/{sha256}?start=2&end=8")
    assert (answer.status, answer.body) == (200, b"Answer")
    headers = {name.lower(): value for name, value in answer.headers.items()}
    assert headers["content-type"].startswith("text/plain")
    assert headers["content-disposition"] == f'attachment; filename="{sha256}.txt"'
    assert finished.ask(f"/api/artefact/{'0' * 64}").status == 404
    assert finished.ask(f"/api/artefact/{sha256}?start=x").status == 400


# Commands ------------------------------------------------------------------------------------------------------------


def test_commands_reach_the_controls_on_the_swarms_loop(live: Live) -> None:
    request = ApprovalRequest(id="r/1", agent="main", call="0.0", tool="send", arguments='{"a": 1}')
    live.approvals.add(request)
    assert live.ask("/api/approval/r%2F1").json["arguments"] == '{"a": 1}'
    assert live.ask("/api/cancel", "POST", {"agent": "main/a"}).json == {"ok": True}
    assert live.ask("/api/steer", "POST", {"agent": "main", "text": "Shorter."}).status == 200
    decision = {"id": "r/1", "decision": "allow", "arguments_sha256": request.arguments_sha256}
    assert live.ask("/api/approve", "POST", decision | {"arguments_sha256": "0" * 64}).status == 409
    assert live.ask("/api/approve", "POST", decision).status == 200
    assert live.ask("/api/approve", "POST", decision).status == 404
    expected = [("cancel", "main/a"), ("steer", "main", "Shorter."), ("decide", "r/1", "allow")]
    assert live.controls.done == expected and live.controls.threads == {"swarm"}


def test_wrong_commands_are_explained_and_do_nothing(live: Live) -> None:
    assert live.ask("/api/cancel").status == 405
    assert live.ask("/api/cancel", "POST", {"agent": 5}).status == 400
    assert live.ask("/api/cancel", "POST", b"{").status == 400
    assert live.ask("/api/cancel", "POST", b"[]").status == 400
    assert live.ask("/api/cancel", "POST", {"agent": "main"}, Content_Type="text/plain").status == 415
    assert live.ask("/api/steer", "POST", {"agent": "main", "text": " "}).status == 400
    assert live.ask("/api/steer", "POST", {"agent": "main", "text": "x" * 70_000}).status == 413
    gone = live.ask("/api/steer", "POST", {"agent": "main/gone", "text": "x"})
    assert gone.status == 409 and gone.json["error"] == "this agent has ended"
    assert live.controls.done == []


# The feed ------------------------------------------------------------------------------------------------------------


def row(told: Told) -> list[tuple]:
    return [(chain, kind, body, note) for _, chain, kind, body, note in told.rows]


def test_the_feed_is_a_snapshot_then_frames_and_resumes_where_it_was_left(live: Live) -> None:
    told = Told()
    told.add(0, "main", "started", started("main", None, 0))
    live.commit(*row(told))
    stream = live.feed()
    kind, position, data = stream.next()
    assert kind == "snapshot" and [born["id"] for born in data["born"]] == ["main"] and data["live"]
    told = Told()
    told.reply(0, "main", 0, "", [("tool", "{}")])
    live.commit(*row(told))
    kind, second, data = stream.next()
    assert kind == "frame" and data["agents"][0]["activity"] == "tool"
    stream.close()
    told = Told()
    told.outcome(0, "main#0.0", "tool", "fine")
    live.commit(*row(told))
    again = live.feed(last=second)
    kind, _, data = again.next()
    assert kind == "frame" and data["agents"][0]["activity"] == "model" and data["index"] == 2
    again.close()
    for unknown in ("999999", "x", "-1"):
        fresh = live.feed(last=unknown)
        assert fresh.next()[0] == "snapshot"
        fresh.close()


def test_a_viewer_that_never_reads_delays_nobody_and_is_given_a_snapshot_when_it_does(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "KEEP_FRAMES", 3)
    monkeypatch.setattr(feed, "FRAME_SECONDS", 0.01)
    told = Told()
    told.add(0, "main", "started", started("main", None, 0))
    for number in range(300):
        told.add(0, f"main/a-{number}", "started", started("a" * 100, "main", 1))
    live.commit(*row(told))
    deaf = [live.feed(receive_buffer=4096) for _ in range(4)]
    reader = live.feed()
    reader.next()
    size = 0
    for step in range(25):
        told = Told()
        for number in range(300):
            told.reply(0, f"main/a-{number}", step, "y" * 100, [("tool", "{}")])
            told.outcome(0, f"main/a-{number}#{step}.0", "tool", "z" * 200)
        live.commit(*row(told))
        while (frame := reader.next()[2])["totals"]["steps"] < 300 * (step + 1):
            size += len(str(frame))
        size += len(str(frame))
    assert size > 1 << 20  # more than the kernel and the server hold for one connection
    assert live.view._inbox.held == (0, 0)
    for stream in deaf:
        seen = [stream.next()]
        while seen[-1][2]["totals"]["steps"] < 300 * 25:
            seen.append(stream.next())
        assert [kind for kind, _, _ in seen].count("snapshot") >= 2
    for stream in (*deaf, reader):
        stream.close()


def test_connections_that_ask_nothing_neither_pile_up_nor_keep_others_out(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MOST", 8)
    monkeypatch.setattr(connection, "SILENT_SECONDS", 10 * SECONDS)
    stream = live.feed()
    assert stream.next()[0] == "snapshot"
    silent = [socket.create_connection(("127.0.0.1", live.view.port)) for _ in range(40)]
    silent[-1].sendall(b"GET / HTTP/1.1\r\nHost: half a requ")
    assert live.ask("/api/state").status == 200
    server = live.view._server
    assert server is not None
    deadline = time.monotonic() + SECONDS
    while len(server.server_state.connections) > 8:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    live.commit(("run", "run_started", {"task": "still there"}, {}))
    assert stream.next()[2]["run"]["task"] == "still there"  # the one that is served stays
    stream.close()
    for each in silent:
        each.close()


def test_whoever_never_ends_a_request_is_let_go(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.2)
    stream = live.feed()
    assert stream.next()[0] == "snapshot"
    with socket.create_connection(("127.0.0.1", live.view.port), timeout=SECONDS) as slow:
        slow.sendall(b"GET /api/state HTTP/1.1\r\nX: ")
        deadline = time.monotonic() + SECONDS
        with contextlib.suppress(ConnectionError):
            while True:  # drop by drop
                assert time.monotonic() < deadline
                slow.sendall(b"x")
                time.sleep(0.02)
    live.commit(("run", "run_started", {"task": "still there"}, {}))
    assert stream.next()[2]["run"]["task"] == "still there"
    stream.close()


def test_an_inbox_that_is_full_lets_go_and_reports_the_gap() -> None:
    journal = MemoryJournal()
    events = tell_example(journal, agents=5)
    inbox = Inbox(max_events=10)
    inbox.receive(events[:5])
    assert inbox.drain() == ([], True)
    inbox.wake()
    assert inbox.drain() == ([], True)
    inbox.receive(events[:5])
    inbox.receive(events[5:8])
    assert inbox.drain() == (events[:8], False)
    inbox.receive(events[8:19])
    inbox.receive(events[19:20])
    assert inbox.held == (0, 0)  # what follows a gap is read from the journal with it
    assert inbox.drain() == ([], True) and inbox.drain() == ([], False)
    bytes_bound = Inbox(max_bytes=100)
    bytes_bound.wake()
    bytes_bound.drain()
    bytes_bound.receive(events[:20])
    assert bytes_bound.held == (0, 0)


def test_stopping_shows_the_last_ends_open_streams_and_frees_the_port() -> None:
    with live_view(MemoryJournal()) as live:
        streams = [live.feed(), live.feed()]
        for stream in streams:
            stream.next()
        port = live.view.port
        receivers = live.journal._receivers
        assert len(receivers) == 1
        told = Told()
        told.add(0, "run", "run_finished", {"status": "done", "answer": None, "error": None})
        live.commit(*row(told))
        live.swarm.call(live.view.stop)
        assert receivers == []
        for stream in streams:
            seen = [stream.next()]
            while seen[-1][0] != "closed":
                seen.append(stream.next())
            assert seen[-2][2]["run"]["status"] == "done"
            assert stream.response.read() == b""
        socket.create_server(("127.0.0.1", port)).close()


def test_a_view_follows_the_journal_in_sqlite_live_and_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def scenario() -> tuple[bytes, bytes]:
        journal = SQLiteJournal.open(path, key=None)
        view = View(reader=SQLiteReader(path), journal=journal)
        view.start()
        live = Live(view, MemoryJournal(), view.approvals, None, None)  # pyrefly: ignore[bad-argument-type]
        stream = await asyncio.to_thread(live.feed)
        await asyncio.to_thread(stream.next)
        artefact = await journal.put(b"<b>whole</b>")
        await journal.append("run", "run_started", {"task": "t", "limits": {}, "model": "m"})
        await journal.append("main", "started", started("main", None, 0))
        await journal.append("main", "finished", ended(result=artefact.plain()))
        await journal.append("run", "run_finished", {"status": "done", "answer": artefact.plain(), "error": None})
        while (await asyncio.to_thread(stream.next))[2].get("run", {}).get("status") != "done":
            pass
        shown = await asyncio.to_thread(live.ask, "/api/state")
        text = await asyncio.to_thread(live.ask, f"/api/artefact/{artefact.sha256}")
        assert text.body == b"<b>whole</b>"
        stream.close()
        view.stop()
        await journal.close()
        return shown.body, path.read_bytes()[:6]

    shown, magic = asyncio.run(scenario())
    assert magic == b"SQLite"
    view = View(reader=SQLiteReader(path))
    view.start()
    later = Live(view, MemoryJournal(), view.approvals, None, None)  # pyrefly: ignore[bad-argument-type]
    assert later.ask("/api/state").body.replace(b'"live":false', b'"live":true') == shown
    assert later.ask("/api/cancel", "POST", {"agent": "main"}).status == 409
    view.stop()
