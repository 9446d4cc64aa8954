"""An engine that replies as scripted policies would, in tokens: a model that has learnt its dialogues by heart."""

from types import SimpleNamespace

from perilune.data.chat import encode, generation_prompt, parse_message, render_message
from perilune.rl.talk import EngineTalk
from perilune.serve.request import Output
from tests.serve.tiny import tokenizer


class Taught:
    """Talks register themselves by name (`taught`), so that the policy can read their messages."""

    def __init__(self, policy, workers):
        self.policy, self.workers, self.talks = policy, workers, {}

    async def stream(self, request, **how):
        name = request.request_id.rpartition("#")[0]
        reply = (self.workers if "@" in name else self.policy)(self.talks[name].messages)
        whole = encode(tokenizer(), render_message(parse_message(reply, path="reply"), thinking=False), []).tokens
        start = len(encode(tokenizer(), generation_prompt(thinking=False), []).tokens)
        yield Output(
            request_id=request.request_id, token_ids=tuple(whole[start:]), finish_reason="stop",
            logprobs=(SimpleNamespace(logprob=-1.0),) * (len(whole) - start),
        )  # fmt: skip


def taught(monkeypatch, policy, workers) -> Taught:
    engine, begin = Taught(policy, workers), EngineTalk.__init__

    def registered(self, *arguments, name, **more):
        begin(self, *arguments, name=name, **more)
        engine.talks[name] = self

    monkeypatch.setattr(EngineTalk, "__init__", registered)
    return engine
