"""Drawing and looking: true answers earn everything, others what they are worth; nothing said breaks a judge."""

import base64
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.raster import decode_png, rasterize
from perilune.data.scenes import ScenesConfig, parse_svg
from perilune.rl.environment import reward_of
from perilune.rl.environments.drawing import STRIDE, Drawing, in_words
from perilune.rl.environments.looking import Looking, closeness
from tests.rl.environments.said import played

SMALL = ScenesConfig(sizes=((56, 56),), max_shapes=3)


def shown(talk) -> np.ndarray:
    (part,) = [part for part in talk.messages[0]["content"] if part["type"] == "image_url"]
    return decode_png(base64.b64decode(part["image_url"]["url"].partition(",")[2]))


def test_the_true_source_earns_everything_and_the_picture_shown_is_its_own():
    environment = Drawing(scenes=SMALL)
    for number in range(3):
        task = environment.task(number, "train")
        assert json.loads(json.dumps(dict(task.data))) == dict(task.data)
        facets, talk = played(environment, task, task.data["svg"])
        assert facets["outcome"] == pytest.approx(1.0) and facets["valid"] == 1.0
        assert reward_of(task, facets) == facets["outcome"]
        np.testing.assert_array_equal(shown(talk), rasterize(task.data["svg"], *task.data["size"]))


def test_another_drawing_earns_less_and_what_cannot_be_drawn_nothing():
    environment = Drawing(scenes=SMALL)
    task, other = environment.task(0, "train"), environment.task(1, "train")
    assert played(environment, task, other.data["svg"])[0]["outcome"] < 0.9
    for hostile in ("", "no", "<svg", "<svg><script>x</script></svg>", "\x00\ud800" * 9, "<svg>" * 3000):
        assert played(environment, task, hostile)[0]["outcome"] == 0.0


def test_kinds_of_shapes_are_looked_at_and_paid_for_where_told():
    blind, asking = Drawing(scenes=SMALL), Drawing(scenes=SMALL, kinds=0.25)
    for number in range(20):
        task, told = (environment.task(number, "train") for environment in (blind, asking))
        true = task.data["svg"]
        facets, _ = played(asking, told, true)
        assert facets["kinds"] == 1.0 and reward_of(told, facets) == pytest.approx(1.0)
        head, tail = true[: true.index(">") + 1], "</svg>"
        names = [shape.name for shape in parse_svg(true).shapes]
        dots = [f'<circle cx="{20 + n}" cy="20" r="9" fill="red"/>' for n in range(len(names))]
        facets, _ = played(asking, told, f"{head}{''.join(dots)}{tail}")
        assert facets["kinds"] == pytest.approx(names.count("circle") / len(names))
        assert reward_of(task, facets) == facets["outcome"]
        assert reward_of(told, facets) == pytest.approx(0.75 * facets["outcome"] + 0.25 * facets["kinds"])
    with pytest.raises(ValueError, match="drawing.kinds is 2"):
        Drawing(kinds=2)


def test_the_shuffled_control_shows_another_picture_and_judges_the_own():
    task = Drawing(scenes=SMALL, ask="shuffled").task(4, "test")
    own = Drawing(scenes=SMALL).task(4, "test")
    assert task.data["svg"] == own.data["svg"] != task.data["shown"]
    facets, talk = played(Drawing(scenes=SMALL), task, task.data["svg"])
    assert facets["outcome"] == pytest.approx(1.0)
    assert not np.array_equal(shown(talk), rasterize(task.data["svg"], *task.data["size"]))


def test_the_picture_shown_instead_has_the_size_of_the_own_where_one_of_three_has():
    sizes = ((56, 56), (84, 84))
    pictures = Drawing(ask="shuffled", scenes=ScenesConfig(sizes=sizes))
    own = Drawing(scenes=ScenesConfig(sizes=sizes))
    found = set()
    for number in range(40):
        task = pictures.task(number, "train")
        others = [own.task(number + STRIDE * turn, "train").data for turn in (1, 2, 3)]
        same = [other["svg"] for other in others if other["size"] == task.data["size"]]
        assert task.data["shown"] == (same[0] if same else others[0]["svg"])
        found.add(bool(same))
    assert found == {True, False}


def test_words_hold_every_shape_and_no_picture():
    environment = Drawing(scenes=SMALL, ask="words")
    task = environment.task(2, "train")
    _, talk = played(environment, task, "")
    assert isinstance(talk.messages[0]["content"], str) and in_words(task.data["svg"]) in talk.messages[0]["content"]
    assert in_words(task.data["svg"]).count("[") == len(parse_svg(task.data["svg"]).shapes)


def test_train_and_test_share_no_picture():
    environment = Drawing(scenes=ScenesConfig(sizes=((28, 28),), max_shapes=1, grid=14))
    sources = {split: {environment.task(n, split).data["svg"] for n in range(60)} for split in ("train", "test")}
    assert not sources["train"] & sources["test"]


@pytest.mark.parametrize("task,kind", [("count", "scene"), ("box", "scene"), ("spatial", "scene"), ("colour", "scene"),
                                       ("ocr", "text"), ("chart", "chart")])  # fmt: skip
def test_every_question_is_answered_by_its_own_answer(task, kind):
    environment = Looking(tasks=(task,), scenes=ScenesConfig(kinds=(kind,), sizes=((112, 112),)))
    for number in range(3):
        asked = environment.task(number, "test")
        facets, talk = played(environment, asked, asked.data["answer"])
        assert facets == {"outcome": 1.0, "exact": 1.0}, asked
        assert talk.messages[0]["content"][-1]["text"] == asked.data["prompt"]
        assert played(environment, asked, "")[0]["outcome"] == 0.0


@pytest.mark.parametrize(
    "task,reply,answer,value",
    [
        ("count", "There are 3.", "3", 1.0),
        ("count", "4", "3", 0.75),
        ("count", "-9", "3", 0.0),
        ("count", "9" * 4000, "3", 0.0),
        ("box", "[0, 0, 10, 10]", "[0, 0, 10, 10]", 1.0),
        ("box", "[0, 0, 10, 5]", "[0, 0, 10, 10]", 0.5),
        ("box", "[0, 0, 10, 10] [20, 20, 30, 30]", "[0, 0, 10, 10]", 2 / 3),
        ("box", "[1, 2, 3, 4]" * 100, "[1, 2, 3, 4]", 0.0),
        ("ocr", "hallo", "Hello", 0.8),
        ("ocr", "  HELLO\n", "Hello", 1.0),
        ("spatial", "I think yes", "Yes", 1.0),
        ("spatial", "yes no", "Yes", 0.0),
        ("chart", "42.", "42", 1.0),
    ],
)
def test_what_a_reply_is_worth(task, reply, answer, value):
    assert closeness(task, reply, answer) == pytest.approx(value)


@given(st.sampled_from(["count", "box", "ocr", "spatial"]), st.text(max_size=300))
@settings(max_examples=60, deadline=None)
def test_no_reply_breaks_the_judge(task, reply):
    assert 0.0 <= closeness(task, reply, {"count": "2", "box": "[1, 2, 3, 4]"}.get(task, "yes")) <= 1.0


def test_the_shuffled_control_asks_the_same_of_another_picture():
    plain, other = (Looking(scenes=SMALL, shuffled=each).task(5, "train").data for each in (False, True))
    assert (plain["prompt"], plain["answer"]) == (other["prompt"], other["answer"]) and plain["svg"] != other["svg"]


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Drawing(ask="sound"), "expected one of picture"),
        (lambda: Drawing(scenes=ScenesConfig(kinds=("html",))), "not judged as drawings"),
        (lambda: Looking(tasks=("smell",)), "expected some of count"),
        (lambda: Looking(scenes=ScenesConfig(kinds=("animation",))), "still pictures"),
        (lambda: Looking(tasks=("chart",)).task(0, "train"), "take other kinds"),
    ],
)
def test_wrong_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
