"""Agents with OpenAI's own client talk to the policy: what it samples is recorded, within its budget."""

import asyncio
import base64
import contextlib
import io
import signal
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from perilune.rl.environment import OUTCOME, Access, Task
from perilune.rl.gateway import Gateway
from perilune.rl.gateway_episode import Episode
from perilune.rl.rollout import Job, RolloutConfig, Rollouts
from perilune.rl.talk import TalkConfig, TalkError
from perilune.rl.trajectory import NOT_SAMPLED
from perilune.serve.async_engine import EngineDead
from perilune.serve.request import Request
from tests.serve.api_engine import ScriptedEngine, endless, ids, tokenizer

TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}},
}
SECONDS = 60


class Policy(ScriptedEngine):
    max_length = 4096


def reply(request: Request) -> list[int]:
    """Says how many turns of users it sees; calls the tool where one is declared and has not answered yet."""
    text = tokenizer().decode(request.prompt)
    if "weather" in text and "Return of" not in text:
        call = ["<|tool_call_begin|>", "functions.weather:0", "<|tool_call_argument_begin|>", '{"place": "Moon"}']
        return ids(
            "<|tool_calls_section_begin|>", *call, "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|im_end|>"
        )
    return ids(f"turn {text.count('<|im_user|>')}", "<|im_end|>")


def client(access: Access) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0, timeout=SECONDS)


def user(content: str) -> Any:
    return {"role": "user", "content": content}


def play(agent: Callable, *, engine: Policy | None = None, **budget: int) -> tuple[Any, Episode]:
    """What an agent returns, and the record of its episode."""

    async def work() -> tuple[Any, Episode]:
        config = TalkConfig(**({"max_tokens": 1000, "max_turns": 50} | budget))
        async with Gateway(engine or Policy(reply), tokenizer()) as gateway:
            async with gateway.episode(name="task/0", seed=1, config=config) as opened, client(opened.access) as asked:
                found = await agent(asked, opened.episode)
            return found, opened.episode

    return asyncio.run(asyncio.wait_for(work(), SECONDS))


async def say(asked: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> Any:
    made = await asked.chat.completions.create(model="gpt-whatever", messages=messages, **more)
    return made.choices[0].message.model_dump(exclude_none=True)


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_a_conversation_is_one_branch_with_the_tokens_log_probs_and_versions_of_the_engine():
    engine = Policy(reply, version_of=lambda number: 3 + number // 2)

    async def agent(asked, episode):
        messages = [{"role": "system", "content": "count"}, user("one")]
        for more in ("two", "three"):
            messages += [await say(asked, messages), user(more)]
        return [*messages, await say(asked, messages)]

    messages, episode = play(agent, engine=engine)
    (branch,) = episode.branches()
    served = [request.prompt for request in engine.seen]
    assert branch.tokens[: len(served[-1])].tolist() == list(served[-1])
    said = [ids(f"turn {n}", "<|im_end|>") for n in (1, 2, 3)]
    assert branch.tokens[branch.mask].tolist() == [token for turn in said for token in turn]
    np.testing.assert_array_equal(branch.logprobs[branch.mask], -branch.tokens[branch.mask].astype(np.float32) / 1000)
    versions = [3 + number // 2 for turn in said for number in range(len(turn))]
    assert branch.versions[branch.mask].tolist() == versions
    assert set(branch.versions[~branch.mask].tolist()) == {NOT_SAMPLED}
    assert episode.messages() == messages and episode.finish == "stop"
    assert [turn.tokens for turn in episode.turns()] == [tuple(each) for each in said]


def test_a_stream_is_recorded_as_a_whole_answer_is_tools_included():
    async def conversation(asked, stream):
        messages = [user("weather?")]
        if stream:
            calls: dict[str, Any] = {}
            async for chunk in await asked.chat.completions.create(
                model="m", messages=messages, tools=[TOOL], stream=True
            ):
                for call in (chunk.choices and chunk.choices[0].delta.tool_calls) or ():
                    known = calls.setdefault("call", {"id": call.id, "name": call.function.name, "arguments": ""})
                    known["arguments"] += call.function.arguments or ""
            call = calls["call"]
            function = {"name": call["name"], "arguments": call["arguments"]}
            messages.append(
                {"role": "assistant", "tool_calls": [{"id": call["id"], "type": "function", "function": function}]}
            )
        else:
            messages.append(await say(asked, messages, tools=[TOOL]))
        call = messages[-1]["tool_calls"][0]
        assert call["function"]["arguments"] == '{"place": "Moon"}'
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "cold"})
        await say(asked, messages, tools=[TOOL])

    found = []
    for stream in (False, True):
        _, episode = play(lambda asked, _, stream=stream: conversation(asked, stream))
        (branch,) = episode.branches()
        found.append((branch.tokens.tolist(), branch.mask.tolist(), branch.logprobs.tolist(), episode.messages()))
        assert [message["role"] for message in episode.messages()] == ["user", "assistant", "tool", "assistant"]
    assert found[0] == found[1]


def test_compaction_and_sub_tasks_begin_branches_and_the_conversation_before_them_goes_on_in_its_own():
    async def agent(asked, episode):
        main = [user("long task")]
        main += [await say(asked, main), user("more")]
        await say(asked, [user("a sub-task")])  # between two turns of the main conversation
        main += [await say(asked, main), user("on")]
        await say(asked, main)
        await say(asked, [user("summary of all that"), user("on")])

    _, episode = play(agent)
    main, sub, compacted = episode.branches()
    assert [int(branch.mask.sum()) for branch in (main, sub, compacted)] == [
        sum(len(ids(f"turn {n}", "<|im_end|>")) for n in turns) for turns in ((1, 2, 3), (1,), (2,))
    ]
    said = tokenizer().decode(main.tokens.tolist())
    assert said.count("<|im_user|>") == 3 and "sub-task" not in said
    assert "summary" in tokenizer().decode(compacted.tokens.tolist())
    assert sum(branch.num_trained for branch in episode.branches()) == sum(len(t.tokens) for t in episode.turns())


def test_another_reply_to_the_same_messages_is_a_branch_with_another_seed():
    engine = Policy(reply)

    async def agent(asked, episode):
        await say(asked, [user("go")])
        await say(asked, [user("go")])
        await asked.chat.completions.create(model="m", messages=[user("go")], n=2)

    _, episode = play(agent, engine=engine)
    assert len(episode.branches()) == 4 and episode.num_replies == 4
    assert len({request.params.seed for request in engine.seen}) == 4
    assert len(episode.messages()) == 5  # what was asked once, and four replies


def test_seeds_follow_from_what_is_asked_not_from_when():
    def seeds(order):
        engine = Policy(reply)

        async def agent(asked, episode):
            for text in order:
                await say(asked, [user(text)])

        play(agent, engine=engine)
        return {request.prompt: request.params.seed for request in engine.seen}

    assert seeds(["a", "b", "c"]) == seeds(["c", "a", "b"])


def test_many_episodes_at_once_get_their_own_requests_and_nobody_elses():
    async def work():
        async with Gateway(Policy(reply), tokenizer()) as gateway:

            async def one(number):
                config = TalkConfig(max_tokens=1000, max_turns=8)
                async with gateway.episode(name=f"task/{number}", seed=1, config=config) as opened:
                    async with client(opened.access) as asked:
                        messages = [user(f"episode {number}")]
                        for _ in range(number % 3):
                            messages += [await say(asked, messages), user(f"again {number}")]
                        await say(asked, messages)
                return opened.episode

            return await asyncio.gather(*(one(number) for number in range(12)))

    for number, episode in enumerate(asyncio.run(asyncio.wait_for(work(), SECONDS))):
        (branch,) = episode.branches()
        text = tokenizer().decode(branch.tokens.tolist())
        assert text.count(f"episode {number}") == 1 and text.count(f"again {number}") == number % 3
        assert episode.num_replies == number % 3 + 1


def test_pictures_are_recorded_with_the_places_of_their_pads():
    file = io.BytesIO()
    Image.new("RGB", (56, 28), (200, 30, 10)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    engine = Policy(reply)

    async def agent(asked, episode):
        shown = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
        messages = [{"role": "user", "content": shown}]
        messages += [await say(asked, messages), user("more")]
        await say(asked, messages)

    _, episode = play(agent, engine=engine)
    (branch,) = episode.branches()
    pad = tokenizer().special_ids["<|media_pad|>"]
    assert branch.starts == (branch.tokens.tolist().index(pad),)
    assert branch.media[0].grid == engine.seen[0].media[0].grid
    np.testing.assert_array_equal(branch.media[0].pixels, engine.seen[0].media[0].pixels)


# --- how it is sampled ------------------------------------------------------------------------------------------------


def test_replies_are_drawn_from_the_policy_whatever_the_agent_asked():
    engine = Policy(reply)

    async def agent(asked, episode):
        body = {"top_k": 3, "min_p": 0.2, "repetition_penalty": 1.3}
        answer = await asked.chat.completions.with_raw_response.create(
            model="m", messages=[user("go")], temperature=0.3, top_p=0.5, presence_penalty=1, frequency_penalty=1,
            seed=7, max_tokens=40, extra_body=body,
        )  # fmt: skip
        return answer.headers["x-perilune-ignored"]

    ignored, _ = play(agent, engine=engine)
    params = engine.seen[0].params
    plain = (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty)
    assert plain == (1.0, 1.0, 0, 0.0, 1.0)
    assert (params.presence_penalty, params.frequency_penalty, params.logit_bias, params.grammar) == (0, 0, {}, None)
    assert params.seed != 7 and params.logprobs == 0 and params.max_tokens == 40
    assert {"temperature", "top_p", "seed", "top_k"} <= set(ignored.split(", "))


@pytest.mark.parametrize(
    "asked_for",
    [
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"5": 3}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": "none"},
        {"extra_body": {"min_tokens": 3}},
        {"extra_body": {"ignore_eos": True}},
        {"extra_body": {"structured_outputs": {"regex": "a+"}}},
    ],
    ids=lambda each: "+".join(each.get("extra_body", each)),
)
def test_what_would_keep_tokens_from_being_sampled_is_refused_with_the_reason(asked_for):
    async def agent(asked, episode):
        with pytest.raises(openai.BadRequestError, match="keeps tokens from being sampled") as refused:
            await say(asked, [user("go")], **asked_for)
        assert refused.value.param in {**asked_for, **asked_for.get("extra_body", {})}
        return await say(asked, [user("go")])

    said, episode = play(agent)
    assert said["content"] == "turn 1" and episode.num_replies == 1


# --- budgets and bad ends ---------------------------------------------------------------------------------------------


def test_a_spent_budget_is_a_clear_error_that_a_client_does_not_try_again():
    async def agent(asked, episode):
        messages = [user("go")]
        messages += [await say(asked, messages), user("on")]
        messages += [await say(asked, messages), user("on")]
        with pytest.raises(openai.PermissionDeniedError, match=r"2 of 2 replies") as refused:
            await say(asked, messages)
        return refused.value.code

    code, episode = play(agent, max_turns=2)
    assert code == "budget_exhausted" and episode.num_replies == 2 and episode.finish == "length"
    assert episode.num_refused == 1

    async def rambling(asked, episode):
        made = await asked.chat.completions.create(model="m", messages=[user("go")], max_tokens=4000)
        with pytest.raises(openai.PermissionDeniedError, match="25 of 25 tokens"):
            await say(asked, [user("more")])
        return made.choices[0].finish_reason

    reason, episode = play(rambling, engine=Policy(endless), max_tokens=25)
    assert reason == "length" and episode.num_sampled == 25 and episode.finish == "length"


class Insisting:
    """Asks twice, through the gateway, and minds no refusal."""

    name = "insisting"

    async def episode(self, task, talk):
        async with talk.served() as access, client(access) as asked:
            for text in ("one", "two"):
                with contextlib.suppress(openai.PermissionDeniedError):
                    await say(asked, [user(text)])
        talk.add({"role": "assistant", "content": "done"})

    def judge(self, task, messages):
        return {OUTCOME: float(messages[-1]["content"] == "done")}


@pytest.mark.parametrize("max_turns,finish", [(1, "length"), (2, "stop")])
def test_a_trajectory_says_whether_its_program_was_refused_something(max_turns, finish):
    async def work():
        config = RolloutConfig(talk=TalkConfig(max_tokens=100, max_turns=max_turns))
        rollouts = Rollouts(Policy(reply), tokenizer(), {"insisting": Insisting()}, config)
        job = Job(environment="insisting", task=Task(name="t", data={}), sample=0, seed=0, iteration=0)
        return await rollouts.collect([job], iteration=0)

    (trajectory,) = asyncio.run(asyncio.wait_for(work(), SECONDS)).trajectories
    assert (trajectory.finish, trajectory.reward, len(trajectory.branches)) == (finish, 1.0, max_turns)


def test_requests_at_the_same_time_share_one_budget():
    async def agent(asked, episode):
        return await asyncio.gather(*(say(asked, [user(f"part {n}")]) for n in range(5)))

    _, episode = play(agent, engine=Policy(endless, pace=0.001), max_tokens=100)
    assert 100 <= episode.num_sampled <= 100 + 5  # one token an event, for each that was under way


def test_a_client_that_leaves_ends_its_reply_and_what_was_sampled_stays_recorded():
    engine = Policy(endless, pace=0.001)

    async def agent(asked, episode):
        stream = await asked.chat.completions.create(model="m", messages=[user("go")], stream=True)
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 5:
                break
        await stream.close()
        while not engine.cancelled:
            await asyncio.sleep(0.005)
        return (await say(asked, [user("other")], max_tokens=3))["content"]

    _, episode = play(agent, engine=engine)
    left, other = episode.branches()
    assert 4 <= left.num_trained < 1000 and other.num_trained == 3 and not engine.running
    assert episode.messages()[0] == user("go") and episode.messages()[1]["content"].startswith("moon")


def test_an_episode_that_ends_ends_what_is_under_way_and_its_key():
    engine = Policy(endless, pace=0.02)

    async def work():
        async with Gateway(engine, tokenizer()) as gateway:
            config = TalkConfig(max_tokens=100_000)
            async with gateway.episode(name="task/0", seed=1, config=config) as opened:
                asked = client(opened.access)
                under_way = asyncio.create_task(say(asked, [user("go")]))
                while not opened.episode.num_sampled:
                    await asyncio.sleep(0.005)
            count = opened.episode.num_sampled
            assert not engine.running
            with pytest.raises(openai.PermissionDeniedError, match="episode is over"):
                await under_way
            with pytest.raises(openai.AuthenticationError):
                await say(asked, [user("more")])
            await asked.close()
            return count, opened.episode

    count, episode = asyncio.run(asyncio.wait_for(work(), SECONDS))
    assert episode.num_sampled == count == episode.branches()[0].num_trained < 1000


def test_an_episode_ends_also_while_a_request_waits_for_an_engine_that_says_nothing():
    class Stuck(Policy):
        async def stream(self, request):
            self.seen.append(request)
            await asyncio.Event().wait()
            yield  # never

    engine = Stuck()

    async def agent(asked, episode):
        asyncio.get_running_loop().create_task(say(asked, [user("go")])).add_done_callback(
            lambda task: task.exception()
        )
        while not engine.seen:
            await asyncio.sleep(0.005)

    assert play(agent, engine=engine)[1].branches() == []


def test_an_episode_that_is_cancelled_twice_can_be_played_again_under_its_name():
    """The second time while the engine still ends what was under way."""

    class Slow(Policy):
        gate = asyncio.Event()

        async def stream(self, request):
            self.seen.append(request)
            try:
                await asyncio.Event().wait()
                yield  # never
            finally:
                while not self.gate.is_set():
                    with contextlib.suppress(asyncio.CancelledError):
                        await self.gate.wait()

    engine = Slow()

    async def work():
        config = TalkConfig(max_tokens=100)
        async with Gateway(engine, tokenizer()) as gateway:

            async def episode():
                async with gateway.episode(name="task/0", seed=1, config=config) as opened:
                    async with client(opened.access) as asked:
                        await say(asked, [user("go")])

            playing = asyncio.create_task(episode())
            while not engine.seen:
                await asyncio.sleep(0.005)
            for _ in range(2):
                playing.cancel()
                await asyncio.sleep(0.05)
            engine.gate.set()
            with contextlib.suppress(asyncio.CancelledError):
                await playing
            async with gateway.episode(name="task/0", seed=1, config=config) as opened:
                return opened.episode.calls

    assert asyncio.run(asyncio.wait_for(work(), SECONDS)) == []


def test_keys_of_episodes_open_nothing_else():
    async def agent(asked, episode):
        found = []
        for method, path in (("GET", "/metrics"), ("POST", "/admin/weights")):
            url = str(asked.base_url).removesuffix("/v1/") + path
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {asked.api_key}"}) as stranger:
                found.append((await stranger.request(method, url, json={"path": "x"})).status_code)
        return found

    assert play(agent)[0] == [403, 403]


def test_an_agent_that_asks_nothing_leaves_nothing():
    async def agent(asked, episode): ...

    _, episode = play(agent)
    assert (episode.branches(), episode.messages(), episode.turns(), episode.finish) == ([], [], [], "stop")


def test_an_engine_that_fails_costs_the_episode_not_the_budget_of_patience():
    async def agent(asked, episode):
        with pytest.raises(openai.InternalServerError):
            await say(asked, [user("go")])

    with pytest.raises(TalkError, match="engine failed"):
        play(agent, engine=Policy(reply, gives_up="error"))
    with pytest.raises(EngineDead):
        play(agent, engine=Policy(reply, failure=EngineDead("gone")))


def test_signals_are_left_to_the_run():
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    async def agent(asked, episode):
        await say(asked, [user("go")])
        return signal.getsignal(signal.SIGTERM)

    assert play(agent)[0] is before[1]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_full_queue_makes_an_agent_wait():
    async def agent(asked, episode):
        return await asyncio.gather(*(say(asked, [user(f"part {n}")]) for n in range(4)))

    found, episode = play(agent, engine=Policy(reply, capacity=1, pace=0.001))
    assert [each["content"] for each in found] == ["turn 1"] * 4 and len(episode.branches()) == 4


def test_what_is_no_conversation_or_has_no_key_is_refused():
    async def agent(asked, episode):
        with pytest.raises(openai.BadRequestError, match="use /v1/chat/completions"):
            await asked.completions.create(model="m", prompt="go")
        async with httpx.AsyncClient() as stranger:
            url = str(asked.base_url) + "chat/completions"
            assert (await stranger.post(url, json={"messages": [user("go")]})).status_code == 401
            assert (await stranger.get(str(asked.base_url) + "models")).status_code == 401
        return [model.id async for model in asked.models.list()]

    models, episode = play(agent)
    assert models == ["policy"] and not episode.calls


# --- any agent --------------------------------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.sampled_from(["on", "again", "new", "cut"]), st.integers(0, 3)), max_size=8)


@settings(max_examples=15)
@given(steps=STEPS)
def test_whatever_an_agent_does_every_sampled_token_is_trained_once_after_the_prompt_it_was_sampled_from(steps):
    engine = Policy(reply)

    async def agent(asked, episode):
        talks = [[user("start")]]
        for step, number in [("on", 0), *steps]:
            talk = talks[number % len(talks)]
            if step == "new":
                talks.append([user(f"task {len(talks)}")])
            elif step == "again":
                await say(asked, talk)
            elif step == "cut":
                talks.append([user("summary"), *talk[-1:]])
            else:
                talk += [await say(asked, talk), user("on")]

    _, episode = play(agent, engine=engine)
    rows = [(request.prompt, tuple(reply(request))) for request in engine.seen]
    branches = episode.branches()
    assert sum(branch.num_trained for branch in branches) == sum(len(tokens) for _, tokens in rows)
    found = []
    for branch in branches:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], branch.mask, [False]]).astype(np.int8))).reshape(-1, 2)
        found += [
            (tuple(branch.tokens[:start].tolist()), tuple(branch.tokens[start:end].tolist())) for start, end in edges
        ]
    assert sorted(found) == sorted(rows)
