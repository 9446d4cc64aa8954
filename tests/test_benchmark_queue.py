"""Rounds of the queue: what fits is run, what is done comes home, and nothing else is written there."""

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmark_scripts import load_script


@pytest.fixture
def script(monkeypatch):
    return load_script(monkeypatch, "queue_round")


def queue(folder: Path, *lines: tuple) -> Path:
    """Lines of (command, minutes), or of (command, minutes, name, after)."""
    path = folder / "queue.toml"
    entries = []
    for command, minutes, *order in lines:
        name, after = order or ("", [])
        said = {"minutes": minutes, "result": "'x'", "name": f"'{name}'", "after": after}
        fields = "".join(f"{field} = {value}\n" for field, value in said.items())
        entries.append(f"[[experiment]]\ncommand = '''{command}'''\n{fields}")
    path.write_text("\n".join(entries))
    return path


def write(name: str, text: str = "1") -> str:
    return f"python -c \"from pathlib import Path; Path('benchmarks/results/{name}').write_text('{text}')\""


@pytest.fixture
def settings(script, tmp_path):
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "old.json").write_text("old")
    return script.Settings(
        step="run", seconds=60, bundle=tmp_path / "out" / "results.tar.gz", folder=tmp_path,
        queue=tmp_path / "queue.toml",
    )  # fmt: skip


def brought(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {each.name: archive.extractfile(each).read().decode() for each in archive.getmembers()}


def test_lines_that_fit_are_run_and_what_is_new_comes_home(script, settings, tmp_path, capsys):
    queue(tmp_path, (write("a.json"), 0.1), (write("b.json"), 30), ("exit 3", 0.1), (write("old.json", "new"), 0.1))
    script.main(settings)
    assert brought(settings.bundle) == {"benchmarks/results/a.json": "1", "benchmarks/results/old.json": "new"}
    said = capsys.readouterr().out
    assert "line 2: no time left" in said and "line 3: failed with status 3" in said and "2 done" in said
    home = tmp_path / "home"
    script.main(replace(settings, step="take", file=settings.bundle, folder=home))
    assert (home / "benchmarks" / "results" / "old.json").read_text() == "new"


def test_a_line_that_has_more_to_do_is_given_again(script, settings, tmp_path):
    again = "n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) > n; [ $n -ge 2 ] || exit 75"
    queue(tmp_path, (again, 0.3))
    (ended,) = script.Round(settings).run()
    assert ended.how == "done" and (tmp_path / "n").read_text() == "3\n"


def test_lines_side_by_side_share_the_cores(script, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(script.os, "cpu_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    says = 'echo "${OMP_NUM_THREADS:-all}" > benchmarks/results/threads.txt'
    queue(tmp_path, (says, 0.1))
    said = []
    for at_a_time, told in ((1, None), (5, None), (40, None), (5, "7")):
        if told is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", told)
        script.Round(replace(settings, at_a_time=at_a_time)).run()
        said.append((tmp_path / "benchmarks/results/threads.txt").read_text().strip())
    assert said == ["all", "3", "1", "7"]


def test_what_still_runs_at_the_end_is_stopped_and_may_save_first(script, settings, tmp_path):
    saves = "trap 'echo saved > benchmarks/results/s.json; exit 75' TERM; sleep 60 & wait"
    queue(tmp_path, (saves, 0.01), ("sleep 60", 0.01), ("echo 1 > benchmarks/results/quick.json", 0.01))
    (first, second, third) = script.Round(replace(settings, seconds=28, at_a_time=3)).run()
    assert (first.how, second.how, third.how) == ("stopped", "stopped", "done")
    assert set(brought(settings.bundle)) == {"benchmarks/results/s.json", "benchmarks/results/quick.json"}


def test_a_program_that_takes_a_while_to_save_is_waited_for(script, settings, tmp_path):
    program = tmp_path / "saves.py"
    program.write_text(
        "import signal, sys, time\nfrom pathlib import Path\n"
        "def stop(*_):\n    time.sleep(2)\n    Path('benchmarks/results/saved.json').write_text('1')\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, stop)\nPath('begun').touch()\ntime.sleep(60)\n"
    )
    queue(tmp_path, (f"python {program} && echo 1 > benchmarks/results/next.json", 0.01))
    (ended,) = script.Round(replace(settings, seconds=script.RESERVE_SECONDS + 3)).run()
    assert (tmp_path / "begun").exists() and ended.how == "stopped"
    assert set(brought(settings.bundle)) == {"benchmarks/results/saved.json"}


def test_lines_wait_for_all_of_the_name_they_come_after_and_others_go_ahead(script, settings, tmp_path):
    queue(
        tmp_path, ("sleep 1; echo model >> order", 0.1, "model", []), ("echo arm >> order", 0.1, "arm", ["model"]),
        ("sleep 2; echo model >> order", 0.1, "model", []), ("echo alone >> order", 0.1),
    )  # fmt: skip
    assert [ended.how for ended in script.Round(replace(settings, at_a_time=3)).run()] == ["done"] * 4
    assert (tmp_path / "order").read_text().split() == ["alone", "model", "model", "arm"]


def test_a_line_whose_model_failed_is_not_begun_nor_what_comes_after_it(script, settings, tmp_path):
    queue(
        tmp_path, ("exit 1", 0.1, "model", []), ("echo 1 > arm", 0.1, "arm", ["model"]),
        ("echo 1 > report", 0.1, "", ["arm"]), ("echo 1 > other", 0.1, "", ["not in this round"]),
    )  # fmt: skip
    ended = script.Round(replace(settings, at_a_time=2)).run()
    assert [each.how for each in ended] == [
        "failed with status 1", "not begun, model is not done", "not begun, arm is not done", "done",
    ]  # fmt: skip
    assert (tmp_path / "other").exists() and not (tmp_path / "arm").exists() and not (tmp_path / "report").exists()


def test_lines_that_wait_for_each_other_do_not_hold_up_the_round(script, settings, tmp_path):
    queue(tmp_path, ("echo 1", 0.1, "a", ["b"]), ("echo 1", 0.1, "b", ["a"]), ("echo 1", 0.1))
    first, second, third = script.Round(replace(settings, at_a_time=2)).run()
    assert first.how == "not begun, b is not done" and second.how == "not begun, a is not done"
    assert third.how == "done"


def test_chosen_lines_come_in_their_order_and_an_unknown_one_is_named(script, settings, tmp_path):
    queue(tmp_path, ("echo 1 >> order", 0.1), ("echo 2 >> order", 0.1), ("echo 3 >> order", 0.1))
    script.Round(replace(settings, lines=(3, 1))).run()
    assert (tmp_path / "order").read_text() == "3\n1\n"
    with pytest.raises(SystemExit, match=r"--lines names \[7\]: the queue has lines 1 to 3"):
        script.chosen(replace(settings, lines=(7,)))


def test_lines_of_the_queue_come_after_lines_that_are_there(script):
    lines = script.read_queue(script.ROOT / "benchmarks" / "queue.toml")
    names = {line.name: line.number for line in lines if line.name}
    for line in lines:
        assert all(names[name] < line.number for name in line.after), line


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "src/perilune/evil.py", "benchmarks/results/../../evil"])
def test_a_bundle_writes_nowhere_but_where_results_are(script, settings, tmp_path, name):
    path = tmp_path / "evil.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for each in ("benchmarks/results/fine.json", name):
            member = tarfile.TarInfo(each)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(SystemExit, match="expected files of"):
        script.take(path, tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_the_real_queue_can_be_shown(script, capsys):
    script.main(script.Settings(step="show"))
    assert "minutes in all" in capsys.readouterr().out


def test_a_line_that_is_to_be_alone_waits_for_those_before_it_and_those_after_it_for_it(script, settings, tmp_path):
    def noted(name: str, seconds: float = 0.2) -> str:
        return f"echo begin {name} >> order; sleep {seconds}; echo end {name} >> order"

    path = queue(tmp_path, (noted("a", 0.5), 0.1), ("exit 1", 0.1), (noted("timed"), 0.1), (noted("b"), 0.1))
    entries = path.read_text().split("[[experiment]]\n")
    entries[3] += "alone = true\n"
    path.write_text("[[experiment]]\n".join(entries))
    script.main(replace(settings, at_a_time=4))
    assert (tmp_path / "order").read_text().split("\n")[:-1] == [
        f"{what} {name}" for name in ("a", "timed", "b") for what in ("begin", "end")
    ]


def test_a_bundle_that_cannot_be_written_is_left_to_the_next_line(script, settings, tmp_path, monkeypatch, capsys):
    queue(tmp_path, (write("a.json"), 0.1), (write("b.json"), 0.1))
    real, calls = script.write_bundle, []

    def vanished(*given):
        calls.append(given)
        if len(calls) == 1:
            raise FileNotFoundError("a file that was there")
        return real(*given)

    monkeypatch.setattr(script, "write_bundle", vanished)
    script.main(settings)
    assert set(brought(settings.bundle)) == {"benchmarks/results/a.json", "benchmarks/results/b.json"}
    said = capsys.readouterr().out
    assert "no bundle this time: a file that was there" in said and "2 done" in said
