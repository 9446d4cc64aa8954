"""A policy that is only ever reached through the gateway learns, from log-probs that are the trainer's."""

import httpx
import numpy as np
import openai

from perilune.rl.environment import OUTCOME, Task
from tests.rl.test_loop import LETTERS, config, fresh, run, taught


class CopyingAgent:
    """One letter is shown, the same one is to be said; the agent is OpenAI's client, which knows only an address."""

    name = "copying"

    def task(self, number, split):
        return Task(name=f"{split}/{number % 4}", data={"letter": LETTERS[number % 4]})

    async def episode(self, task, talk):
        async with talk.served() as access:
            # Without certificates, whose reading takes longer than an episode.
            http = httpx.AsyncClient(verify=False, trust_env=False, timeout=60)
            async with openai.AsyncOpenAI(
                base_url=access.base_url, api_key=access.api_key, max_retries=0, http_client=http
            ) as client:
                messages = [{"role": "user", "content": task.data["letter"]}]
                made = await client.chat.completions.create(model="any", messages=messages)
        talk.add({"role": "assistant", "content": made.choices[0].message.content or ""})

    def judge(self, task, messages):
        return {OUTCOME: float(messages[-1]["content"] == task.data["letter"])}


def test_reward_rises_through_the_gateway(tmp_path):
    start = {name: value.clone() for name, value in taught().state_dict().items()}
    environment = CopyingAgent()
    records, _ = run(fresh(start), {"copying": environment}, config(12, keep_trajectories=False), tmp_path)
    rewards = [record["reward"] for record in records]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2
    assert all(not record["failures"] and record["episodes"] == 32 for record in records)
    assert max(record["largest_gap"] for record in records) < 1e-3
