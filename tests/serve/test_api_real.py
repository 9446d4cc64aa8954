"""The server on a real engine with tiny models: the openai client and lm-evaluation-harness, nothing scripted."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from perilune.serve.api import ServerConfig
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine, EngineConfig
from perilune.serve.keys import Keys
from perilune.serve.limits import Limits
from perilune.serve.server import Server
from tests.serve import tiny
from tests.serve.test_api_clients import picture

MODEL = "tiny"
ADMIN = "key-of-the-admin-1"
ENGINE = EngineConfig(max_sequences=8, num_pages=96, page_size=16, num_snapshots=8)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["moon", "earth"]}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


class Real:
    """A served tiny model and a client for it."""

    def __init__(self, name: str) -> None:
        self.model = tiny.fresh_model(name, "float32")
        self.engine = Engine(self.model, tiny.tokenizer(), ENGINE)
        self.served = AsyncEngine(self.engine)
        config = ServerConfig(
            keys=Keys(admin=ADMIN),
            max_length=self.engine.max_length,
            takes_pictures=name == "pictures",
            load_weights=self.load,
            limits=Limits(drain_seconds=1.0),
        )
        self.server = Server(self.served, tiny.tokenizer(), MODEL, config)
        self.url = self.server.start()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    async def load(self, path: str, version: int | None) -> int:
        assert version is not None
        await self.served.load_weights(tiny.fresh_model("hybrid", "float32", seed=int(path)), version)
        return version

    def close(self) -> None:
        self.client.close()
        self.server.stop()

    def chat(self, text: Any = "How far is the moon?", **fields: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(**{"model": MODEL, "messages": messages, "max_tokens": 24} | fields)


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    made = Real("hybrid")
    yield made
    made.close()


def logprobs_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probs of every next token, by one forward of the whole."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens]))[0].double(), dim=-1)


def test_a_stream_is_the_whole_answer_with_the_same_seed(real):
    whole = real.chat(seed=5, logprobs=True, extra_body={"return_token_ids": True})
    chunks = list(real.chat(seed=5, stream=True, extra_body={"return_token_ids": True}))
    said = "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks if c.choices)
    assert said == (whole.choices[0].message.reasoning_content or "")
    written = [t for c in chunks for choice in c.choices for t in getattr(choice, "token_ids", None) or ()]
    assert written == whole.choices[0].token_ids and chunks[0].prompt_token_ids == whole.prompt_token_ids


def test_log_probs_are_those_of_the_model(real):
    reply = real.chat(seed=1, logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True})
    prompt, written = reply.prompt_token_ids, reply.choices[0].token_ids
    table = logprobs_of(real.model, [*prompt, *written])
    for index, (row, token) in enumerate(zip(reply.choices[0].logprobs.content, written, strict=True)):
        expected = table[len(prompt) + index - 1]
        assert row.logprob == pytest.approx(float(expected[token]), abs=1e-4)
        assert row.top_logprobs[0].logprob == pytest.approx(float(expected.max()), abs=1e-4)


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_json_follows_its_schema(real, thinking):
    format = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    # A model of random weights thinks for long, so the bias ends it.
    end = {str(tiny.tokenizer().special_ids["</think>"]): 100}
    reply = real.chat(
        seed=2, max_tokens=200, response_format=format, logit_bias=end, extra_body={"thinking": {"type": thinking}}
    )
    choice = reply.choices[0]
    assert choice.finish_reason == "stop", choice
    value = json.loads(choice.message.content)
    assert set(value) == {"name", "size"} and value["name"] in ("moon", "earth") and isinstance(value["size"], int)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_required_tool_is_called_and_the_turn_goes_on(real, choice):
    off = {"thinking": {"type": "disabled"}, "session_id": str(choice), "return_token_ids": True}
    first = real.chat(
        seed=3, max_tokens=300, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, extra_body=off
    )
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and len(message.tool_calls) == 1
    call = message.tool_calls[0]
    assert re.fullmatch(r"functions\.look:\d{1,4}", call.id) and json.loads(call.function.arguments)["name"]
    messages = [
        {"role": "user", "content": "How far is the moon?"},
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "far"},
    ]
    second = real.client.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, tools=[TOOL], max_tokens=8, extra_body=off
    )
    assert second.headers["x-perilune-session"] == "continued"
    before = first.prompt_token_ids + first.choices[0].token_ids
    ids = second.parse().prompt_token_ids
    assert ids[: len(before)] == before
    end = tiny.tokenizer().special_ids["<|im_end|>"]
    assert ids[len(before) :].count(end) <= 2 and (end, end) not in zip(ids, ids[1:]), "no turn is ended twice"


def test_new_weights_are_stamped_on_what_follows(real):
    def post(path: str, version: int) -> Any:
        body = {"path": path, "version": version}
        headers = {"Authorization": f"Bearer {ADMIN}"}
        return real.client.post(f"{real.url}/admin/weights", cast_to=object, body=body, options={"headers": headers})

    before = real.chat(seed=4, extra_body={"return_token_ids": True})
    assert post("7", 3) == {"weight_version": 3}
    after = real.chat(seed=4, extra_body={"return_token_ids": True})
    assert (before.weight_version, after.weight_version) == (0, 3)
    assert before.choices[0].token_ids != after.choices[0].token_ids
    assert post("0", 0) == {"weight_version": 0}
    again = real.chat(seed=4, extra_body={"return_token_ids": True})
    assert again.choices[0].token_ids == before.choices[0].token_ids


def test_many_at_once_answer_as_one_alone(real):
    alone = [real.chat(seed=n).choices[0].message for n in range(3)]
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        found[number] = real.chat(seed=number % 3).choices[0].message

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(12)] == [alone[number % 3] for number in range(12)]


def test_a_client_that_leaves_frees_the_engine(real):
    async def play() -> None:
        async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "go on"}]
            stream = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()
            async with asyncio.timeout(60):
                while real.engine.stats().running or real.engine.stats().waiting:
                    await asyncio.sleep(0.01)

    asyncio.run(play())
    assert real.chat(max_tokens=2).usage.completion_tokens == 2


def test_what_is_longer_than_the_engine_holds_names_max_tokens(real):
    with pytest.raises(openai.BadRequestError) as refused:
        real.chat(max_tokens=real.engine.max_length)
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "max_tokens"


def test_a_picture_changes_the_answer():
    seeing = Real("pictures")
    try:
        parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": picture()}}]
        reply = seeing.chat(parts, seed=1, logprobs=True)
        other = seeing.chat(parts[:1], seed=1, logprobs=True)
        assert reply.usage.prompt_tokens > other.usage.prompt_tokens
        assert reply.choices[0].logprobs.content[0].logprob != other.choices[0].logprobs.content[0].logprob
    finally:
        seeing.close()


# lm-evaluation-harness ------------------------------------------------------------------------------------------------


def tokenizer_folder(folder: Path) -> Path:
    """What `AutoTokenizer` reads."""
    folder.mkdir()
    tiny.tokenizer().save(folder / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tasks(folder: Path) -> Path:
    """Two tasks on local rows: one of log-likelihoods, one of generated text."""
    folder.mkdir()
    rows = [
        {"question": "The moon turns around the", "choices": [" earth", " orbit", " name"], "gold": 0},
        {"question": "The point that is closest is called", "choices": [" world", " perilune"], "gold": 1},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {folder / 'rows.jsonl'}}}\ntest_split: test\n"
    (folder / "choices.yaml").write_text(
        f"task: tiny_choices\n{data}output_type: multiple_choice\ndoc_to_text: '{{{{question}}}}'\n"
        "doc_to_choice: choices\ndoc_to_target: gold\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\n"
    )
    (folder / "words.yaml").write_text(
        f"task: tiny_words\n{data}output_type: generate_until\ndoc_to_text: '{{{{question}}}}'\n"
        "doc_to_target: ''\ngeneration_kwargs: {until: ['\\n', 'moon'], max_gen_toks: 12}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    return folder


def test_lm_evaluation_harness_runs_unmodified(real, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import lm_eval  # here, because it reads the variables above when it is imported
    from lm_eval.tasks import TaskManager

    folder = tokenizer_folder(tmp_path / "tokenizer")
    settings = {
        "model": MODEL,
        "base_url": f"{real.url}/v1/completions",
        "tokenizer": str(folder),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
        "max_retries": 1,
        "max_length": 512,
    }
    manager = TaskManager(include_path=str(tasks(tmp_path / "tasks")), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=settings,
        tasks=["tiny_choices", "tiny_words"],
        task_manager=manager,
        batch_size=2,
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = results["samples"]["tiny_choices"]
    assert len(samples) == 2
    for sample in samples:
        doc = sample["doc"]
        before = tiny.tokenizer().encode(doc["question"])
        for choice, (found, is_greedy) in zip(doc["choices"], sample["filtered_resps"], strict=True):
            whole = tiny.tokenizer().encode(doc["question"] + choice)
            table = logprobs_of(real.model, whole)
            rows = range(len(before), len(whole))
            expected = sum(float(table[n - 1, whole[n]]) for n in rows)
            assert float(found) == pytest.approx(expected, abs=1e-3)
            assert bool(is_greedy) == all(int(table[n - 1].argmax()) == whole[n] for n in rows)
    for sample in results["samples"]["tiny_words"]:
        assert isinstance(sample["filtered_resps"][0], str) and "moon" not in sample["filtered_resps"][0]
