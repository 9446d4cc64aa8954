"""The benchmark of the view runs and counts what it should; its numbers are for benchmarks/."""

import pytest

from perilune.swarm.view.measure import measure_view

pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install 'perilune[test]')")


@pytest.mark.long
@pytest.mark.needs_tool("chromium")
def test_every_event_of_a_small_measurement_reaches_the_screen() -> None:
    found = measure_view(agents=4, events_per_second=80, seconds=0.5)
    assert found["events"] == 40 and found["frames_drawn"] >= 1
    assert 0 < found["latency_p50"] <= found["latency_p95"] <= found["latency_max"]
