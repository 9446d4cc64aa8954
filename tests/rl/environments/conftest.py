"""For environments that run programs: a machine on which a sandbox starts."""

import pytest

from perilune.rl.environments.code import missing_sandbox
from perilune.swarm.sandbox import layers


@pytest.fixture(scope="session")
def working_sandbox() -> None:
    """Skips where bubblewrap is there but the machine forbids what it needs."""
    if problem := missing_sandbox():
        pytest.skip(f"no sandbox here: {problem}")


@pytest.fixture(scope="session")
def landlock(working_sandbox: None) -> None:
    """Skips where the kernel has none: there a solution can read installed packages and start programs."""
    if not any(layer.name == "landlock" and layer.active for layer in layers()):
        pytest.skip("no Landlock in this kernel")
