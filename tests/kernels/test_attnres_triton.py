"""Triton kernels of Attention Residuals against the stacked definition in float64, in outputs and gradients."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import perilune.kernels.attnres.triton_mix  # noqa: F401  (registers attnres_mix)
from perilune.kernels.attnres import cuda, merge, mix, phase1
from perilune.kernels.attnres.triton import Bank, Carried, triton_merge_norm, triton_open
from perilune.kernels.norm import rms_norm

EPS, NORM_EPS = 1e-6, 1e-4
# Relative norm. float32 carries 2^-24 = 6e-8 a rounding. Gradients of scores are differences of inner products over the
# width, p (g.v - sum p g.v), which lose another one to two digits where sources agree.
FLOAT32_RTOL = 2e-5


def draw(
    num_sources: int, leading: tuple[int, ...], width: int, queries: int, *, dtype=torch.float32, device="cpu"
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Sources, queries [S, d] and gains [S, d], all with gradient; scores are around 1."""
    generator = torch.Generator().manual_seed(1000 * num_sources + width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    sources = [normal(*leading, width).to(device, dtype).requires_grad_() for _ in range(num_sources)]
    query, gain = normal(queries, width) * width**-0.5, 1 + 0.3 * normal(queries, width)
    return sources, *(x.to(device, torch.float32).requires_grad_() for x in (query, gain))


def exact(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype).to(x) for x in outputs]
    return list(torch.autograd.grad(outputs, inputs, weights))


def assert_close(ours: list[Tensor], right: list[Tensor], rtol: float = FLOAT32_RTOL) -> None:
    for index, (mine, expected) in enumerate(zip(ours, right, strict=True)):
        assert mine.shape == expected.shape
        assert (mine.double() - expected).norm() <= rtol * max(1.0, expected.norm()), index


def all_forms(sources: list[Tensor], queries: Tensor, gain: Tensor, backend: str) -> list[Tensor]:
    """phase1, mix and merge with their gradients."""
    mixes, lse = phase1(sources, queries, gain=gain, eps=EPS, backend=backend)
    h = mix(sources, queries[0], gain=gain[0], eps=EPS, backend=backend)
    merged = merge(mixes[-1], lse[-1], sources[0] * 2, queries[-1], gain=gain[-1], eps=EPS, backend=backend)
    outputs = [mixes, lse, h, merged]
    return [*outputs, *gradients(outputs, [*sources, queries, gain])]


@pytest.mark.parametrize(
    "num_sources, leading, width, queries",
    [
        (1, (1,), 1, 1), (2, (3,), 1, 2), (1, (3,), 5, 3), (3, (17,), 5, 1), (9, (1,), 5, 4), (4, (2, 3), 64, 2),
        (5, (3,), 64, 4), (7, (1, 1, 1), 100, 3), (2, (17,), 100, 1), (6, (3,), 300, 1), (8, (1,), 300, 2),
        (9, (1,), 1024, 1), (3, (1,), 1024, 3), (12, (2,), 5, 1),
    ],
)  # fmt: skip
def test_triton_equals_the_definition_in_outputs_and_gradients(
    num_sources: int, leading: tuple[int, ...], width: int, queries: int
) -> None:
    sources, query, gain = draw(num_sources, leading, width, queries)
    *exact_sources, exact_query, exact_gain = exact([*sources, query, gain])
    ours = all_forms(sources, query, gain, "triton")
    assert_close(ours, all_forms(exact_sources, exact_query, exact_gain, "reference"))


@pytest.mark.parametrize("outputs", ["mixes", "log sums"])
def test_phase1_gives_gradients_of_one_output_alone(outputs: str) -> None:
    sources, query, gain = draw(3, (4,), 8, 3)
    tensors = exact([*sources, query, gain])
    results = []
    for *inputs, backend in ([*sources, query, gain, "triton"], [*tensors, "reference"]):
        pair = phase1(inputs[:3], inputs[3], gain=inputs[4], eps=EPS, backend=backend)
        results.append(gradients([pair[outputs == "log sums"]], inputs))
    assert_close(*results)


def test_single_source_comes_back_exactly_and_query_and_gain_get_exact_zeros() -> None:
    (source,), query, gain = draw(1, (6,), 16, 1)
    h = mix([source], query[0], gain=gain[0], eps=EPS, backend="triton")
    assert torch.equal(h, source)
    d_source, d_query, d_gain = torch.autograd.grad(h.square().sum(), [source, query, gain])
    assert torch.equal(d_source, 2 * source)
    assert d_query.eq(0).all() and d_gain.eq(0).all()


def test_strided_sources_equal_contiguous_ones_and_no_tokens_give_empty_results() -> None:
    sources, query, gain = draw(3, (2, 3), 8, 2)
    strided = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in sources]
    for ours, right in zip(all_forms(strided, query, gain, "triton"), all_forms(sources, query, gain, "triton")):
        assert torch.equal(ours, right)
    empty = all_forms([x.detach()[:0].requires_grad_() for x in sources], query, gain, "triton")
    assert empty[0].shape == (2, 0, 3, 8) and empty[-1].eq(0).all()


def test_large_scores_and_zero_sources_stay_finite() -> None:
    sources, query, gain = draw(3, (5,), 8, 2)
    with torch.no_grad():
        sources[1].zero_()
        query.mul_(1e4)
    assert all(x.isfinite().all() for x in all_forms(sources, query, gain, "triton"))


# Whole blocks ---------------------------------------------------------------------------------------------------------


class Network:
    """Sublayers tanh(x W) around block Attention Residuals: by definition, or by the fused operators."""

    def __init__(self, width: int, leading: tuple[int, ...], sublayers: int, block: int, dtype, device="cpu") -> None:
        generator = torch.Generator().manual_seed(width)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.block, self.dtype = block, dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.embedding = normal(*leading, width).to(torch.bfloat16).to(device, dtype).requires_grad_()
        self.queries = [(normal(width) * width**-0.5).float().to(device, wide) for _ in range(sublayers + 1)]
        self.norms = [(1 + 0.2 * normal(width)).float().to(device, wide) for _ in range(sublayers + 1)]
        self.matrices = [(normal(width, width) * width**-0.5).bfloat16().to(device, dtype) for _ in range(sublayers)]
        self.parameters = [self.embedding, *(x.requires_grad_() for x in (*self.queries, *self.norms))]

    def sublayer(self, index: int, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrices[index])

    def by_definition(self) -> Tensor:
        bank, running = [], self.embedding
        last = len(self.matrices)
        for index in range(last + 1):
            if index % self.block == 0 or index == last:
                bank, running = [*bank, running], None
            sources = bank if running is None else [*bank, running]
            h = mix(sources, self.queries[index], eps=EPS, backend="reference")
            normed = rms_norm(h, self.norms[index], NORM_EPS, backend="reference")
            if index == last:
                return normed
            output = self.sublayer(index, normed)
            running = output if running is None else running + output
        raise AssertionError

    def fused(self, run=lambda function, *inputs: function(*inputs)) -> Tensor:
        """`run` calls a sublayer; a test may wrap it."""
        bank, running, pending = Bank(), Carried(self.embedding), None
        queries = torch.stack(self.queries)
        last = len(self.matrices)
        sizes = [min(self.block, last - start) for start in range(0, last, self.block)] + [1]
        for index in range(last + 1):
            if index % self.block == 0 or index == last:
                if running is None:
                    running, pending = Carried(pending), None
                bank, normed, mixes, log_sums = triton_open(
                    bank, running, pending, queries, self.norms[index],
                    sizes=sizes[len(bank.sources) :], all_queries=last + 1, eps=EPS, norm_eps=NORM_EPS,
                )  # fmt: skip
                running = None
            else:
                offset = index % self.block - 1
                running, normed = triton_merge_norm(
                    running, pending, mixes[offset], log_sums[offset], self.queries[index], self.norms[index],
                    eps=EPS, norm_eps=NORM_EPS, num_sources=len(bank.sources),
                )  # fmt: skip
            if index == last:
                return normed
            pending = run(lambda x, index=index: self.sublayer(index, x), normed)
        raise AssertionError


@pytest.mark.parametrize(
    "width, leading, sublayers, block",
    [(8, (5,), 3, 1), (8, (17,), 4, 2), (5, (1, 3), 7, 3), (64, (3,), 6, 4), (300, (1,), 4, 4), (8, (2,), 17, 2)],
)
def test_fused_blocks_equal_the_definition_in_output_and_all_gradients(
    width: int, leading: tuple[int, ...], sublayers: int, block: int
) -> None:
    ours, right = (Network(width, leading, sublayers, block, dtype) for dtype in (torch.float32, torch.float64))
    output, expected = ours.fused(), right.by_definition()
    grads = gradients([output], ours.parameters)
    # Errors of a sublayer reach all later ones.
    rtol = FLOAT32_RTOL * sublayers**0.5
    assert_close([output, *grads], [expected, *gradients([expected], right.parameters)], rtol)


def test_a_block_over_the_embedding_alone_gives_its_first_query_no_gradient() -> None:
    network = Network(8, (3,), 4, 2, torch.float32)
    grads = gradients([network.fused()], network.parameters)
    assert grads[1].eq(0).all() and not grads[2].eq(0).all()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_fused_blocks_under_activation_checkpointing_give_the_same_bits(use_reentrant: bool) -> None:
    network = Network(8, (3,), 5, 3, torch.float32)
    plain = network.fused()
    checkpointed = network.fused(lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant))
    pairs = zip(gradients([plain], network.parameters), gradients_by_backward(checkpointed, network.parameters))
    assert all(torch.equal(ours, right) for ours, right in pairs)


def test_the_operators_themselves_can_be_checkpointed() -> None:
    network = Network(8, (3,), 5, 3, torch.float32)
    plain = gradients([network.fused()], network.parameters)
    again = gradients([checkpoint(network.fused, use_reentrant=False)], network.parameters)
    assert all(torch.equal(ours, right) for ours, right in zip(again, plain))


def test_a_block_opened_without_gradient_is_refused_where_gradients_would_get_lost() -> None:
    """Gradients of sources and queries are handed on by the blocks that opened before; one under no_grad hands on
    nothing. Without any gradient, or with nothing that has one, nothing is lost."""
    network = Network(8, (3,), 4, 2, torch.float32)

    def first_sublayer_under_no_grad(function, x):
        torch.set_grad_enabled(True)
        return function(x)

    with torch.no_grad():
        expected = network.fused()
    with torch.inference_mode():
        assert torch.equal(network.fused(), expected)
    with torch.no_grad(), pytest.raises(RuntimeError, match="opened under no_grad"):
        network.fused(first_sublayer_under_no_grad)
    for x in network.parameters:
        x.requires_grad_(False)
    for matrix in network.matrices:
        matrix.requires_grad_()
    with torch.no_grad():
        output = network.fused(first_sublayer_under_no_grad)
    right = torch.autograd.grad(network.by_definition().square().sum(), network.matrices)
    assert_close(list(torch.autograd.grad(output.square().sum(), network.matrices)), [x.double() for x in right])


def gradients_by_backward(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """By backward(), as the older form of checkpointing wants."""
    for x in inputs:
        x.grad = None
    generator = torch.Generator().manual_seed(7)
    output.backward(torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output))
    return [x.grad for x in inputs]


def test_fused_blocks_trace_without_a_break() -> None:
    network = Network(8, (3,), 5, 3, torch.float32)
    eager = network.fused()
    compiled = torch.compile(network.fused, fullgraph=True, backend="aot_eager")()
    assert_close(
        [compiled, *gradients([compiled], network.parameters)],
        [x.double() for x in (eager, *gradients([eager], network.parameters))],
    )


def test_a_second_backward_through_kept_graph_gives_the_same_gradients() -> None:
    network = Network(8, (3,), 5, 3, torch.float32)
    loss = network.fused().square().sum()
    first = torch.autograd.grad(loss, network.parameters, retain_graph=True)
    second = torch.autograd.grad(loss, network.parameters)
    assert all(torch.equal(ours, right) for ours, right in zip(first, second))


def test_operators_keep_the_rules_of_torch_library() -> None:
    sources, query, gain = draw(2, (3,), 8, 2)
    torch.library.opcheck(torch.ops.perilune.attnres_mix, (sources, query, gain, EPS))
    weight, lse = torch.ones(8, requires_grad=True), torch.zeros(3, requires_grad=True)
    arguments = (sources[0], sources[1], torch.ones(3, 8, requires_grad=True), lse, query[0], weight, EPS, EPS, 2)
    torch.library.opcheck(torch.ops.perilune.attnres_merge, (*arguments, None, None))


def test_wrong_input_is_named() -> None:
    query = torch.zeros(8)
    with pytest.raises(ValueError, match="float64"):
        mix([torch.zeros(2, 8, dtype=torch.float64)], query, eps=EPS, backend="triton")
    with pytest.raises(ValueError, match="33 sources"):
        mix([torch.zeros(2, 8)] * 33, query, eps=EPS, backend="triton")


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "num_sources, leading, width, queries",
    [(9, (300,), 2048, 1), (4, (77,), 1024, 6), (3, (50,), 300, 2), (20, (9,), 1024, 1)],
)
def test_gpu_equals_the_definition_on_the_same_inputs_and_repeats_its_bits(
    num_sources: int, leading: tuple[int, ...], width: int, queries: int
) -> None:
    sources, query, gain = draw(num_sources, leading, width, queries, dtype=torch.bfloat16, device="cuda")
    *exact_sources, exact_query, exact_gain = exact([*sources, query, gain])
    ours = all_forms(sources, query, gain, "triton")
    # Mixes and gradients of sources are rounded once or twice (phase1, then merge), 2^-9 at most each; those of query
    # and gain see rounded mixes.
    assert_close(ours, all_forms(exact_sources, exact_query, exact_gain, "reference"), 5e-3)
    assert all(torch.equal(a, b) for a, b in zip(ours, all_forms(sources, query, gain, "triton")))


@pytest.mark.gpu
def test_gpu_blocks_equal_the_definition_and_repeat_their_bits() -> None:
    ours, right = (Network(256, (123,), 9, 3, dtype, "cuda") for dtype in (torch.float32, torch.float64))
    output, expected = ours.fused(), right.by_definition()
    grads = gradients([output], ours.parameters)
    assert_close([output, *grads], [expected, *gradients([expected], right.parameters)], 3 * FLOAT32_RTOL)
    again = ours.fused()
    assert all(torch.equal(a, b) for a, b in zip([output, *grads], [again, *gradients([again], ours.parameters)]))


@pytest.mark.gpu
def test_gpu_blocks_in_cuda_are_as_close_to_float64_as_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = (1024, (77,), 9, 3)
    right = Network(*inputs, torch.float64, "cuda")
    expected = [right.by_definition()]
    expected += gradients(expected, right.parameters)

    def errors() -> list[float]:
        network = Network(*inputs, torch.bfloat16, "cuda")
        output = network.fused()
        found = [output, *gradients([output], network.parameters)]
        return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, expected) if y.any()]

    in_cuda = errors()
    monkeypatch.setattr(cuda, "takes", lambda *inputs: False)
    in_triton = errors()
    assert in_cuda != in_triton
    # The same roundings to bfloat16 of numbers that agree to 16 bits: equal errors up to luck.
    assert sum(x**2 for x in in_cuda) <= 1.3**2 * sum(x**2 for x in in_triton)


@pytest.mark.gpu
def test_gpu_blocks_compile_and_replay_in_a_cuda_graph() -> None:
    network = Network(256, (64,), 6, 3, torch.bfloat16, "cuda")
    weight = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)

    def step(forward) -> list[Tensor]:
        return list(torch.autograd.grad(forward(), network.parameters, weight))

    eager = step(network.fused)
    compiled = step(torch.compile(network.fused, fullgraph=True))
    # Inductor may round products of tanh's derivative elsewhere: one bfloat16 rounding a sublayer.
    assert_close(compiled, [x.double() for x in eager], 6 * 2**-8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(network.fused)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, eager))


@pytest.mark.gpu
def test_gpu_scores_repeat_their_bits_beside_other_work() -> None:
    """Products that read registers too late do so rarely, and where the tensor cores are busy."""
    tokens, width, sizes = 65536, 384, [4, 4, 1]
    generator = torch.Generator("cuda").manual_seed(0)
    running, x = (torch.randn(tokens, width, generator=generator, device="cuda").bfloat16() for _ in range(2))
    queries = torch.randn(sum(sizes), width, generator=generator, device="cuda") * width**-0.5
    weight, busy = torch.ones(width, device="cuda"), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    options = {"all_queries": sum(sizes), "eps": EPS, "norm_eps": NORM_EPS}
    other = torch.cuda.Stream()

    def scores() -> Tensor:
        """Of the second source for the queries of its block and of all later ones; those before are never written."""
        grown, *_ = triton_open(bank, Carried(running), x, queries, weight, sizes=sizes[1:], **options)
        return grown.scores[-1][:, sizes[0] :]

    with torch.no_grad():
        bank, *_ = triton_open(Bank(), Carried(x), None, queries, weight, sizes=sizes, **options)
        first, differ = scores(), torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(2000):
            with torch.cuda.stream(other):
                torch.mm(busy, busy)
            differ += (scores() != first).any()
    assert differ.item() == 0 and first.isfinite().all()
