"""QK-Clip in float64: clipped heads land on tau, all others stay, for every attention kind."""

import copy
import math

import pytest
import torch
from torch import nn

from perilune.optim import MaxLogitRecorder, MuonClip, QKClip, QKHeads, RowScaling, gqa_heads, mha_heads, mla_heads
from perilune.optim.qk_clip import gamma_of
from tests.optim.small_attention import GroupedAttention, LatentAttention

KINDS = {
    "mha": ("query", lambda: GroupedAttention(16, 6, 6, 8)),
    "mha_without_bias": ("query", lambda: GroupedAttention(16, 6, 6, 8, bias=False)),
    "gqa_query": ("query", lambda: GroupedAttention(16, 6, 2, 8)),
    "gqa_balanced": ("balanced", lambda: GroupedAttention(16, 6, 2, 8)),
    "mqa_balanced": ("balanced", lambda: GroupedAttention(16, 6, 1, 8)),
    "mla": ("query", lambda: LatentAttention(16, 6, nope=6, rope=4, v_dim=5, q_lora_rank=None)),
    "mla_with_query_compression": ("query", lambda: LatentAttention(16, 6, nope=6, rope=4, v_dim=5, q_lora_rank=12)),
}


def build(kind: str) -> tuple[QKClip, nn.Module, torch.Tensor]:
    """The clip, the module, and a batch whose third-largest head logit is exactly what tau will be set from."""
    gqa, make = KINDS[kind]
    module = make().double()
    x = torch.randn(3, 9, 16, dtype=torch.float64) * 4
    before = module.max_logit(x)
    tau = float(before.sort().values[2:4].mean())
    return QKClip(module, tau, gqa=gqa), module, x


@pytest.mark.parametrize("kind", KINDS)
def test_clipped_heads_land_on_tau_and_the_others_keep_their_logits(kind):
    clip, module, x = build(kind)
    before = module.logits(x)
    largest = module.max_logit(x)
    module(x)
    report = clip.apply()
    after, over = module.logits(x), largest > clip.tau
    assert over.sum() == 3 and report.num_clipped == 3
    torch.testing.assert_close(report.max_logits[0], largest, rtol=0, atol=0)
    # Acceptance bar: 1e-6. A handful of float64 roundings stay far below it.
    assert (module.max_logit(x)[over] - clip.tau).abs().max() <= 1e-6
    # Not only the maximum: every logit of a head shrinks by its gamma, so unclipped heads keep all of theirs.
    gamma = gamma_of(largest, clip.tau)[None, :, None, None]
    finite = before.isfinite()
    assert ((after - before * gamma)[finite].abs() / before[finite].abs().max()).max() <= 1e-12


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "balanced" not in kind])
def test_rows_of_unclipped_heads_are_bitwise_unchanged(kind):
    clip, module, x = build(kind)
    calm = (module.max_logit(x) <= clip.tau).nonzero().flatten().tolist()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    module(x)
    clip.apply()
    for name, parameter in module.named_parameters():
        is_query = name.startswith("q_proj") or name.startswith("q_b_proj")
        owners = module.num_heads if is_query or kind.startswith(("mha", "mla")) else None
        if owners is None or name.startswith(("q_a", "kv_a")):
            assert torch.equal(parameter, before[name])  # shared keys under "query", latents
            continue
        rows, old = parameter.unflatten(0, (owners, -1)), before[name].unflatten(0, (owners, -1))
        assert all(torch.equal(rows[head], old[head]) for head in calm)


def test_mla_leaves_values_untouched():
    clip, module, x = build("mla")
    values = module.values(x)
    module(x)
    clip.apply()
    assert torch.equal(module.values(x), values)


def test_balanced_rule_shrinks_the_key_by_the_root_of_the_groups_smallest_gamma():
    clip, module, x = build("gqa_balanced")
    gamma = gamma_of(module.max_logit(x), clip.tau).view(2, 3)
    key = module.k_proj.weight.detach().clone().view(2, 8, 16)
    module(x)
    clip.apply()
    expected = key * gamma.amin(1).sqrt()[:, None, None]
    torch.testing.assert_close(module.k_proj.weight.detach().view(2, 8, 16), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("value", [-3.0, 0.0, -math.inf, math.inf, math.nan, 1.0])
def test_statistics_that_are_no_overflow_leave_every_weight_alone(value):
    module = GroupedAttention(8, 2, 2, 4)
    clip = QKClip(module, tau=1.0)
    before = copy.deepcopy(module.state_dict())
    module.recorder.update(torch.tensor([value, -5.0]))
    report = clip.apply()
    assert report.num_clipped == 0 and not clip.ever_clipped.any()
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_an_infinite_tau_only_watches():
    module = GroupedAttention(8, 2, 2, 4)
    before = copy.deepcopy(module.state_dict())
    module.recorder.update(torch.tensor([1e6, 2.0]))
    report = QKClip(module, tau=math.inf).apply()
    assert report.max_logits.tolist() == [[1e6, 2.0]] and report.num_clipped == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_upper_bounds_are_reported_and_clip_nothing():
    module = GroupedAttention(8, 3, 3, 4)
    clip = QKClip(module, tau=1.0)
    before = copy.deepcopy(module.state_dict())
    module.recorder.update(torch.tensor([0.9, 0.4, 5.0]), torch.tensor([True, False, True]))
    report = clip.apply()
    # A bound above tau means that somebody else's threshold was used; it says nothing about the head.
    torch.testing.assert_close(report.max_logits, torch.tensor([[0.9, 0.4, 5.0]]))
    assert report.is_bound.tolist() == [[True, False, True]] and report.num_clipped == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_bounds_and_exact_maxima_mix_over_micro_batches():
    module = GroupedAttention(8, 4, 4, 4, bias=False)
    clip = QKClip(module, tau=1.0)
    module.recorder.update(torch.tensor([0.9, 0.9, 4.0, 0.5]), torch.tensor([True, True, False, False]))
    module.recorder.update(torch.tensor([0.5, 4.0, 0.9, 0.7]), torch.tensor([False, False, True, True]))
    seen = clip.seen()
    assert seen.is_bound.tolist() == [[True, False, False, True]] and seen.num_clipped == 0
    report = clip.apply()
    torch.testing.assert_close(report.max_logits, torch.tensor([[0.9, 4.0, 4.0, 0.7]]))
    assert torch.equal(report.is_bound, seen.is_bound) and report.num_clipped == 2
    assert report.by_layer() == ([4.0], [False])
    assert not clip.seen().is_bound.any() and clip.seen().max_logits.eq(-math.inf).all()
    module.recorder.update(torch.tensor([0.1, 0.9, 0.3, 0.2]), torch.tensor([False, True, False, False]))
    largest, is_bound = clip.apply().by_layer()
    assert largest == [pytest.approx(0.9)] and is_bound == [True]
    assert QKClip({}).apply().by_layer() == ([], [])


def test_recorders_learn_the_lowest_threshold_anybody_clips_at():
    module = GroupedAttention(8, 2, 2, 4)
    assert module.recorder.clip_threshold == -math.inf  # all exact, as long as nobody says what they need
    QKClip(module, tau=math.inf)
    assert module.recorder.clip_threshold == math.inf
    for tau, expected in ((50.0, 50.0), (70.0, 50.0), (20.0, 20.0)):
        QKClip(module, tau)
        assert module.recorder.clip_threshold == expected


def test_a_broken_head_does_not_keep_another_from_being_clipped():
    module = GroupedAttention(8, 2, 2, 4, bias=False)
    before = module.q_proj.weight.detach().clone()
    module.recorder.update(torch.tensor([math.nan, 4.0]))
    QKClip(module, tau=1.0).apply()
    assert torch.equal(module.q_proj.weight[:4], before[:4])
    torch.testing.assert_close(module.q_proj.weight[4:], before[4:] * 0.5)


def test_the_maximum_runs_over_micro_batches_and_starts_anew_after_apply():
    clip, module, x = build("mha")
    small, large = x * 0.1, x
    module(large)
    module(small)
    torch.testing.assert_close(clip.max_logits()[0], module.max_logit(large), rtol=0, atol=0)
    clip.apply()
    assert (clip.max_logits() == -torch.inf).all()
    module(small)
    torch.testing.assert_close(clip.max_logits()[0], module.max_logit(small), rtol=0, atol=0)


def test_evaluation_does_not_count():
    clip, module, x = build("mha")
    module.eval()(x)
    assert (clip.max_logits() == -torch.inf).all()
    assert clip.apply().num_clipped == 0


def test_a_discarded_step_does_not_clip():
    clip, module, x = build("mla")
    before = copy.deepcopy(module.state_dict())
    module(x)
    clip.discard()
    assert clip.apply().num_clipped == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_recording_keeps_no_graph_and_no_alias():
    recorder = MaxLogitRecorder(2)
    seen = torch.tensor([1.0, 2.0], requires_grad=True) * 1.0
    recorder.update(seen)
    assert not recorder.value.requires_grad and recorder.value.grad_fn is None
    with torch.no_grad():
        seen.zero_()
    assert recorder.value.tolist() == [1.0, 2.0]


def test_it_holds_the_cap_after_any_optimizer():
    clip, module, x = build("gqa_query")

    def train(module: nn.Module, clip: QKClip | None) -> list[float]:
        """AdamW on a loss that only drives the largest logit of every head up."""
        optimizer, largest = torch.optim.AdamW(module.parameters(), lr=3e-3), []
        for _ in range(60):
            optimizer.zero_grad()
            module(x)
            largest.append(float(module.max_logit(x).max()))
            (-module.logits(x).amax(dim=(0, 2, 3)).sum()).backward()
            optimizer.step()
            if clip is not None:
                clip.apply()
        return largest

    free = train(copy.deepcopy(module), None)
    capped = train(module, clip)
    assert free[-1] > 3 * clip.tau
    # A controller, not a bound: one step may pass tau, but growth does not accumulate.
    assert max(capped[1:]) <= 1.5 * clip.tau


def test_layers_with_different_numbers_of_heads_are_padded():
    model = nn.ModuleList([GroupedAttention(8, 4, 2, 4), nn.Linear(8, 8), GroupedAttention(8, 2, 2, 4)])
    clip = QKClip(model, tau=1.0)
    model[0].recorder.update(torch.tensor([0.0, 4.0, 0.0, 0.0]))
    model[2].recorder.update(torch.tensor([2.0, 0.5]))
    report = clip.apply()
    assert report.layers == ("0", "2") and report.num_clipped == 2
    assert report.max_logits.tolist() == [[0.0, 4.0, 0.0, 0.0], [2.0, 0.5, -math.inf, -math.inf]]
    assert clip.ever_clipped.tolist() == [[False, True, False, False], [True, False, False, False]]


def test_half_precision_weights_are_scaled_in_place():
    module = GroupedAttention(8, 2, 2, 4, bias=False).bfloat16()
    before = module.q_proj.weight.detach().clone()
    module.recorder.update(torch.tensor([400.0, 1.0]))
    QKClip(module, tau=100.0).apply()
    assert module.q_proj.weight.dtype == torch.bfloat16
    assert torch.equal(module.q_proj.weight[:4], before[:4] * 0.5) and torch.equal(module.q_proj.weight[4:], before[4:])


def test_statistics_round_trip_and_refuse_another_model():
    clip, module, x = build("mha")
    module(x)
    clip.apply()
    other = QKClip(copy.deepcopy(module), clip.tau)
    other.load_state_dict(clip.state_dict())
    assert torch.equal(other.ever_clipped, clip.ever_clipped) and torch.equal(
        other.last_max_logits, clip.last_max_logits
    )
    with pytest.raises(ValueError, match="load it into the model it was saved from"):
        QKClip(GroupedAttention(8, 2, 2, 4)).load_state_dict(clip.state_dict())


class DeclaredNormAttention(GroupedAttention):
    def qk_heads(self) -> QKHeads:
        weights = (self.q_proj.weight, self.k_proj.weight)
        return mha_heads(*weights, num_heads=2, recorder=self.recorder, qk_norm=True)


def test_qk_norm_is_refused_with_the_way_out():
    model = nn.ModuleDict({"attention": DeclaredNormAttention(8, 2, 2, 4)})
    with pytest.raises(ValueError, match=r"'attention' normalises q or k.*qk_clip_tau=None"):
        QKClip(model)
    with pytest.raises(ValueError, match="QK-norm"):
        MuonClip.for_model(model, lr=1e-3)
    assert MuonClip.for_model(model, lr=1e-3, qk_clip_tau=None).qk_clip is None


def test_names_inside_a_module_that_declares_its_heads_mean_nothing():
    module = LatentAttention(16, 2, 6, 4, 5, 12)
    module.q_a_layernorm, module.q_norm = nn.RMSNorm(12), nn.RMSNorm(12)  # both on the latent
    assert QKClip(module).layers == ("",)


class SharedProjection(GroupedAttention):
    """q and k are the same projection (Reformer, arXiv 2001.04451)."""

    def __init__(self) -> None:
        super().__init__(16, 2, 2, 8)
        self.k_proj = self.q_proj


def test_a_projection_shared_by_q_and_k_is_scaled_once():
    module = SharedProjection().double()
    x = torch.randn(2, 5, 16, dtype=torch.float64) * 4
    tau = float(module.max_logit(x).min() / 2)
    clip = QKClip(module, tau)
    module(x)
    assert clip.apply().num_clipped == 2
    torch.testing.assert_close(module.max_logit(x), torch.full((2,), tau, dtype=torch.float64), rtol=1e-12, atol=0)


def test_a_parameter_of_two_layers_is_refused():
    first, second = GroupedAttention(8, 2, 2, 4), GroupedAttention(8, 2, 2, 4)
    second.k_proj.weight = first.k_proj.weight
    with pytest.raises(ValueError, match=r"shape \(8, 8\) is scaled by '0' and again by '1'.*qk_clip_tau=None"):
        QKClip(nn.ModuleList([first, second]))


def test_a_layer_frozen_after_building_is_left_alone():
    model = nn.ModuleList([GroupedAttention(8, 2, 2, 4), GroupedAttention(8, 2, 2, 4)])
    clip = QKClip(model, tau=1.0)
    model[0].k_proj.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    for module in model:
        module.recorder.update(torch.tensor([4.0, 4.0]))
    report = clip.apply()
    assert report.num_clipped == 2 and clip.ever_clipped.tolist() == [[False, False], [True, True]]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] if name.startswith("0.") else before[name] * 0.5), name


def test_a_broken_micro_batch_does_not_erase_the_maximum_of_the_others():
    seen = torch.tensor([[5.0, 2.0], [math.nan, math.nan], [1.0, math.nan], [3.0, 4.0]])
    for order in ([0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0]):
        recorder = MaxLogitRecorder(2)
        for number in order:
            recorder.update(seen[number])
        assert recorder.value.tolist() == [5.0, 4.0]


def test_wrong_declarations_are_named():
    recorder = MaxLogitRecorder(2)
    weight = nn.Parameter(torch.zeros(8, 4))
    with pytest.raises(ValueError, match="num_kv_heads is 3; it must divide num_heads=8"):
        gqa_heads(weight, weight, num_heads=8, num_kv_heads=3, recorder=recorder)
    with pytest.raises(ValueError, match="8 rows cannot hold num_heads=3"):
        mha_heads(weight, weight, num_heads=3, recorder=recorder)
    with pytest.raises(ValueError, match="expected 10 from nope=3, rope=2"):
        mla_heads(weight, weight, 2, 3, 2, 1, recorder)
    rows = RowScaling(parameter=weight, head_of_row=torch.full((8,), 5), exponent=torch.ones(8))
    with pytest.raises(ValueError, match="names head 5, but num_heads is 2"):
        QKClip([QKHeads(num_heads=2, rows=(rows,), recorder=recorder)])
    with pytest.raises(ValueError, match=r"tau is 0\.0; expected a positive"):
        QKClip([], tau=0.0)
    with pytest.raises(ValueError, match="gqa is 'group'"):
        QKClip([], gqa="group")
    with pytest.raises(ValueError, match=r"max_logit has shape \(3,\)"):
        recorder.update(torch.zeros(3))
