"""How many agents worked at a time, kept as a step function of at most `MAX_POINTS` points.

A point is `(bucket, width)`: the width from `bucket * resolution` milliseconds on. When the points are too many the
resolution doubles and two buckets become one with the larger width, so peaks survive.
"""

from __future__ import annotations

from typing import Any

MAX_POINTS = 600


class WidthHistory:
    def __init__(self, resolution: int = 20) -> None:
        self.now = 0
        self.peak = 0
        self.resolution = resolution
        self.points: list[tuple[int, int]] = []
        self._sent = 0

    def change(self, time: int, width: int) -> None:
        bucket = time // self.resolution
        if self.points and self.points[-1][0] >= bucket:
            last, widest = self.points[-1]
            self.points[-1] = (last, max(widest, width))
        else:
            if self.points and self.points[-1][1] != self.now and self.points[-1][0] + 1 < bucket:
                self.points.append((self.points[-1][0] + 1, self.now))
            self.points.append((bucket, width))
        self._sent = min(self._sent, len(self.points) - 1)
        self.now = width
        self.peak = max(self.peak, width)
        if len(self.points) > MAX_POINTS:
            self._coarsen()

    def _coarsen(self) -> None:
        self.resolution *= 2
        coarse: dict[int, int] = {}
        for bucket, width in self.points:
            coarse[bucket // 2] = max(coarse.get(bucket // 2, 0), width)
        self.points = list(coarse.items())
        self._sent = 0

    def plain(self) -> dict[str, Any]:
        return {"resolution": self.resolution, "from": 0, "points": self.points}

    def take_changes(self) -> dict[str, Any] | None:
        """The points from the first that changed since the last call, or None."""
        if self._sent >= len(self.points):
            return None
        start, self._sent = self._sent, len(self.points)
        return {"resolution": self.resolution, "from": start, "points": self.points[start:]}
