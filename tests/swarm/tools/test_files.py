"""File tools: the workspace, granted folders, and nothing else."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.swarm.sandbox import Mount, open_sandbox
from perilune.swarm.sandbox.contract import Completed
from perilune.swarm.tools.files import FILE_TOOLS, edit_file, list_files, read_file, search_files, write_file
from perilune.swarm.tools.room import write_within
from perilune.swarm.tools.tool import ToolContext, ToolError
from tests.swarm.tools.calling import FakeSandbox, call, context_in


@pytest.fixture
def place(tmp_path: Path) -> ToolContext:
    """A workspace, a granted folder, and secrets beside both."""
    workspace, papers = tmp_path / "workspace", tmp_path / "papers"
    for folder in (workspace, papers, tmp_path / "papers2"):
        folder.mkdir()
    (papers / "moon.txt").write_text("The Moon\nis far.\n")
    for folder in (tmp_path, tmp_path / "papers2"):
        (folder / "secret.txt").write_text("SECRET")
    return context_in(workspace, folders={"/papers": papers})


def run(place: ToolContext, tool, **arguments) -> str:
    return asyncio.run(call(tool, place, **arguments)).text


def test_what_was_written_is_read_back(place: ToolContext) -> None:
    run(place, write_file, path="notes/a.md", content="one\ntwo\r\nthree")
    assert run(place, read_file, path="notes/a.md") == "one\ntwo\r\nthree"
    assert run(place, read_file, path="/workspace/notes/a.md") == "one\ntwo\r\nthree"
    assert (place.workspace / "notes" / "a.md").read_bytes() == b"one\ntwo\r\nthree"


def test_lines_are_counted_from_one_and_both_ends_belong(place: ToolContext) -> None:
    run(place, write_file, path="a", content="".join(f"line {n}\n" for n in range(1, 11)))
    assert run(place, read_file, path="a", start=3, end=4) == "[a: lines 3-4 of 10]\nline 3\nline 4\n"
    with pytest.raises(ToolError, match="start is 11, but 'a' has 10 lines"):
        run(place, read_file, path="a", start=11)
    with pytest.raises(ToolError, match="end is 2, before start"):
        run(place, read_file, path="a", start=3, end=2)


def test_a_long_file_comes_in_parts_that_say_so(place: ToolContext) -> None:
    run(place, write_file, path="a", content="".join(f"{n:09}\n" for n in range(20_000)))
    text = run(place, read_file, path="a")
    assert len(text) <= 60_000
    first, last = text.splitlines()[0], text.splitlines()[-1]
    assert first == f"[a: lines 1-{int(last) + 1} of 20000]"


def test_an_edit_needs_text_that_occurs_once(place: ToolContext) -> None:
    run(place, write_file, path="a", content="x = 1\nx = 2\n")
    run(place, edit_file, path="a", old="x = 1", new="y = 1")
    assert run(place, read_file, path="a") == "y = 1\nx = 2\n"
    with pytest.raises(ToolError, match="occurs 2 times"):
        run(place, edit_file, path="a", old=" = ", new="=")
    with pytest.raises(ToolError, match="does not occur"):
        run(place, edit_file, path="a", old="z", new="")
    run(place, edit_file, path="a", old=" = ", new="=", all=True)
    assert run(place, read_file, path="a") == "y=1\nx=2\n"


def test_an_edit_never_harms_bytes_that_are_no_text(place: ToolContext) -> None:
    data = b"caf\xe9 " + b"x" * 100
    (place.workspace / "latin").write_bytes(data)
    with pytest.raises(ToolError, match="not all UTF-8"):
        run(place, edit_file, path="latin", old="x" * 100, new="")
    assert (place.workspace / "latin").read_bytes() == data


def test_an_edit_that_would_fill_the_memory_is_refused_before_it_is_made(place: ToolContext) -> None:
    (place.workspace / "many.txt").write_text("a" * (4 << 20))
    with pytest.raises(ToolError, match="would have 41943040000000 bytes"):
        run(place, edit_file, path="many.txt", old="a", new="b" * 10_000_000, all=True)
    assert (place.workspace / "many.txt").read_text() == "a" * (4 << 20)


def test_writing_fills_a_workspace_no_further_than_its_room(tmp_path: Path) -> None:
    def write(name: str) -> None:
        write_within(tmp_path, name, b"x" * 100_000, room=1_000_000)

    (tmp_path / "before").write_bytes(b"y" * 3_000_000)  # what was there counts for nothing
    for number in range(5):
        write(str(number))
    with pytest.raises(OSError, match="workspace is full"):
        any(write(str(number)) for number in range(5, 20))
    assert 5 <= len(list(tmp_path.iterdir())) - 1 <= 10  # blocks and names take room too
    (tmp_path / "0").unlink()
    (tmp_path / "1").unlink()
    write("0")
    for _ in range(50):  # to replace a file takes no more room
        write("0")


def test_binary_and_huge_files_are_named_not_shown(place: ToolContext) -> None:
    (place.workspace / "b").write_bytes(b"\x7fELF\0\0")
    with pytest.raises(ToolError, match="no text file"):
        run(place, read_file, path="b")
    with (place.workspace / "h").open("wb") as file:
        file.truncate(9 << 20)
    with pytest.raises(ToolError, match="more than 8388608"):
        run(place, read_file, path="h")
    with pytest.raises(ToolError, match="more than 2097152"):
        run(place, write_file, path="w", content="x" * (3 << 20))


def test_a_granted_folder_is_read_and_never_written(place: ToolContext) -> None:
    assert run(place, read_file, path="/papers/moon.txt") == "The Moon\nis far.\n"
    assert "/papers/moon.txt  17" in run(place, list_files, folder="/papers")
    assert run(place, search_files, text="far", folder="/papers") == "/papers/moon.txt:2: is far."
    assert "[folders you may also read: /papers]" in run(place, list_files)
    for tool, arguments in ((write_file, {"content": "x"}), (edit_file, {"old": "Moon", "new": "Sun"})):
        with pytest.raises(ToolError, match="may only read"):
            run(place, tool, path="/papers/moon.txt", **arguments)


ESCAPES = [
    "../secret.txt",
    "notes/../../secret.txt",
    "./../secret.txt",
    "..",
    "/workspace/../secret.txt",
    "/papers/../secret.txt",
    "/papers2/secret.txt",
    "/papers/../papers2/secret.txt",
    "/etc/passwd",
    "//etc/passwd",
    "/workspace//../../etc/passwd",
    "/proc/self/root/etc/passwd",
    "/proc/self/environ",
    "link",
    "link/passwd",
    "linked_file",
    "loop/loop",
    "notes/up/secret.txt",
    "pipe",
    "\u2025/secret.txt",
    "\uff0e\uff0e/secret.txt",
    "..\\secret.txt",
    "a\0b",
    "~/.ssh/id_rsa",
    "file:///etc/passwd",
]


@pytest.mark.parametrize("path", ESCAPES)
def test_no_name_leads_out(place: ToolContext, path: str) -> None:
    workspace = place.workspace
    (workspace / "notes").mkdir()
    (workspace / "link").symlink_to("/etc")
    (workspace / "linked_file").symlink_to(workspace.parent / "secret.txt")
    (workspace / "loop").symlink_to("loop")
    (workspace / "notes" / "up").symlink_to("../..")
    os.mkfifo(workspace / "pipe")
    with pytest.raises(ToolError):
        run(place, read_file, path=path)
    with pytest.raises(ToolError):
        run(place, edit_file, path=path, old="SECRET", new="x")
    for text in ("SECRET", "root:"):
        try:
            found = run(place, search_files, text=text, folder=path)
        except ToolError:
            continue
        assert "SECRET" not in found and "root:" not in found
    try:
        run(place, write_file, path=path, content="HARM")
    except ToolError:
        pass
    else:  # a strange but harmless name: the file lies in the workspace
        assert any(
            each.is_file() and each.read_text() == "HARM" for each in workspace.rglob("*") if not each.is_symlink()
        )
    assert (workspace.parent / "secret.txt").read_text() == "SECRET"
    assert "HARM" not in Path("/etc/passwd").read_text()


def test_a_hard_link_is_not_written_through(place: ToolContext) -> None:
    os.link(place.workspace.parent / "secret.txt", place.workspace / "alias")
    with pytest.raises(ToolError, match="second name"):
        run(place, write_file, path="alias", content="HARM")
    assert (place.workspace.parent / "secret.txt").read_text() == "SECRET"


@given(path=st.text(alphabet="./\\ab\0\u2025\uff0e~", max_size=12))
def test_any_spelling_reads_the_workspace_or_nothing(tmp_path_factory: pytest.TempPathFactory, path: str) -> None:
    outside = tmp_path_factory.mktemp("outside", numbered=True)
    (outside / "a").write_text("SECRET")
    workspace = outside / "b"
    workspace.mkdir()
    place = context_in(workspace)
    if not path:
        return
    with suppress(ToolError):
        assert "SECRET" not in run(place, read_file, path=path)


def test_names_made_to_deceive_are_shown_as_escapes(place: ToolContext) -> None:
    for name in ("line\nbreak", "<script>alert(1)</script>".replace("/", "\u2215"), "\u202egpj.exe", "a\x1b[31mred"):
        (place.workspace / name).write_text("find me")
    listing = run(place, list_files)
    assert "line\\nbreak" in listing and "\\u202egpj" in listing and "\\x1b[31m" in listing
    assert "\x1b" not in listing and "\u202e" not in listing
    found = run(place, search_files, text="find me")
    assert "\x1b" not in found and len(found.splitlines()) <= 4


def test_a_list_is_filtered_and_bounded(place: ToolContext) -> None:
    for number in range(600):
        (place.workspace / f"{number:03}.{'md' if number % 2 else 'txt'}").touch()
    assert "001.md" in run(place, list_files, pattern="*.md") and ".txt" not in run(place, list_files, pattern="*.md")
    assert "[only the first 500; give a narrower pattern or folder]" in run(place, list_files)
    assert run(place, list_files, pattern="nothing*").startswith("[folders you may")


def test_a_regular_expression_runs_in_the_sandbox_or_not_at_all(place: ToolContext) -> None:
    with pytest.raises(ToolError, match="regex needs the sandbox"):
        run(place, search_files, text="a+", regex=True)
    place.sandbox = FakeSandbox(
        answer=Completed(exit_code=0, stdout=b"/workspace/a.py:3:x\n", stderr=b"", truncated=False, stopped=None)
    )
    assert run(place, search_files, text="-x+", regex=True, names="*.py") == "a.py:3:x"
    asked = place.sandbox.asked[0]
    assert asked["argv"][-5:] == ["--include=*.py", "-e", "-x+", "--", "/workspace"] and not asked["network"]


@pytest.mark.needs_tool("bwrap", "grep")
def test_a_regular_expression_finds_lines_and_reads_no_link(place: ToolContext) -> None:
    (place.workspace / "a.py").write_text("x = 10\ny = 2\n")
    (place.workspace / "passwd").symlink_to("/etc/passwd")
    place.sandbox = open_sandbox(
        place.workspace, mounts=[Mount(source=place.workspace.parent / "papers", target="/papers")]
    )
    assert run(place, search_files, text="[0-9]{2}|root:", regex=True) == "a.py:1:x = 10"
    assert run(place, search_files, text="^is", regex=True, folder="/papers") == "/papers/moon.txt:2:is far."
    with pytest.raises(ToolError, match="grep refused"):
        run(place, search_files, text="(", regex=True)


def test_what_files_hold_taints_and_what_they_do_stays_in_the_workspace() -> None:
    assert {tool.name: (tool.effects, tool.untrusted) for tool in FILE_TOOLS} == {
        "read_file": ("none", True),
        "write_file": ("workspace", False),
        "edit_file": ("workspace", False),
        "list_files": ("none", True),
        "search_files": ("none", True),
    }
