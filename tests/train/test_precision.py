"""What stays float32 in a bf16 run: weights, gradients, optimizer state, and the quantities that bf16 would spoil."""

import pytest
import torch
import torch.nn.functional as F

import perilune.kernels.kda
import perilune.model.moe
from perilune.kernels.kda import BoundedGate, SoftplusGate
from perilune.model import KDAConfig
from perilune.model.decoder import Decoder
from perilune.train import checkpoint, train
from perilune.train.optimizer import Optimization
from tests.train.tiny_runs import MOE, tiny_run

MODEL = {"moe": MOE, "residual": "block_attnres", "block_sublayers": 2}


class Dtypes:
    """Dtypes by name of a quantity, gathered while a run goes on."""

    def __init__(self):
        self.seen: dict[str, set[torch.dtype]] = {}

    def see(self, name, tensor):
        self.seen.setdefault(name, set()).add(tensor.dtype)
        return tensor


def watch(monkeypatch, dtypes):
    """Look at every quantity where it is computed, in the code that trains."""

    def looked_at(real, look):
        def watched(*args, **kwargs):
            result = real(*args, **kwargs)
            look(result, *args)
            return result

        return watched

    def wrap(owner, name, look):
        monkeypatch.setattr(owner, name, looked_at(getattr(owner, name), look))

    def gate(log_decay, self, x, log_rate, bias):
        dtypes.see("log decay", log_decay)
        dtypes.see("A_log in the gate", log_rate)
        dtypes.see("dt_bias in the gate", bias)

    def kda(result, q, k, v, g, beta):
        dtypes.see("KDA inputs", q)
        dtypes.see("beta", beta)
        dtypes.see("KDA state", result[1])

    def gradients(norm, self, max_norm):
        dtypes.see("gradient norm", norm)
        for parameter in (parameter for group in self.optimizer.param_groups for parameter in group["params"]):
            dtypes.see("parameters", parameter)
            if parameter.grad is not None:
                dtypes.see("gradients", parameter.grad)

    wrap(SoftplusGate, "forward", gate)
    path = perilune.kernels.kda._path
    monkeypatch.setattr(perilune.kernels.kda, "_path", lambda name: looked_at(path(name), kda))
    wrap(perilune.model.moe.Router, "_select", lambda experts, self, scores: dtypes.see("router scores", scores))
    wrap(perilune.model.moe.Router, "forward", lambda result, *args: dtypes.see("router weights", result[0]))
    wrap(F, "rms_norm", lambda normed, x, *args: (dtypes.see("norms", normed), dtypes.see("input of norms", x)))
    wrap(Decoder, "loss", lambda loss, *args: dtypes.see("loss", loss))
    wrap(Optimization, "clip_gradients", gradients)
    wrap(Optimization, "step", lambda report, self: dtypes.see("max logits", report.max_logits))


@pytest.mark.parametrize("kind", ["muonclip", "adamw"])
def test_a_bf16_run_keeps_float32_where_bf16_would_spoil_it(tmp_path, monkeypatch, kind):
    dtypes = Dtypes()
    watch(monkeypatch, dtypes)
    config = tiny_run(
        tmp_path / "cache",
        model=MODEL,
        optimizer={"kind": kind},
        trainer={"precision": "bf16", "steps": 2, "sample_prompts": ()},
    )
    train(config, runs_folder=tmp_path, quiet=True)

    # The run did compute in bf16: the rest of this test means nothing otherwise.
    assert dtypes.seen.pop("KDA inputs") == {torch.bfloat16}
    expected = {
        *("log decay", "A_log in the gate", "dt_bias in the gate", "KDA state", "beta"),
        *("router scores", "router weights", "norms", "input of norms", "loss", "max logits"),
        *("parameters", "gradients", "gradient norm"),
    }
    assert set(dtypes.seen) == expected
    assert {name: kinds for name, kinds in dtypes.seen.items() if kinds != {torch.float32}} == {}

    saved = checkpoint.load_tensors(checkpoint.find(tmp_path / "tiny/checkpoints").folder)
    state = {name: value.dtype for name, value in saved.items() if value.is_floating_point()}
    assert {"model.layers.0.self_attn.A_log", "model.layers.0.self_attn.dt_bias"} <= set(state)
    assert any(name.startswith("optimizer.") for name in state)
    assert {name: dtype for name, dtype in state.items() if dtype != torch.float32} == {}


def test_the_bounded_gate_is_float32_too(tmp_path, monkeypatch):
    dtypes = Dtypes()
    real = BoundedGate.forward
    monkeypatch.setattr(BoundedGate, "forward", lambda self, *args: dtypes.see("log decay", real(self, *args)))
    kda = KDAConfig(num_heads=2, head_dim=16, gate_lower_bound=-5.0)
    config = tiny_run(tmp_path / "cache", model={"kda": kda}, trainer={"precision": "bf16", "steps": 1})
    train(config, runs_folder=tmp_path, quiet=True)
    assert dtypes.seen == {"log decay": {torch.float32}}
