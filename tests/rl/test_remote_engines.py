"""Contracts of engines in other processes that need no Ray."""

import asyncio
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from perilune.rl import remote_engines
from perilune.rl.environment import OUTCOME, Task
from perilune.rl.loop import RLConfig
from perilune.rl.remote_engines import RemoteEngines, RemoteError
from perilune.rl.remote_player import EnginePlan, Player, PlayerPlan, Stage, plain_weights, tensors_of
from perilune.rl.rollout import Job, RolloutConfig
from perilune.serve.engine import EngineConfig
from tests.serve.tiny import model, tokenizer


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RemoteError, match=r"processes=2 needs the extra 'scale': pip install 'perilune\[scale\]'"):
        RemoteEngines(model(), tokenizer(), EngineConfig(), processes=2)


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="processes is 0, expected 1 or more"):
        RemoteEngines(model(), tokenizer(), EngineConfig(), processes=0)
    with pytest.raises(ValueError, match=r"rl\.processes is -1"):
        RLConfig(processes=-1)


class Echo:
    name = "echo"

    async def episode(self, task, talk):
        talk.add({"role": "user", "content": task.name})
        await talk.ask(max_tokens=3)

    def judge(self, task, messages):
        return {OUTCOME: 1.0}


def test_a_player_fetches_a_stage_once_keeps_a_few_and_fetches_it_again_when_it_was_dropped():
    async def work():
        engine = EngineConfig(page_size=16, num_pages=32, max_sequences=2, token_budget=64, snapshot_interval=16)
        plan = PlayerPlan(
            policy=EnginePlan(model=model("mla").config, tokenizer=tokenizer(), config=engine),
            frozen=None, device="cpu", num_threads=torch.get_num_threads(), folder="/nowhere",
        )  # fmt: skip
        player = Player(plan)
        await player.open(plain_weights(model("mla")), 4, None)
        stage = Stage(environments={"echo": Echo()}, config=RolloutConfig(), asides=None, trains_asides=False)
        job = Job(environment="echo", task=Task(name="hi", data={}), sample=0, seed=0, iteration=0)
        fetched = []

        async def fetch(name):
            fetched.append(name)
            return stage

        order = ["a", "a", "b", "c", "a", "d", "e", "a", "b"]
        found = []
        for name in order:
            promise = fetch(name)
            found.append(await player.play(name, [promise], job))
            promise.close()
        await player._engine.close()
        return fetched, found

    fetched, found = asyncio.run(work())
    assert fetched == ["a", "b", "c", "d", "e", "b"]
    assert {each.branches[0].tokens.tobytes() for each in found} == {found[0].branches[0].tokens.tobytes()}
    assert set(found[0].branches[0].versions[found[0].branches[0].mask].tolist()) == {4}


# A Ray of a few lines: what happens at odd moments can be said exactly ------------------------------------------------


class Lost(Exception): ...


class FakeRay:
    """One process, its actors in memory. `start` and `put` take as long as their gates are closed."""

    def __init__(self):
        self.is_up, self.starts, self.stops, self.actors = False, 0, 0, []
        self.dying = 0
        """Actors that die while they start, the next ones."""
        self.gate = threading.Event()
        self.gate.set()
        self.exceptions = SimpleNamespace(
            ActorDiedError=Lost, ActorUnavailableError=Lost, ObjectLostError=type("Gone", (Exception,), {})
        )

    def is_initialized(self):
        return self.is_up

    def start(self, **_):
        self.gate.wait(10)
        assert not self.is_up, "started twice"
        self.is_up, self.starts = True, self.starts + 1

    def shutdown(self):
        self.is_up, self.stops = False, self.stops + 1
        for actor in self.actors:
            actor.ended.set()

    def put(self, value):
        self.gate.wait(10)
        return value

    def remote(self, _):
        assert self.is_up, "an actor without Ray"
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._actor))

    def _actor(self, plan):
        self.dying -= 1
        self.actors.append(FakeActor(dies=self.dying >= 0))
        return self.actors[-1]

    def kill(self, actor, no_restart):
        actor.ended.set()

    def cancel(self, asked): ...


class FakeActor:
    def __init__(self, *, dies):
        self.versions, self.ended, self.plays, self.failure = [], asyncio.Event(), 0, None
        self.dies = dies
        self.open, self.load, self.play, self.ping = map(self._method, (self._open, self._load, self._play, self._ping))

    def _method(self, call):
        return SimpleNamespace(remote=lambda *given: call(*given))

    async def _open(self, weights, version, frozen):
        if self.dies:
            raise Lost("killed while it started")
        self.versions.append(version)
        return "elsewhere", 1

    async def _load(self, weights, version):
        self.versions.append(version)

    async def _ping(self): ...

    async def _play(self, name, stage, job):
        self.plays += 1
        if self.failure is not None:
            self.failure, error = None, self.failure
            raise error
        await self.ended.wait()
        raise Lost("gone")


@pytest.fixture
def fake(monkeypatch):
    ray = FakeRay()
    monkeypatch.setattr(remote_engines, "import_ray", lambda what: ray)
    monkeypatch.setattr(remote_engines, "start_ray", ray.start)
    return ray


def engines_on(fake, processes=1):
    return RemoteEngines(model(), tokenizer(), EngineConfig(), processes=processes)


JOB = Job(environment="echo", task=Task(name="hi", data={}), sample=0, seed=0, iteration=0)


def within(work):
    return asyncio.run(asyncio.wait_for(work, 20))


@pytest.mark.parametrize("is_up", [False, True], ids=["Ray starts", "weights are stored"])
def test_weights_that_come_while_the_first_processes_start_reach_them(fake, is_up):
    async def work():
        if is_up:
            fake.start()
        engines = engines_on(fake)
        fake.gate.clear()
        opening = asyncio.create_task(engines.open())
        await asyncio.sleep(0.05)
        loading = asyncio.create_task(engines.load_weights(model(), 7))
        await asyncio.sleep(0.05)
        fake.gate.set()
        await asyncio.gather(opening, loading)
        found = fake.actors[0].versions[-1]
        await engines.close()
        return found

    assert within(work()) == 7


def test_of_two_loops_in_a_process_the_one_that_ends_first_leaves_ray_to_the_other(fake):
    async def work():
        one, other = engines_on(fake), engines_on(fake)
        await asyncio.gather(one.open(), other.open())
        assert fake.starts == 1
        await one.close()
        await one.close()  # once more says nothing more
        assert fake.is_up and fake.stops == 0
        await other.load_weights(model(), 3)
        await other.close()
        assert fake.stops == 1 and not fake.is_up
        again = engines_on(fake)
        await again.open()
        await again.close()
        return fake.starts, fake.stops

    assert within(work()) == (2, 2)


def test_a_ray_that_was_there_before_is_left_running(fake):
    async def work():
        fake.start()
        engines = engines_on(fake)
        await engines.open()
        await engines.close()
        return fake.stops

    assert within(work()) == 0


def test_episodes_under_way_when_the_engines_close_end_and_start_no_process(fake):
    async def work():
        engines = engines_on(fake)
        name, stage = await engines.put(None)
        playing = [asyncio.create_task(engines.play(name, stage, JOB, most=1)) for _ in range(2)]
        while not fake.actors[0].plays:
            await asyncio.sleep(0.005)
        await engines.close()
        found = await asyncio.wait_for(asyncio.gather(*playing, return_exceptions=True), 5)
        return [type(each) for each in found], len(fake.actors), engines.num_lost

    assert within(work()) == ([RemoteError, RemoteError], 1, 1)


@pytest.mark.parametrize("processes", [1, 3])
def test_a_process_that_dies_while_it_starts_is_replaced_too(fake, processes):
    async def work():
        engines = engines_on(fake, processes)
        fake.dying = 2
        await engines.open()
        found = len(engines._posts), len(fake.actors)
        await engines.close()
        return found

    assert within(work()) == (processes, processes + 2)


def test_processes_that_all_die_while_they_start_are_given_up(fake):
    async def work():
        engines = engines_on(fake)
        fake.dying = 1000
        with pytest.raises(RemoteError, match="no process can be started: killed while it started"):
            await engines.open()
        await engines.close()
        return len(fake.actors)

    assert within(work()) == remote_engines.MOST_HIRES


def test_a_process_that_ray_has_forgotten_when_it_is_asked_is_lost_and_replaced(fake):
    """Ray then raises a bare Exception at once, instead of an answer."""

    async def work():
        engines = engines_on(fake)
        await engines.open()

        def forgotten(*_):
            raise Exception('Failed to submit task to actor due to b"Can\'t find actor 7. It might be dead"')

        fake.actors[0].load = SimpleNamespace(remote=forgotten)
        await engines.load_weights(model(), 2)
        while not engines._posts:
            await asyncio.sleep(0.005)
        found = [actor.versions for actor in fake.actors], engines.num_lost
        await engines.close()
        return found

    assert within(work()) == ([[0], [2]], 1)


def test_an_answer_that_was_lost_with_its_machine_is_a_lost_process(fake):
    async def work():
        engines = engines_on(fake)
        name, stage = await engines.put(None)
        fake.actors[0].failure = fake.exceptions.ObjectLostError("its owner is gone")
        playing = asyncio.create_task(engines.play(name, stage, JOB, most=1))
        while len(fake.actors) < 2 or not fake.actors[1].plays:
            assert not playing.done(), playing
            await asyncio.sleep(0.005)
        await engines.close()
        await asyncio.gather(playing, return_exceptions=True)
        return engines.num_again

    assert within(work()) >= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_travel_as_bytes_and_come_back_as_they_were(dtype):
    module = torch.nn.ParameterDict(
        {
            "matrix": torch.randn(3, 5).to(dtype),
            "number": torch.tensor(2.5).to(dtype),
            "none": torch.zeros(0, 4).to(dtype),
        }
    )
    plain = plain_weights(module)
    for flat, _, _ in plain.values():
        flat.flags.writeable = False  # as they come out of Ray's memory
    found = tensors_of(plain)
    for name, value in module.state_dict().items():
        assert found[name].dtype == dtype and torch.equal(found[name], value)
    with torch.no_grad():
        module["matrix"].zero_()
    assert found["matrix"].abs().sum() > 0  # a copy: the learner goes on meanwhile
