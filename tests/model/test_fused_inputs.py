"""Stacked products: the operators of a training step on a GPU against the layer written product by product."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from perilune.kernels.triton_support import why_not_triton
from perilune.model.cache import MLACache
from perilune.model.documents import Packing
from perilune.model.kda import KDAConfig, KimiDeltaAttention
from perilune.model.linear import Linear, SwiGLU, projections
from perilune.model.mla import LatentAttention, MLAConfig
from perilune.model.rope import RopeConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(why_not_triton(torch.empty(0, device=DEVICE)) is not None, reason="Triton cannot run")


def layer_and_input(full_rank: bool, tokens: int = 11, batch: int = 2, heads: int = 3):
    torch.manual_seed(0)
    config = KDAConfig(num_heads=heads, head_dim=4, use_full_rank_gate=full_rank)
    layer = KimiDeltaAttention(10, config).to(DEVICE)
    return layer, torch.randn(batch, tokens, 10, device=DEVICE, requires_grad=True)


def everything(layer: KimiDeltaAttention, x: Tensor, inputs, **options) -> list[Tensor]:
    """The six results, then the gradients of x and of every parameter they depend on."""
    found = inputs(x, options.get("cu_seqlens"), options.get("cache"))
    results = [found.q, found.k, found.v, found.gate_input, found.output_gate, found.beta]
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(y.shape, generator=generator).to(y) for y in results]
    sources = [x, layer.conv_weight, *(m.weight for m in layer.children() if isinstance(m, Linear))]
    return [*results, *torch.autograd.grad(results, sources, gradients, allow_unused=True)]


# 3 heads make a product that is padded to a multiple of 16 columns, 8 heads one that needs none (with low-rank gates).
@needs_triton
@pytest.mark.parametrize(
    ("heads", "full_rank", "packed"), [(3, False, True), (3, True, False), (8, False, False), (8, True, True)]
)
def test_one_operator_gives_what_the_products_give_one_by_one(full_rank, packed, heads) -> None:
    layer, x = layer_and_input(full_rank, batch=1 if packed else 2, heads=heads)
    options = {"cu_seqlens": torch.tensor([0, 2, 2, 3, 11], device=DEVICE)} if packed else {}
    ours = everything(layer, x, layer._inputs_at_once, **options)
    right = everything(layer, x, layer._inputs, **options)
    for mine, expected in zip(ours, right, strict=True):
        assert (mine is None) == (expected is None)  # o_proj is not part of it
        if mine is not None:
            # float32 sums of at most 36 products of size 1 in another order
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@needs_triton
def test_results_that_nobody_uses_cost_no_gradient() -> None:
    layer, x = layer_and_input(False)
    found = layer._inputs_at_once(x, None, None)
    (dx,) = torch.autograd.grad(found.k.sum(), x)
    (expected,) = torch.autograd.grad(layer._inputs(x, None, None).k.sum(), x)
    torch.testing.assert_close(dx, expected, rtol=1e-5, atol=1e-5)


def latent_layer(config: MLAConfig, hidden_size: int = 10) -> LatentAttention:
    torch.manual_seed(0)
    layer = LatentAttention(hidden_size, config).to(DEVICE)
    with torch.no_grad():
        layer.kv_a_layernorm.weight.uniform_(0.5, 1.5)
    return layer


def latent_inputs(layer: LatentAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values product by product."""
    q, latent, k_rope = layer.compressed(x, somewhere(x))
    return q, *layer._expand(latent, k_rope)


def at_once(layer: LatentAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return layer._inputs_at_once(x, somewhere(x))


def somewhere(x: Tensor) -> Packing:
    """Positions in two documents, the second of which begins at token 3."""
    index = torch.arange(x.shape[1], device=x.device)
    return Packing(positions=torch.where(index < 3, index, index - 3).expand(x.shape[:2]))


def all_of_latent(layer: LatentAttention, x: Tensor, inputs) -> list[Tensor]:
    """q, k and v, then the gradients of x and of every parameter they depend on."""
    results = inputs(x)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(y.shape, generator=generator).to(y) for y in results]
    sources = [parameter for name, parameter in layer.named_parameters() if not name.startswith("o_proj")]
    return [*results, *torch.autograd.grad(results, [x, *sources], gradients)]


# Widths off powers of two, no shared part, a compressed query, one head, more tokens than a tile of latents holds.
@needs_triton
@pytest.mark.parametrize(
    ("heads", "own", "shared", "q_rank", "rank", "tokens", "rope"),
    [
        (3, 5, 3, None, 12, 11, None),
        (3, 5, 0, None, 12, 11, None),
        (2, 4, 6, 7, 16, 5, None),
        (1, 8, 2, None, 3, 1500, None),
        (5, 1, 1, 1, 1, 1, None),
        (70, 2, 33, None, 3, 4, None),  # the shared parts of one token are more than a tile of latents holds
        (3, 5, 6, None, 12, 11, RopeConfig(theta=3.0)),
        (3, 5, 0, None, 12, 11, RopeConfig()),
        (2, 4, 6, 7, 16, 5, RopeConfig(theta=3.0, interleaved=False)),
        (1, 7, 2, None, 3, 1500, RopeConfig(interleaved=False)),
        (70, 2, 34, None, 3, 4, RopeConfig(theta=100.0, factor=4.0)),
    ],
)
def test_keys_and_values_at_once_are_those_of_the_products(heads, own, shared, q_rank, rank, tokens, rope) -> None:
    config = MLAConfig(
        num_attention_heads=heads, q_lora_rank=q_rank, kv_lora_rank=rank, qk_nope_head_dim=own,
        qk_rope_head_dim=shared, v_head_dim=7, rope=rope,
    )  # fmt: skip
    layer = latent_layer(config)
    x = torch.randn(2, tokens, 10, device=DEVICE, requires_grad=True)
    ours = all_of_latent(layer, x, lambda x: at_once(layer, x))
    for mine, right in zip(ours, all_of_latent(layer, x, lambda x: latent_inputs(layer, x)), strict=True):
        # float32 sums over at most 2 x tokens rows in another order, whose errors add up at random
        bound = 8 * 2.0**-24 * (1 + (2 * tokens) ** 0.5)
        assert (mine - right).norm() <= bound * max(right.norm().item(), 1.0)


@needs_triton
def test_no_tokens_give_no_keys_and_zero_gradients() -> None:
    layer = latent_layer(MLAConfig(num_attention_heads=2, kv_lora_rank=4, qk_nope_head_dim=3, v_head_dim=2))
    x = torch.empty(2, 0, 10, device=DEVICE, requires_grad=True)
    q, k, v, dx, *gradients = all_of_latent(layer, x, lambda x: at_once(layer, x))
    assert q.shape == k.shape == (2, 0, 2, 19) and v.shape == (2, 0, 2, 2) and dx.shape == x.shape
    assert all((gradient == 0).all() for gradient in gradients)


@needs_triton
def test_keys_alone_give_the_gradient_of_keys() -> None:
    layer = latent_layer(MLAConfig(num_attention_heads=2, kv_lora_rank=4, qk_nope_head_dim=3, v_head_dim=2))
    x = torch.randn(1, 6, 10, device=DEVICE, requires_grad=True)
    (dx,) = torch.autograd.grad(at_once(layer, x)[1].square().sum(), x)
    (expected,) = torch.autograd.grad(latent_inputs(layer, x)[1].square().sum(), x)
    torch.testing.assert_close(dx, expected, rtol=1e-5, atol=1e-5)


@needs_triton
def test_the_operator_of_latent_inputs_passes_the_library_checks() -> None:
    layer = latent_layer(MLAConfig(num_attention_heads=2, kv_lora_rank=4, qk_nope_head_dim=3, v_head_dim=2))
    weights = (layer.kv_a_proj_with_mqa.weight, layer.kv_a_layernorm.weight, layer.kv_b_proj.weight)
    x = torch.randn(1, 3, 10, device=DEVICE, requires_grad=True)
    turns = [torch.randn(3, 8, device=DEVICE) for _ in range(2)]
    for q_weights, angles in (([], []), ([layer.q_proj.weight], []), ([layer.q_proj.weight], turns)):
        torch.library.opcheck(torch.ops.perilune.mla_inputs.default, (x, q_weights, *weights, angles, 2, 2, 1e-6, True))


@needs_triton
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inputs_at_once_under_activation_checkpointing_give_the_same_bits(use_reentrant: bool) -> None:
    config = MLAConfig(
        num_attention_heads=2, kv_lora_rank=4, qk_nope_head_dim=3, v_head_dim=2, rope=RopeConfig(theta=3.0)
    )
    latent = latent_layer(config)
    delta, x = layer_and_input(False)

    def delta_inputs(x: Tensor) -> tuple[Tensor, ...]:
        found = delta._inputs_at_once(x, None, None)
        return found.q, found.k, found.v, found.gate_input, found.output_gate, found.beta

    for layer, inputs in ((latent, lambda x: at_once(latent, x)), (delta, delta_inputs)):
        gradients = []
        for results in (inputs(x), checkpoint(inputs, x, use_reentrant=use_reentrant)):
            sum(y.square().sum() for y in results).backward()
            sources = [x, *(parameter for parameter in layer.parameters() if parameter.grad is not None)]
            gradients.append([source.grad for source in sources])
            for source in sources:
                source.grad = None
        assert len(gradients[0]) > 4
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@needs_triton
def test_tiles_of_keys_hold_one_token_or_no_more_than_they_should() -> None:
    from perilune.kernels.attention.triton_latent import _tile

    for per_token in (1, 8, 512, 2048, 4096, 1 << 16):
        tokens, num_warps = _tile(per_token, 2048, 2)
        assert tokens == 1 or tokens * per_token <= 2048
        assert 2 <= num_warps <= 16 and (num_warps == 2) == (per_token < 4096)


class Adapter(nn.Module):
    """A linear map and a trained correction of low rank, with the weight of the map, as adapters for LoRA show it."""

    def __init__(self, base: Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def mla_and_fused() -> tuple[nn.Module, list[str]]:
    return LatentAttention(10, MLAConfig()), ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj"]


def kda_and_fused() -> tuple[nn.Module, list[str]]:
    names = ["q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj"]
    return KimiDeltaAttention(10, KDAConfig(num_heads=2, head_dim=4)), names


@needs_triton
@pytest.mark.parametrize("build", [mla_and_fused, kda_and_fused])
def test_a_layer_with_an_adapter_or_a_hook_calls_its_modules(build, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mla", "kda"):  # as on a GPU in half precision
        monkeypatch.setattr(f"perilune.model.{module}.takes_one_product", lambda x, *weights: True)
    layer, names = build()
    x = torch.randn(1, 5, 10)
    assert layer._takes_inputs_at_once(x, None)
    for name in names:
        seen = []
        handle = layer.get_submodule(name).register_forward_hook(lambda *_, seen=seen: seen.append(1))
        layer(x, Packing())
        handle.remove()
        assert seen and layer._takes_inputs_at_once(x, None), name
        base = layer.get_submodule(name)
        adapter = Adapter(base)
        setattr(layer, name, adapter)
        layer(x, Packing()).square().sum().backward()
        assert adapter.up.grad is not None and adapter.up.grad.any(), name
        setattr(layer, name, base)


@needs_triton
def test_a_norm_with_a_hook_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.model.mla.takes_one_product", lambda x, *weights: True)
    layer, seen = LatentAttention(10, MLAConfig()), []
    layer.kv_a_layernorm.register_forward_hook(lambda *_: seen.append(1))
    layer(torch.randn(1, 5, 10), Packing())
    assert seen


def test_an_mlp_with_an_adapter_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.model.linear.takes_one_product", lambda x, *weights: True)
    mlp, x = SwiGLU(6, 10), torch.randn(3, 6)
    without = mlp(x)
    mlp.up_proj = Adapter(mlp.up_proj)
    assert not torch.allclose(mlp(x), without)


def test_a_step_of_decoding_uses_an_adapter_of_the_up_projection() -> None:
    layer = latent_layer(MLAConfig())
    layer.kv_b_proj = Adapter(layer.kv_b_proj).to(DEVICE)
    x = torch.randn(2, 6, 10, device=DEVICE)
    with torch.no_grad():
        whole, cache = layer(x, Packing()), MLACache()
        steps = [layer(x[:, :4], Packing(), cache), *(layer(x[:, t : t + 1], Packing(), cache) for t in (4, 5))]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-5, atol=1e-5)


def test_layers_that_keep_latents_take_the_products() -> None:
    layer = latent_layer(MLAConfig())
    x = torch.randn(1, 3, 10, device=DEVICE)
    assert not layer._takes_inputs_at_once(x, None)  # float32
    if DEVICE == "cuda":
        assert layer._takes_inputs_at_once(x.bfloat16(), None)
        assert not layer._takes_inputs_at_once(x.bfloat16(), MLACache())


def test_stacked_projections_equal_separate_ones() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, device=DEVICE, requires_grad=True)
    weights = [torch.randn(rows, 8, device=DEVICE, requires_grad=True) for rows in (3, 4)]
    y, used = torch.ops.perilune.projections(x, weights)
    assert torch.equal(used, torch.cat(weights))
    separate = torch.cat([x @ weight.T for weight in weights], dim=-1)
    dy = torch.randn_like(y)
    ours = [y, *torch.autograd.grad(y, [x, *weights], dy)]
    right = [separate, *torch.autograd.grad(separate, [x, *weights], dy)]
    for mine, expected in zip(ours, right, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(projections(x, weights), separate)


def test_weights_that_were_rounded_on_their_way_get_gradients_in_their_own_dtype() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, device=DEVICE, dtype=torch.bfloat16)
    weights = [torch.randn(rows, 8, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for rows in (3, 4)]
    y, used = torch.ops.perilune.projections(x, weights)
    assert used.dtype == torch.bfloat16
    ours = torch.autograd.grad(y.float().square().sum(), weights)
    twins = [weight.detach().float().requires_grad_() for weight in weights]
    products = torch.cat([x.float() @ weight.T for weight in twins], dim=-1)
    right = torch.autograd.grad(products.square().sum(), twins)
    for mine, expected in zip(ours, right, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.float(), expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


@pytest.mark.gpu
def test_half_precision_weights_take_the_one_operator_in_training_only() -> None:
    layer = latent_layer(MLAConfig())
    x = torch.randn(1, 3, 10, device="cuda", dtype=torch.bfloat16)
    for linear in (layer.q_proj, layer.kv_a_proj_with_mqa, layer.kv_b_proj):
        linear.weight.data = linear.weight.data.bfloat16()
    assert layer._takes_inputs_at_once(x, None)
    with torch.no_grad():
        assert not layer._takes_inputs_at_once(x, None)


@pytest.mark.gpu
@pytest.mark.parametrize("full_rank", [False, True])
def test_a_bfloat16_layer_stays_near_float32_and_compiles(full_rank) -> None:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(256, KDAConfig(num_heads=8, head_dim=32, use_full_rank_gate=full_rank)).cuda()
    x = torch.randn(2, 300, 256, device="cuda")
    exact = everything(layer, x.requires_grad_(), layer._inputs)
    half = x.detach().bfloat16().requires_grad_()
    assert layer._takes_inputs_at_once(half, None)
    ours = everything(layer, half, layer._inputs_at_once)
    for mine, right in zip(ours, exact, strict=True):
        if mine is not None:
            # x, weights, products and results are each rounded to 8 bits, two products deep.
            assert (mine.float() - right).norm() / right.norm() < 6 * 2**-9 * 2
    compiled = everything(layer, half, torch.compile(layer._inputs_at_once, fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(ours, compiled, strict=True) if a is not None)


@pytest.mark.gpu
def test_a_bfloat16_latent_layer_stays_near_float32_repeats_itself_and_compiles() -> None:
    config = MLAConfig(
        num_attention_heads=8, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    layer = latent_layer(config, 256)
    x = torch.randn(2, 300, 256, device="cuda")
    exact = all_of_latent(layer, x.requires_grad_(), lambda x: latent_inputs(layer, x))
    half = x.detach().bfloat16().requires_grad_()
    assert layer._takes_inputs_at_once(half, None)
    ours = all_of_latent(layer, half, lambda x: at_once(layer, x))
    for mine, right in zip(ours, exact, strict=True):
        # x, weights, products, the norm and results are each rounded to 8 bits, two products deep.
        assert (mine.float() - right).norm() / right.norm() < 7 * 2**-9 * 2
    again = all_of_latent(layer, half, lambda x: at_once(layer, x))
    compiled = all_of_latent(layer, half, torch.compile(lambda x: at_once(layer, x), fullgraph=True))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(ours, again, compiled, strict=True))


@pytest.mark.gpu
def test_packed_documents_never_make_the_host_wait() -> None:
    layer = KimiDeltaAttention(64, KDAConfig(num_heads=2, head_dim=32)).cuda()
    x = torch.randn(1, 100, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    borders = torch.tensor([0, 10, 10, 11, 100], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = layer._inputs_at_once(x, borders, None)
        (found.q * found.k * found.v * found.gate_input * found.output_gate).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_weights_of_a_bfloat16_mlp_get_float32_gradients() -> None:
    torch.manual_seed(0)
    mlp = SwiGLU(256, 704).cuda()
    x = torch.randn(500, 256, device="cuda")
    exact = torch.autograd.grad(mlp(x).square().sum(), list(mlp.parameters()))
    ours = torch.autograd.grad(mlp(x.bfloat16()).float().square().sum(), list(mlp.parameters()))
    for mine, right in zip(ours, exact, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - right).norm() / right.norm() < 6 * 2**-8
        assert not torch.equal(mine, mine.bfloat16().float())  # not rounded on its way
