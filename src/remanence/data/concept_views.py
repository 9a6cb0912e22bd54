"""Examples as concepts see them: the same row with another label, turned, or corrupted.

A view is a way to look at rows. View 0 shows them as they are; every other one has new labels, new
pixels, or both. An example is a row in a view, and its id is `view * n + row` with n rows in the
split: stable, and different wherever the example differs. Pixels are stored once for each distinct
look, and altered ones only for the rows somebody holds, so a label swap costs no image at all. An
altered dataset is a dataset: it does not depend on the seed of an experiment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from remanence.core.rng import Key
from remanence.data.concepts import Concept
from remanence.data.dataset import DatasetSplit

_VALUES_AT_ONCE = 1 << 21  # pixels that are float64 at one time
_Look = tuple[float, str, int, int]  # turn, corruption, severity, white
_PLAIN: _Look = (0.0, "", 0, 255)


class ConceptViews(NamedTuple):
    """All examples of a split in all views."""

    x: np.ndarray  # [stored, ...]: the split's own rows, then altered ones
    y: np.ndarray  # [V * n] int64: the label of each id
    # [V * n] int64: where in x an id lies, -1 where nobody holds it; None: an id is its place
    storage_index: np.ndarray | None
    view_of: tuple[int, ...]  # concept -> view


def number_views(concepts: Sequence[Concept]) -> tuple[int, ...]:
    """The view of each concept. Concepts that only select rows share view 0; the others are
    numbered as they come.

    >>> number_views([Concept(rotation=90.0), Concept(labels=(1,)), Concept(mapping=(1, 0)), Concept(labels=(0,), rotation=90.0)])
    (1, 0, 2, 1)
    """
    numbers: dict[tuple[object, _Look], int] = {(None, _PLAIN): 0}
    return tuple(
        numbers.setdefault((concept.mapping, _look_of(concept)), len(numbers))
        for concept in concepts
    )


def make_views(
    split: DatasetSplit, concepts: Sequence[Concept], used: Sequence[np.ndarray], part: str
) -> ConceptViews:
    """Labels of all ids, and the inputs of the ids in `used`.

    `part` names the split ("train", "test"): row 5 of the one must not get the same noise as row 5
    of the other.
    """
    rows, view_of = len(split), number_views(concepts)
    shown = [_shown_by(concepts, view_of, view) for view in range(max(view_of, default=0) + 1)]
    y = np.concatenate(
        [
            split.y if concept.mapping is None else np.asarray(concept.mapping)[split.y]
            for concept in shown
        ]
    )
    if len(shown) == 1:
        return ConceptViews(split.x, y.astype(np.int64), None, view_of)
    wanted = np.zeros((len(shown), rows), dtype=bool)
    for ids in used:
        wanted.reshape(-1)[ids] = True
    place = np.empty((len(shown), rows), dtype=np.int64)
    stored, parts = rows, [split.x]
    places: dict[_Look, np.ndarray] = {_PLAIN: np.arange(rows)}
    looks = [_look_of(concept) for concept in shown]
    for view, look in enumerate(looks):
        if look not in places:
            held = np.flatnonzero(wanted[[other == look for other in looks]].any(axis=0))
            parts.append(_alter(split.x, held, look, Key(0).fold_in("corruption", part)))
            places[look] = np.full(rows, -1, dtype=np.int64)
            places[look][held] = stored + np.arange(len(held))
            stored += len(held)
        place[view] = places[look]
    x = split.x if stored == rows else np.concatenate(parts)
    return ConceptViews(x, y.astype(np.int64), place.reshape(-1), view_of)


def _shown_by(concepts: Sequence[Concept], view_of: Sequence[int], view: int) -> Concept:
    return next(
        (concept for concept, number in zip(concepts, view_of, strict=True) if number == view),
        Concept(),
    )


def _look_of(concept: Concept) -> _Look:
    return concept.rotation, concept.corruption, concept.severity, concept.max_pixel


def _alter(x: np.ndarray, rows: np.ndarray, look: _Look, key: Key) -> np.ndarray:
    """Some rows of x [n, c, h, w] uint8, first turned, then corrupted."""
    turn, corruption, severity, white = look
    step = max(1, _VALUES_AT_ONCE // math.prod(x.shape[1:]))
    altered = np.empty((len(rows), *x.shape[1:]), dtype=np.uint8)
    for start in range(0, len(rows), step):
        chosen = rows[start : start + step]
        images = turn_images(np.asarray(x[chosen]), turn)
        if corruption:
            images = corrupt_images(
                images, corruption, severity, white, [key.fold_in(int(row)) for row in chosen]
            )
        altered[start : start + step] = images
    return altered


def turn_images(x: np.ndarray, degrees: float) -> np.ndarray:
    """Turn images against the clock around their middle. x: [n, c, h, w] uint8 -> the same shape.

    Quarter turns move pixels and change none. Any other turn interpolates between the four nearest
    pixels; what comes from outside is 0.

    >>> turn_images(np.array([[[[1, 2], [3, 4]]]], dtype=np.uint8), 90).tolist()
    [[[[2, 4], [1, 3]]]]
    """
    quarters, rest = divmod(degrees, 90)
    return np.rot90(x, int(quarters), axes=(2, 3)) if rest == 0 else _interpolate(x, degrees)


def _interpolate(x: np.ndarray, degrees: float) -> np.ndarray:
    """Bilinear: each pixel of the result looks up where it comes from."""
    height, width = x.shape[2:]
    angle, middle = math.radians(degrees), ((height - 1) / 2, (width - 1) / 2)
    down, right = np.meshgrid(
        np.arange(height) - middle[0], np.arange(width) - middle[1], indexing="ij"
    )
    row = math.cos(angle) * down + math.sin(angle) * right + middle[0]  # [h, w]
    column = math.cos(angle) * right - math.sin(angle) * down + middle[1]
    top, left = np.floor(row), np.floor(column)
    turned = np.zeros(x.shape, dtype=np.float64)
    for r, c, weight in (
        (top, left, (top + 1 - row) * (left + 1 - column)),
        (top, left + 1, (top + 1 - row) * (column - left)),
        (top + 1, left, (row - top) * (left + 1 - column)),
        (top + 1, left + 1, (row - top) * (column - left)),
    ):
        inside = (r >= 0) & (r < height) & (c >= 0) & (c < width)
        pixels = x[
            :, :, r.clip(0, height - 1).astype(np.int64), c.clip(0, width - 1).astype(np.int64)
        ]
        turned += np.where(inside, weight, 0.0) * pixels
    return np.rint(turned).astype(np.uint8)


def corrupt_images(
    x: np.ndarray, corruption: str, severity: int, white: int, keys: Sequence[Key]
) -> np.ndarray:
    """Images made worse, clipped to 0 .. white and rounded; `concepts.corrupt` lists the
    formulas. x: [n, c, h, w] uint8, a key an image
    """
    worse = _CORRUPTIONS[corruption](x.astype(np.float64), severity, float(white), keys)
    return np.asarray(np.rint(worse.clip(0, white)), dtype=np.uint8)


def _noise(x: np.ndarray, severity: int, white: float, keys: Sequence[Key]) -> np.ndarray:
    noise = np.empty(x.shape)
    for place, key in enumerate(keys):  # Box and Muller
        radius, angle = (
            key.fold_in("radius").uniform(noise[place].size),
            key.fold_in("angle").uniform(noise[place].size),
        )
        noise[place] = (np.sqrt(-2.0 * np.log1p(-radius)) * np.cos(2.0 * math.pi * angle)).reshape(
            x.shape[1:]
        )
    return x + 0.05 * severity * white * noise


def _blur(x: np.ndarray, severity: int, white: float, keys: Sequence[Key]) -> np.ndarray:
    from scipy.ndimage import gaussian_filter  # slow to import, so only where it is used

    sigma = severity / 4 * max(1.0, min(x.shape[2:]) / 32)
    return np.asarray(gaussian_filter(x, (0, 0, sigma, sigma), mode="nearest"))


def _contrast(x: np.ndarray, severity: int, white: float, keys: Sequence[Key]) -> np.ndarray:
    mean = x.mean(axis=(2, 3), keepdims=True)
    return np.asarray(mean + (1 - 0.18 * severity) * (x - mean))


def _brightness(x: np.ndarray, severity: int, white: float, keys: Sequence[Key]) -> np.ndarray:
    return x + 0.1 * severity * white


def _pixelate(x: np.ndarray, severity: int, white: float, keys: Sequence[Key]) -> np.ndarray:
    for axis in (2, 3):
        length = x.shape[axis]
        starts = np.arange(0, length, max(2, round(severity * length / 32)))
        sizes = np.diff(starts, append=length)  # the last may be smaller
        shape = [1, 1, 1, 1]
        shape[axis] = len(sizes)
        x = np.repeat(
            np.add.reduceat(x, starts, axis=axis) / sizes.reshape(shape), sizes, axis=axis
        )
    return x


def _invert(x: np.ndarray, severity: int, white: float, keys: Sequence[Key]) -> np.ndarray:
    return white - x


_CORRUPTIONS: dict[str, Callable[[np.ndarray, int, float, Sequence[Key]], np.ndarray]] = {
    "noise": _noise,
    "blur": _blur,
    "contrast": _contrast,
    "brightness": _brightness,
    "pixelate": _pixelate,
    "invert": _invert,
}
