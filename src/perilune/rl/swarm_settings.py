"""What an episode of a swarm is made with.

Apart from the episode itself (swarm_episode.py): configs are read where the swarm's packages are not installed.
"""

from dataclasses import dataclass

from perilune.rl.critical_steps import ASSIGN, CREATE


@dataclass(frozen=True, kw_only=True)
class SwarmEpisode:
    """What an episode is made with; the same for all agents of a kind."""

    system_prompt: str
    worker_prompt: str | None = None
    """The system prompt of every worker; None: what `create_subagent` says."""
    critical_steps: int = 16
    """The cap."""
    worker_steps: int = 8
    """Steps of one worker, at most; fewer where the cap leaves fewer."""
    max_workers: int = 32
    """Tasks that can be assigned in one episode."""
    main_tools: tuple[str, ...] = (CREATE, ASSIGN, "search", "open", "answer")
    worker_tools: tuple[str, ...] = ("search", "open")
    answer: str = "answer"
    """The tool whose call ends the episode."""
    reply_tokens: int | None = None
    worker_reply_tokens: int | None = None
    tool_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("critical_steps", "worker_steps", "max_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected at least 1")
        if forbidden := sorted({CREATE, ASSIGN, self.answer} & set(self.worker_tools)):
            raise ValueError(f"worker_tools holds {forbidden[0]!r}, which only the orchestrator may call")
        if self.answer not in self.main_tools:
            raise ValueError(f"main_tools is {self.main_tools!r}, expected {self.answer!r} among them")
