"""The runner on CUDA: graphs against steps without them, and both against the CPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from perilune.model import Decoder, MLAConfig, ModelConfig, MoEConfig
from perilune.serve.plan import Share, StepPlan
from perilune.serve.runner import Runner

PAGE = 16
BASE = ModelConfig(
    vocab_size=512,
    hidden_size=128,
    mla=MLAConfig(num_attention_heads=4, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
    initializer_range=0.05,
)
CONFIGS = {
    "block_attnres": BASE,
    "plain": replace(BASE, residual="plain"),
    "experts": replace(BASE, moe=MoEConfig(num_experts=8, moe_intermediate_size=64)),
}


def served(model: Decoder, sequences: list[tuple[int, ...]], *, use_graphs: bool, prompt: int = 40) -> Tensor:
    """Logits after every decoded token [steps, sequences, vocabulary]; prompts come in two chunks."""
    each = -(-len(sequences[0]) // PAGE)
    runner = Runner(
        model, num_pages=each * len(sequences), page_size=PAGE, num_slots=len(sequences) + 1,
        max_sequences=len(sequences), device=model.embed_tokens.weight.device, use_graphs=use_graphs,
    )  # fmt: skip

    def step(start: int, end: int) -> Tensor:
        return runner.run(
            StepPlan(
                shares=tuple(
                    Share(
                        request_id=str(index),
                        start=start,
                        tokens=tokens[start:end],
                        slot=index,
                        want="last",
                        samples=True,
                        pages=tuple(index * each + page for page in range(-(-end // PAGE))),
                    )
                    for index, tokens in enumerate(sequences)
                )
            )
        )

    step(0, prompt // 2)
    step(prompt // 2, prompt)
    return torch.stack([step(at, at + 1) for at in range(prompt, len(sequences[0]))])


def random_sequences(count: int, length: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(512, (length,), generator=generator).tolist()) for _ in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_graphs_give_the_logits_of_steps_without_them(name: str) -> None:
    sequences = random_sequences(3, 70)  # a bucket of 3; pages grow while graphs replay
    config = replace(CONFIGS[name], compute_dtype="bfloat16")
    plain = served(Decoder(config, seed=0).cuda(), sequences, use_graphs=False)
    graphs = served(Decoder(config, seed=0).cuda(), sequences, use_graphs=True)
    # The number of shares in which attention is split depends on the width of the page table.
    torch.testing.assert_close(graphs, plain, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_float32_on_cuda_equals_float32_on_cpu(name: str) -> None:
    sequences = random_sequences(2, 60)
    cpu = served(Decoder(CONFIGS[name], seed=0), sequences, use_graphs=False)
    cuda = served(Decoder(CONFIGS[name], seed=0).cuda(), sequences, use_graphs=True).cpu()
    assert (cuda.log_softmax(-1) - cpu.log_softmax(-1)).abs().max() < 1e-3


@pytest.mark.gpu
def test_new_weights_are_read_by_graphs_that_were_recorded_before() -> None:
    config = replace(BASE, compute_dtype="bfloat16")
    sequences = random_sequences(1, 45)
    model = Decoder(config, seed=0).cuda()
    runner = Runner(model, num_pages=4, page_size=PAGE, num_slots=2, max_sequences=1)
    tokens = sequences[0]

    def decode(start: int) -> Tensor:
        runner.clear_state(0)
        common = {"request_id": "a", "pages": (0, 1, 2), "slot": 0, "want": "last", "samples": True}
        runner.run(StepPlan(shares=(Share(start=0, tokens=tokens[:start], **common),)))
        return runner.run(StepPlan(shares=(Share(start=start, tokens=tokens[start : start + 1], **common),)))

    before = decode(40)
    other = Decoder(config, seed=1).cuda()
    runner.load_weights(other)
    after = decode(40)
    right = other.eval()(torch.tensor([tokens[:41]], device="cuda"))[0, -1:]
    torch.testing.assert_close(after, right, rtol=5e-2, atol=5e-2)
    assert not torch.allclose(after, before, rtol=5e-2, atol=5e-2)
