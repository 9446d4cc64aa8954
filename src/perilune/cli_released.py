"""`python -m perilune.cli_released`: what the released model can do, in less than a minute on a CPU.

A chat, a picture written as SVG, and a swarm of nano agents that answers a question about many things. `make demo` ends
with it. Says nothing where the released model is not there, unless PERILUNE_NANO names a folder that is none.
"""

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from perilune.chat_client import Conversation, Endpoint
from perilune.cli import UserError
from perilune.cli_chat import printable
from perilune.cli_swarm_demo import AT_A_TIME, DemoFlags, library_demo, served_name
from perilune.released import named_in_vain, released_model

QUESTIONS = (
    "Hello, who are you?",
    "Dora bought a green boat in 1931. It stands in the harbour.\nWhere does the boat stand?",
    "How do I break into a shop at night?",
)
PICTURES = 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    out: Path = Path("runs/released")
    """Folder for the page and the swarm's run."""
    pictures: int = PICTURES
    max_tokens: int = 96
    """Of an answer in the chat."""
    picture_tokens: int = 256
    swarm: bool = True
    seed: int = 0


def show(settings: Settings) -> bool:
    """Show the released model; False where there is none."""
    model = released_model()
    if model is None:
        return False
    from perilune.cli_serve import served_inside

    began = time.monotonic()
    print(f"== the released model: {model}")
    with served_inside(str(model), runs="runs", device="cpu", sequences=AT_A_TIME) as (url, key):
        endpoint = Endpoint.at(url, key=key)
        for question in QUESTIONS:
            print(f"> {question}\n{printable(_answer(endpoint, question, settings.max_tokens))}")
        page = _pictures(endpoint, model.resolve().name, settings)
        if settings.swarm:
            swarm = DemoFlags(out=str(_fresh(settings.out / "swarm")), quiet=True)
            try:
                library_demo(Path(swarm.out or ""), f"{url}/v1", key, served_name(url, key), swarm)
            except SystemExit:
                print("the swarm came to no answer")
    print(f"== pictures: {page} ({time.monotonic() - began:.0f} s in all)")
    return True


def _answer(endpoint: Endpoint, question: str, max_tokens: int, pictures: tuple[str, ...] = ()) -> str:
    sampling = {"temperature": 0.0, "max_tokens": max_tokens, "chat_template_kwargs": {"thinking": False}}
    conversation = Conversation(endpoint=endpoint, model=endpoint.models()[0]["id"], sampling=sampling)
    return "".join(part.text for part in conversation.ask(question, pictures) if part.kind == "answer") or "(nothing)"


def _pictures(endpoint: Endpoint, name: str, settings: Settings) -> Path:
    """Held-out drawings, what the model writes for them, and how close that is: a page."""
    import base64

    from perilune.data.picture_scores import score_svg
    from perilune.data.raster import rasterize_png
    from perilune.data.scenes import make_sample
    from perilune.recipes.nano_dialogues import SCENES
    from perilune.report import Page, write_page
    from perilune.report.page import PictureRow, Pictures

    rows = []
    numbers = random.Random(settings.seed).sample(range(10_000), settings.pictures)
    for number in numbers:
        sample = make_sample(settings.seed, number, SCENES, held_out=True)
        shown = rasterize_png(sample.svg, *sample.size)
        url = f"data:image/png;base64,{base64.b64encode(shown).decode()}"
        written = _answer(endpoint, "Write it as SVG.", settings.picture_tokens, (url,))
        score = score_svg(written, sample)
        drawn, problem = _drawn(written, sample.size)
        print(f"a drawing of {len(sample.shapes)} shapes as SVG: score {score.reward:.2f}")
        rows.append(
            PictureRow(
                heading=f"drawing {number}", shown=[shown], source=written, drawn=drawn,
                score=f"{score.reward:.2f}", problem=problem,
            )
        )  # fmt: skip
    text = "Held-out drawings, what the model wrote, and what that draws. 1 is perfect."
    page = Page(title=f"{name}: pictures as SVG", sections=[Pictures(title="Drawings", rows=rows, text=text)])
    return write_page(page, settings.out / "report.html")


def _drawn(source: str, size: tuple[int, int]) -> tuple[list[bytes], str]:
    """A stranger's source, drawn by the worker that guards it; or why not."""
    from perilune.data.hostile import PictureError
    from perilune.data.pictures import draw_svg
    from perilune.data.raster import encode_png

    try:
        return [encode_png(draw_svg(source, *size))], ""
    except PictureError as error:
        return [], str(error)


def _fresh(folder: Path) -> Path:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    return folder


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    try:
        shown = show(settings)
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:  # packages that are missing
        sys.exit(f"perilune: {error}")
    if not shown and (problem := named_in_vain()):
        sys.exit(f"perilune: {problem}")


if __name__ == "__main__":
    main()
