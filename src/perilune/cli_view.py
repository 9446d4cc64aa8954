"""`perilune view RUN`: a page of samples of a trained run: held-out pictures it draws, and texts it continues."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.cli import UserError, _parse, _positional, _print_json, _run_folder

if TYPE_CHECKING:
    from perilune.data import Tokenizer
    from perilune.model import Decoder
    from perilune.report import Page, Section
    from perilune.train import RunConfig
    from perilune.train.pictures import Drawing


@dataclass(kw_only=True)
class ViewFlags:
    out: str | None = None
    """The page to write; by default samples.html in the run's folder."""
    count: int = 24
    """Held-out pictures to draw, for each source the run was trained to write."""
    seed: int = 0
    """Of the texts that are sampled."""
    device: str = "auto"
    """"auto" takes the first of cuda, cpu that is there."""
    runs: str = "runs"
    """Folder that holds runs."""
    json: bool = False


def view_verb(arguments: list[str]) -> None:
    """Write a page of samples of a run."""
    example = "perilune view nano --out samples.html"
    name, rest = _positional(arguments, "RUN", "a run's name or folder", example, helps=True)
    help_text = (
        "Write a page of samples: held-out pictures with what the model makes of them, and texts it continues.\n\n"
        f"example: perilune view {name} --count 48 --out samples.html"
    )
    flags = _parse(f"perilune view {name}", help_text, ViewFlags, rest)
    if flags.count < 1:
        raise UserError(f"--count is {flags.count}, expected 1 or more")
    from perilune.report import write_page
    from perilune.train.run_folder import load_run
    from perilune.train.trainer import pick_device

    folder = _run_folder(name, flags.runs)
    out = folder / "samples.html" if flags.out is None else Path(flags.out)
    if out.is_dir():
        raise UserError(f"--out {str(out)!r} is a folder, expected a file: {str(out / 'samples.html')!r}")
    if not flags.json:
        print(f"drawing samples of {name} ...", file=sys.stderr)
    model, tokenizer, config = load_run(folder, device=pick_device(flags.device, "--device"))
    page, numbers = samples_page(folder.resolve().name, model, tokenizer, config, count=flags.count, seed=flags.seed)
    path = write_page(page, out)
    if flags.json:
        _print_json({"page": str(path), **numbers})
        return
    for task, means in numbers.items():
        control = "" if "shuffled" not in means else f" ({means['shuffled']:.3f} against other pictures)"
        print(f"{task}: {means['parses']:.0%} of {means['count']} parse, score {means['reward']:.3f}{control}")
    print(f"page: {path}")


def samples_page(
    name: str, model: "Decoder", tokenizer: "Tokenizer", config: "RunConfig", *, count: int, seed: int
) -> tuple["Page", dict[str, dict[str, float]]]:
    """The page, and the mean scores of every source that was asked for."""
    from perilune.report import Headline, Page

    sections, numbers = [], {}
    if config.data.has_pictures:
        for task in ("svg", "video", "html"):
            assert config.data.vision is not None
            if task in config.data.vision.tasks:
                section, means = _drawn_section(task, model, tokenizer, config, count)
                sections += [] if section is None else [section]
                numbers |= {task: means} if means else {}
    sections += _text_section(model, tokenizer, config, seed)
    headlines = [Headline(label=f"score of {task}", value=f"{means['reward']:.3f}") for task, means in numbers.items()]
    page = Page(
        title=f"Samples of {name}", subtitle="Held-out pictures and texts", headlines=headlines, sections=sections
    )
    return page, numbers


def _drawn_section(
    task: str, model: "Decoder", tokenizer: "Tokenizer", config: "RunConfig", count: int
) -> tuple["Section | None", dict[str, float]]:
    from statistics import fmean

    from perilune.data import VisionRows
    from perilune.data.hostile import RendererMissing
    from perilune.data.picture_scores import paired_scores, score_source
    from perilune.report.pictures import picture_row, pictures_section
    from perilune.serve.greedy import greedy_answers
    from perilune.train.pictures import draw_held_out

    vision = config.data.vision
    assert vision is not None
    rows = VisionRows(vision, tokenizer, seq_len=config.data.seq_len, seed=config.seed, held_out=True)
    drawings = draw_held_out(
        model,
        tokenizer,
        rows,
        count=count,
        max_new_tokens=max(vision.sample_tokens, config.data.seq_len),
        task=task,
        answer=greedy_answers,
    )
    if not drawings:
        return None, {}
    texts, samples = [each.text for each in drawings], [each.exercise.sample for each in drawings]
    own, others = [], []
    try:
        if len(drawings) > 1:
            own, others = paired_scores(texts, samples, score=score_source)
        else:
            own = [score_source(texts[0], samples[0])]
    except RendererMissing as missing:
        print(f"perilune: {task} is not scored: {missing}", file=sys.stderr)
    names = ("pixel", "f1", "reward") if task == "svg" else ("pixel", "reward")  # other sources have no shapes to match
    shown = []
    for number, each in enumerate(drawings):
        drawn, problem = _drawing(each)
        score = {} if not own else {name: getattr(own[number], name) for name in names}
        images = _images(each.exercise.sample)
        heading = f"{task} {number + 1}"
        shown.append(picture_row(heading, shown=images, source=each.text, drawn=drawn, problem=problem, score=score))
    means: dict[str, float] = {}
    if own:
        means = {"count": len(own), "parses": fmean(score.parses for score in own)}
        means["reward"] = fmean(score.reward for score in own)
        means |= {"shuffled": fmean(score.reward for score in others)} if others else {}
    text = "What the model was shown, the source it wrote, and what that source draws."
    return pictures_section(f"Pictures as {task}", shown, text=text), means


def _drawing(drawing: "Drawing") -> tuple[Any, str]:
    """PNG files of what the source draws, and why there are none."""
    from perilune.data.hostile import PictureError, RendererMissing
    from perilune.data.pictures import draw_frames, draw_html, draw_svg
    from perilune.data.raster import encode_png
    from perilune.data.scenes import DialectError

    width, height = drawing.exercise.sample.size
    try:
        if drawing.exercise.task == "html":
            return encode_png(draw_html(drawing.text, width, height)), ""
        if drawing.exercise.task == "video":
            return [encode_png(frame) for frame in draw_frames(drawing.text, width, height)], ""
        return encode_png(draw_svg(drawing.text, width, height)), ""
    except (PictureError, DialectError, RendererMissing) as error:
        return None, str(error)


def _images(sample: Any) -> list[bytes]:
    from perilune.data.raster import rasterize_png
    from perilune.data.vision_documents import still_png

    return [rasterize_png(source, *sample.size) for source in sample.frames] or [still_png(sample)]


def _text_section(model: "Decoder", tokenizer: "Tokenizer", config: "RunConfig", seed: int) -> list["Section"]:
    from perilune.model import SamplingConfig
    from perilune.report import Sample, Samples
    from perilune.train.evaluate import continuations

    if config.data.probe is not None:
        return []
    settings = config.trainer
    sampling = SamplingConfig(
        max_new_tokens=max(64, settings.sample_tokens), temperature=settings.sample_temperature, seed=seed
    )
    texts = continuations(model, tokenizer, settings.sample_prompts or ("",), sampling)
    samples = [Sample(heading=f"text {n + 1}", prompt=prompt, text=text) for n, (prompt, text) in enumerate(texts)]
    return [Samples(title="Texts", samples=samples, text="The prompt is in colour, the model's text follows.")]
