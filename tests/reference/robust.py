"""The robust aggregators reimplemented with Python lists and explicit loops. Points are lists of
float64 coordinates, one list a client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = Sequence[float]


def median(points: Sequence[Point]) -> list[float]:
    found = []
    for coordinate in range(len(points[0])):
        values = sorted(point[coordinate] for point in points)
        half = len(values) // 2
        found.append(values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2)
    return found


def trimmed_mean(points: Sequence[Point], cut: int) -> list[float]:
    found = []
    for coordinate in range(len(points[0])):
        values = sorted(point[coordinate] for point in points)
        for _ in range(cut):
            values.pop(0)
            values.pop()
        found.append(math.fsum(values) / len(values))
    return found


def krum_order(points: Sequence[Point], byzantine: int) -> list[int]:
    """Positions from the best score to the worst."""
    scores = []
    for i, point in enumerate(points):
        others = []
        for j, other in enumerate(points):
            if i != j:
                others.append(sum((a - b) ** 2 for a, b in zip(point, other, strict=True)))
        others.sort()
        scores.append(sum(others[: len(points) - byzantine - 2]))
    return sorted(range(len(points)), key=lambda place: scores[place])


def multi_krum(points: Sequence[Point], byzantine: int, keep: int) -> list[float]:
    chosen = krum_order(points, byzantine)[:keep]
    return [math.fsum(points[place][c] for place in chosen) / keep for c in range(len(points[0]))]


def sum_of_distances(points: Sequence[Point], weights: Sequence[float], at: Point) -> float:
    return math.fsum(
        weight * math.dist(point, at) for weight, point in zip(weights, points, strict=True)
    )


def geometric_median(points: Sequence[Point], weights: Sequence[float]) -> list[float]:
    """By descent, not by Weiszfeld: try a step along every axis and straight downhill, and
    halve the step if none helps. The sum is convex.
    """
    size = len(points[0])
    at = [math.fsum(point[c] for point in points) / len(points) for c in range(size)]
    best, step = (
        sum_of_distances(points, weights, at),
        max(max(abs(x) for x in point) for point in points) + 1.0,
    )
    while step > 1e-10:
        directions = [
            [sign if c == axis else 0.0 for c in range(size)]
            for axis in range(size)
            for sign in (1.0, -1.0)
        ]
        moved = False
        for direction in [downhill(points, weights, at), *directions]:
            there = [x + step * towards for x, towards in zip(at, direction, strict=True)]
            value = sum_of_distances(points, weights, there)
            if value < best:
                at, best, moved = there, value, True
        if not moved:
            step /= 2
    return at


def downhill(points: Sequence[Point], weights: Sequence[float], at: Point) -> list[float]:
    """The direction, of length 1, in which the sum of distances falls fastest; points at the current
    position have no direction and count against it.
    """
    pull = [0.0] * len(at)
    for point, weight in zip(points, weights, strict=True):
        far = math.dist(point, at)
        if far > 0:
            pull = [p + weight * (x - y) / far for p, x, y in zip(pull, point, at, strict=True)]
    length = math.hypot(*pull)
    return [p / length for p in pull] if length else pull


def norm_clip(points: Sequence[Point], weights: Sequence[float], limit: float) -> list[float]:
    """limit 0: the median of the norms"""
    norms = [math.sqrt(math.fsum(x * x for x in point)) for point in points]
    if limit == 0:
        limit = median([[norm] for norm in norms])[0]
    found = [0.0] * len(points[0])
    for point, weight, norm in zip(points, weights, norms, strict=True):
        for coordinate, x in enumerate(point):
            found[coordinate] += weight * (x * limit / norm if norm > limit else x)
    return found
