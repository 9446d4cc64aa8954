"""What runs in worlds of processes share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of a file keep their tokens."""
    return tmp_path_factory.mktemp("cache")
