"""Bursts on CUDA: rounds replayed from numbers that were sent at once, and drawn by graphs, against single steps."""

from dataclasses import replace

import pytest
import torch

from perilune.model import Decoder
from perilune.serve.engine import EngineConfig
from perilune.serve.request import Output
from tests.serve.engines import answers, ask, check_nothing_is_held, make_engine
from tests.serve.test_runner_cuda import BASE

CONFIG = EngineConfig(
    page_size=16, num_pages=400, max_sequences=12, token_budget=600, num_snapshots=12, snapshot_interval=64
)
TRUNK = tuple((7 * n * n + 3 * n) % 250 for n in range(1, 400))


@pytest.mark.gpu
@pytest.mark.parametrize("how", ({}, {"temperature": 0.0}, {"top_k": 20, "top_p": 0.9}), ids=("plain", "greedy", "cut"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_bursts_say_what_single_steps_say(dtype: str, how: dict[str, float]) -> None:
    model = Decoder(replace(BASE, compute_dtype=dtype), seed=0).cuda()
    # In bfloat16 the last bits depend on how many run at once: there all begin and end together.
    together = dtype == "bfloat16"
    lengths = [(40, 45) if together else (30 * n % 170 + 3, 20 + 3 * n) for n in range(12 if together else 20)]
    asked = [
        replace(
            ask(str(n), TRUNK[n : n + prompt], seed=n, max_tokens=answer, logprobs=0, ignore_eos=together, **how),
            whole=True,
        )
        for n, (prompt, answer) in enumerate(lengths)
    ]
    said: dict[int, dict[str, list[Output]]] = {}
    for burst in (8, 1):
        engine = make_engine(model, replace(CONFIG, burst=burst))
        said[burst] = answers(engine, *asked)
        check_nothing_is_held(engine)
        graphs = engine._sampler._graphs
        assert graphs is not None
        recorded = [recording.graph for recording in graphs._recordings.values()]
        assert all(graph is not None for graph in recorded) and bool(recorded) == (burst > 1)
        torch.cuda.synchronize()
    for request in asked:
        (many,), (one,) = said[8][request.request_id], said[1][request.request_id]
        assert many.token_ids == one.token_ids and many.finish_reason == one.finish_reason
        assert [each.logprob for each in many.logprobs] == pytest.approx([each.logprob for each in one.logprobs])
