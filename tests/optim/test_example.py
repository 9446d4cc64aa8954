"""The example runs as it stands."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "muonclip.py"


def test_the_example_trains_under_the_cap_in_forty_lines(capsys):
    names = runpy.run_path(str(EXAMPLE))
    printed = capsys.readouterr().out
    assert "muon " in printed and "step 60" in printed
    assert float(names["loss"].detach()) < 4.0  # guessing costs log(64) = 4.16
    optimizer = names["optimizer"]
    assert optimizer.qk_clip.ever_clipped.any() and optimizer.qk_report.max_logits.max() <= 1.5 * optimizer.qk_clip.tau
    assert len(EXAMPLE.read_text().splitlines()) <= 40
