"""The program of the process that runs chat templates of strangers: jinja2 and the standard library.

Started by `perilune.data.render_worker` as `python -I template_process.py DESCRIPTOR MEMORY SECONDS CHARACTERS`.
Messages are framed as in svg_process.py:

    request  JSON {"template": source, "variables": {...}}
    answer   b"P" + JSON {"text": what the template wrote} or {"error": why there is none}

Templates run in jinja2's immutable sandbox: no attribute that begins with an underscore, no change of what they are
given, no import, no file. Around it stands the process: memory, processor time and open files are limited by the
kernel, because the sandbox alone does not stop a template from counting to a trillion or doubling a string sixty times.
Besides, templates find what transformers gives them: `raise_exception`, `strftime_now`, `tojson` that escapes nothing,
`break` and `continue`, and `generation` blocks, which are transparent here.
"""

import json
import signal
import socket
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # an isolated interpreter does not know the folder of its program
from svg_process import find_packages, give_up_privileges, receive, send  # type: ignore[import-not-found]


def main(descriptor: int, memory: int, seconds: float, characters: int) -> None:
    parent = socket.socket(fileno=descriptor)
    find_packages()
    try:
        compiled = lru_cache(maxsize=8)(make_environment().from_string)
    except ImportError:
        send(parent, b"F" + b"chat templates need jinja2: pip install perilune")
        return
    for warm_up in ("{{ [1] | tojson }}{{ strftime_now('%Y') }}", "{{ raise_exception('') }}", "{% if"):
        answer_to(compiled, {"template": warm_up, "variables": {}}, 100)  # whatever loads late loads now
    give_up_privileges(memory)
    send(parent, b"P")
    while (message := receive(parent)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(answer_to(compiled, json.loads(message), characters)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(parent, b"P" + answer)


def answer_to(compiled: Callable[[str], Any], request: dict[str, Any], characters: int) -> dict[str, str]:
    pieces: list[str] = []
    length = 0
    try:
        for piece in compiled(request["template"]).generate(**request["variables"]):
            length += len(piece)
            if length > characters:
                return {"error": f"it writes more than {characters} characters"}
            pieces.append(piece)
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except Exception as error:  # a template may raise anything at all
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"text": "".join(pieces)}


def make_environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant wrote; the text is the same without."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: object) -> None:
        raise TemplateError(str(message))

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    own: Any = environment.globals
    del own["lipsum"]
    own |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
