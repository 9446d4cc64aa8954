"""A picture, what is asked about it, and the answer, as tokens.

    [BOS] media tokens, prompt "\\n" answer [EOS]

Media tokens are those of data/media.py; a video is a row of timestamped chunks. Prompt and answer are encoded apart, so
that a prompt typed by a person gives the very tokens that were trained on. Only the answer and [EOS] are to be
predicted: never a media token, and the prompt only when asked for.

    task      picture                        answer
    svg       any picture with a source      its SVG
    html      a page                         its HTML
    video     the frames of an animation     its animated SVG
    others    any picture                    the answer of a question that came with the sample
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from perilune.data.fusion import FusionConfig
from perilune.data.media import Media, MediaPrompt, prompt_tokens
from perilune.data.raster import decode_png, rasterize, rasterize_png
from perilune.data.scenes import VERSION as SCENES_VERSION
from perilune.data.scenes import Sample, ScenesConfig, make_sample, page_pool
from perilune.data.tokenizer import Tokenizer

Task = Literal["svg", "html", "video", "caption", "count", "box", "ocr", "spatial", "chart", "colour", "motion"]
TASKS: tuple[Task, ...] = get_args(Task)

PROMPTS: dict[str, str] = {
    "svg": "Write it as SVG.",
    "html": "Write it as HTML.",
    "video": "Write it as animated SVG.",
}
"""How a picture's source is asked for, in training and by `perilune generate --to`."""

FRAMES_PER_SECOND = 2  # of an animation's frames as a video: all of them are kept (images.py samples at 2 as well)


@dataclass(frozen=True, kw_only=True)
class VisionDataConfig:
    """Pictures made on the fly, and what is asked about them."""

    scenes: ScenesConfig = field(default_factory=ScenesConfig)
    tasks: tuple[Task, ...] = ("svg",)
    """What may be asked; each sample is asked one of those it can answer."""
    fusion: FusionConfig = field(default_factory=FusionConfig)
    train_prompt: bool = False
    """Whether the prompt is to be predicted too."""
    workers: int = 1
    """Processes that make pictures ahead of the training; 0: in the training process."""
    dialect_texts: int = 2000
    """Answers that the tokenizer sees beside the corpus, so that it does not cut tags and numbers into crumbs."""
    samples: int = 64
    """Held-out pictures that are drawn and scored after the last step."""
    sample_tokens: int = 256

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        if not self.tasks or any(task not in TASKS for task in self.tasks):
            raise ValueError(f"data.vision.tasks is {self.tasks!r}, expected some of {', '.join(TASKS)}")
        for name in ("workers", "dialect_texts", "samples", "sample_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"data.vision.{name} is {getattr(self, name)!r}, expected 0 or more")


@dataclass(frozen=True, kw_only=True, eq=False)
class Exercise:
    """One sample with the one thing that is asked about it."""

    sample: Sample
    task: Task
    prompt: str
    answer: str


@dataclass(frozen=True, kw_only=True, eq=False)
class VisionDocument:
    """tokens: int32 [n], from [BOS] to [EOS]. predicted: bool [n], which of them count in the loss."""

    tokens: np.ndarray
    predicted: np.ndarray
    media: tuple[Media, ...]


def exercises(sample: Sample, tasks: Sequence[Task]) -> list[Exercise]:
    """Everything of `tasks` that this sample can be asked."""
    found: list[Exercise] = []
    for task in tasks:
        for prompt, answer in _asked(sample, task):
            found.append(Exercise(sample=sample, task=task, prompt=prompt, answer=answer))
    return found


def _asked(sample: Sample, task: Task) -> list[tuple[str, str]]:
    if task == "svg":
        return [(PROMPTS[task], sample.svg)] if not sample.html and not sample.frames else []
    if task == "html":
        return [(PROMPTS[task], sample.html)] if sample.html else []
    if task == "video":
        return [(PROMPTS[task], sample.svg)] if sample.frames else []
    return [(question.prompt, question.answer) for question in sample.questions if question.task == task]


def exercise(config: VisionDataConfig, seed: int, number: int, *, held_out: bool = False) -> Exercise | None:
    """Exercise `number`, a pure function of its arguments; None for a sample that answers none of the tasks."""
    asks = any(task not in PROMPTS for task in config.tasks)
    sample = make_sample(seed, number, config.scenes, held_out=held_out, with_questions=asks)
    found = exercises(sample, config.tasks)
    return found[_spread(number) % len(found)] if found else None


def _spread(number: int) -> int:
    """A hash (Knuth's multiplicative one), so that the choice of a task does not go with the kind of the sample."""
    return (number * 2654435761 % (1 << 32)) >> 8


def pictures(sample: Sample) -> tuple[list[Media], list[list[tuple[str, Media]]]]:
    """The images and the videos of a sample, one of which is empty."""
    from perilune.data.images import image_media, video_media  # reads and scales with Pillow, which text needs not

    if sample.frames:
        drawn = {source: rasterize(source, *sample.size) for source in set(sample.frames)}  # things stop and come back
        frames = [drawn[source] for source in sample.frames]
        return [], [video_media(frames, [number / FRAMES_PER_SECOND for number in range(len(frames))])]
    return [image_media(decode_png(still_png(sample)))], []


def still_png(sample: Sample) -> bytes:
    """The picture of a sample that does not move, as a PNG file: the one that came with it, or what resvg draws."""
    return sample.png or rasterize_png(sample.svg, *sample.size)


def question(tokenizer: Tokenizer, exercise: Exercise, *, shown: Sample | None = None) -> MediaPrompt:
    """[BOS], the pictures (of `shown` instead, where given) and the prompt: all that comes before the answer."""
    images, videos = pictures(exercise.sample if shown is None else shown)
    return ask(tokenizer, exercise.prompt, images=images, videos=videos)


def ask(
    tokenizer: Tokenizer,
    prompt: str,
    *,
    images: Sequence[Media] = (),
    videos: Sequence[Sequence[tuple[str, Media]]] = (),
) -> MediaPrompt:
    """The tokens before an answer, for any pictures and any prompt."""
    asked = prompt_tokens(tokenizer, prompt + "\n", images=images, videos=videos)
    return MediaPrompt(tokens=[tokenizer.bos_id, *asked.tokens], media=asked.media)


def document(tokenizer: Tokenizer, exercise: Exercise, *, train_prompt: bool = False) -> VisionDocument:
    asked = question(tokenizer, exercise)
    answer = [*tokenizer.encode(exercise.answer), tokenizer.eos_id]
    predicted = np.zeros(len(asked.tokens) + len(answer), dtype=bool)
    predicted[len(asked.tokens) :] = True
    if train_prompt:
        num_prompt = len(tokenizer.encode(exercise.prompt + "\n"))
        predicted[len(asked.tokens) - num_prompt : len(asked.tokens)] = True
    return VisionDocument(
        tokens=np.array([*asked.tokens, *answer], dtype=np.int32), predicted=predicted, media=asked.media
    )


def dialect(config: VisionDataConfig) -> list[str]:
    """Prompts and answers as training text for a tokenizer."""
    found = (exercise(config, 0, number) for number in range(config.dialect_texts))
    return [f"{each.prompt}\n{each.answer}" for each in found if each is not None]


def dialect_fingerprint(config: VisionDataConfig) -> str:
    """What `dialect` is a function of."""
    if not config.dialect_texts:
        return ""
    pages = f" {page_pool(config.scenes).digest}" if config.scenes.pages else ""
    return f"dialect {SCENES_VERSION} {config.dialect_texts} {config.tasks!r} {config.scenes!r}{pages}"
