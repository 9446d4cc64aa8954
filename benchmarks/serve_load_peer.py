"""transformers' generate on a folder of weights, in a process of its own: the peer of serve_load.py.

Run by it, as `python serve_load_peer.py FOLDER DEVICE ASKED TUNING`; ASKED is a JSON file of prompts and numbers of
tokens. It loads, tries its kernels, says so, waits for a line with the seconds it has, measures, and writes one JSON
line for each mode:

    one by one     generate(prompt) for one request after the other, as many as there is time for
    one batch      generate(all prompts, padded on the left), for as many tokens as the longest answer has

Attention runs in the fastest form it has here: with cuDNN's kernels and without, whichever decoded faster. The kernels
of flash-linear-attention are taken where that package is installed; each is tuned over TUNING of its settings (0: all,
which takes minutes), as only prompts run through those that have several.
"""

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

SETTLED = 16
"""Tokens of an answer by which forms of attention are compared, and of the one that is shown."""


class Asked(Protocol):
    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def answer(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Measured:
    mode: str
    requests: int
    tokens: int
    """Of answers, as many as were asked for."""
    seconds: float


# --- in the benchmark's process ---------------------------------------------------------------------------------------


class Peer:
    def __init__(
        self, folder: Path, device: torch.device, asked: Sequence[Asked], forbidden: Sequence[int], tuning: int
    ) -> None:
        """`forbidden` ids are suppressed in the answer that is shown, as the engine never gives them."""
        file = folder.parent / "asked.json"
        file.write_text(
            json.dumps({"asked": [[list(each.prompt), each.answer] for each in asked], "forbidden": list(forbidden)})
        )
        self._log = (folder.parent / "peer.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder), device.type, str(file), str(tuning)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.name = "transformers"
        self.first_tokens: list[int] = []

    def pause(self) -> None:
        """Let it rest, wherever it is: what it has begun on the GPU ends by itself."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def wait_until_ready(self, seconds: float) -> bool:
        found = self._next(seconds)
        if found is None:
            self.close()
            return False
        self.name, self.first_tokens = found["name"], found["first_tokens"]
        return True

    def measure(self, seconds: float) -> Iterator[Measured]:
        """Let it go, with so much time for the requests one by one; what it measures, as it comes."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        while (found := self._next(3 * seconds + 30)) is not None and "mode" in found:
            yield Measured(**found)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def last_words(self) -> str:
        self._log.flush()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _next(self, seconds: float) -> dict[str, Any] | None:
        with contextlib.suppress(queue.Empty):
            return self._lines.get(timeout=seconds)
        return None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                self._lines.put(json.loads(line))
        self._lines.put(None)


# --- in its own -------------------------------------------------------------------------------------------------------


def tune_over(settings: int) -> None:
    """Let Triton kernels that are defined from now on try no more than so many settings, spread over all."""
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    original = Autotuner.__init__

    def with_fewer(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **more: Any) -> None:
        step = max(1, len(configs or ()) // settings)
        original(self, fn, arg_names, configs[::step][:settings] if configs else configs, *rest, **more)

    Autotuner.__init__ = with_fewer


def kernels() -> str:
    """What the model has for its delta attention."""
    try:
        import fla
    except Exception:
        return "plain torch kernels"
    return f"kernels of fla {getattr(fla, '__version__', '')}"


class Generation:
    def __init__(self, folder: str, device: str) -> None:
        # Nothing here looks at pictures, and a torchvision without its compiled operators would break the import.
        sys.modules.setdefault("torchvision", None)  # pyrefly: ignore
        from transformers import AutoModelForCausalLM

        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        except (ValueError, KeyError, ImportError) as error:  # a version without Kimi Linear: the folder's own code
            print(f"transformers' own class does not take the folder: {error}", file=sys.stderr)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=True)
        self.model: Any = model.to(device).eval()
        self.device = device

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Sequence[int]], tokens: int, **more: Any) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        found = self.model.generate(
            ids.to(self.device), attention_mask=mask.to(self.device), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, pad_token_id=0, **more,
        )  # fmt: skip
        return found[:, longest:].tolist()

    def settle(self, prompt: Sequence[int]) -> str:
        """The form of attention in which it decodes faster."""
        if self.device != "cuda":
            return "as it is"
        taken = {}
        for use in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(use)
            self([prompt], 2)
            taken[use] = _seconds(lambda: self([prompt], SETTLED))
        best = min(taken, key=taken.__getitem__)
        torch.backends.cuda.enable_cudnn_sdp(best)
        return "with cuDNN" if best else "without cuDNN"


def _seconds(call: Callable[[], object]) -> float:
    """The answers are lists on the host, so the device has finished."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main(folder: str, device: str, file: str, tuning: str) -> None:
    said = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is not for the benchmark

    def tell(**found: Any) -> None:
        print(json.dumps(found), file=said, flush=True)

    if int(tuning):
        tune_over(int(tuning))
    given = json.loads(Path(file).read_text())
    asked: list[tuple[list[int], int]] = given["asked"]
    prompts, answers = [prompt for prompt, _ in asked], [answer for _, answer in asked]
    generate = Generation(folder, device)
    form = generate.settle(prompts[0])
    first = generate(prompts[:1], min(SETTLED, answers[0]), suppress_tokens=given["forbidden"])[0]
    for prompt in (min(prompts, key=len), max(prompts, key=len)):
        generate([prompt], 2)
    batch_fails = ""
    try:
        generate(prompts, 3)
    except Exception as error:
        batch_fails = f"{type(error).__name__}: {error}"
        print(f"one batch: {batch_fails}", file=sys.stderr)
    name = f"{type(generate.model).__name__}, {kernels()}, attention {form}"
    tell(name=name, first_tokens=first, batch_fails=batch_fails)
    limit = float(sys.stdin.readline())
    if not batch_fails:
        seconds = _seconds(lambda: generate(prompts, max(answers)))
        tell(mode="one batch", requests=len(asked), tokens=sum(answers), seconds=seconds)
    began, tokens, count = time.perf_counter(), 0, 0
    for prompt, answer in asked:
        tokens += len(generate([prompt], answer)[0])
        count += 1
        if time.perf_counter() - began > limit:
            break
    tell(mode="one by one", requests=count, tokens=tokens, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
