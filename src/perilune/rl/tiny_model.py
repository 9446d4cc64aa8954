"""A tiny policy that needs no training run before it: made and taught within seconds on a CPU.

It learns to answer a letter with some letter: of all of them, the one that follows most often and the right one next.
So it is wrong when it is greedy, and right often enough when it samples for reinforcement learning to begin. A function
of its seed alone, on any machine with the same torch.
"""

from collections.abc import Callable

import torch

from perilune.data.chat import encode, parse_messages, render
from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig
from perilune.train.batches import DataConfig
from perilune.train.run_config import RunConfig

VOCAB_SIZE = 320
TEXTS = ("The moon turns around the earth; the point of its orbit that is closest is called perilune.\n",)
TEACHING_STEPS = 60
Progress = Callable[[str, int, int | None], None]


def tiny_config(name: str, *, seed: int = 0) -> RunConfig:
    """As a run would describe it."""
    model = ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=("kda", "mla"),
        kda=KDAConfig(num_heads=2, head_dim=8),
        mla=MLAConfig(num_attention_heads=2, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
        intermediate_size=48,
        residual="plain",
        initializer_range=0.2,
    )
    return RunConfig(name=name, seed=seed, model=model, data=DataConfig(vocab_size=VOCAB_SIZE, seq_len=64))


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, VOCAB_SIZE)


def taught(
    config: RunConfig, tokenizer: Tokenizer, letters: str, *, progress: Progress = lambda stage, done, total: None
) -> Decoder:
    """The model of `config`, which says some letter when it is asked for one."""
    model = Decoder(config.model, seed=config.seed)
    tokens, targets, borders = [], [], [0]
    for place, asked in enumerate(letters):
        follows = letters[(place + 1) % len(letters)]
        for said in letters + asked + 2 * follows:
            messages = parse_messages([{"role": "user", "content": asked}, {"role": "assistant", "content": said}])
            made = encode(tokenizer, render(messages, thinking=False, add_generation_prompt=False))
            tokens += made.tokens[:-1]
            targets += [token if is_said else -100 for token, is_said in zip(made.tokens[1:], made.produced[1:])]
            borders.append(len(tokens))
    row, wanted, cu_seqlens = torch.tensor([tokens]), torch.tensor([targets]), torch.tensor(borders, dtype=torch.int32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(TEACHING_STEPS):
        (model.loss(row, wanted, cu_seqlens) / (wanted != -100).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        progress("teaching a tiny model", step + 1, TEACHING_STEPS)
    return model
