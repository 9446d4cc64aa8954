"""All that a GPU has to say about a commit, in pieces that end in time: tests, then benchmarks, results in a folder.

    python benchmarks/gpu_round.py --seconds 540 --out round                      tests and every area
    python benchmarks/gpu_round.py --seconds 240 --only tests attnres --out round

Tests run in one process per file, several side by side; areas one after the other, alone on the card, the shortest
first. A step that would not end in time is not begun, or is stopped and said to be. Writes test_gpu.json and
bench_AREA.json as they stand under benchmarks/results. Needs no more than the interpreter that runs perilune itself.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS = {"muon": 50, "attention": 65, "decode": 60, "attnres": 65, "kda": 90, "train": 110}
"""What an area is given on an H200, fla left out: what earlier rounds took, and some room."""
SLOW = {"tests/kernels/test_attention.py": 170, "tests/kernels/test_kda_adapters.py": 240}
"""Files that compile or tune for long: begun first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=540.0, help="all of it")
    parser.add_argument("--out", type=Path, default=Path("gpu_round"))
    parser.add_argument("--only", nargs="*", choices=["tests", *SECONDS], help="default: all")
    parser.add_argument("--filter", default="", help="of the benchmarks' cases")
    parser.add_argument("--processes", type=int, default=8, help="of tests, side by side")
    parser.add_argument("--commit", default="", help="its name, where there is no git")
    chosen = parser.parse_args()
    end = time.monotonic() + chosen.seconds
    chosen.out.mkdir(parents=True, exist_ok=True)
    steps = chosen.only or ["tests", *SECONDS]
    lines = []
    if "tests" in steps:
        lines.append(run_tests(chosen, end))
    for area in [area for area in SECONDS if area in steps]:
        lines.append(run_area(area, chosen, end))
    print("\n".join(lines))


def run_tests(chosen: argparse.Namespace, end: float) -> str:
    """Every file with GPU tests in a process of its own."""
    began = time.monotonic()
    files = sorted(_files(), key=lambda name: -SLOW.get(name, 0))
    share = end - time.monotonic() - 10
    with ThreadPoolExecutor(chosen.processes) as pool:
        found = dict(zip(files, pool.map(lambda name: _test(name, chosen.out, began + share), files)))
    counts = {what: sum(each["counts"][what] for each in found.values()) for what in ("passed", "failed", "skipped")}
    unfinished = {name: each["why"] for name, each in found.items() if each["why"]}
    body = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": chosen.commit or _commit(),
        "machine": {"system": "Linux", "cores": os.cpu_count(), "gpu": _gpu()},
        "versions": {name: _version(name) for name in ("torch", "triton", "transformers", "numpy")}
        | {"python": sys.version.split()[0]},
        "command": "python benchmarks/gpu_round.py --only tests",
        "counts": counts,
        "not_run": unfinished,
        "seconds": round(time.monotonic() - began, 1),
    }
    (chosen.out / "test_gpu.json").write_text(json.dumps(body, indent=2) + "\n")
    said = ", ".join(f"{number} {what}" for what, number in counts.items())
    return f"tests: {said}, {body['seconds']:.0f} s" + "".join(f"\n  {name}: {why}" for name, why in unfinished.items())


def _files() -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=_environment())
    return sorted({line.split("::")[0] for line in listed.stdout.splitlines() if "::" in line})


def _test(name: str, out: Path, until: float) -> dict[str, Any]:
    log = out / (re.sub(r"\W", "_", name) + ".log")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-rA", name]
    left = max(1.0, until - time.monotonic())
    why = ""
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=_environment())
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            why = f"stopped after {left:.0f} s"
    text = log.read_text(errors="replace")
    counts = {
        what: len(re.findall(rf"^{what.upper()} tests/", text, re.MULTILINE)) for what in ("passed", "failed", "error")
    }
    if why:  # the summary was not written: dots of what passed stand in the progress lines
        dots = "".join(re.findall(r"^([.FsEx]+)(?:\s+\[ *\d+%\])?$", text, re.MULTILINE))
        counts = {"passed": dots.count("."), "failed": dots.count("F"), "error": dots.count("E")}
    elif process.returncode not in (0, 1):
        why = f"ended with exit code {process.returncode}"
    skipped = len(re.findall(r"^SKIPPED ", text, re.MULTILINE))
    return {
        "counts": {"passed": counts["passed"], "failed": counts["failed"] + counts["error"], "skipped": skipped},
        "why": why,
    }


def run_area(area: str, chosen: argparse.Namespace, end: float) -> str:
    """`perilune bench AREA`, if there is time for it."""
    left = end - time.monotonic() - 5
    if left < SECONDS[area]:
        return f"{area}: not begun, {left:.0f} s are left and it takes about {SECONDS[area]}"
    out = chosen.out / f"bench_{area}.json"
    command = [sys.executable, "-m", "perilune", "bench", area, "--json", str(out.absolute())]
    command += ["--filter", chosen.filter] if chosen.filter else []
    command += ["--commit", chosen.commit] if chosen.commit else []
    began = time.monotonic()
    with (chosen.out / f"bench_{area}.log").open("w") as log:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=left).returncode
        except subprocess.TimeoutExpired:
            return f"{area}: stopped after {left:.0f} s"
    rows = len(json.loads(out.read_text())) if out.exists() else 0
    return f"{area}: exit code {code}, {rows} rows, {time.monotonic() - began:.0f} s"


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    return os.environ | {"PYTHONPATH": path}


def _gpu() -> str | None:
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
