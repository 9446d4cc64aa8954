"""Promises of the repository itself: what the README says, what the glossary points at, what files may hold."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {".git", ".venv", ".cache", "runs", "build", "dist", "__pycache__"}
COMMAND_BLOCK = re.compile(r"^```(?:sh|bash|console|shell)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def committed_files() -> list[Path]:
    """What git holds or would hold; every file outside generated folders where git cannot say (an archive)."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        names = answer.stdout.split("\0") if answer.returncode == 0 else []
    except OSError:
        names = []
    files = [ROOT / name for name in names if name] or [
        path for path in ROOT.rglob("*") if not GENERATED & set(path.relative_to(ROOT).parts)
    ]
    return sorted(path for path in files if path.is_file())


def text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_readme_gives_a_fresh_machine_exactly_two_commands() -> None:
    first_block = COMMAND_BLOCK.search((ROOT / "README.md").read_text())
    assert first_block, "README.md has no block of commands"
    commands = [line.partition("#")[0].strip() for line in first_block[1].splitlines()]
    assert [command for command in commands if command] == ["make demo", "make test"]


def test_documents_name_only_make_targets_that_exist() -> None:
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        # In code only: prose may well "make sense".
        code = re.findall(r"`[^`\n]+`", document.read_text()) + COMMAND_BLOCK.findall(document.read_text())
        named = {target for piece in code for target in re.findall(r"\bmake ([a-z][a-z-]*)", piece)}
        assert named <= make_targets(), f"{document.name} names {named - make_targets()}"


def test_help_lists_every_target_a_user_may_call() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    output = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = {line.split()[1] for line in output.splitlines() if line.startswith("make ")}
    assert listed == set(phony[1].split()) == make_targets()


def test_glossary_points_only_at_files_that_exist() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    paths = re.findall(r"`([\w./-]+(?:\.py|\.md|/))`", glossary)
    assert paths, "docs/glossary.md names no file"
    # A path counts from the repository or from the package.
    missing = [path for path in paths if not ((ROOT / path).exists() or (ROOT / "src" / "perilune" / path).exists())]
    assert not missing


def test_no_source_file_exceeds_600_lines() -> None:
    # A file that passes 600 lines has two ideas.
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "src").rglob("*.py")}
    too_long = {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > 600}
    assert lengths and not too_long


def test_no_module_has_a_name_that_says_nothing() -> None:
    names = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "handler"}
    assert not [path for path in (ROOT / "src").rglob("*.py") if path.stem in names]


FORBIDDEN = {
    # Where people keep things, and wherever this checkout lies.
    "a path of one machine": re.compile(
        r"(?<![\w.~$}<>*/-])(?:/root(?![\w-])|/(?:tmp|home|Users)/\w|" + re.escape(str(ROOT)) + r"(?![\w-]))[\w./-]*"
    ),
    "a path beside the repository": re.compile(r"\.\./shared\b"),
    "a private host": re.compile(
        r"https?://(?:[\w.-]+\.(?:internal|intranet|local|lan|corp)\b|10\.|192\.168\.|172\.(?:1[6-9]|2\d|3[01])\.)"
    ),
    "a chosen package index": re.compile(
        r"(?:index-url|find-links|trusted-host|registry)[ =:]+[\"']?(?:https?://|file:|/)"
    ),
}


ATTACKS = tuple(ROOT / "tests" / part for part in ("swarm", "serve", "rl"))
"""Their corpora hold private hosts, and folders inside sandboxes or of nobody."""


@pytest.mark.parametrize("what", FORBIDDEN)
def test_committed_files_name_no_place_outside_the_repository(what: str) -> None:
    found = []
    for path in committed_files():
        if path == Path(__file__).resolve() or (text := text_of(path)) is None:
            continue
        matches = [match[0] for match in FORBIDDEN[what].finditer(text)]
        if any(path.is_relative_to(folder) for folder in ATTACKS):
            matches = [match for match in matches if not match.startswith(("/tmp/", "/home/", "http"))]
        found += [f"{path.relative_to(ROOT)}: {match!r}" for match in matches]
    assert not found, f"committed files hold {what}"


@pytest.mark.parametrize(
    "what, text",
    [
        ("a path of one machine", f'open("{ROOT}/thing")'),
        ("a path of one machine", "see /root/.config"),
        ("a path of one machine", "writes /tmp/out.json"),
        ("a path beside the repository", "read ../shared/x.md"),
        ("a private host", "http://10.0.0.3:8080/simple"),
        ("a private host", "https://registry.build.internal/simple"),
        ("a chosen package index", "--index-url https://example.org/simple"),
        ("a chosen package index", "PIP_FIND_LINKS".lower().replace("_", "-") + "=/opt/wheels"),
    ],
)
def test_the_search_for_forbidden_places_finds_them(what: str, text: str) -> None:
    assert FORBIDDEN[what].search(text)


@pytest.mark.parametrize(
    "text", ["tests/tmp/x", "the /tmp folder", "a/root/b", "$HOME/tmp/x", "--tmpfs /tmp", "/rooted"]
)
def test_the_search_for_forbidden_places_leaves_innocent_text(text: str) -> None:
    assert not any(pattern.search(text) for pattern in FORBIDDEN.values())


def test_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "The Perilune Authors" in text
