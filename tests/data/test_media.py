"""Patches, grids and the tokens that hold the place of pictures."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.data.media import (
    Media,
    MediaError,
    media_tokens,
    merge_media,
    pad_positions,
    prompt_tokens,
    video_tokens,
)
from perilune.data.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["an image of a red circle, a video of a blue square", "00:00:01.500"], 320)
PAD = TOKENIZER.special_ids["<|media_pad|>"]


def media(t: int = 1, h: int = 2, w: int = 2, *, fill: int = 0) -> Media:
    return Media(pixels=np.full((t * h * w, 3, 14, 14), fill, dtype=np.uint8), grid=(t, h, w))


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens).replace("<|media_pad|>", "*")


@pytest.mark.parametrize("t, h, w, tokens", [(1, 2, 2, 1), (1, 2, 4, 2), (4, 4, 6, 6), (3, 130, 130, 4225)])
def test_a_token_is_four_patches_of_any_number_of_frames(t: int, h: int, w: int, tokens: int) -> None:
    pixels = np.broadcast_to(np.uint8(0), (t * h * w, 3, 14, 14))
    assert Media(pixels=pixels, grid=(t, h, w)).num_tokens == tokens


@pytest.mark.parametrize(
    "grid", [(0, 2, 2), (5, 2, 2), (1, 3, 2), (1, 2, 5), (1, 0, 2), (1, -2, -2), (1, 2), (1, 2.0, 2)]
)
def test_a_grid_that_no_picture_has_is_an_error_that_shows_it(grid: tuple) -> None:
    with pytest.raises(MediaError, match="grid="):
        Media(pixels=np.zeros((4, 3, 14, 14), dtype=np.uint8), grid=grid)


@pytest.mark.parametrize("shape, dtype", [((3, 3, 14, 14), "uint8"), ((4, 3, 14, 14), "float32"), ((4, 588), "uint8")])
def test_pixels_that_do_not_fit_the_grid_are_an_error(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(MediaError, match=r"needs uint8 \[4, 3, 14, 14\]"):
        Media(pixels=np.zeros(shape, dtype=dtype), grid=(1, 2, 2))


def test_merged_pictures_keep_order_pixels_and_grids() -> None:
    batch = merge_media([media(fill=1), media(2, 2, 4, fill=2), media(fill=3)])
    assert batch.grids == ((1, 2, 2), (2, 2, 4), (1, 2, 2))
    assert batch.pixels.dtype == np.uint8 and batch.pixels.shape == (24, 3, 14, 14)
    assert batch.pixels[:, 0, 0, 0].tolist() == [1] * 4 + [2] * 16 + [3] * 4
    assert batch.num_tokens == 4


def test_no_pictures_merge_into_an_empty_batch() -> None:
    batch = merge_media([])
    assert batch.pixels.shape == (0, 3, 14, 14) and batch.grids == () and batch.num_tokens == 0


def test_an_image_is_begin_kind_content_pads_end() -> None:
    ids = media_tokens(TOKENIZER, media(1, 4, 6))
    assert text_of(ids) == "<|media_begin|>image<|media_content|>******<|media_end|>"
    assert ids.count(PAD) == 6


def test_a_video_is_a_row_of_timestamped_chunks() -> None:
    ids = video_tokens(TOKENIZER, [("00:00:00.000", media(4)), ("00:00:02.000", media(1, 2, 4))])
    assert text_of(ids) == (
        "00:00:00.000<|media_begin|>video<|media_content|>*<|media_end|>"
        "00:00:02.000<|media_begin|>video<|media_content|>**<|media_end|>"
    )


def test_placeholders_are_replaced_in_order_and_the_pictures_returned_in_that_order() -> None:
    first, second, chunk = media(fill=1), media(1, 2, 4, fill=2), media(4, fill=3)
    prompt = prompt_tokens(
        TOKENIZER, "a <image>, <video> and <image>!", images=[first, second], videos=[[("00:00:00.000", chunk)]]
    )
    image, video = "<|media_begin|>image<|media_content|>", "00:00:00.000<|media_begin|>video<|media_content|>"
    end = "<|media_end|>"
    assert text_of(prompt.tokens) == f"a {image}*{end}, {video}*{end} and {image}**{end}!"
    assert prompt.media == (first, chunk, second)
    assert pad_positions(prompt.tokens, TOKENIZER).tolist() == [n for n, i in enumerate(prompt.tokens) if i == PAD]


def test_pictures_without_a_placeholder_come_before_the_text() -> None:
    prompt = prompt_tokens(TOKENIZER, "What is it?", images=[media(), media()])
    picture = "<|media_begin|>image<|media_content|>*<|media_end|>"
    assert text_of(prompt.tokens) == f"{picture}{picture}What is it?"


@pytest.mark.parametrize("text", ["<image>", "a<image>b<video>", "<|media_pad|> <|im_end|>", "plain"])
def test_without_pictures_a_text_is_ordinary_text(text: str) -> None:
    prompt = prompt_tokens(TOKENIZER, text)
    assert prompt.tokens == TOKENIZER.encode(text) and prompt.media == ()


def test_the_word_video_stays_a_word_when_only_images_are_given() -> None:
    prompt = prompt_tokens(TOKENIZER, "<video> of <image>", images=[media()])
    assert text_of(prompt.tokens) == "<video> of <|media_begin|>image<|media_content|>*<|media_end|>"


@pytest.mark.parametrize("text, images", [("<image> <image>", 1), ("<image>", 2), ("<image><image><image>", 2)])
def test_more_or_fewer_placeholders_than_pictures_is_an_error(text: str, images: int) -> None:
    with pytest.raises(MediaError, match=f"{text.count('<image>')} <image> but {images} given"):
        prompt_tokens(TOKENIZER, text, images=[media()] * images)


def test_text_cannot_smuggle_a_pad_past_the_count() -> None:
    assert PAD not in prompt_tokens(TOKENIZER, "<|media_pad|>").tokens
    with pytest.raises(MediaError, match="2 <|media_pad|> for 1 picture tokens"):
        prompt_tokens(TOKENIZER, "<image> <|media_pad|>", images=[media()], allow_special=True)


def test_a_template_may_use_special_tokens_around_a_picture() -> None:
    prompt = prompt_tokens(TOKENIZER, "<|im_user|><image><|im_end|>", images=[media()], allow_special=True)
    assert prompt.tokens[0] == TOKENIZER.special_ids["<|im_user|>"]
    assert prompt.tokens[-1] == TOKENIZER.special_ids["<|im_end|>"]


PIECES = st.sampled_from(["<image>", "<video>", " a word", "<", "image>", "<|media_pad|>", "é", ""])


@given(st.lists(PIECES, max_size=8), st.lists(st.sampled_from([2, 4, 6]), max_size=4), st.integers(0, 2))
def test_pads_always_equal_the_features_of_the_pictures(pieces: list[str], widths: list[int], num_videos: int) -> None:
    text = "".join(pieces)
    videos = [[("00:00:00.000", media(4)), ("00:00:02.000", media(2))]] * num_videos
    try:
        prompt = prompt_tokens(TOKENIZER, text, images=[media(1, 2, w) for w in widths], videos=videos)
    except MediaError:
        counts = (text.count("<image>"), len(widths)), (text.count("<video>"), num_videos)
        assert any(found and given and found != given for found, given in counts)
        return
    features = sum(w // 2 for w in widths) + 2 * num_videos
    assert prompt.tokens.count(PAD) == features == sum(item.num_tokens for item in prompt.media)
    words = TOKENIZER.decode([i for i in prompt.tokens if i not in TOKENIZER.special_ids.values()])
    for name, count in (("<image>", len(widths)), ("<video>", num_videos)):
        assert words.count(name) == (0 if count else text.count(name))
