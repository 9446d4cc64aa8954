"""Recorded routes on CUDA: in graphs, beside steps under way, and what replaying them does in half precision."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from perilune.model import Decoder, MLAConfig, ModelConfig, MoEConfig
from perilune.model.routes import Recorded, Replayed, new_book
from perilune.serve.engine import Engine, EngineConfig
from perilune.serve.plan import Share, StepPlan
from perilune.serve.runner import Runner
from tests.serve import tiny
from tests.serve.engines import answers, ask, tokens

BASE = ModelConfig(
    vocab_size=325,
    hidden_size=128,
    num_hidden_layers=6,
    mla=MLAConfig(num_attention_heads=4, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
    moe=MoEConfig(num_experts=32, num_experts_per_token=4, moe_intermediate_size=64),
    initializer_range=0.08,
)
ENGINE = EngineConfig(
    page_size=16, num_pages=100, max_sequences=8, token_budget=256, num_snapshots=8, snapshot_interval=64,
    record_routes=True,
)  # fmt: skip


def requests(count: int, length: int = 60) -> list:
    trunk = tuple((7 * n * n + 3 * n) % 250 for n in range(1, 400))
    return [
        ask(str(n), trunk[: 20 + n % 3] + trunk[n : n + length], seed=n, max_tokens=40, routes=0, logprobs=0)
        for n in range(count)
    ]


@torch.no_grad()
def forward(model: Decoder, sequence: list[int], book: torch.Tensor | None = None) -> tuple[torch.Tensor, np.ndarray]:
    """(log-probs [tokens, vocabulary], routes [tokens, layers, k]) of one forward."""
    row = torch.tensor([sequence], device="cuda")
    if book is not None:
        return model.logits(model.hidden(row, routes=Replayed(book=book)))[0].log_softmax(-1), np.zeros(0)
    written = new_book(model.config, len(sequence), "cuda")
    routes = Recorded(book=written, rows=torch.arange(len(sequence), device="cuda"))
    return model.logits(model.hidden(row, routes=routes))[0].log_softmax(-1), written.transpose(0, 1).cpu().numpy()


@pytest.mark.gpu
@pytest.mark.parametrize("num_pages", [100, 26])
def test_an_asynchronous_engine_with_graphs_reports_the_routes_of_a_forward(num_pages: int) -> None:
    """In float32, where ties are rare; with few pages sequences are pre-empted."""
    engine = Engine(Decoder(BASE, seed=0).cuda(), tiny.tokenizer(), replace(ENGINE, num_pages=num_pages))
    model = Decoder(BASE, seed=0).cuda().eval()
    asked = requests(8)
    found = answers(engine, *asked)
    assert bool(engine.stats().preemptions) == (num_pages == 26)
    for request in asked:
        outputs = found[request.request_id]
        _, expected = forward(model, [*request.prompt, *tokens(outputs)[:-1]])
        assert outputs[-1].routes.shape == expected.shape
        assert (outputs[-1].routes == expected).all(-1).mean() > 0.999


@pytest.mark.gpu
def test_recording_in_a_graph_makes_nobody_wait() -> None:
    model = Decoder(replace(BASE, compute_dtype="bfloat16"), seed=0).cuda()
    runner = Runner(model, num_pages=8, page_size=16, num_slots=3, max_sequences=3, record_routes=True)
    runner_without = Runner(
        Decoder(model.config, seed=0).cuda(), num_pages=8, page_size=16, num_slots=3, max_sequences=3
    )

    def plan(start: int, end: int) -> StepPlan:
        common = {"want": "last", "samples": True}
        return StepPlan(
            shares=tuple(
                Share(request_id=str(n), start=start, tokens=tuple(range(n + start, n + end)), slot=n,
                      pages=(2 * n, 2 * n + 1), **common)
                for n in range(3)
            )
        )  # fmt: skip

    for each in (runner, runner_without):
        each.run(plan(0, 20))
        each.run(plan(20, 21))  # records the graph
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits, without = runner.run(plan(21, 22)), runner_without.run(plan(21, 22))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(logits, without)  # recording changes nothing that is computed
    assert runner.routes is not None
    for n in range(3):
        last = runner.routes.gather((2 * n, 2 * n + 1), 20, 22)
        assert all(len(set(chosen)) == 4 for chosen in last.flatten(0, 1).tolist())


@pytest.mark.gpu
def test_replay_in_half_precision_closes_most_of_the_gap() -> None:
    """Server and trainer in bfloat16 choose otherwise now and then; with replay their log-probs differ less."""
    config = replace(BASE, compute_dtype="bfloat16")
    engine = Engine(Decoder(config, seed=0).cuda(), tiny.tokenizer(), replace(ENGINE, num_pages=200))
    model = Decoder(config, seed=0).cuda().eval()
    gaps: dict[str, list[float]] = {"own": [], "replayed": []}
    differing = total = 0
    asked = requests(8, 200)
    found = answers(engine, *asked)
    for request in asked:
        outputs = found[request.request_id]
        said, routes = tokens(outputs), outputs[-1].routes
        computed = [*request.prompt, *said[:-1]]
        sampled = np.array([each.logprob for output in outputs for each in output.logprobs])
        own, chosen = forward(model, computed)
        book = torch.from_numpy(routes).cuda().transpose(0, 1).contiguous()
        replayed, _ = forward(model, computed, book)
        differing += (np.sort(chosen) != np.sort(routes)).any(-1).sum()
        total += chosen[..., 0].size
        for name, found_here in (("own", own), ("replayed", replayed)):
            rows = found_here[len(request.prompt) - 1 :]
            mine = rows[torch.arange(len(said)), torch.tensor(said)].float().cpu().numpy()
            gaps[name] += np.abs(mine - sampled).tolist()
    report = {name: (float(np.mean(each)), float(np.max(each))) for name, each in gaps.items()}
    print(f"experts differ in {differing / total:.2%} of choices; gap (mean, largest): {report}")
    assert differing > 0
    assert report["replayed"][0] < report["own"][0]
