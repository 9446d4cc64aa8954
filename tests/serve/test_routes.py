"""The experts that an engine reports are those of one plain forward over the same tokens, whatever else it does."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from perilune.model import Decoder
from perilune.model.config import ComputeDtype
from perilune.model.routes import Recorded, bytes_per_token, new_book
from perilune.serve.engine import Engine, EngineConfig
from perilune.serve.request import Output, RequestError
from perilune.serve.runner import Runner
from perilune.serve.sizing import fitted
from tests.serve import tiny
from tests.serve.engines import SMALL, answers, ask, check_nothing_is_held, finish, make_engine, tokens
from tests.serve.test_engine_deterministic import CONFIG as DETERMINISTIC

MOE = replace(tiny.VARIANTS["experts"].moe, num_experts=16, num_experts_per_token=3)
LAYERS = {"hybrid": None, "mla": ("mla",) * 4, "kda": ("kda",) * 4}
RECORDING = replace(SMALL, record_routes=True)
TRUNK = tuple((7 * n * n + 3 * n) % 250 for n in range(1, 33))


def build(name: str, seed: int = 0, dtype: ComputeDtype = "float64", moe=MOE) -> Decoder:
    config = replace(tiny.BASE, layer_types=LAYERS[name], moe=moe, compute_dtype=dtype)
    return Decoder(config, seed=seed).eval()


@cache
def shared(name: str, seed: int = 0) -> Decoder:
    return build(name, seed)


@torch.no_grad()
def forward_routes(model: Decoder, sequence: list[int]) -> np.ndarray:
    """[tokens, layers, k] of one forward."""
    book = new_book(model.config, len(sequence))
    model.hidden(torch.tensor([sequence]), routes=Recorded(book=book, rows=torch.arange(len(sequence))))
    return book.transpose(0, 1).numpy()


def check(model: Decoder, request, outputs: list[Output]) -> None:
    assert all(output.routes is None for output in outputs[:-1])
    routes, first = outputs[-1].routes, request.params.routes
    computed = [*request.prompt, *tokens(outputs)[:-1]]
    assert routes.dtype == np.uint8
    np.testing.assert_array_equal(routes, forward_routes(model, computed)[first:])


class RoutesMachine(RuleBasedStateMachine):
    """Few pages, so that sequences are pre-empted; few tokens a step, so that prompts are cut; beginnings in common."""

    names = tuple(LAYERS)

    @initialize(data=st.data(), asynchronous=st.booleans())
    def start(self, data: st.DataObject, asynchronous: bool) -> None:
        self.model = shared(data.draw(st.sampled_from(self.names)))
        config = replace(
            RECORDING,
            asynchronous=asynchronous,
            num_pages=data.draw(st.integers(13, 20)),
            max_sequences=data.draw(st.integers(1, 4)),
            token_budget=data.draw(st.integers(5, 24)),
            num_snapshots=data.draw(st.integers(0, 5)),
            prefix_caching=data.draw(st.sampled_from((True, True, False))),
            burst=data.draw(st.sampled_from((1, 3, 4))),
        )
        self.engine: Engine = make_engine(self.model, config)
        self.asked, self.got, self.cancelled = {}, {}, set()

    @rule(
        cut=st.integers(0, len(TRUNK)),
        rest=st.lists(st.integers(0, 250), min_size=1, max_size=6),
        max_tokens=st.integers(0, 14),
        seed=st.integers(0, 3),
        wanted=st.sampled_from((True, True, True, False)),
        first=st.integers(0, 40),
        stops=st.booleans(),
    )
    def ask(
        self, cut: int, rest: list[int], max_tokens: int, seed: int, wanted: bool, first: int, stops: bool
    ) -> None:  # fmt: skip
        prompt, name = (*TRUNK[:cut], *rest), str(len(self.asked))
        routes = min(first // 3, len(prompt) - 1) if wanted else None
        stop_ids = frozenset(range(seed, 250, 9)) if stops else frozenset()
        request = ask(
            name, prompt, max_tokens=max_tokens, seed=seed, routes=routes, ignore_eos=True, stop_ids=stop_ids
        )  # fmt: skip
        self.asked[name] = replace(request, whole=True)
        self.engine.add(self.asked[name])

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.asked:
            name = data.draw(st.sampled_from(sorted(self.asked)))
            self.cancelled.add(name)
            self.engine.cancel(name)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.got.setdefault(output.request_id, []).append(output)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for outputs in finish(self.engine).values():
            self.take(outputs)
        check_nothing_is_held(self.engine)
        for name, request in self.asked.items():
            outputs = self.got[name]
            if request.params.routes is None or outputs[-1].finish_reason == "cancelled":
                assert outputs[-1].routes is None
            elif request.params.max_tokens:
                check(self.model, request, outputs)
            else:
                every = forward_routes(self.model, list(request.prompt))
                np.testing.assert_array_equal(outputs[-1].routes, every[request.params.routes :])


@pytest.mark.parametrize("name", tuple(LAYERS))
def test_routes_equal_those_of_one_forward_under_everything_at_once(name: str) -> None:
    case = type("Machine", (RoutesMachine,), {"names": (name,)}).TestCase
    case.settings = settings(max_examples=10, stateful_step_count=14, phases=[Phase.generate])
    case("runTest").runTest()


def test_a_burst_that_went_on_after_the_end_of_one_that_was_preempted_adds_no_routes() -> None:
    config = replace(RECORDING, num_pages=11, burst=4, asynchronous=True, max_length=28)
    engine = make_engine(shared("mla"), config)
    told = {"routes": 0, "max_tokens": 18, "ignore_eos": True}
    requests = [
        replace(ask("a", TRUNK[0:4], seed=12, stop_ids=frozenset({253}), **told), whole=True),
        replace(ask("b", TRUNK[3:10], seed=9, stop_ids=frozenset({262}), **told), whole=True),
    ]
    found = answers(engine, *requests)
    assert engine.stats().preemptions
    for request in requests:
        check(shared("mla"), request, found[request.request_id])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_sequence_that_was_preempted_keeps_the_experts_it_was_sampled_with(asynchronous: bool) -> None:
    """Even if computing it again chooses others: here its routers are pushed aside in between."""
    model = build("hybrid")
    engine = make_engine(model, replace(RECORDING, num_pages=7, asynchronous=asynchronous, prefix_caching=False))
    second = ask("b", TRUNK[8:14], seed=1, routes=0, max_tokens=20)
    engine.add(ask("a", TRUNK[:8], seed=0, routes=0, max_tokens=9))
    engine.add(second)
    found: dict[str, list[Output]] = {"a": [], "b": []}
    moved = at = None
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].append(output)
        if moved is None and engine.stats().preemptions:
            kept = engine._answers["b"].kept
            at, moved = kept.end, {n: b for n, b in model.named_buffers() if n.endswith("correction_bias")}
            before = forward_routes(build("hybrid"), [*second.prompt, *tokens(found["b"])])
            for bias in moved.values():
                bias += torch.linspace(3.0, 0.0, MOE.num_experts)
    assert moved and at is not None and len(second.prompt) < at < len(second.prompt) + 19
    routes = found["b"][-1].routes
    known = min(at, len(before))  # asynchronous: the token under way was not out yet
    np.testing.assert_array_equal(routes[:known], before[:known])
    after = forward_routes(model, [*second.prompt, *tokens(found["b"])[:-1]])
    np.testing.assert_array_equal(routes[at:], after[at:])
    assert (routes[:at] != after[:at]).any()


def test_a_prompt_found_in_the_cache_brings_its_routes_also_from_one_that_did_not_ask() -> None:
    model = shared("hybrid")
    engine = make_engine(model, RECORDING)
    answers(engine, ask("first", TRUNK, max_tokens=1))
    request = ask("second", (*TRUNK, 5), max_tokens=3, seed=1, routes=0)
    outputs = answers(engine, request)["second"]
    assert outputs[-1].num_cached >= 28
    check(model, request, outputs)


def test_a_prompt_without_an_answer_has_routes_of_all_its_tokens() -> None:
    request = ask("a", TRUNK[:11], max_tokens=0, routes=2)
    (output,) = answers(make_engine(shared("hybrid"), RECORDING), request)["a"]
    np.testing.assert_array_equal(output.routes, forward_routes(shared("hybrid"), list(request.prompt))[2:])


@pytest.mark.parametrize("recompute", [True, False])
def test_new_weights_route_what_follows_and_what_was_sampled_keeps_its_experts(recompute: bool) -> None:
    old, new = shared("mla"), shared("mla", 1)
    engine = make_engine(build("mla"), RECORDING)
    half, late = ask("half", TRUNK[:9], max_tokens=12, seed=0, routes=0), ask("late", TRUNK[9:29], seed=1, routes=0)
    engine.add(half)
    outputs: dict[str, list[Output]] = {"half": [], "late": []}
    while len(outputs["half"]) < 5:
        outputs["half"] += engine.step()
    engine.add(late)  # its prompt takes more than one step: nothing is sampled yet
    outputs["half"] += engine.step()
    assert all(output.request_id == "half" for output in outputs["half"])
    sampled = len(outputs["half"])
    engine.load_weights(new, version=1, recompute=recompute)
    for name, more in finish(engine).items():
        outputs[name] += more
    said = [*half.prompt, *tokens(outputs["half"])[:-1]]
    border = len(half.prompt) + sampled - 1
    np.testing.assert_array_equal(outputs["half"][-1].routes[:border], forward_routes(old, said)[:border])
    if recompute:
        np.testing.assert_array_equal(outputs["half"][-1].routes[border:], forward_routes(new, said)[border:])
        check(new, late, outputs["late"])


def test_deterministic_engines_report_the_routes_of_the_trainers_forward() -> None:
    config = replace(DETERMINISTIC, record_routes=True)
    model = build("hybrid", dtype="float32")
    engine = make_engine(build("hybrid", dtype="float32"), config)
    model.deterministic = True
    trunk = tuple((7 * n * n + 3 * n) % 250 for n in range(1, 201))
    lengths = (3, 64, 70, 130, 200)
    asked = [ask(str(n), trunk[:length], seed=n, max_tokens=5, routes=0) for n, length in enumerate(lengths)]
    again = [replace(request, request_id=f"again {request.request_id}") for request in asked]
    for round_of in (asked, again):
        found = answers(engine, *round_of)
        for request in round_of:
            check(model, request, found[request.request_id])
    assert engine.stats().cached_tokens > 0


def test_padded_steps_write_padding_to_nobodys_row() -> None:
    """As CUDA graphs run them; also where no layer keeps latents."""
    for name in LAYERS:
        model = shared(name)
        engine = make_engine(model, RECORDING)
        engine._runner = Runner(
            model, num_pages=RECORDING.num_pages, page_size=4, num_slots=engine._scheduler.states.num_slots,
            max_sequences=4, use_graphs=True, record_routes=True,
        )  # fmt: skip
        asked = [ask(str(n), TRUNK[n : 3 * n + 4], seed=n, routes=0, max_tokens=6) for n in range(3)]
        found = answers(engine, *asked)
        for request in asked:
            check(model, request, found[request.request_id])


def test_many_experts_are_reported_as_uint16() -> None:
    model = build("mla", moe=replace(MOE, num_experts=300))
    request = ask("a", TRUNK, seed=0, routes=0)
    routes = answers(make_engine(model, RECORDING), request)["a"][-1].routes
    assert routes.dtype == np.uint16 and routes.max() > 255
    computed = [*request.prompt, *tokens(answers(make_engine(model, RECORDING), request)["a"])[:-1]]
    np.testing.assert_array_equal(routes, forward_routes(model, computed))


def test_nothing_is_recorded_unless_the_engine_is_told_and_a_request_says_so() -> None:
    engine = make_engine(shared("hybrid"))
    assert engine._runner.routes is None
    with pytest.raises(RequestError, match="set record_routes=True") as refused:
        engine.add(ask("a", TRUNK, routes=0))
    assert refused.value.field == "routes"
    recording = make_engine(shared("hybrid"), RECORDING)
    with pytest.raises(RequestError, match="inside the 32 prompt tokens"):
        recording.add(ask("a", TRUNK, routes=32))
    assert all(output.routes is None for output in answers(recording, ask("b", TRUNK, seed=0))["b"])
    with pytest.raises(ValueError, match="without experts"):
        make_engine(tiny.model(), RECORDING)


def test_room_for_routes_is_counted_as_memory_of_pages() -> None:
    config = replace(tiny.BASE, layer_types=LAYERS["mla"], moe=MOE)
    wanted = EngineConfig(memory_gib=0.001, max_sequences=2, token_budget=64)
    without, with_routes = (
        fitted(replace(wanted, record_routes=each), config, torch.device("cpu")).num_pages for each in (False, True)
    )
    page = 64 * 4 * (12 + 4) * 4
    assert without == 0.001 * (1 << 30) // page
    assert with_routes == 0.001 * (1 << 30) // (page + 64 * bytes_per_token(config))
