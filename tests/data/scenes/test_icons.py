"""Icons, hand-made for these tests: normalised into the dialect, parted by set, skipped with a reason."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import zstandard

from perilune.data.raster import rasterize
from perilune.data.scenes import ScenesConfig, ScenesError, icon_pool, make_sample, parse_svg, write_svg
from perilune.data.scenes.icons import normalise
from perilune.data.svg_guard import clean_svg

OUTLINE = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="24" height="24" viewBox="0 0 24 24" fill="none" '
    'stroke="currentColor" stroke-width="2" stroke-linecap="round" stroke-linejoin="round">{}</svg>'
)
DRAWINGS = {
    "cross": '<path d="M4 4l16 16M20 4L4 20"/>',
    "ring": '<circle cx="12" cy="12" r="9"/>',
    "card": '<rect x="3" y="5" width="18" height="14" rx="3"/><line x1="3" y1="10" x2="21" y2="10"/>',
    "tent": '<polygon points="12 3 21 20 3 20"/>',
    "wave": '<polyline points="2,12 7 5 12 12 17,19 22 12"/>',
    "egg": '<ellipse cx="12" cy="12" rx="6" ry="9"/><path d="M12 12h.01"/>',
    "bend": '<path d="M4 20c0-8 4-16 16-16"/>',
    "box": '<rect x="4" y="4" width="16" height="16"/>',
}


def _record(name: str, drawing: str, source: str = "made/first", style: str = "outline") -> dict[str, str]:
    return {"source": source, "licence": "CC0", "name": name, "style": style, "svg": OUTLINE.format(drawing)}


def _file(place: Path, records: list[dict[str, str]]) -> str:
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    place.write_bytes(zstandard.compress(text) if place.suffix == ".zst" else text)
    return str(place)


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_normalised_icon_draws_what_the_icon_draws(name: str) -> None:
    record = _record(name, DRAWINGS[name])
    data = normalise(record).data(112)
    mine = f'<path d="{data}" fill="none" stroke="black" stroke-width="9"/></svg>'
    header = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 112 112" stroke-linecap="round" stroke-linejoin="round">'
    )
    drawn = rasterize(header + mine, 112, 112)[..., 0] < 128
    given = rasterize(record["svg"].replace("currentColor", "black"), 112, 112)[..., 0] < 128
    # Points move by half a pixel at most and the stroke of 9.33 pixels becomes 9.
    assert (drawn & given).sum() / (drawn | given).sum() > 0.85


def _two_sets(tmp_path: Path) -> ScenesConfig:
    records = [_record(name, drawing) for name, drawing in DRAWINGS.items()]
    records.append(_record("other-ring", '<circle cx="12" cy="12" r="9.2"/>', "made/second"))  # a copy in the test set
    records.append(_record("bars", '<path d="M5 4v16M12 4v16M19 4v16"/>', "made/second"))
    records.append(_record("turned", '<g transform="rotate(3)"><path d="M1 1h5"/></g>', "made/second"))
    records.append(_record("solid", '<path d="M1 1h5z" fill="red"/>', "made/first"))
    records.append(_record("thick", '<path d="M1 1h5"/>', "made/first", style="filled"))
    place = _file(tmp_path / "icons.jsonl.zst", records)
    return ScenesConfig(kinds=("icon",), icons=place, icon_sets=("first",), icon_held_out_sets=("second",))


def test_sets_are_kept_apart_and_copies_are_dropped_from_the_test_side(tmp_path: Path) -> None:
    pool = icon_pool(_two_sets(tmp_path))
    assert {icon.name for icon in pool.train} == set(DRAWINGS)
    assert [icon.name for icon in pool.held_out] == ["bars"]
    assert dict(pool.skipped) == {
        "element g": 1,
        "filled parts in an outline icon": 1,
        "held out, but nearly equal to one of training": 1,
    }


def test_samples_keep_the_licence_and_are_canonical(tmp_path: Path) -> None:
    config = _two_sets(tmp_path)
    for held_out, set_name in ((False, "made/first"), (True, "made/second")):
        for index in range(20):
            sample = make_sample(0, index, config, held_out=held_out)
            assert sample.origin.startswith(set_name) and sample.origin.endswith("CC0")
            assert write_svg(parse_svg(sample.svg)) == sample.svg
            clean_svg(sample.svg, width=112, height=112)
            assert sample == make_sample(0, index, config, held_out=held_out)
            assert (np.ptp(rasterize(sample.svg, 112, 112), axis=(0, 1)) > 60).any()


def test_without_test_sets_icons_are_parted_by_their_drawing(tmp_path: Path) -> None:
    # Combs with teeth at different places: far enough apart not to be copies.
    combs = [sorted({(seed * k * 7 + k * 3) % 22 + 1 for k in range(1, 5)}) for seed in range(1, 23)]
    heights = ((2, 14, 8, 5), (9, 2, 16, 12), (16, 7, 1, 10))
    records = [
        _record(f"comb-{i}-{j}", "".join(f'<path d="M{x} {y}v6"/>' for x, y in zip(comb, row)))
        for i, comb in enumerate(combs)
        for j, row in enumerate(heights)
    ]
    config = ScenesConfig(kinds=("icon",), icons=_file(tmp_path / "icons.jsonl", records))
    train = {make_sample(0, index, config).shapes[0].path for index in range(300)}
    test = {make_sample(0, index, config, held_out=True).shapes[0].path for index in range(100)}
    assert train and test and not train & test


def test_a_folder_of_sets_is_read(tmp_path: Path) -> None:
    for set_name, names in (("moon", ["cross", "ring", "card"]), ("sun", ["tent"])):
        (tmp_path / set_name).mkdir()
        for name in names:
            (tmp_path / set_name / f"{name}.svg").write_text(f"<!-- by hand -->{OUTLINE.format(DRAWINGS[name])}")
    config = ScenesConfig(
        kinds=("icon",), icons=str(tmp_path), icon_sets=("moon",), icon_held_out_sets=("sun",), icon_styles=("outline",)
    )
    assert {icon.name for icon in icon_pool(config).train} == {"cross", "ring", "card"}
    assert make_sample(0, 0, config, held_out=True).origin == "sun/outline/tent"


@pytest.mark.parametrize(
    "drawing, reason",
    [
        ('<path d="M1 1h5" transform="scale(2)"/>', "attribute transform"),
        ('<image href="x.png"/>', "element image"),
        ('<path d="M1 1a5 3 30 0 1 4 4"/>', "turned ellipse"),
        ('<path d="M1 1" style="fill:red"/>', "attribute style"),
        ("&amp;", "declarations or entities"),
        ("", "nothing drawn"),
    ],
)
def test_what_the_dialect_cannot_say_is_named(drawing: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        normalise(_record("odd", drawing))


HOSTILE = {
    "far": (OUTLINE.format('<path d="M1e9 0L5 5"/>'), "point out of range"),
    "farther": (OUTLINE.format('<path d="M1e999 0L5 5"/>'), "point out of range"),
    "adding-up": (OUTLINE.format(f'<path d="M0 0{"l20 0" * 50}"/>'), "point out of range"),
    "round": (OUTLINE.format('<path d="M0 0a1e9 1e9 0 0 1 5 5"/>'), "radius out of range"),
    "tiny": (OUTLINE.format('<path d="M0 0a1e-300 1e-300 0 0 1 5 5"/>'), "radius out of range"),
    "turning": (OUTLINE.format('<path d="M0 0a5 5 1e999 0 1 5 5"/>'), "number"),
    "no-side": (OUTLINE.replace("0 0 24 24", "0 0 0 0").format('<path d="M1 1h5"/>'), "viewBox is not a square of"),
    "below": (OUTLINE.replace("0 0 24 24", "0 0 -9 -9").format('<path d="M1 1h5"/>'), "viewBox is not a square of"),
    "endless": (OUTLINE.replace("0 0 24 24", "0 0 inf inf").format('<path d="M1 1h5"/>'), "viewBox is not a square of"),
    "no-number": (OUTLINE.replace("0 0 24 24", "0 0 nan nan").format('<path d="M1 1h5"/>'), "viewBox is not a square"),
    "no-pen": (OUTLINE.replace('"2"', '"nan"').format('<path d="M1 1h5"/>'), "stroke out of range"),
    "thin-pen": (OUTLINE.replace('"2"', '"0"').format('<path d="M1 1h5"/>'), "stroke out of range"),
    "thick-pen": (OUTLINE.replace('"2"', '"1e300"').format('<path d="M1 1h5"/>'), "stroke out of range"),
    "long": (OUTLINE.format('<path d="M1 1h5"/>' + " " * (1 << 16)), "too many bytes"),
    "open": (OUTLINE.format("<!--" * 8000), "declarations or entities"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_icon_out_of_all_proportion_is_refused_with_its_reason(name: str) -> None:
    svg, reason = HOSTILE[name]
    with pytest.raises(ValueError, match=reason):
        normalise({**_record(name, ""), "svg": svg})


def test_hostile_files_of_a_folder_are_counted_and_never_drawn(tmp_path: Path) -> None:
    for set_name, names in (("moon", ["cross", "ring", "card"]), ("sun", ["tent"])):
        (tmp_path / set_name).mkdir()
        for name in names:
            (tmp_path / set_name / f"{name}.svg").write_text(OUTLINE.format(DRAWINGS[name]))
    for name, (svg, _) in HOSTILE.items():
        (tmp_path / "moon" / f"{name}.svg").write_text(svg)
    (tmp_path / "moon" / "latin.svg").write_bytes(OUTLINE.format("<title>\xe9</title>").encode("latin-1"))
    (tmp_path / "moon" / "folder.svg").mkdir()
    (tmp_path / "moon" / "gone.svg").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "moon" / "pipe.svg")
    (tmp_path / "moon" / os.fsdecode(b"\xff.svg")).write_text(OUTLINE.format(DRAWINGS["wave"]))
    config = ScenesConfig(kinds=("icon",), icons=str(tmp_path), icon_sets=("moon",), icon_held_out_sets=("sun",))
    pool = icon_pool(config)
    assert {icon.name for icon in pool.train} == {"cross", "ring", "card"}
    skipped = dict(pool.skipped)
    assert skipped["unreadable file"] == 3 and skipped["not UTF-8"] == 1 and skipped["name"] == 1
    assert sum(skipped.values()) == len(HOSTILE) + 5
    for index in range(20):
        sample = make_sample(0, index, config)
        assert rasterize(sample.svg, *sample.size).shape == (112, 112, 3)


@pytest.mark.parametrize(
    "name, content", [("a.jsonl", b"\xff\n"), ("a.jsonl.zst", b"not zstandard"), ("b.jsonl", b"[" * 99999)]
)
def test_a_file_of_icons_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    place = tmp_path / name
    place.write_bytes(content)
    with pytest.raises(ScenesError, match=name):
        icon_pool(ScenesConfig(kinds=("icon",), icons=str(place)))


def test_files_that_are_no_icons_are_refused_by_name(tmp_path: Path) -> None:
    for place, reason in ((tmp_path / "none.jsonl", "expected a folder"), (tmp_path / "bad.jsonl", "line 2")):
        if "bad" in place.name:
            place.write_text(json.dumps(_record("ring", DRAWINGS["ring"])) + "\n{}\n")
        with pytest.raises(ScenesError, match=reason):
            make_sample(0, 0, ScenesConfig(kinds=("icon",), icons=str(place)))
    place = _file(tmp_path / "one.jsonl", [_record("ring", DRAWINGS["ring"])])
    with pytest.raises(ScenesError, match="0 for testing"):
        make_sample(0, 0, ScenesConfig(kinds=("icon",), icons=place, icon_sets=("first",), icon_held_out_sets=("x",)))
