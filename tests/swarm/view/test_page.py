"""The page in a real browser: it shows what happens, sends commands, and never runs what agents write."""

import time
from collections.abc import Callable, Iterator

import pytest

from perilune.swarm.view import feed
from perilune.swarm.view.controls import ApprovalRequest
from tests.swarm.view.example_run import MemoryJournal, Told, ended, started, tell_example
from tests.swarm.view.payloads import PAYLOADS
from tests.swarm.view.serving import Live, live_view
from tests.swarm.view.watching import Watched, expect

pytestmark = pytest.mark.needs_tool("chromium")


@pytest.fixture
def live() -> Iterator[Live]:
    with live_view(MemoryJournal(clock=time.time)) as live:
        yield live


def commit(live: Live, told: Told) -> None:
    live.commit(*[(chain, kind, body, note) for _, chain, kind, body, note in told.rows])


def begin(live: Live) -> None:
    told = Told()
    told.add(0, "run", "run_started", {"task": "Count the stars", "model": "m", "limits": {"steps": 10}})
    told.add(0, "main", "started", started("main", None, 0))
    commit(live, told)


def test_what_happens_appears_without_reloading(live: Live, watch: Callable[..., Watched]) -> None:
    begin(live)
    watched = watch(live.url)
    page = watched.page
    page.wait_for_selector("#agent-0")
    assert page.url == live.url.partition("#")[0]  # the token has left the address
    page.click("#agent-0")
    told = Told()
    told.reply(0, "main", 0, "I ask an astronomer.", [("start_task", '{"agent": "astronomer"}')], seconds=0.0)
    commit(live, told)
    page.click("details.call.open summary >> text=start_task")
    told = Told()
    told.outcome(0, "main#0.0", "start_task", "Started.", spawned=["main/astronomer-0.0"])
    told.add(0, "main/astronomer-0.0", "started", started("astronomer", "main", 1))
    commit(live, told)
    page.wait_for_selector("#agent-1 >> text=astronomer")
    page.wait_for_selector(".entry >> text=I ask an astronomer.")
    page.wait_for_selector("details.call.ok[open] >> text=Started.")  # still unfolded
    answer = live.journal.store(b"Four thousand.")
    told = Told()
    told.add(0, "main/astronomer-0.0", "finished", ended())
    told.add(0, "main", "finished", ended(result=answer))
    told.add(0, "run", "run_finished", {"status": "done", "answer": answer, "error": None})
    commit(live, told)
    page.wait_for_selector("#status >> text=done")
    page.keyboard.press("Escape")
    page.wait_for_selector("#detail >> text=Four thousand.")
    live.swarm.call(live.view.stop)
    page.wait_for_selector("#connection >> text=view closed")
    watched.check()


def test_commands_from_the_page_reach_the_controls(live: Live, watch: Callable[..., Watched]) -> None:
    begin(live)
    short = ApprovalRequest(id="a", agent="main", call="0.0", tool="send_mail", arguments='{"to": "x@example.org"}')
    long = ApprovalRequest(
        id="b", agent="main", call="0.1", tool="write", arguments='{"text": "' + "long " * 2000 + 'END"}'
    )
    live.approvals.add(short)
    live.approvals.add(long)
    watched = watch(live.url)
    page = watched.page
    card = page.locator(".approval", has_text="send_mail")
    assert card.locator(".arguments").inner_text() == '{"to": "x@example.org"}'
    card.get_by_role("button", name="Allow").click()
    expect(page, "document.querySelectorAll('.approval').length === 1")
    card = page.locator(".approval", has_text="write")
    assert card.locator(".allow").is_disabled()
    card.get_by_role("button", name="Show all").click()
    expect(page, "document.querySelector('.approval .arguments').textContent.endsWith('END\"}')")
    card.get_by_role("button", name="Deny").click()
    expect(page, "document.querySelector('#approvals').hidden")
    page.click("#agent-0")
    page.fill("textarea", "Only the bright ones.")
    page.get_by_role("button", name="Steer").click()
    page.wait_for_selector(".said >> text=sent")
    page.get_by_role("button", name="Cancel agent").click()
    page.get_by_role("button", name="Really cancel").click()
    page.wait_for_selector(".said >> text=cancelled")
    expected = [("decide", "a", "allow"), ("decide", "b", "deny"), ("steer", "main", "Only the bright ones.")]
    assert live.controls.done == [*expected, ("cancel", "main")]
    watched.check()


def test_nothing_an_agent_writes_is_ever_run(live: Live, watch: Callable[..., Watched]) -> None:
    assert len(PAYLOADS) >= 40
    told = Told()
    everything = "\n".join(PAYLOADS)
    artefact = live.journal.store(everything.encode())
    told.add(0, "run", "run_started", {"task": everything, "model": PAYLOADS[6], "limits": {PAYLOADS[0]: 1}})
    told.add(0, "main", "started", started(PAYLOADS[0], None, 0, everything))
    told.add(0, "main/heard", "started", started("heard", "main", 1, everything) | {"system_prompt": everything})
    for step, payload in enumerate(PAYLOADS):
        told.add(0, "main/heard", "message", {"id": payload, "sender": payload, "step": None, "text": payload})
        told.reply(0, "main", step, payload, [(payload, payload), (payload, "{}")])
        result = artefact if step == len(PAYLOADS) - 1 else None
        told.outcome(0, f"main#{step}.0", payload, payload, payload, untrusted=True, result=result)
        id = f"main/{payload.replace('#', '')}-{step}"
        told.add(0, id, "started", started(payload, "main", 1, payload) | {"model": payload})
        if step % 3 == 0:
            told.add(0, id, "finished", ended("failed", artefact, payload))
        request = ApprovalRequest(id=payload, agent=id, call="0", tool=payload, arguments=payload, reason=payload)
        live.approvals.add(request)
    told.add(0, "run", "run_finished", {"status": PAYLOADS[7], "answer": artefact, "error": everything})
    commit(live, told)
    watched = watch(live.url)
    page = watched.page
    expect(page, f"document.querySelectorAll('.approval').length === {len(PAYLOADS)}")
    assert page.locator("#task").inner_text().startswith(PAYLOADS[0])
    page.wait_for_selector("#detail .artefact pre >> text=window.hacked")
    for number in range(0, len(PAYLOADS), 8):
        page.evaluate("(n) => document.querySelector('#tree').scrollTop = n * 26", number)
        page.wait_for_selector(f"#agent-{number + 2}")
        spilled = "[...document.querySelectorAll('.row')].filter((row) => row.scrollHeight > row.clientHeight).length"
        assert page.evaluate(spilled) == 0  # no row reaches over another
    page.evaluate("document.querySelector('#tree').scrollTop = 0")
    for agent, kind in (("#agent-0", "reply"), ("#agent-1", "message")):
        page.click(agent)
        expect(page, f"document.querySelectorAll('.entry.{kind}').length === {len(PAYLOADS)}")
        page.evaluate("document.querySelectorAll('.detail details').forEach((details) => (details.open = true))")
        expect(page, "[...document.querySelectorAll('.artefact pre')].every((each) => each.textContent.length > 1000)")
    page.hover("#bars")
    page.wait_for_timeout(100)
    watched.check()
    foreign = "document.querySelectorAll('main :is(script, img, iframe, svg, object, form, a, style)').length"
    assert page.evaluate(foreign) == 0


def test_the_policy_stops_scripts_even_if_one_got_into_the_page(live: Live, watch: Callable[..., Watched]) -> None:
    begin(live)
    page = watch(live.url).page
    page.wait_for_selector("#agent-0")
    blocked = page.evaluate(
        """() => { try { document.body.innerHTML = '<img src=x onerror="window.hacked=1">'; return false; }
                   catch (error) { return error instanceof TypeError; } }"""
    )
    assert blocked
    assert page.evaluate("window.hacked ?? null") is None


def test_without_a_token_the_page_says_what_to_do(live: Live, watch: Callable[..., Watched]) -> None:
    page = watch(live.url.partition("#")[0]).page
    page.wait_for_selector("#notice >> text=lacks the token")
    wrong = watch(live.url[:-4] + "AAAA").page
    wrong.wait_for_selector("#notice >> text=wrong token")


def test_three_hundred_agents_need_few_elements_and_the_slider_shows_the_past(watch: Callable[..., Watched]) -> None:
    journal = MemoryJournal()
    tell_example(journal, agents=300, steps=4)
    with live_view(journal) as live:
        watched = watch(live.url)
        page = watched.page
        page.wait_for_selector("#agent-3")
        assert page.evaluate("document.querySelectorAll('*').length") < 700
        page.evaluate("document.querySelector('#tree').scrollTop = 200 * 26")
        page.wait_for_selector("#agent-201")
        assert page.evaluate("document.querySelectorAll('.row').length") < 60
        page.fill("#filter", "writer 28")
        expect(page, "[...document.querySelectorAll('.row .name')].every((e) => e.textContent.startsWith('writer 28'))")
        page.keyboard.press("Escape")
        page.evaluate("const m = document.querySelector('#moment'); m.value = 1; m.dispatchEvent(new Event('input'))")
        expect(page, "document.querySelectorAll('.row').length === 1 && !document.querySelector('#end').hidden")
        page.click("#end")
        expect(page, "document.querySelectorAll('.row').length > 10")
        watched.check()


def test_the_tree_is_used_with_keys_alone(watch: Callable[..., Watched]) -> None:
    journal = MemoryJournal()
    tell_example(journal, agents=5)
    with live_view(journal) as live:
        page = watch(live.url, color_scheme="dark").page
        page.wait_for_selector("#agent-2")
        page.focus("#tree")
        for key in ("ArrowDown", "ArrowDown", "ArrowDown"):
            page.keyboard.press(key)
        expect(page, "document.querySelector('#tree').getAttribute('aria-activedescendant') === 'agent-2'")
        page.wait_for_selector(".detail >> text=physics researcher 1")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        expect(page, "document.querySelectorAll('.row').length === 1")
        page.keyboard.press("ArrowRight")
        expect(page, "document.querySelectorAll('.row').length === 6")


@pytest.mark.parametrize("kept", [300, 0])
def test_the_page_comes_back_after_the_connection_broke(
    live: Live, watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr(feed, "KEEP_FRAMES", kept)
    begin(live)
    watched = watch(live.url)
    page = watched.page
    page.wait_for_selector("#connection.live")
    page.evaluate(
        """() => {
            window.states = [];
            const shown = document.querySelector('#connection');
            new MutationObserver(() => window.states.push(shown.textContent)).observe(shown, {childList: true});
        }"""
    )
    live.break_connections()
    told = Told()
    told.add(0, "main/late", "started", started("late", "main", 1))
    commit(live, told)
    page.wait_for_selector("#agent-1 >> text=late")
    page.wait_for_selector("#connection.live")
    assert page.evaluate("window.states.includes('connection lost')")


DECEIVING = {
    "direction": ('{"to":"a\u202egro.elpmaxe@x"}', '{"to":"a<U+202E>gro.elpmaxe@x"}', ""),
    "no width": ('{"to":"al\u200bice\u2060\ufeff"}', '{"to":"al<U+200B>ice<U+2060><U+FEFF>"}', ""),
    "letters of tags": ('{"to":"x\U000e0061\U000e0062"}', '{"to":"x<U+E0061><U+E0062>"}', ""),
    "blank": ('{"to":"a\u00a0b\u3164c"}', '{"to":"a<U+00A0>b<U+3164>c"}', ""),
    "alike": ('{"to":"p\u0430ypal.com"}', '{"to":"p\u0430ypal.com"}', "\u0430 U+0430"),
    "wide": ('{"to":"\uff45vil.com"}', '{"to":"\uff45vil.com"}', "\uff45 U+FF45"),
    "innocent": ('{"to":"Мария, 你好, שלום","text":"\\nПривет"}', '{"to":"Мария, 你好, שלום","text":"\\nПривет"}', ""),
}


def test_what_a_person_approves_is_shown_to_the_last_character(live: Live, watch: Callable[..., Watched]) -> None:
    begin(live)
    for name, (arguments, _, _) in DECEIVING.items():
        request = ApprovalRequest(id=name, agent="main", call="0.0", tool=f"tool\u202e {name}", arguments=arguments)
        live.approvals.add(request)
    watched = watch(live.url)
    for name, (_, shown, warning) in DECEIVING.items():
        card = watched.page.locator(".approval", has_text=name)
        assert card.locator("b").inner_text() == f"tool<U+202E> {name}"
        assert card.locator(".arguments").text_content() == shown
        told = card.locator(".alike").text_content()
        assert warning in told and bool(told) == bool(warning)
        # Each string keeps its own direction: none reaches into the next.
        assert all(
            part.startswith('"') or '"' not in part for part in card.locator(".arguments > bdi").all_inner_texts()
        )
    watched.check()


def test_a_click_meant_for_one_request_never_allows_the_next(live: Live, watch: Callable[..., Watched]) -> None:
    begin(live)
    for name in ("first", "second"):
        live.approvals.add(ApprovalRequest(id=name, agent="main", call="0.0", tool="send", arguments='{"same":1}'))
    watched = watch(live.url)
    page = watched.page
    page.wait_for_selector(".approval .allow:not([disabled])")
    place = page.locator(".approval .allow").first.bounding_box()
    page.mouse.click(place["x"] + 5, place["y"] + 5)
    # The next one moves to the same place, and the hand clicks on.
    deadline = time.monotonic() + 60
    while page.locator(".approval").count() == 2:
        assert time.monotonic() < deadline
        page.mouse.click(place["x"] + 5, place["y"] + 5)
    page.mouse.click(place["x"] + 5, place["y"] + 5)
    assert live.controls.done == [("decide", "first", "allow")]
    page.locator(".approval .allow").click()  # once it has settled there
    expect(page, "document.querySelector('#approvals').hidden")
    assert live.controls.done[1:] == [("decide", "second", "allow")]
    watched.check()
