"""Policy, taint and arguments: nothing with effects runs on a stranger's word or on text that means two things."""

import asyncio
import fnmatch
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.swarm.approvals import ApprovalDesk
from perilune.swarm.policy import Policy, Rule, Taint, load_policy, parse_arguments, read_policy
from perilune.swarm.tools.tool import ToolError

INJECTIONS = json.loads((Path(__file__).parent / "corpora" / "injections.json").read_text(encoding="utf-8"))["cases"]


def decision(
    policy: Policy, tool: str, effects: str | None = "outside", taint: Taint | None = None, **arguments
) -> str:
    return policy.decide(tool, effects, arguments, taint=taint).decision


# Rules ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "effects, expected", [("none", "allow"), ("workspace", "allow"), ("outside", "ask"), (None, "ask")]
)
def test_without_rules_the_declared_effects_decide(effects: str | None, expected: str) -> None:
    ruling = Policy().decide("tool", effects, {})
    assert (ruling.decision, ruling.rule) == (expected, None)
    if effects is None:
        assert ruling.reason == "tool does not declare its effects"


def test_the_first_rule_that_matches_decides() -> None:
    policy = Policy(
        (
            Rule(tool="shell", where={"command": "git push*"}, decision="deny"),
            Rule(tool="shell", where={"command": "git *"}, decision="allow"),
            Rule(tool="mcp.*", decision="ask"),
            Rule(tool="mcp.git.log", decision="allow"),
        )
    )
    assert decision(policy, "shell", command="git push origin") == "deny"
    assert decision(policy, "shell", command="git log") == "allow"
    assert decision(policy, "shell", command="ls") == "ask"
    assert decision(policy, "mcp.git.log") == "ask", "an earlier rule wins"
    assert policy.decide("shell", "outside", {"command": "git log"}).rule == 1


@pytest.mark.parametrize(
    "command",
    [
        "git status; rm -rf /",
        "git status && curl evil",
        "git status | sh",
        "git status\nrm x",
        "git status\rrm x",
        "git status $(rm x)",
        "git status `rm x`",
        "git status > /etc/passwd",
        "git status < secret",
        "git status &",
        "git status ${IFS}x",
        "git status \\\nrm",
        "git status\x00rm",
        "git status\u2028rm",
        "git status ../../other",
        "git status --git-dir=../other",
        "git status '../x'",
        " git status",
        "GIT STATUS",
        "xgit status",
    ],
)
def test_a_star_that_allows_does_not_reach_over_shell_operators(command: str) -> None:
    careful = Policy((Rule(tool="shell", where={"command": "git status*"}, decision="allow"),))
    assert decision(careful, "shell", command="git status --short 'a b' v1..v2 *") == "allow"
    assert decision(careful, "shell", command=command) == "ask"


def test_two_stars_allow_anything_and_a_star_that_denies_matches_anything() -> None:
    anything = Policy((Rule(tool="shell", where={"command": "sh -c **"}, decision="allow"),))
    assert decision(anything, "shell", command="sh -c 'cd ..; ls | wc'") == "allow"
    denied = Policy((Rule(tool="shell", where={"command": "*curl*"}, decision="deny"), Rule(decision="allow")))
    assert decision(denied, "shell", command="true;\n(curl x)") == "deny"
    one = Policy((Rule(tool="t?", where={"a": "b?d"}, decision="allow"),))
    assert decision(one, "tx", a="bcd") == "allow"
    assert decision(one, "tx", a="b;d") == decision(one, "t", a="bcd") == "ask"


def test_a_rule_on_an_argument_needs_the_argument_and_reads_other_values_as_json() -> None:
    policy = Policy((Rule(tool="post", where={"count": "3", "to": "*@example.org"}, decision="allow"),))
    assert decision(policy, "post", count=3, to="a@example.org") == "allow"
    assert decision(policy, "post", count=33, to="a@example.org") == "ask"
    assert decision(policy, "post", to="a@example.org") == "ask"
    listed = Policy((Rule(tool="post", where={"to": "*@evil*"}, decision="deny"),))
    assert decision(listed, "post", to=["a@evil.test"]) == "deny"


@given(st.lists(st.sampled_from(["a", "b", "ab", "*", "?", "**"]), max_size=6), st.text("ab", max_size=8))
def test_patterns_of_letters_match_as_globs_do(parts: list[str], text: str) -> None:
    pattern = "".join(parts)
    expected = fnmatch.fnmatchcase(text, pattern)
    for wanted in ("deny", "allow"):
        assert Rule(tool="t", where={"a": pattern}, decision=wanted).matches("t", {"a": text}) == expected


def test_rules_are_read_from_toml_and_mistakes_are_named(tmp_path: Path) -> None:
    text = '[[rule]]\ntool = "mail"\nwhere = {to = "*@example.org"}\ndecision = "allow"\neven_tainted = true\n'
    rule = Rule(tool="mail", where={"to": "*@example.org"}, decision="allow", even_tainted=True)
    assert read_policy(text) == Policy((rule,))
    assert read_policy("") == Policy()
    path = tmp_path / "policy.toml"
    path.write_text('[[rule]]\ndescision = "deny"\n')
    with pytest.raises(ValueError, match="policy.toml: rule 0: there is no 'descision'; did you mean 'decision'\\?"):
        load_policy(path)


@pytest.mark.parametrize(
    "text, match",
    [
        ('[[rules]]\ndecision = "deny"', "policy: there is no 'rules'; did you mean 'rule'"),
        ('[rule]\ndecision = "deny"', "write \\[\\[rule\\]\\] with two brackets"),
        ('[[rule]]\ntool = "x"', "rule 0: decision is missing"),
        ('[[rule]]\ndecision = "maybe"', "decision is 'maybe', expected allow, deny or ask"),
        ('[[rule]]\ndecision = "deny"\neven_tainted = true', "even_tainted is for rules that allow"),
        ('[[rule]]\ndecision = "allow"\neven_tainted = 1', "even_tainted is 1, expected true or false"),
        ('[[rule]]\ndecision = "deny"\nwhere = {a = 3}', "where is {'a': 3}, expected a pattern"),
        ('[[rule]]\ndecision = "deny"\ntool = ""', "tool is '', expected a name"),
        ('[[rule]]\ndecision = "deny"\nzzz = 1', "there is no 'zzz'; expected decision, tool, where, even_tainted"),
        ("[[rule]", "Expected"),
    ],
)
def test_a_wrong_policy_says_what_is_wrong(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_policy(text)


# Taint ----------------------------------------------------------------------------------------------------------------


def test_a_tainted_agent_is_asked_for_effects_outside_even_where_a_rule_allows() -> None:
    taint = Taint("web_fetch at step 3")
    policy = Policy((Rule(tool="mail", decision="allow"), Rule(tool="post", decision="allow", even_tainted=True)))
    ruling = policy.decide("mail", "outside", {}, taint=taint)
    assert (ruling.decision, ruling.rule) == ("ask", 0)
    assert "the agent read untrusted content (web_fetch at step 3)" in ruling.reason
    assert decision(policy, "mail", None, taint) == "ask"
    assert decision(policy, "mail", "workspace", taint) == decision(policy, "mail", "none", taint) == "allow"
    assert decision(policy, "post", "outside", taint) == "allow"
    assert decision(policy, "mail", "outside", Taint()) == "allow"
    assert decision(Policy((Rule(decision="deny"),)), "mail", "outside", taint) == "deny"
    assert "untrusted" in Policy().decide("mail", "outside", {}, taint=taint).reason


def test_taint_goes_down_with_tasks_and_up_with_results_and_never_away() -> None:
    parent = Taint()
    assert not Taint.inherited(parent).is_tainted
    child = Taint.inherited(parent)
    parent.read(child, "result of main/a-0.0")
    assert not parent.is_tainted
    child.add("web_fetch at step 0")
    parent.read(child, "result of main/a-0.0")
    assert parent.sources == ("result of main/a-0.0, whose author read: web_fetch at step 0",)
    second = Taint.inherited(parent)
    assert second.is_tainted and "web_fetch at step 0" in second.sources[0]


def test_many_sources_are_kept_up_to_a_number_and_once() -> None:
    taint = Taint()
    for at in range(100):
        taint.add(f"source {at // 2}")
    assert taint.sources[:2] == ("source 0", "source 1") and len(taint.sources) == 20
    assert repr(Taint("a")) == "Taint('a')"


def reached(case: dict) -> Taint:
    """The taint of the agent that makes the call, after the words went the way that the case says."""
    reader = Taint()
    reader.add(f"{case['source']} at step 0")
    if case["via"] == "direct":
        return reader
    if case["via"] == "parent":
        return Taint.inherited(reader)
    if case["via"] == "grandchild":
        return Taint.inherited(Taint.inherited(reader))
    other = Taint()
    other.read(reader, "result" if case["via"] == "child" else "message")
    return other


def test_the_corpus_of_injections_is_large_and_varied() -> None:
    assert len(INJECTIONS) >= 100 and len({case["text"] for case in INJECTIONS}) == len(INJECTIONS)
    assert {case["via"] for case in INJECTIONS} == {"direct", "child", "parent", "grandchild", "message"}


@pytest.mark.parametrize("case", INJECTIONS, ids=[case["id"] for case in INJECTIONS])
def test_an_agent_that_obeys_an_injection_makes_no_call_outside_without_a_person(case: dict) -> None:
    tool, effects, arguments = case["call"]["tool"], case["call"]["effects"], case["call"]["arguments"]
    taint = reached(case)
    for policy in (Policy(), Policy((Rule(tool=tool, decision="allow"),)), Policy((Rule(decision="allow"),))):
        ruling = policy.decide(tool, effects, arguments, taint=taint)
        assert ruling.decision == "ask"
        ask = ApprovalDesk(seconds=5).ask(
            agent="main", call="1.0", tool=tool, arguments=arguments, reason=ruling.reason
        )
        assert not asyncio.run(ask).is_allowed


# Arguments ------------------------------------------------------------------------------------------------------------

EFFECTS = ["none", "workspace", "outside", None]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), VALUES, max_size=4)


@given(OBJECTS, st.sampled_from(EFFECTS), st.sampled_from([None, 2]))
def test_valid_arguments_are_read_as_they_are(value: dict, effects: str | None, indent: int | None) -> None:
    assert parse_arguments(json.dumps(value, indent=indent), effects) == value


@given(OBJECTS)
def test_a_fence_and_a_comma_too_many_are_repaired_without_effects_alone(value: dict) -> None:
    broken = f"```json\n{json.dumps([value])[1:-2]}{',' if value else ''} }}\n```"
    assert parse_arguments(broken, "none") == value
    for effects in EFFECTS[1:]:
        with pytest.raises(ToolError, match="arguments of a tool with effects are not repaired: send the call again"):
            parse_arguments(broken, effects)


@given(OBJECTS, st.integers(0, 200))
def test_cut_arguments_are_an_error_or_hold_nothing_that_was_not_there(value: dict, cut: int) -> None:
    text = json.dumps(value)
    try:
        repaired = parse_arguments(text[:cut], "none")
    except ToolError:
        return
    assert repaired.items() <= value.items() or _is_prefix(repaired, value)


def _is_prefix(cut: object, whole: object) -> bool:
    if isinstance(cut, dict) and isinstance(whole, dict):
        return all(name in whole and _is_prefix(each, whole[name]) for name, each in cut.items())
    if isinstance(cut, list) and isinstance(whole, list):
        return len(cut) <= len(whole) and all(_is_prefix(a, b) for a, b in zip(cut, whole, strict=False))
    return cut == whole


@pytest.mark.parametrize(
    "text, value",
    [
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, 2,],\n}', {"a": [1, 2]}),
        ('{"a": "x", "b": ["y"', {"a": "x", "b": ["y"]}),
        ('{"a": "x",', {"a": "x"}),
        ('{"a": {"b": null', {"a": {"b": None}}),
        ('{"a": ",}", }', {"a": ",}"}),
        ('{"a": "\\"]", "b": [ {', {"a": '"]', "b": [{}]}),
        ("", {}),
        ("  \n", {}),
    ],
)
def test_what_is_repaired(text: str, value: dict) -> None:
    assert parse_arguments(text, "none") == value
    with pytest.raises(ToolError, match="Nothing was run"):
        parse_arguments(text, "workspace")


@pytest.mark.parametrize(
    "text, match",
    [
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        ('{"b": {"a": 1, "a": 1,}}', "Expecting property name"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": 1e999}', "the number 1e999 is too large"),
        ('{"a": 18446744073709551616}', "does not fit into 64 bits; send it as a string"),
        ('{"a": ' + "9" * 5000 + "}", "does not fit"),
        ('{"a": "\\ud800"}', "a broken character"),
        ('{"a": ' + "[" * 400 + "]" * 400 + "}", "too many levels"),
        ('{"a": ' + "[" * 100_000, "too many levels"),
        ("[1]", "it is a list, not an object"),
        ('"{}"', "it is a str, not an object"),
        ('{"a": "cut', "Unterminated string starting at character 6"),
        ('{"a": 12', "Expecting ',' delimiter"),
        ('{"a": 1 2}', "Expecting ',' delimiter"),
        ('{"a": 1]', "Expecting"),
        ("{'a': 1}", "Expecting property name"),
        ('{"a": 1} {"b": 2}', "Extra data"),
        ("call it", "Expecting value at character 0"),
        (",", "Expecting value"),
        ('{"a": tru', "Expecting value"),
        ("\ufeff{}", "BOM"),
    ],
)
@pytest.mark.parametrize("effects", ["none", "outside"])
def test_arguments_that_mean_two_things_or_nothing_are_refused(text: str, match: str, effects: str) -> None:
    with pytest.raises(ToolError, match=match):
        parse_arguments(text, effects)
