"""Recipes of PARL: an orchestrator learns to work with a swarm (`perilune rl NAME`).

`micro_parl` needs nothing: a tiny model is made, taught to work mostly alone, and learns to work with others, on a CPU.
`parl` starts from a model that was taught by traces of wide search (benchmarks/parl.py makes one):

    perilune rl parl --from RUN                            workers: the same weights, frozen
    perilune rl parl --from RUN --parl.workers-from OTHER  workers: those of another run
    perilune rl parl --from RUN --arm outcome              an arm of the experiment (rl/parl.py)
    perilune rl parl --from RUN --parl.workers joint       workers are the policy, and trained with it
"""

from perilune.rl.environments.gathering import Gathering
from perilune.rl.environments.wide_search import WideSearch
from perilune.rl.learner import LearnerConfig
from perilune.rl.loop import RLConfig
from perilune.rl.parl import ParlConfig
from perilune.rl.rollout import RolloutConfig
from perilune.rl.run_config import EnvironmentsConfig, EvaluationConfig, RLRunConfig
from perilune.rl.talk import TalkConfig
from perilune.serve.engine import EngineConfig
from perilune.train.optimizer import OptimizerConfig


def micro_parl() -> RLRunConfig:
    """A tiny orchestrator learns to give work away: a minute or two on a CPU, nothing else needed."""
    return RLRunConfig(
        name="micro_parl",
        environments=EnvironmentsConfig(gathering=Gathering()),
        makes_model=True,
        rl=RLConfig(
            iterations=18,
            tasks=6,
            pool=256,
            warmup=0,
            rollout=RolloutConfig(
                group_size=12,
                talk=TalkConfig(max_tokens=512, max_turns=8),
                workers=TalkConfig(max_tokens=64, max_turns=4),
            ),
            learner=LearnerConfig(optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0), row_tokens=4096),
            engine=EngineConfig(num_pages=1024, page_size=32, max_sequences=64, token_budget=1024),
            parl=ParlConfig(window=2, finish_rate=0.7, over=6),
            checkpoint_every=9,
        ),
        evaluation=EvaluationConfig(tasks=24),
        device="cpu",
    )


def parl() -> RLRunConfig:
    """Wide search with a swarm: instantiation, finish and outcome are paid for; workers are frozen."""
    return RLRunConfig(
        name="parl",
        environments=EnvironmentsConfig(
            wide_search=WideSearch(spare_steps=1, reply_tokens=1024, worker_reply_tokens=192)
        ),
        rl=RLConfig(
            # The skill is there after fifteen, the extra rewards are gone after sixteen more, and what is left when
            # only the outcome is paid takes as many again to settle: at a rate that falls.
            iterations=48,
            cooldown=24,
            tasks=16,
            rollout=RolloutConfig(
                group_size=8,
                # A whole iteration takes less: one that hangs is to cost no more.
                episode_seconds=90.0,
                talk=TalkConfig(max_tokens=3072, max_turns=24),
                workers=TalkConfig(max_tokens=1024, max_turns=12),
            ),
            learner=LearnerConfig(optimizer=OptimizerConfig(lr=2e-4, weight_decay=0.0), row_tokens=16384),
            engine=EngineConfig(max_sequences=256, token_budget=8192, max_length=10_240),
            worker_engine=EngineConfig(max_sequences=512, token_budget=8192, max_length=4096),
            # A tenth of the episodes with eleven workers each is one task an episode already: rewards that fade then
            # fade before the skill is there. Four means that a third of the episodes have them.
            parl=ParlConfig(least_assigned=4.0, over=16),
        ),
        evaluation=EvaluationConfig(tasks=64, every=20),
    )
