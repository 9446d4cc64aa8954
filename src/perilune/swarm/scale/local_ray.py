"""Ray on this machine, quiet and on the loopback address: for swarms and for rollouts over processes.

Without dashboard, usage statistics and news on standard output. A program that has started or joined a cluster before
(`ray.init`) keeps it; then this is not needed.
"""

import logging
import os
import sys
import uuid
from typing import Any

STORE_BYTES = 80 << 20
"""Of Ray's object store, where it is hardly used."""


class EngineError(RuntimeError):
    """The engine cannot start, or has no worker left."""


def import_ray(what: str = "the Ray engine") -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise EngineError(f"{what} needs the extra 'scale': pip install 'perilune[scale]' ({error})") from None
    return ray


def start_ray(*, store_bytes: int = STORE_BYTES) -> Any:
    """Start Ray on this machine's loopback address."""
    ray = import_ray()
    from ray._private import ray_constants, worker

    # Ray takes a loopback address only where it believes that clusters are impossible; its processes read the variable.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    ray_constants.ENABLE_RAY_CLUSTER = False
    # It would print news of dead workers to standard output, among our results.
    worker.print_to_stdstream = lambda data, ignore_prefix: None
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        namespace=f"perilune-{uuid.uuid4().hex}",
        num_cpus=max(1, os.cpu_count() or 1),
        object_store_memory=store_bytes,
    )
    return ray


def importable_places() -> dict[str, str]:
    """Environment variables for actors that import what this process can: environments and tools may live beside the
    program that started the run."""
    return {"PYTHONPATH": os.pathsep.join(os.path.abspath(each) for each in sys.path)}
