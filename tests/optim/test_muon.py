"""The update of MuonClip: its direction on every path, what it leaves alone, and defects seen in other
implementations."""

import copy

import pytest
import torch
from torch import nn

import perilune.optim.muon as muon_module
from perilune.kernels.newton_schulz import orthogonalize
from perilune.optim import Adam, ColumnBlocks, MuonClip, RowBlocks, Stacked, Whole, clip_grad_norm_
from perilune.optim.matrices import blocks
from perilune.optim.plan import PlannedParameter
from tests.optim.small_attention import GroupedAttention

LR = 0.5


def optimizer_for(parameter: nn.Parameter, layout, **options) -> MuonClip:
    plan = [PlannedParameter(name="weight", parameter=parameter, layout=layout)]
    return MuonClip(plan, **{"lr": LR, "weight_decay": 0.0, **options})


def update_of(gradient: torch.Tensor, layout, **options) -> torch.Tensor:
    """What one step with this gradient adds to a zero parameter, divided by -lr."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    optimizer_for(parameter, layout, **options).step()
    return parameter.detach() / -LR


PATHS = {
    "whole": ((24, 40), Whole()),
    "tall": ((40, 24), Whole()),
    "heads": ((48, 32), RowBlocks((12,) * 4)),
    "uneven_heads": ((48, 32), RowBlocks((8, 20, 8, 12))),
    "column_heads": ((32, 48), ColumnBlocks((12,) * 4)),
    "experts": ((3, 24, 16), Stacked()),
    "fused_experts": ((3, 32, 24), Stacked(row_sizes=(16, 16))),
    "fused_qkv": ((48, 16), RowBlocks((16, 16, 16), fused=True)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("path", PATHS)
def test_each_block_moves_along_its_polar_factor(path, dtype):
    shape, layout = PATHS[path]
    gradient = torch.randn(shape)
    update = update_of(gradient, layout, per_head=True, orthogonalize_dtype=dtype)
    for block, moved in zip(
        blocks(gradient, layout, per_head=True), blocks(update, layout, per_head=True), strict=True
    ):
        u, _, vh = torch.linalg.svd(block.double(), full_matrices=False)
        polar = u @ vh
        exact = orthogonalize(block.double(), dtype=torch.float64, backend="reference")

        def cosine(matrix, polar=polar):
            return float(torch.cosine_similarity(matrix.double().flatten(), polar.flatten(), dim=0))

        # No path may be further from the polar factor than the iteration in exact arithmetic, by more than 1e-3, or
        # half an epsilon where the iteration itself runs in bfloat16 (the loss of torch.optim.Muon is as large).
        assert cosine(moved) >= cosine(exact) - max(1e-3, torch.finfo(dtype).eps / 2)
        # RMS matching with the block's own shape: singular values s of O give 0.2 sqrt(mean s^2), and the Jordan
        # coefficients leave s in [0.68, 1.21] except the few that start below 3e-3 of the norm.
        rms = float(moved.square().mean().sqrt())
        assert 0.2 * 0.6 <= rms <= 0.2 * 1.21


def test_blocks_stay_whole_unless_asked_for():
    gradient = torch.randn(48, 32)
    assert torch.equal(update_of(gradient, RowBlocks((12,) * 4)), update_of(gradient, Whole()))
    assert not torch.equal(update_of(gradient, RowBlocks((12,) * 4), per_head=True), update_of(gradient, Whole()))


def test_same_shapes_go_through_newton_schulz_as_one_stack(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    seen = []
    monkeypatch.setattr(muon_module, "orthogonalize", lambda x, **options: seen.append(x.shape) or orthogonalize(x))
    optimizer = MuonClip.for_model(model, lr=1e-3, qk_clip_tau=None)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert [tuple(shape) for shape in seen] == [(3, 8, 16), (2, 16, 16)]


def test_stacks_are_cut_to_bound_memory(monkeypatch):
    monkeypatch.setattr("perilune.optim.stacks.STACK_ELEMENTS", 2 * 8 * 8 + 1)
    seen = []
    monkeypatch.setattr(
        muon_module, "orthogonalize", lambda x, **options: seen.append(x.shape) or orthogonalize(x, **options)
    )
    gradient = torch.randn(5, 8, 8)
    cut = update_of(gradient, Stacked(), orthogonalize_dtype=torch.float32)
    assert [tuple(shape) for shape in seen] == [(2, 8, 8), (2, 8, 8), (1, 8, 8)]
    monkeypatch.undo()
    whole = update_of(gradient, Stacked(), orthogonalize_dtype=torch.float32)
    # A matrix does not see its stack; a batched product may sum in another order, lifted by the slope of at most 485
    # and multiplied by the update's factor 0.2 sqrt(8).
    torch.testing.assert_close(cut, whole, rtol=0, atol=0.2 * 8**0.5 * 485 * 2**-23)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exponent", [-100, -40, 40, 100])
@pytest.mark.parametrize("steps", [1, 4])
def test_gradients_times_a_power_of_two_give_the_same_bits(exponent, dtype, steps):
    start, gradients = torch.randn(24, 40), torch.randn(steps, 24, 40)
    results = []
    for factor in (1.0, 2.0**exponent):
        parameter = nn.Parameter(start.clone())
        optimizer = optimizer_for(parameter, Whole(), weight_decay=0.1, orthogonalize_dtype=dtype)
        for gradient in gradients:
            parameter.grad = gradient * factor
            optimizer.step()
        results.append(parameter.detach())
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-10, 1e10, 1e20, 1e30])
@pytest.mark.parametrize("steps", [1, 4])
def test_gradients_of_any_scale_give_the_same_update(scale, steps):
    start, gradients = torch.randn(24, 40), torch.randn(steps, 24, 40)
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        for factor in (1.0, scale):
            parameter = nn.Parameter(start.clone())
            optimizer = optimizer_for(parameter, Whole(), weight_decay=0.1, orthogonalize_dtype=dtype)
            for gradient in gradients:
                parameter.grad = gradient * factor
                optimizer.step()
            results[dtype, factor] = parameter.detach()
    # Scaling by a decimal rounds each entry once (2^-24); five steps of slope up to 3.44 amplify that by at most 485.
    torch.testing.assert_close(
        results[torch.float32, scale], results[torch.float32, 1.0], rtol=0, atol=LR * steps * 485 * 2**-24 * 4
    )
    # bfloat16 rounds the scaled entries elsewhere, by up to 2^-9 each: a few thousandths of the update in total, and
    # less than its square in the cosine.
    moves = [results[torch.bfloat16, factor] - start for factor in (1.0, scale)]
    assert torch.cosine_similarity(moves[0].flatten(), moves[1].flatten(), dim=0) > 1 - 2**-9


def test_gradients_beyond_the_range_of_adamw_stop_its_entries_as_torch_does_and_leave_muon_alone():
    def run(scale: float) -> tuple[nn.Sequential, MuonClip, nn.Parameter]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.LayerNorm(6, bias=False))
        torch_gain = nn.Parameter(torch.ones(6))
        options = {"lr": 0.1, "weight_decay": 0.0}
        optimizer = MuonClip.for_model(model, qk_clip_tau=None, orthogonalize_dtype=torch.float32, **options)
        torch_adamw = torch.optim.AdamW([torch_gain], betas=(0.9, 0.95), **options)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) * scale
            torch_gain.grad = model[1].weight.grad.clone()
            optimizer.step()
            torch_adamw.step()
        return model, optimizer, torch_gain.detach()

    # A power of two near 1e30, so that Muon must not lose a bit.
    (model, optimizer, torch_gain), (calm, _, _) = run(2.0**100), run(1.0)
    assert torch.equal(model[0].weight, calm[0].weight)
    assert optimizer.state[model[1].weight]["exp_avg_sq"].isinf().all()
    assert torch.equal(model[1].weight, torch.ones(6)) and torch.equal(torch_gain, torch.ones(6))


def test_a_zero_gradient_moves_nothing_but_the_decay():
    parameter = nn.Parameter(torch.ones(4, 6))
    parameter.grad = torch.zeros(4, 6)
    optimizer_for(parameter, Whole(), weight_decay=0.1).step()
    torch.testing.assert_close(parameter.detach(), torch.full((4, 6), 1 - LR * 0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
def test_gradients_are_only_read_and_momentum_is_the_average(dtype, nesterov):
    # torch 2.13 normalises a bfloat16 momentum buffer in place without Nesterov; KellerJordan/Muon overwrites p.grad.
    parameter = nn.Parameter(torch.randn(8, 6).to(dtype))
    optimizer = optimizer_for(parameter, Whole(), nesterov=nesterov)
    average = torch.zeros(8, 6)
    for _ in range(3):
        gradient = torch.randn(8, 6).to(dtype)
        parameter.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(parameter.grad, gradient)
        average.lerp_(gradient.float(), 0.05)
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], average)


def test_half_precision_parameters_keep_float32_state():
    model = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6)).bfloat16()
    optimizer = MuonClip.for_model(model, lr=1e-2, qk_clip_tau=None)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    assert {value.dtype for value in state} == {torch.float32}


def test_half_precision_updates_are_rounded_once():
    start, gradient = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    half, full = nn.Parameter(start.clone()), nn.Parameter(start.float())
    half.grad, full.grad = gradient, gradient.float()
    for parameter in (half, full):
        optimizer_for(parameter, Whole(), lr=1e-2, weight_decay=0.1).step()
    assert torch.equal(half.detach(), full.detach().bfloat16())


def test_parameters_without_gradient_are_left_alone():
    # KellerJordan/Muon gives them a zero gradient and moves them; torchtitan's DistMuon raises (idle experts).
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.LayerNorm(6))
    optimizer = MuonClip.for_model(model, lr=0.1, qk_clip_tau=None)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    model[0].weight.grad = model[2].weight.grad = None
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.step()
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(order):
        still = parameter.grad is None
        same = [torch.equal(value, state[index][key]) for key, value in optimizer.state[parameter].items()]
        assert all(same) if still else not any(same)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (parameter.grad is None)


def test_nothing_happens_without_any_gradient():
    module = GroupedAttention(8, 2, 2, 4)
    optimizer = MuonClip.for_model(module, lr=0.1)
    before, state = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())
    module.recorder.update(torch.tensor([500.0, 1.0]))
    optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert optimizer.qk_report is None and module.recorder.value.tolist() == [500.0, 1.0]
    assert all(
        torch.equal(value, state["state"][number][key])
        for number, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    )


def test_convolutions_go_to_adamw():
    # KellerJordan/Muon takes the scale of a 4-D kernel from its height and width.
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv1d(4, 4, 4, groups=4))
    assert [row.group for row in MuonClip.for_model(model, lr=0.1, qk_clip_tau=None).describe()] == [
        "adam_decay",
        "adam",
    ]


def test_weight_decay_uses_the_unscaled_rate_and_separate_rates_work():
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    options = {"lr": 0.1, "weight_decay": 0.3, "adam_lr": 0.2, "adam_weight_decay": 0.05}
    optimizer = MuonClip.for_model(model, qk_clip_tau=None, **options)
    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before["0.weight"] * (1 - 0.1 * 0.3))
    torch.testing.assert_close(model[1].weight.detach(), before["1.weight"] * (1 - 0.2 * 0.05))
    assert torch.equal(model[0].bias, before["0.bias"])


def test_closure_is_evaluated_with_gradients():
    model = nn.Linear(6, 4)
    optimizer = MuonClip.for_model(model, lr=0.01, qk_clip_tau=None)
    x = torch.randn(5, 6)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_torch_schedulers_drive_every_group():
    def run(scheduled: bool) -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
        optimizer = MuonClip.for_model(model, lr=0.1, adam_lr=0.4, qk_clip_tau=None)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step) if scheduled else None
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            if scheduler is None:
                for group, base in zip(optimizer.param_groups, (0.1, 0.4, 0.4), strict=True):
                    group["lr"] = base * 0.5**step
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(run(True), run(False))


def test_clipping_the_norm_scales_adamw_gradients_only():
    # DeepSpeed clipped the orthogonalised update by its own norm; others let tiny clipped gradients meet an epsilon.
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    optimizer = MuonClip.for_model(model, lr=0.1, qk_clip_tau=None)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 10
    before = [parameter.grad.clone() for parameter in model.parameters()]
    expected = torch.nn.utils.get_total_norm(before)
    norm = clip_grad_norm_(optimizer, max_norm=1.0)
    torch.testing.assert_close(norm, expected)
    for (name, parameter), gradient in zip(model.named_parameters(), before, strict=True):
        wanted = gradient if name == "0.weight" else gradient / (expected + 1e-6)
        torch.testing.assert_close(parameter.grad, wanted)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    clip_grad_norm_(optimizer, max_norm=1e9)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_clipping_plain_parameters_is_that_of_torch():
    parameters = [nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    for parameter in parameters[:2]:
        parameter.grad = torch.randn_like(parameter)
    twin = copy.deepcopy(parameters)
    for mine, theirs in zip(parameters, twin, strict=True):
        theirs.grad = None if mine.grad is None else mine.grad.clone()
    torch.testing.assert_close(clip_grad_norm_(parameters, 0.1), torch.nn.utils.clip_grad_norm_(twin, 0.1))
    for mine, theirs in zip(parameters[:2], twin[:2], strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_it_owns_a_qk_clip_for_declared_heads():
    module = GroupedAttention(16, 4, 2, 8)
    optimizer = MuonClip.for_model(module, lr=1e-9, weight_decay=0.0, qk_clip_tau=2.0)
    x = torch.randn(2, 7, 16) * 6
    largest = module.max_logit(x)
    module(x).sum().backward()
    optimizer.step()
    report = optimizer.qk_report
    torch.testing.assert_close(report.max_logits[0], largest)
    assert report.num_clipped == int((largest > 2.0).sum()) > 0
    # The step itself moved the weights by about 1e-9; float32 logits of this size carry 1e-6.
    assert module.max_logit(x).max() <= 2.0 * (1 + 1e-5)


def test_a_skipped_step_leaves_no_trace_in_the_next_clip():
    module = GroupedAttention(8, 2, 2, 4)
    optimizer = MuonClip.for_model(module, lr=1e-3, qk_clip_tau=2.0)
    module.recorder.update(torch.tensor([torch.inf, 700.0]))
    optimizer.skip_step()
    module(torch.zeros(1, 3, 8)).sum().backward()
    optimizer.step()
    assert optimizer.qk_report.num_clipped == 0


@pytest.mark.parametrize("frozen", ["q_proj", "k_proj"])
def test_attention_that_is_frozen_by_half_is_left_out_by_name(frozen):
    model = nn.ModuleDict({"first": GroupedAttention(8, 2, 2, 4), "second": GroupedAttention(8, 2, 2, 4)})
    getattr(model["first"], frozen).requires_grad_(False)
    with pytest.warns(UserWarning, match="QK-Clip leaves out 'first': .* frozen"):
        assert MuonClip.for_model(model, lr=1e-3).qk_clip.layers == ("second",)
    getattr(model["second"], frozen).requires_grad_(False)
    with pytest.warns(UserWarning, match="QK-Clip leaves out 'first', 'second'"):
        assert MuonClip.for_model(model, lr=1e-3).qk_clip is None
    model.requires_grad_(False)
    model["free"] = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="no trainable attention"):
        assert MuonClip.for_model(model, lr=1e-3).qk_clip is None


def test_a_frozen_shared_key_does_not_matter_to_the_rule_that_leaves_it_alone():
    module = GroupedAttention(8, 4, 2, 4)
    module.k_proj.requires_grad_(False)
    assert MuonClip.for_model(module, lr=1e-3, gqa="query").qk_clip.layers == ("",)
    with pytest.warns(UserWarning, match="leaves out"):
        assert MuonClip.for_model(module, lr=1e-3, gqa="balanced").qk_clip is None


def test_a_model_without_known_heads_works_and_says_so():
    with pytest.warns(UserWarning, match="attention logits are not clipped"):
        optimizer = MuonClip.for_model(nn.Linear(4, 4), lr=1e-3, qk_clip_tau=50.0)
    assert optimizer.qk_clip is None and optimizer.qk_report is None


def test_bad_settings_are_named():
    model = nn.Linear(4, 4)
    for options, message in (
        ({"lr": -1.0}, r"lr is -1.0; expected a finite number >= 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": 1.0, "momentum": 1.0}, r"momentum is 1.0; expected a number in \[0, 1\)"),
        ({"lr": 1.0, "adam_betas": (0.9, 1.5)}, r"adam_betas\[1\] is 1.5"),
        ({"lr": 1.0, "weight_decay": -0.1}, "weight_decay is -0.1"),
    ):
        with pytest.raises(ValueError, match=message):
            MuonClip.for_model(model, qk_clip_tau=None, **options)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        MuonClip.for_model(nn.ReLU(), lr=1.0, qk_clip_tau=None)
    with pytest.raises(ValueError, match="cannot add param group"):
        MuonClip.for_model(model, lr=1.0, qk_clip_tau=None).add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_sparse_gradients_are_refused_by_name():
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = MuonClip.for_model(model, lr=1.0, qk_clip_tau=None)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="gradient of 'weight' is sparse"):
        optimizer.step()


def test_overrides_reach_the_groups():
    model = nn.Linear(4, 4, bias=False)
    optimizer = MuonClip.for_model(model, lr=1.0, qk_clip_tau=None, overrides={"weight": Adam()})
    assert [group["name"] for group in optimizer.param_groups] == ["adam"]


@pytest.mark.gpu
def test_a_step_never_waits_for_the_device():
    module = nn.Sequential(GroupedAttention(64, 4, 2, 16), nn.Linear(64, 64), nn.LayerNorm(64)).cuda()
    optimizer = MuonClip.for_model(module, lr=1e-3, qk_clip_tau=2.0, per_head=True)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    for step in range(3):
        module[0].recorder.update(torch.full((4,), 9.0, device="cuda"))
        # The first step may move constant indices to the device.
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.qk_report.num_clipped == 4
