"""Build a matcher of llguidance; and, run as a program, find out in a process of its own whether that can be done.

A hostile schema can make llguidance compute for hours (a large `multipleOf` is enough), and nothing in a thread can
stop it. So a grammar is first built here, where the kernel ends the process when its CPU seconds are over or refuses it
memory; only what could be built is built again by the server. CPU seconds, not seconds: a busy machine refuses nothing.

One JSON object per line. First in: {"tokens": [hex], "limits": {}, "seconds": 5, "memory_bytes": n}, and out comes
{"ready": true}. Then in: {"kind": "json_schema", "source": "..."}, out: {"error": null} or {"error": "why not"}.
It ends with its input. This file is run by its path and imports nothing of the package, so that it starts quickly.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Between the parts of JSON: a space or two, or a new line with its indentation. A model that has lost its way would
# write more of it without end.
WHITESPACE = r" {1,2}|\r?\n[ \t]{0,40}"
LONGEST_ERROR = 300


class Vocabulary:
    """What llguidance needs to know of a tokenizer.

    A token that the text of a grammar can never hold is empty here: special and unused ids, and those with the byte
    0xFF, which is never part of UTF-8 and means something else to llguidance. One more id stands for the end.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = [b"" if b"\xff" in token else bytes(token) for token in tokens] + [b"\xff[end]"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [len(tokens)]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("masks need no encoder: nothing is forced")


def make_tokenizer(tokens: Sequence[bytes]) -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer(Vocabulary(tokens))  # pyrefly: ignore[bad-argument-type]


def make_matcher(tokenizer: Any, kind: str, source: str, limits: dict[str, int]) -> tuple[Any, str | None]:
    """(matcher, None) or (None, why there is none). The first mask is computed: much is built only then."""
    from llguidance import LLMatcher, LLParserLimits

    bounds = LLParserLimits(verbose_errors=False, **limits)  # pyrefly: ignore[bad-argument-type]
    matcher = LLMatcher(tokenizer, as_lark(kind, source), log_level=0, limits=bounds)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return (None, readable(matcher.get_error())) if matcher.is_error() else (matcher, None)


def as_lark(kind: str, source: str) -> str:
    """In the Lark dialect of llguidance, with `no_forcing`: it would look for text that must follow, however long."""
    if kind == "json_schema":
        source = f"start: {json_literal(json.loads(source))}"
    elif kind == "regex":
        source = f"start: {regex_literal(source)}"
    return f'%llguidance {{ "no_forcing": true }}\n{source}\n'


def json_literal(schema: dict[str, Any]) -> str:
    """JSON of a schema as it stands in a Lark grammar: on one line and ASCII, so that it cannot end its rule."""
    return f"%json {json.dumps(schema | {'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def regex_literal(pattern: str) -> str:
    """A regular expression as it stands in a Lark grammar. As in a JSON schema, \\d and \\w are those of ASCII."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, 'dw')}/"


def readable(error: str) -> str:
    """The line that says why, cut to a length: the whole source may stand in it."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    # What was asked for stands on one line of a longer grammar: its place there means nothing to anybody.
    reason = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", (reasons + lines + ["unknown"])[0])
    if reason in ("NoExtension", "NoExtensionBias"):
        return "no text can satisfy it"
    return reason if len(reason) <= LONGEST_ERROR else f"{reason[: LONGEST_ERROR - 4]} ..."


def own_bytes() -> int:
    """Address space in use; 0 where only Linux would know."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[0]) * resource.getpagesize() if path.exists() else 0


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    tokens = [bytes.fromhex(token) for token in setup["tokens"]]
    tokenizer = make_tokenizer(tokens)
    allowed = setup["memory_bytes"] + own_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, setup["seconds"])  # SIGPROF ends a process that has no handler for it
        _, error = make_matcher(tokenizer, asked["kind"], asked["source"], setup["limits"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main()
