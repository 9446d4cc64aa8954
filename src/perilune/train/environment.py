"""What a result was made with: the report shows it, and a number without it cannot be compared."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

COMMIT_VARIABLE = "PERILUNE_COMMIT"


def describe_environment(device: torch.device) -> dict[str, str]:
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    if device.type == "cuda":
        machine = f"{torch.cuda.get_device_name(device)}, {machine}"
    facts = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "perilune": _version(),
        "commit": _commit(),
    }
    return {name: value for name, value in facts.items() if value}


def _version() -> str:
    try:
        return metadata.version("perilune")
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """What PERILUNE_COMMIT says, for a copy of the tree; else of the checkout this file lies in, if there is one."""
    if told := os.environ.get(COMMIT_VARIABLE, ""):
        return told
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        answer = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
