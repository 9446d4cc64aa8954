"""The spatial probe: answers follow from the shapes as told, are balanced, and are read off log-probs."""

import re
from collections import Counter

import numpy as np
import pytest
import torch

from perilune.data.scenes import box, mask, parse_svg
from perilune.data.tokenizer import Tokenizer
from perilune.eval.spatial import (
    KINDS,
    Item,
    choice_log_probs,
    paired_interval,
    right_of,
    spatial_item,
    spatial_items,
    spatial_score,
)
from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig

ITEMS = spatial_items(480)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([item.question for item in ITEMS[:50]], 400)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Decoder:
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_hidden_layers=2, layer_types=("kda", "mla"),
        kda=KDAConfig(num_heads=2, head_dim=8),
        mla=MLAConfig(num_attention_heads=2, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
        intermediate_size=48, residual="plain", initializer_range=0.3,
    )  # fmt: skip
    return Decoder(config, seed=1)


def _true_choice(item: Item) -> str:
    """Worked out from the text of the question alone."""
    told, asked = item.question.split("\n")
    if item.form == "svg":
        boxes = {f"{shape.colour} {shape.name}": box(shape) for shape in parse_svg(told).shapes}
        masks = {f"{shape.colour} {shape.name}": mask(shape, 112, 112) for shape in parse_svg(told).shapes}
        names = [shape.name for shape in parse_svg(told).shapes]
    else:
        boxes, masks, names = _read_sentences(told)
    if item.kind == "count":
        wanted = re.findall(r"How many (\w+)s are", asked)[0]
        return str(names.count(wanted))
    one, other = re.findall(r"the (\w+ (?:circle|rectangle))", asked)[:2]
    common = int((masks[one] & masks[other]).sum())
    if item.kind == "left":
        return min(one, other, key=lambda name: boxes[name][0]).split()[0]
    if item.kind == "above":
        return min(one, other, key=lambda name: boxes[name][1]).split()[0]
    if item.kind == "size":
        return max(one, other, key=lambda name: masks[name].sum()).split()[0]
    holds = common == masks[one].sum() if item.kind == "inside" else common > 0
    return "true" if holds else "false"


def _read_sentences(told: str) -> tuple[dict, dict, list]:
    boxes, masks, names = {}, {}, []
    y, x = np.mgrid[0:112, 0:112] + 0.5
    for sentence in re.findall(r"An? [^.]*\.", told):
        colour, name = sentence.split()[1:3]
        n = [int(each) for each in re.findall(r"\d+", sentence)]
        if name == "circle":
            boxes[f"{colour} {name}"] = (n[0] - n[2], n[1] - n[2], n[0] + n[2], n[1] + n[2])
            masks[f"{colour} {name}"] = (x - n[0]) ** 2 + (y - n[1]) ** 2 < n[2] ** 2
        else:
            boxes[f"{colour} {name}"] = tuple(n)
            masks[f"{colour} {name}"] = (x > n[0]) & (x < n[2]) & (y > n[1]) & (y < n[3])
        names.append(name)
    return boxes, masks, names


def test_every_answer_follows_from_what_the_question_tells() -> None:
    for item in ITEMS:
        assert item.choices[item.answer] == _true_choice(item), item


def test_kinds_forms_and_answers_are_balanced_and_no_item_comes_twice() -> None:
    assert Counter(item.kind for item in ITEMS) == {kind: 80 for kind in KINDS}
    for kind in KINDS:
        counts = Counter((item.form, item.answer) for item in ITEMS if item.kind == kind)
        assert len(set(counts.values())) == 1
    assert len({item.question for item in ITEMS}) == len(ITEMS)


def test_an_item_depends_on_its_seed_and_number_alone() -> None:
    assert spatial_item(37) == ITEMS[37] != spatial_item(37, seed=1)


def test_scores_do_not_depend_on_how_items_are_packed(model: Decoder, tokenizer: Tokenizer) -> None:
    some = ITEMS[:9]
    together = choice_log_probs(model, tokenizer, some)
    alone = choice_log_probs(model, tokenizer, some, row_tokens=1)
    for first, second in zip(together, alone, strict=True):
        assert first == pytest.approx(second, abs=1e-4)
    assert all(score < 0 for scores in together for score in scores)


def test_a_model_without_knowledge_is_near_chance_and_one_that_learnt_the_answers_is_not(
    model: Decoder, tokenizer: Tokenizer
) -> None:
    some = ITEMS[:12]
    blind = spatial_score(model, tokenizer, some)
    assert blind.chance == pytest.approx((10 * 0.5 + 2 * 0.25) / 12)
    asked = [{"item": item, "reply": item.choices[item.answer]} for item in some]
    taught = Decoder(model.config, seed=1)
    _teach(taught, tokenizer, asked)
    knows = spatial_score(taught, tokenizer, some)
    assert knows.accuracy == 1.0 > blind.accuracy
    assert (right_of(knows.plain()) == np.array(knows.right)).all() and len(right_of(knows.plain())) == 12


def _teach(model: Decoder, tokenizer: Tokenizer, asked: list[dict]) -> None:
    from perilune.eval.spatial import _document

    rows = [_document(tokenizer, each["item"].question, each["reply"]) for each in asked]
    tokens = torch.tensor([[token for each, _ in rows for token in each[:-1]]])
    wanted = [
        token if said else -100 for each, produced in rows for token, said in zip(each[1:], produced[1:], strict=True)
    ]
    borders = torch.tensor(np.cumsum([0, *(len(each) - 1 for each, _ in rows)]), dtype=torch.int32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        model.loss(tokens, torch.tensor([wanted]), borders).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_paired_interval_is_narrower_than_the_items_are_different() -> None:
    generator = np.random.default_rng(0)
    before = (generator.random(2000) < 0.6).astype(float)
    after = before.copy()
    after[:60] = 1.0
    found = paired_interval([before], [after])
    assert found.low <= found.mean <= found.high and found.mean == pytest.approx((after - before).mean())
    assert found.low > 0 and found.high - found.low < 0.02
    several = paired_interval([before, before], [after, before])
    assert several.low <= 0 < several.high


def test_differences_need_items() -> None:
    with pytest.raises(ValueError, match=r"expected \[seeds, items\]"):
        paired_interval([], [])
