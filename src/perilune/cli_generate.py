"""`perilune generate RUN`: continue a prompt, or answer about pictures, with a trained run.

With `--image` or `--video` the prompt is a question about them. `--to svg` and `--to html` ask for their source. What a
model writes is a stranger's input: only what passes the guards of data/svg_guard.py and data/html_guard.py and is drawn
by a worker within its limits (data/pictures.py) is written. `--to svg` writes the source as the guard wrote it, `--to
html` a page with the picture and, as text, the source.
"""

import html
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from perilune.cli import UserError, _parse, _positional, _print_json, _run_folder

if TYPE_CHECKING:
    from perilune.data.images import ProcessorConfig
    from perilune.data.media import MediaPrompt
    from perilune.train import RunConfig

FORMATS = ("text", "svg", "html")


@dataclass(kw_only=True)
class GenerateFlags:
    prompt: str = ""
    """Text to continue, or a question about the pictures; "-" reads standard input."""
    image: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A picture to look at (PNG, JPEG, WebP, GIF); several are allowed. <image> in the prompt marks its place."""
    video: str | None = None
    """A folder of frames, or an animated GIF or WebP."""
    to: str = "text"
    """text, svg or html: what to write; or the name of a file that ends in .svg or .html."""
    max_new_tokens: int | None = None
    """At most so many; by default 200 for text and 2000 for a source."""
    temperature: float | None = None
    """0 is greedy; by default 0.8 for text and 0 for a source."""
    top_p: float = 0.95
    top_k: int = 0
    seed: int = 0
    device: str = "auto"
    """"auto" takes the first of cuda, cpu that is there."""
    runs: str = "runs"
    """Folder that holds runs."""
    json: bool = False
    """Print prompt, text, tokens and speed as JSON at the end instead of streaming."""


def generate_verb(arguments: list[str]) -> None:
    """Continue a prompt with a trained run, streaming; or look at pictures."""
    example = 'perilune generate nano --prompt "import os"'
    name, rest = _positional(arguments, "RUN", "a run's name or folder", example, helps=True)
    flags = _parse(
        f"perilune generate {name}",
        "Continue a prompt with a trained run, streaming; or answer about pictures.\n\n"
        f'example: perilune generate {name} --prompt "import os"\n\n'
        f"example: perilune generate {name} --image picture.png --to svg",
        GenerateFlags,
        rest,
    )
    form, path = _target(flags)
    from perilune.data.media import MediaPrompt
    from perilune.hub import is_model_folder
    from perilune.hub.opened import read_processor
    from perilune.train.run_folder import load_run
    from perilune.train.trainer import pick_device

    folder = _run_folder(name, flags.runs)
    processor = read_processor(folder) if is_model_folder(folder) else None
    if flags.image or flags.video is not None:
        from perilune.train.run_folder import read_config

        _check_sees(name, read_config(folder), video=flags.video is not None, is_run=processor is None)
    model, tokenizer, config = load_run(folder, device=pick_device(flags.device, "--device"))
    prompt = sys.stdin.read() if flags.prompt == "-" else flags.prompt
    size = (0, 0)
    if flags.image or flags.video is not None:
        prompt = prompt or _default_prompt(form, config, video=flags.video is not None)
        asked, size = _asked(tokenizer, prompt, flags, config, processor)
    else:
        asked = MediaPrompt(tokens=[tokenizer.bos_id, *tokenizer.encode(prompt)], media=())
    stream = _stream(model, tokenizer, asked, flags, form)
    began, tokens, text = time.perf_counter(), [], ""
    streaming = not flags.json and form == "text"
    if streaming and not asked.media:
        print(prompt, end="", flush=True)
    for token, piece in stream:
        tokens += [] if token is None else [token]
        text += piece
        if streaming:
            print(piece, end="", flush=True)
    if streaming:
        print()
    seconds = time.perf_counter() - began
    written = None if form == "text" else _write(text, form, path, size, video=flags.video is not None)
    if flags.json:
        speed = round(len(tokens) / seconds, 1) if seconds else None
        found = {"prompt": prompt, "text": text, "tokens": tokens, "tokens_per_s": speed}
        _print_json(found if written is None else {**found, "file": str(written)})
    elif written is not None:
        print(f"{written}: {len(tokens)} tokens")


def _target(flags: GenerateFlags) -> tuple[str, Path | None]:
    """What is asked for, and the file it goes to."""
    suffix = Path(flags.to).suffix.lower().removeprefix(".")
    form, path = (suffix, Path(flags.to)) if suffix in ("svg", "html") else (flags.to, None)
    if form not in FORMATS:
        raise UserError(f"--to is {flags.to!r}, expected {', '.join(FORMATS)}, or a file that ends in .svg or .html")
    if flags.video == "":  # as a path it is the current folder
        raise UserError("--video is '', expected a folder of frames, or an animated GIF or WebP")
    if flags.image and flags.video is not None:
        raise UserError("--image and --video are both given: ask about one of them")
    if form != "text" and not flags.image and flags.video is None:
        raise UserError(f"--to {flags.to} writes a picture's source: give one with --image or --video")
    if form != "text" and len(flags.image) > 1:
        raise UserError(f"--to {flags.to} writes the source of one picture, but --image names {len(flags.image)}")
    if form != "text" and path is None:
        seen = flags.image[0] if flags.image else flags.video or ""
        path = Path(f"{Path(seen).stem or 'picture'}.{form}")
        if path.exists():  # a drawing by hand often lies beside the picture of it
            raise UserError(f"{str(path)!r} is already there: --to {path} replaces it, --to other.{form} leaves it")
    if path is not None and path.is_dir():
        raise UserError(f"--to {flags.to!r} is a folder, expected a file: {str(path / f'picture.{form}')!r}")
    return form, path


def _check_sees(name: str, config: "RunConfig", *, video: bool, is_run: bool = True) -> None:
    if config.model.vision is None:
        raise UserError(
            f"{name!r} has no vision tower (model.vision is None): it reads text only; train one with pictures, as "
            "`perilune train nano`"
        )
    if not is_run:
        return  # what it was trained on is not in the folder
    trained = config.data.vision if config.data.has_pictures else None
    if trained is None:
        print(f"perilune: the run {name!r} has a vision tower but saw no pictures in training", file=sys.stderr)
    elif video and "video" not in trained.tasks and "motion" not in trained.tasks:
        print(f"perilune: the run {name!r} saw pictures but no videos in training; expect little", file=sys.stderr)


def _default_prompt(form: str, config: "RunConfig", *, video: bool) -> str:
    from perilune.data.vision_documents import PROMPTS

    if video:
        return PROMPTS["video"]
    trained = () if config.data.vision is None else config.data.vision.tasks
    return PROMPTS["html" if form == "html" and "html" in trained else "svg"]


def _asked(
    tokenizer: Any, prompt: str, flags: GenerateFlags, config: "RunConfig", processor: "ProcessorConfig | None"
) -> tuple["MediaPrompt", Any]:
    """The tokens of the question, and the size in pixels of what is shown."""
    from perilune.data.images import image_media, load_frames, load_image, video_media
    from perilune.data.vision_documents import ask

    if flags.video is not None:
        frames, times = load_frames(flags.video)
        chunks = video_media(frames, times, processor or _processor(flags.video, frames[0].shape, config))
        return ask(tokenizer, prompt, videos=[chunks]), _size(frames[0].shape, chunks[0][1].grid)
    pictures = [load_image(path) for path in flags.image]
    media = [
        image_media(picture, processor or _processor(path, picture.shape, config))
        for path, picture in zip(flags.image, pictures, strict=True)
    ]
    return ask(tokenizer, prompt, images=media), _size(pictures[0].shape, media[0].grid)


def _size(shape: tuple[int, ...], grid: tuple[int, int, int]) -> tuple[int, int]:
    """Width and height of the canvas the answer is drawn on: the picture's, or what is left of it after scaling."""
    from perilune.data.media import PATCH_SIZE

    height, width = grid[1] * PATCH_SIZE, grid[2] * PATCH_SIZE
    return min(width, shape[1]), min(height, shape[0])


def _processor(path: str, shape: tuple[int, ...], config: "RunConfig") -> "ProcessorConfig":
    """The published budgets, or those of the largest picture the run was trained on."""
    from perilune.data.images import ProcessorConfig
    from perilune.data.media import PATCH_SIZE

    if config.data.vision is None:
        return ProcessorConfig()
    sizes = config.data.vision.scenes.sizes
    height, width = shape[:2]
    if (width, height) not in sizes:
        seen = ", ".join(f"{w} x {h}" for w, h in sizes)
        smaller = ": it is scaled down" if width * height > max(w * h for w, h in sizes) else ""
        print(
            f"perilune: {path!r} is {width} x {height} pixels and the run has only seen {seen}{smaller}; expect little",
            file=sys.stderr,
        )
    most = max(w * h for w, h in sizes) // PATCH_SIZE**2
    return ProcessorConfig(max_patches=most, max_patches_per_frame=most)


def _stream(
    model: Any, tokenizer: Any, asked: "MediaPrompt", flags: GenerateFlags, form: str
) -> Iterator[tuple[int | None, str]]:
    """(token, text that became complete with it); at the end (None, what was held back)."""
    from perilune.data import StreamDecoder
    from perilune.model import SamplingConfig, generate
    from perilune.train.drawing import media_input
    from perilune.train.evaluate import forbidden_tokens

    plain = form == "text"
    temperature = flags.temperature if flags.temperature is not None else (0.8 if plain else 0.0)
    limit = flags.max_new_tokens if flags.max_new_tokens is not None else (200 if plain else 2000)
    sampling = SamplingConfig(
        max_new_tokens=limit, temperature=temperature, top_p=flags.top_p, top_k=flags.top_k, seed=flags.seed
    )
    decoder = StreamDecoder(tokenizer)
    for token in generate(
        model,
        asked.tokens,
        sampling,
        stop=frozenset({tokenizer.eos_id}),
        forbidden=forbidden_tokens(model, tokenizer),
        media=media_input(tokenizer, [asked], model.embed_tokens.weight.device),
    ):
        yield token, decoder.push(token)
    yield None, decoder.finish()


def _write(text: str, form: str, path: Path | None, size: tuple[int, int], *, video: bool) -> Path:
    """The source or its page in a file; UserError with the reason when it may not be written."""
    from perilune.data.hostile import PictureError
    from perilune.data.pictures import draw_clean_svg
    from perilune.data.svg_guard import clean_svg

    assert path is not None
    if form == "svg" and not text.lstrip().startswith("<svg"):
        raise UserError(f"the model wrote no SVG: its answer begins with {text[:60]!r}")
    try:
        if form == "svg":
            clean = clean_svg(text, width=size[0], height=size[1])
            draw_clean_svg(clean)  # what the next reader's renderer would hang on is not handed on
            content = clean.source
        else:
            content = _page(text, path.stem, size, video=video)
    except PictureError as error:
        raise UserError(f"what the model wrote is not written to {str(path)!r}: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(content + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def _page(text: str, title: str, size: tuple[int, int], *, video: bool) -> str:
    """A page that shows what a source draws, as PNG files, and the source, as text. PictureError when it is refused."""
    from perilune.data.hostile import RendererMissing
    from perilune.data.html_guard import clean_html
    from perilune.data.pictures import draw_frames, draw_html, draw_svg
    from perilune.data.raster import encode_png
    from perilune.data.scenes import DialectError
    from perilune.data.svg_guard import clean_svg
    from perilune.report.page import png_uri

    width, height = size
    problem = ""
    if text.lstrip().startswith("<svg"):
        source = clean_svg(text, width=width, height=height).source
        try:
            drawn = draw_frames(text, width, height) if video else [draw_svg(text, width, height)]
        except DialectError:  # it moves in ways that only a browser follows
            drawn = [draw_svg(text, width, height)]
    else:
        source, drawn = clean_html(text, width=width, height=height).source, []
        try:
            drawn = [draw_html(text, width, height)]
        except RendererMissing as missing:
            problem = f"not drawn: {missing}"
            print(f"perilune: {problem}", file=sys.stderr)
    pictures = "\n".join(f'<img src="{png_uri(encode_png(pixels))}" alt="what the source draws">' for pixels in drawn)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{html.escape(title)}</title><style>pre{{white-space:pre-wrap}}</style></head>\n"
        f"<body>\n{pictures or f'<p>{html.escape(problem)}</p>'}\n<pre>{html.escape(source)}</pre>\n</body>\n</html>"
    )
