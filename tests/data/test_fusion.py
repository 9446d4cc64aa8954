"""Which rows of a run hold pictures."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perilune.data.fusion import TIMINGS, Fusion, FusionConfig

shares = st.integers(1, 100).map(lambda percent: percent / 100)
starts = st.integers(0, 99).map(lambda percent: percent / 100)


@given(share=shares, start=starts, total=st.integers(1, 400))
@example(share=3 / 11, start=0.0, total=110)
def test_every_row_is_the_next_of_its_kind(share, start, total):
    fusion = Fusion.of(FusionConfig(share=share, start=start), total)
    text, vision = 0, 0
    for row in range(total):
        assert (fusion.text_before(row), fusion.vision_before(row)) == (text, vision)
        if fusion.is_vision(row):
            assert row >= start * total
            vision += 1
        else:
            text += 1


@given(share=shares, start=starts, total=st.integers(1, 10_000), first=st.integers(0, 10_000), span=st.integers(1, 500))
def test_pictures_are_spread_evenly_after_the_start(share, start, total, first, span):
    fusion = Fusion.of(FusionConfig(share=share, start=start), total)
    first += fusion.first_row
    held = fusion.vision_before(first + span) - fusion.vision_before(first)
    assert abs(held - share * span) < 1


@given(percent=st.integers(1, 20), rows=st.integers(1, 200).map(lambda n: 100 * n))
def test_early_mid_and_late_spend_the_same_rows(percent, rows):
    base = FusionConfig(share=percent / 100)
    spent = {}
    for timing, start in TIMINGS.items():
        config = base.at(timing)
        assert config.start == start
        spent[timing] = Fusion.of(config, rows).vision_before(rows)
    assert set(spent.values()) == {percent * rows // 100}


def test_a_share_that_late_fusion_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="share is 0.3.*late"):
        FusionConfig(share=0.3).at("late")
    with pytest.raises(ValueError, match="'never'"):
        FusionConfig(share=0.1).at("never")


@pytest.mark.parametrize("wrong", [{"share": -0.1}, {"share": 1.5}, {"start": 1.0}, {"start": -0.5}])
def test_parts_outside_of_the_run_are_refused(wrong):
    with pytest.raises(ValueError, match=f"fusion.{next(iter(wrong))} is"):
        FusionConfig(**wrong)
