"""What this machine can do: versions, processors, memory, accelerators, tools, and which verbs that leaves usable."""

import importlib
import importlib.metadata
import os
import platform
import shutil
import socket
from pathlib import Path
from typing import Any

EXTRAS = {
    "train": (
        "torch",
        "safetensors",
        "tokenizers",
        "pillow",
        "resvg-py",
        "defusedxml",
        "zstandard",
        "tensorboard",
    ),
    "parquet": ("pyarrow",),
    "gpu": ("triton",),
    "serve": ("starlette", "uvicorn", "prometheus-client", "llguidance"),
    "swarm": ("aiohttp", "orjson", "pydantic", "mcp", "starlette", "uvicorn", "jsonschema", "pypdf"),
    "scale": ("ray", "asyncpg"),
    "test": ("pytest", "hypothesis", "transformers", "ruff"),
}
TOOLS = {
    "chromium": "screenshots of reports and pages",
    "bwrap": "sandboxed tools for agents (package bubblewrap)",
    "postgres": "a journal shared by several machines (package postgresql)",
}


def examine() -> dict[str, Any]:
    """Everything, as values that fit into JSON."""
    packages = {name: _version(name) for names in EXTRAS.values() for name in names}
    return {
        "perilune": _version("perilune"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "free_disk_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
        "packages": packages,
        "torch": _torch() if packages["torch"] else None,
        "serving": _serving(packages),
        "tools": {name: _tool(name) for name in TOOLS},
        "sandbox": _swarm("sandbox", "sandbox_report", packages),
        "agent_tools": _swarm("tools.registry", "tools_report", packages),
        "advice": _advice(packages),
    }


def kernels_line(found: dict[str, Any]) -> str:
    """What the own GPU kernels say of themselves, for a machine that has a GPU."""
    state = found["torch"]["kernels"]
    return "ok" if state == "ok" else f"not used, everything on the GPU is slow: {state}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _tool(name: str) -> str | None:
    # Debian keeps the PostgreSQL server out of PATH.
    servers = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres")) if name == "postgres" else []
    return shutil.which(name) or (str(servers[-1]) if servers else None)


def _swarm(module: str, function: str, packages: dict[str, str | None]) -> dict[str, str] | None:
    """What a part of the swarm says of itself; None where the extra is not installed."""
    if any(packages[name] is None for name in EXTRAS["swarm"]):
        return None
    return dict(getattr(importlib.import_module(f"perilune.swarm.{module}"), function)())


def _serving(packages: dict[str, str | None]) -> dict[str, str]:
    """What `perilune serve` and `perilune chat` can do here."""
    missing = [name for extra in ("train", "serve") for name in EXTRAS[extra] if packages[name] is None]
    if missing:
        return {"serve": f"lacks {', '.join(missing)}", "chat": "with servers elsewhere: perilune chat URL"}
    return {
        "serve": _check_engine(),
        "device": _serving_device(),
        "port 8000": _port_state(8000),
        "chat": "in the terminal and in the browser",
    }


def _check_engine() -> str:
    """A tiny model through the whole engine on the CPU, against decoding step by step."""
    import torch

    from perilune.data.tokenizer import MIN_VOCAB_SIZE, Tokenizer
    from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig, SamplingConfig, generate
    from perilune.serve.engine import Engine, forbidden_ids
    from perilune.serve.request import Request, SamplingParams
    from perilune.serve.sizing import EngineConfig

    tokenizer = Tokenizer.train(["the moon and the sun"], MIN_VOCAB_SIZE + 8)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=("kda", "mla"),
        kda=KDAConfig(num_heads=2, head_dim=8),
        mla=MLAConfig(num_attention_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
        intermediate_size=48,
    )
    prompt = [tokenizer.bos_id, *tokenizer.encode("the moon")]
    try:
        with torch.random.fork_rng(devices=[]):
            model = Decoder(config, seed=0).eval()
        sampling = SamplingConfig(max_new_tokens=8, temperature=0.0)
        forbidden = forbidden_ids(tokenizer, config.vocab_size)
        wanted = list(generate(model, prompt, sampling, forbidden=forbidden))
        engine = Engine(model, tokenizer, EngineConfig(num_pages=4, max_sequences=2), device="cpu")
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id="doctor", prompt=tuple(prompt), params=params))
        found: list[int] = []
        while engine.has_work:
            found += [token for output in engine.step() for token in output.token_ids]
    except Exception as problem:  # a doctor reports what is broken, whatever it is
        return f"failed: {type(problem).__name__}: {problem}"
    return "ok" if found == wanted else f"differs from decoding step by step: {found}, expected {wanted}"


def _serving_device() -> str:
    import torch

    if not torch.cuda.is_available():
        memory = _memory_gib()
        room = "" if memory is None else f" of {memory} GiB"
        return f"CPU; 1 GiB{room} for the cache unless --memory-gib says otherwise"
    free = torch.cuda.mem_get_info()[0] / 2**30
    graphs = "CUDA graphs" if _check_kernels(torch) == "ok" else "slow operators, see kernels"
    return f"{torch.cuda.get_device_name()}; {graphs}, 85% of {free:.1f} GiB free memory for weights and cache"


def _port_state(port: int) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return f"taken ({error.strerror}): --port 0 takes a free one"
    return "free"


def _torch() -> dict[str, Any]:
    import torch

    cpu = torch.backends.cpu.get_cpu_capability()
    gpus = [
        {
            "name": torch.cuda.get_device_name(index),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(index))),
            "memory_gib": round(torch.cuda.get_device_properties(index).total_memory / 2**30, 1),
        }
        for index in range(torch.cuda.device_count())
    ]
    return {
        "version": torch.__version__,
        "cpu_capability": cpu,
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "bf16": bool(gpus) and torch.cuda.is_bf16_supported(),
        "kernels": _check_kernels(torch) if gpus else None,
        "operators": _check_operators(torch),
    }


def _check_kernels(torch: Any) -> str:
    """Whether the own GPU kernels can run, or why not."""
    from perilune.kernels.triton_support import why_not_triton

    return why_not_triton(torch.empty(0, device="cuda")) or "ok"


def _check_operators(torch: Any) -> dict[str, str]:
    """Each operator once, on a small input, against its definition."""
    from perilune.kernels.attention import attention
    from perilune.kernels.kda import kda

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 100, 2, 16, device=device) for _ in range(3))
    g, beta = -torch.rand(1, 100, 2, 16, device=device), torch.rand(1, 100, 2, device=device)
    results = {}
    for name, run in {
        "kda": lambda backend: kda(q, k, v, g, beta, qk_l2norm=True, backend=backend)[0],
        "attention": lambda backend: attention(q, k, v, backend=backend)[0],
    }.items():
        try:
            error = (run(None) - run("reference")).abs().max().item()
            results[name] = "ok" if error < 1e-3 else f"differs from its definition by {error:.1e}"
        except Exception as problem:  # a doctor reports what is broken, whatever it is
            results[name] = f"failed: {problem}"
    return results


def _advice(packages: dict[str, str | None]) -> list[str]:
    advice = []
    for extra, names in EXTRAS.items():
        missing = [name for name in names if packages[name] is None]
        if missing:
            advice.append(f"{extra}: lacks {', '.join(missing)}; pip install 'perilune[{extra}]'")
    for name, use in TOOLS.items():
        if _tool(name) is None:
            advice.append(f"no {name}: needed for {use}; make system-deps (Debian)")
    return advice


def show(found: dict[str, Any]) -> None:
    """The same for a person."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = {
        "perilune": found["perilune"],
        "python": f"{found['python']} on {found['system']}",
        "machine": f"{found['processors']} processors, {found['memory_gib']} GiB memory, "
        f"{found['free_disk_gib']} GiB free disk",
    }
    if found["torch"]:
        torch = found["torch"]
        rows["torch"] = f"{torch['version']}, {torch['threads']} threads, {torch['cpu_capability']}"
        gpus = [f"{gpu['name']} ({gpu['memory_gib']} GiB, sm {gpu['capability']})" for gpu in torch["gpus"]]
        rows["gpu"] = ", ".join(gpus) or "none: training runs on the CPU in float32"
        if torch["kernels"]:
            rows["kernels"] = kernels_line(found)
        rows["operators"] = ", ".join(f"{name} {state}" for name, state in torch["operators"].items())
    else:
        rows["torch"] = "not installed: train, generate and data need it"
    rows["packages"] = ", ".join(f"{name} {version}" for name, version in found["packages"].items() if version)
    rows["tools"] = ", ".join(name for name, path in found["tools"].items() if path) or "none"
    serving = ("serving", found["serving"])
    for name, states in (serving, ("sandbox", found["sandbox"]), ("agents", found["agent_tools"])):
        rows[name] = "needs the extra swarm" if states is None else "\n".join(f"{n}: {s}" for n, s in states.items())
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", str(value))
    console.print(table)
    for line in found["advice"]:
        console.print(f"- {line}", style="yellow", markup=False)
    if not found["advice"]:
        console.print("nothing is missing", style="green")
