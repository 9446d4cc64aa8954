"""Rights only shrink on the way down, and every refusal says what is missing."""

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.swarm.rights import Rights, RightsExceeded, RightsRequest

TOOLS = ["shell", "read_file", "mcp.git.log", "mcp.git.*", "mcp.*", "mcp.gitlab.x", "*"]
HOSTS = ["example.org", "a.example.org", "b.a.example.org", "*.example.org", "*.a.example.org", "notexample.org", "*"]
PATHS = [
    "/",
    "/workspace",
    "/workspace/a",
    "/workspace/ab",
    "/workspace/a/b",
    "/workspace/./a",
    "/etc//passwd",
    "/workspace/a/",
]


def some(names: list[str]) -> st.SearchStrategy[frozenset[str]]:
    return st.frozensets(st.sampled_from(names), max_size=4)


rights = st.builds(
    Rights,
    tools=some(TOOLS),
    models=some(["kimi-k2", "kimi-k2.5", "kimi-*", "*"]),
    read_paths=some(PATHS),
    write_paths=some(PATHS),
    network=some(HOSTS),
    effects=some(["none", "workspace", "outside"]),
    depth=st.integers(0, 3),
)
PROBES = {
    "tools": [*(name.replace("*", "q") for name in TOOLS), "mcp.git", "mcp", "shell2"],
    "hosts": [*(host.replace("*", "q") for host in HOSTS), "org", "example.org.evil.net", "example.org."],
    "paths": [*PATHS, "/workspace/a/b/c", "/workshop", "/etc", "/tmp/x"],
}


def permitted(of: Rights) -> set[tuple[str, str]]:
    """All probes that the rights let through: their meaning, found by asking."""
    found = {("tool", name) for name in PROBES["tools"] if of.allows_tool(name, "none")}
    found |= {("undeclared", name) for name in PROBES["tools"] if of.allows_tool(name, None)}
    found |= {("host", host) for host in PROBES["hosts"] if of.allows_host(host)}
    found |= {("read", path) for path in PROBES["paths"] if of.may_read(path)}
    found |= {("write", path) for path in PROBES["paths"] if of.may_write(path)}
    return found | {("model", name) for name in ("kimi-k2", "kimi-k2.5", "gpt") if of.allows_model(name)}


@st.composite
def chains_of_rights(draw: st.DrawFn) -> tuple[Rights, Rights, Rights]:
    """Three rights, of which many are comparable: fields are taken from the one before or drawn anew."""
    one, two, three = draw(rights), draw(rights), draw(rights)
    kept = draw(st.sets(st.sampled_from(sorted(one.plain())), min_size=5))
    second = Rights.from_plain(two.plain() | {field: one.plain()[field] for field in kept})
    return one, second, Rights.from_plain(three.plain() | {field: second.plain()[field] for field in kept})


@given(chains_of_rights())
def test_rights_are_partially_ordered_and_less_permits_less(three: tuple[Rights, Rights, Rights]) -> None:
    a, b, c = three
    assert a <= a
    assert not a < a
    if a <= b:
        assert permitted(a) <= permitted(b)
        assert (a < b) == (a != b)
        if b <= a:
            assert a == b and hash(a) == hash(b)
        if b <= c:
            assert a <= c


@given(rights, rights)
def test_a_grant_is_never_more_than_the_parent_has(parent: Rights, wish: Rights) -> None:
    fields = ("tools", "models", "read_paths", "write_paths", "network", "effects", "depth")
    request = RightsRequest(**{field: getattr(wish, field) for field in fields})
    try:
        child = parent.grant(request)
    except RightsExceeded as refused:
        missing = refused.missing
    else:
        assert child == wish <= parent
        assert child.depth < parent.depth
        return
    assert missing and (parent.depth == 0 or not wish <= parent or wish.depth == parent.depth)


@given(rights)
def test_rights_survive_the_journal(some_rights: Rights) -> None:
    assert Rights.from_plain(some_rights.plain()) == some_rights


def test_a_child_inherits_everything_but_a_level_of_depth() -> None:
    parent = Rights(tools=frozenset({"shell"}), write_paths=frozenset({"/workspace"}), depth=2)
    child = parent.grant()
    assert child == Rights(tools=frozenset({"shell"}), write_paths=frozenset({"/workspace"}), depth=1)
    assert child < parent


def test_a_refusal_lists_all_that_is_missing_and_what_there_is() -> None:
    parent = Rights(tools=frozenset({"read_file", "shell"}), network=frozenset(), depth=1)
    request = RightsRequest(tools=["read_file", "mail"], network=["*"], depth=1)
    with pytest.raises(RightsExceeded) as caught:
        parent.grant(request)
    assert str(caught.value) == (
        "you cannot grant what you do not have: tools: 'mail' (yours: read_file, shell); "
        "network: '*' (yours: none); depth: '1' (yours: at most 0 for a child)"
    )
    assert caught.value.missing == {"tools": ("mail",), "network": ("*",), "depth": ("1",)}
    with pytest.raises(RightsExceeded, match="depth: 'a further level of agents'"):
        Rights(depth=0).grant()


@pytest.mark.parametrize(
    "path",
    [
        "/workshop",
        "/workspace/../etc/passwd",
        "/workspace/..",
        "work/a",
        "",
        ".",
        "/workspace/a\0b/..",
        "../workspace",
        "//etc",
        "/WORK/a",
    ],
)
def test_paths_are_held_by_components_not_by_letters(path: str) -> None:
    owner = Rights(read_paths=frozenset({"/workspace"}), write_paths=frozenset({"/workspace"}))
    assert not owner.may_read(path) and not owner.may_write(path)
    assert owner.may_read("/workspace") and owner.may_read("/workspace//a/./b")


@given(st.lists(st.sampled_from(["a", "b", "ab"]), max_size=4), st.lists(st.sampled_from(["a", "b", "ab"]), max_size=4))
def test_path_containment_equals_being_relative(wide: list[str], narrow: list[str]) -> None:
    outer, inner = "/" + "/".join(wide), "/" + "/".join(narrow)
    assert Rights(read_paths=frozenset({outer})).may_read(inner) == PurePosixPath(inner).is_relative_to(outer)


def test_a_domain_holds_its_subdomains_alone() -> None:
    owner = Rights(network=frozenset({"*.example.org"}))
    assert owner.allows_host("A.example.org.") and owner.allows_host("b.a.example.org")
    assert not any(owner.allows_host(host) for host in ("example.org", "notexample.org", "a.example.org.evil.net"))


def test_depth_is_part_of_the_order_and_covered_names_are_not_part_of_the_set() -> None:
    assert Rights(depth=1) < Rights(depth=2) and not Rights(depth=2) <= Rights(depth=1)
    assert Rights(tools=frozenset({"*", "shell"})) == Rights(tools=frozenset({"*"}))
    assert Rights(read_paths=frozenset({"/a", "/a/b"})).plain()["read_paths"] == ["/a"]


def test_a_star_in_a_name_is_never_itself_permitted() -> None:
    assert not Rights(tools=frozenset({"*"})).allows_tool("mcp.*", "none")
    assert not Rights(network=frozenset({"*"})).allows_host("*")


def test_undeclared_effects_count_as_outside() -> None:
    inner = Rights(effects=frozenset({"none", "workspace"}))
    assert inner.allows_tool("shell", "workspace") and not inner.allows_tool("shell", None)


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"tools": frozenset({"a*b"})}, "tools has 'a\\*b', expected a name or its beginning"),
        ({"tools": "shell"}, "tools is 'shell', expected a set of strings"),
        ({"read_paths": frozenset({"work"})}, "read_paths has 'work', expected an absolute path"),
        ({"write_paths": frozenset({"/a/../b"})}, "write_paths has '/a/../b'"),
        ({"network": frozenset({"http://example.org"})}, "network has 'http://example.org', expected a host name"),
        ({"network": frozenset({"a.*.org"})}, "network has"),
        ({"network": frozenset({"*."})}, "network has"),
        ({"network": frozenset({"example.org:80"})}, "expected a host name without a port"),
        ({"effects": frozenset({"all"})}, "effects has 'all', expected one of none, workspace, outside"),
        ({"depth": -1}, "depth is -1, expected a whole number"),
        ({"depth": True}, "depth is True"),
    ],
)
def test_wrong_rights_name_the_field_and_the_value(wrong: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Rights(**wrong)
