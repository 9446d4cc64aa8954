"""MuonClip on a GPU: fused passes over memory (also in Triton's interpreter), and steps recorded in CUDA graphs."""

import contextlib
import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from perilune.kernels.newton_schulz import COEFFICIENTS
from perilune.kernels.newton_schulz.dense import dense_orthogonalize
from perilune.kernels.triton_support import HAS_TRITON
from perilune.optim import Adam, ColumnBlocks, MuonClip, RowBlocks, Stacked, Whole, capture
from perilune.optim.capture import CapturedStep, CaptureFailed
from perilune.optim.matrices import blocks
from perilune.optim.sharded import ShardedMuonClip
from tests.optim.small_attention import GroupedAttention

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from perilune.kernels.newton_schulz.fast import iterate_normalized
from perilune.optim.fused import FusedMatrices, device_table, why_not_fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="Triton's interpreter runs where there is no GPU")
LR, DECAY, MOMENTUM = 0.1, 0.3, 0.95

# Shape, layout: every way a matrix can lie in a parameter, more than one tile, and sizes that fill none.
CASES = {
    "wide": ((24, 40), Whole()),
    "tall": ((40, 24), Whole()),
    "odd": ((5, 3), Whole()),
    "row": ((1, 7), Whole()),
    "several tiles": ((70, 140), Whole()),
    "several tiles, tall": ((140, 70), Whole()),
    "heads": ((20, 16), RowBlocks((5,) * 4)),
    "column heads": ((12, 10), ColumnBlocks((7, 3))),
    "experts": ((3, 10, 8), Stacked((4, 6))),
}


def expected(parameter, gradient, momentum, layout, nesterov):
    """One step by the equations, in float32."""
    parameter, momentum = parameter.float(), momentum.clone()
    momentum.lerp_(gradient.float(), 1 - MOMENTUM)
    cut = [list(blocks(each, layout, per_head=True)) for each in (parameter, gradient.float(), momentum)]
    for block, gradient_block, momentum_block in zip(*cut, strict=True):
        direction = gradient_block.lerp(momentum_block, MOMENTUM) if nesterov else momentum_block
        update = dense_orthogonalize(direction[None], COEFFICIENTS["jordan"], torch.float32)[0]
        block.mul_(1 - LR * DECAY).add_(update, alpha=-LR * 0.2 * math.sqrt(max(block.shape)))
    return parameter, momentum


@on_cpu
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fused_passes_are_the_step(dtype, nesterov):
    generator = torch.Generator().manual_seed(0)
    shapes, layouts = [case[0] for case in CASES.values()], [case[1] for case in CASES.values()]
    parameters, gradients = ([torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(2))
    momenta = [torch.randn(shape, generator=generator) for shape in shapes]
    # Rows that do not follow each other in memory.
    parameters[0] = torch.randn(24, 48, generator=generator).to(dtype)[:, 4:44]
    gradients[1] = torch.randn(40, 32, generator=generator).to(dtype)[:, :24]
    assert not any(map(why_not_fused, parameters, gradients, momenta))
    want = [expected(*tensors, nesterov) for tensors in zip(parameters, gradients, momenta, layouts, strict=True)]
    untouched = [gradient.clone() for gradient in gradients]
    fused = FusedMatrices(parameters, gradients, momenta, layouts=layouts, per_head=True)
    settings = torch.tensor([LR, DECAY, 1 - MOMENTUM])
    for stack, members in zip(fused.stacks, fused.members(gradients), strict=True):
        directions = stack.direction(members, settings, nesterov=nesterov, dtype=torch.float32)
        stack.update(settings, iterate_normalized(directions, COEFFICIENTS["jordan"]))
    for got, momentum, gradient, before, (parameter, average) in zip(
        parameters, momenta, gradients, untouched, want, strict=True
    ):
        assert torch.equal(gradient, before)
        torch.testing.assert_close(momentum, average, rtol=2**-22, atol=2**-22)
        # Newton-Schulz lifts float32 rounding by up to 485, the update's factor is at most 0.1 * 0.2 * sqrt(140); the
        # parameter itself is rounded once.
        atol = 0.24 * 485 * 2**-22 + (2**-9 if dtype == torch.float16 else 0.0)
        torch.testing.assert_close(got.float(), parameter, rtol=0, atol=atol)


@on_cpu
def test_gradients_may_move_between_steps():
    parameters = [torch.zeros(6, 9), torch.zeros(9, 6)]
    gradients = [torch.randn(6, 9), torch.randn(9, 6)]
    momenta = [torch.zeros(6, 9), torch.zeros(9, 6)]
    settings = torch.tensor([LR, DECAY, 1 - MOMENTUM])
    fused = FusedMatrices(parameters, gradients, momenta, layouts=[Whole(), Whole()], per_head=False)
    assert fused.fits(parameters, gradients, momenta) and fused.holds(gradients)
    moved = [torch.randn(9, 6).mT.contiguous(), torch.randn(9, 8)[:, :6]]
    again = fused.with_gradients(moved)
    assert again.holds(moved) and not fused.holds(moved)
    first = again.stacks[0].direction(again.members(moved)[0], settings, nesterov=False, dtype=torch.float32)
    for direction, gradient in zip(first, (moved[0], moved[1].mT), strict=True):
        torch.testing.assert_close(direction, gradient / gradient.norm(), rtol=1e-5, atol=1e-6)
    # The first still knows the old places: a graph may be using them.
    old = fused.stacks[0].direction(fused.members(gradients)[0], settings, nesterov=False, dtype=torch.float32)
    assert not torch.allclose(old, first)
    assert not fused.fits(parameters, gradients, [each.clone() for each in momenta])
    assert not fused.fits(parameters, [each.half() for each in gradients], momenta)


@on_cpu
def test_tensors_that_kernels_cannot_serve_are_named():
    x = torch.zeros(4, 6)
    assert why_not_fused(x, x, x) is None
    assert why_not_fused(x.T, x, x) == "rows are not contiguous"
    assert why_not_fused(x.double(), x, x) == "torch.float64 is not float32, bfloat16 or float16"
    assert why_not_fused(x, x, x.half()) == "momentum is torch.float16"
    assert device_table([1, 2**40, -3], torch.device("cpu")).tolist() == [1, 2**40, -3]


def test_capturable_changes_nothing_without_a_graph():
    def run(capturable: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(GroupedAttention(8, 2, 2, 4), nn.Linear(8, 8), nn.LayerNorm(8)).to(DEVICE)
        optimizer = MuonClip.for_model(model, lr=0.1, qk_clip_tau=2.0, capturable=capturable)
        for step in range(3):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * 0.5**step
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            model[0].recorder.update(torch.tensor([9.0, 1.0], device=DEVICE))
            optimizer.step()
        assert optimizer.qk_clip.ever_clipped.tolist() == [[True, False]]
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(one, two) for one, two in zip(run(True), run(False), strict=True))


def test_only_a_capturable_optimizer_gives_a_captured_step():
    optimizer = MuonClip.for_model(nn.Linear(4, 4), lr=0.1, qk_clip_tau=None)
    with pytest.raises(ValueError, match="capturable=True"):
        optimizer.captured_step()


@on_cpu
def test_a_captured_step_says_that_it_needs_a_gpu():
    model = nn.Linear(4, 4)
    captured = MuonClip.for_model(model, lr=0.1, qk_clip_tau=None, capturable=True).captured_step()
    before = model.weight.clone()
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(RuntimeError, match="one CUDA device, found cpu"):
        captured()
    assert torch.equal(model.weight, before)


class Tape:
    """Stands for a CUDA graph: recording runs the step instead, replaying runs nothing."""

    replays = 0

    def replay(self) -> None:
        Tape.replays += 1


@on_cpu
def test_a_recorded_step_is_refused_once_its_state_moved_and_kept_only_when_whole(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(capture, "recording", lambda graph, device: contextlib.nullcontext())
    monkeypatch.setattr(CapturedStep, "_check_devices", lambda self: None)
    model = nn.Sequential(GroupedAttention(8, 2, 2, 4), nn.Linear(8, 8))
    optimizer = MuonClip.for_model(model, lr=0.1, qk_clip_tau=2.0, capturable=True)
    captured = optimizer.captured_step()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    Tape.replays = 0
    captured()
    with monkeypatch.context() as broken:
        broken.setattr(optimizer, "_muon_update", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            captured()
    captured()
    captured()
    assert Tape.replays == 2
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    captured()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    with pytest.raises(RuntimeError, match="make a new captured_step"):
        captured()
    captured = optimizer.captured_step()
    for _ in range(2):
        captured()
    model[1].weight.data = model[1].weight.data.clone()
    with pytest.raises(RuntimeError, match="make a new captured_step"):
        captured()
    assert Tape.replays == 4


@on_cpu
def test_a_recorded_step_is_refused_once_the_optimizer_has_given_up_what_it_reads(monkeypatch):
    """Loading a state that is the optimizer's own moves no tensor of it, but settings and tables are made anew."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(capture, "recording", lambda graph, device: contextlib.nullcontext())
    monkeypatch.setattr(CapturedStep, "_check_devices", lambda self: None)
    model = nn.Linear(8, 8)
    optimizer = MuonClip.for_model(model, lr=0.1, qk_clip_tau=None, capturable=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    captured = optimizer.captured_step()
    for _ in range(2):
        captured()
    places = captured._other_places()
    optimizer.load_state_dict(optimizer.state_dict())
    assert captured._other_places() == places
    with pytest.raises(RuntimeError, match="make a new captured_step"):
        captured()


@on_cpu
@pytest.mark.parametrize("breaks", ["before the step", "behind it"])
def test_a_step_that_cannot_be_recorded_is_left_to_be_taken(monkeypatch, breaks):
    model = nn.Sequential(GroupedAttention(8, 2, 2, 4), nn.Linear(8, 8))
    optimizer = MuonClip.for_model(model, lr=0.1, qk_clip_tau=2.0, capturable=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    @contextlib.contextmanager
    def breaking(graph, device):
        if breaks == "before the step":
            raise RuntimeError("operation not permitted when stream is capturing")
        before = [value.detach().clone() for value in model.parameters()]
        yield
        for value, held in zip(model.parameters(), before, strict=True):
            value.data.copy_(held)  # nothing of it ran
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(capture, "recording", breaking)
    monkeypatch.setattr(CapturedStep, "_check_devices", lambda self: None)
    captured = optimizer.captured_step()
    captured()
    weights = [value.detach().clone() for value in model.parameters()]
    (heads,), report = optimizer.qk_clip.heads, optimizer.qk_report
    heads.recorder.update(torch.tensor([1.0, 5.0]))
    with pytest.raises(CaptureFailed, match="could not be recorded"):
        captured()
    assert heads.recorder.value.tolist() == [1.0, 5.0] and heads.recorder.has_seen
    assert optimizer.qk_report is report and not optimizer._captured
    assert all(map(torch.equal, weights, model.parameters()))
    optimizer.step()
    assert optimizer.qk_report.num_clipped == 1


# On a GPU


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 64)
        self.attention = GroupedAttention(64, 4, 2, 16)
        self.up, self.down = nn.Linear(64, 300), nn.Linear(300, 64)
        self.experts = nn.Parameter(torch.randn(3, 64, 64) * 0.1)
        self.norm = nn.LayerNorm(64)

    def logical_matrices(self):
        return {"experts": Stacked((16, 48)), "embed.weight": Adam(weight_decay=True)}


def build(seed: int = 0, dtype: torch.dtype = torch.float32, **options) -> tuple[Model, MuonClip]:
    torch.manual_seed(seed)
    model = Model().to("cuda", dtype)
    options = {"lr": 0.02, "qk_clip_tau": 2.0, "capturable": True, **options}
    return model, MuonClip.for_model(model, **options)


def give_gradients(model: nn.Module, step: int) -> None:
    """In place where there is one, as a graph needs it."""
    generator = torch.Generator("cuda").manual_seed(step)
    for parameter in model.parameters():
        value = torch.randn(parameter.shape, generator=generator, device="cuda").to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = value
        else:
            parameter.grad.copy_(value)
    logits = torch.rand(4, generator=generator, device="cuda") * 4
    model.attention.recorder.update(logits)


def schedule(optimizer: MuonClip, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * (1 + step) / 3
        if group["name"] == "muon":
            group["momentum"], group["weight_decay"] = 0.9 + 0.01 * step, 0.1 * step


def same(model: nn.Module, optimizer: MuonClip, other: nn.Module, other_optimizer: MuonClip) -> None:
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name
        for key, value in optimizer.state[one].items():
            assert torch.equal(value.cpu(), other_optimizer.state[two][key].cpu()), (name, key)
    assert torch.equal(optimizer.qk_clip.ever_clipped, other_optimizer.qk_clip.ever_clipped)
    assert torch.equal(optimizer.qk_report.max_logits, other_optimizer.qk_report.max_logits)
    assert torch.equal(optimizer.qk_report.num_clipped, other_optimizer.qk_report.num_clipped)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_on_a_gpu_is_that_of_the_cpu(dtype):
    model, optimizer = build(dtype=dtype, capturable=False)
    twin = copy.deepcopy(model).cpu()
    twin_optimizer = MuonClip.for_model(twin, lr=0.02, qk_clip_tau=2.0, orthogonalize_dtype=torch.float32)
    for step in range(3):
        give_gradients(model, step)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            theirs.grad = mine.grad.cpu()
        twin.attention.recorder.update(model.attention.recorder.value.cpu())
        optimizer.step()
        twin_optimizer.step()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        update = 3 * 0.02 * 0.2 if mine.ndim > 1 and "embed" not in name else 3 * 0.02
        # Of an update with entries of 0.2 lr, float16 loses a few 2^-11; a bfloat16 weight is rounded at every step.
        atol = update * 2**-5 + (3 * 2**-8 * float(theirs.abs().max()) if dtype == torch.bfloat16 else 0.0)
        torch.testing.assert_close(mine.cpu().float(), theirs.float(), rtol=0, atol=atol)
        for key, value in optimizer.state[mine].items():
            torch.testing.assert_close(value.cpu(), twin_optimizer.state[theirs][key], rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_after_a_broken_recording_work_goes_on_where_it_was():
    model, optimizer = build()
    stream, weight = torch.cuda.current_stream(), model.up.weight
    captured = optimizer.captured_step()
    give_gradients(model, 0)
    captured()
    real = optimizer._apply_qk_clip
    optimizer._apply_qk_clip = lambda: float(weight.sum())  # waits for the device, which a recording cannot
    before = weight.detach().clone()
    with pytest.raises(CaptureFailed):
        captured()
    assert torch.cuda.current_stream() == stream and torch.equal(weight, before)
    torch.cuda.empty_cache()  # refused as long as the allocator believes in a recording
    optimizer._apply_qk_clip = real
    captured = optimizer.captured_step()
    for step in range(3):
        give_gradients(model, step)
        captured()
    assert captured._graph is not None and not torch.equal(weight, before)


@pytest.mark.gpu
def test_steps_are_deterministic():
    results = []
    for _ in range(2):
        model, optimizer = build()
        for step in range(3):
            give_gradients(model, step)
            optimizer.step()
        results.append((model, optimizer))
    same(*results[0], *results[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_steps_follow_the_schedule_like_eager_ones(dtype):
    eager_model, eager = build(dtype=dtype, capturable=False)
    model, optimizer = build(dtype=dtype)
    captured = optimizer.captured_step()
    for step in range(6):
        for each, chosen, take in ((eager_model, eager, eager.step), (model, optimizer, captured)):
            schedule(chosen, step)
            give_gradients(each, step)
            take()
        same(model, optimizer, eager_model, eager)
    assert optimizer.qk_clip.ever_clipped.any()


@pytest.mark.gpu
def test_a_graph_of_ones_own_honours_a_tensor_lr_and_update_settings():
    eager_model, eager = build(capturable=False)
    model, optimizer = build()
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.02, device="cuda")
    give_gradients(eager_model, 0)
    give_gradients(model, 0)
    eager.step()
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    give_gradients(model, 1)
    recorder = model.attention.recorder
    static = recorder.value, recorder.exact
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, 4):
        for group, other in zip(optimizer.param_groups, eager.param_groups, strict=True):
            group["lr"].fill_(0.02 / step)
            other["lr"] = float(torch.tensor(0.02 / step))
            if group["name"] == "muon":
                group["momentum"] = other["momentum"] = 0.9
        give_gradients(eager_model, step)
        eager.step()
        give_gradients(model, step)
        for place, value in zip(static, (recorder.value, recorder.exact), strict=True):
            place.copy_(value)
        optimizer.update_settings()
        graph.replay()
        recorder.reset()
    same(model, optimizer, eager_model, eager)


@pytest.mark.gpu
def test_moved_gradients_and_changed_constants_are_refused():
    model, optimizer = build()
    captured = optimizer.captured_step()
    for step in range(3):
        give_gradients(model, step)
        captured()
    optimizer.param_groups[-1]["eps"] = 1e-3
    with pytest.raises(RuntimeError, match="make a new captured_step"):
        captured()
    optimizer.param_groups[-1]["eps"] = 1e-8
    model.up.weight.grad = torch.randn_like(model.up.weight)
    with pytest.raises(RuntimeError, match="set_to_none=False"):
        captured()
    captured = optimizer.captured_step()
    for step in range(3):
        give_gradients(model, step)
        captured()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(RuntimeError, match="optimizer state or a tensor"):
        captured()
    _, plain = build(capturable=False)
    for parameter in plain.param_groups[0]["params"]:
        parameter.grad = torch.randn_like(parameter)
    plain.step()
    with pytest.raises(RuntimeError, match="capturable=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        plain.step()


@pytest.mark.gpu
def test_a_state_moves_between_capturable_and_not():
    model, optimizer = build()
    give_gradients(model, 0)
    optimizer.step()
    other_model, other = build(capturable=False)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in (1, 2):
        for each, chosen in ((model, optimizer), (other_model, other)):
            give_gradients(each, step)
            chosen.step()
    same(model, optimizer, other_model, other)
    third_model, third = build()
    third_model.load_state_dict(other_model.state_dict())
    third.load_state_dict(copy.deepcopy(other.state_dict()))
    captured = third.captured_step()
    for step in (3, 4, 5):
        give_gradients(other_model, step)
        other.step()
        give_gradients(third_model, step)
        captured()
    same(third_model, third, other_model, other)


@pytest.mark.gpu
def test_one_rank_that_holds_everything_steps_with_the_bits_of_a_single_process():
    model, alone = build(capturable=False)
    torch.manual_seed(0)
    spread = Model().to("cuda")
    dist.init_process_group("cuda:nccl,cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(spread, mesh=init_device_mesh("cuda", (1,)))
        sharded = ShardedMuonClip.for_model(spread, lr=0.02, qk_clip_tau=2.0)
        for step in range(3):
            give_gradients(model, step)
            for mine, theirs in zip(model.parameters(), spread.parameters(), strict=True):
                theirs.grad = distribute_tensor(mine.grad.clone(), theirs.device_mesh, theirs.placements)
            spread.attention.recorder.update(model.attention.recorder.value)
            alone.step()
            sharded.step()
        assert sharded._fused is not None, "the fused passes were not used"
        for (name, mine), theirs in zip(model.named_parameters(), spread.parameters(), strict=True):
            assert torch.equal(mine, theirs.full_tensor()), name
    finally:
        dist.destroy_process_group()
