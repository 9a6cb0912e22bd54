"""Views: the examples of a split with the labels and the image transform of a concept.

View 0 has the original examples; each other view has new labels, transformed images, or both. The
id of an example is `view * n + index` with n examples in the split, so two examples with different
inputs or labels have different ids. Images are stored once for each distinct transform, and only
for the ids that a client has: a label swap stores no image. Views do not depend on the seed of an
experiment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from remanence.core.rng import Key
from remanence.data.concepts import Concept
from remanence.data.dataset import DatasetSplit

CHUNK_VALUES = 1 << 21  # float64 values in memory at one time
_Transform = tuple[float, str, int, float]  # rotation, corruption, severity, max_pixel
_IDENTITY: _Transform = (0.0, "", 0, 255)


class ConceptViews(NamedTuple):
    """The examples of a split in all views.

    Args:
        x: [stored, ...] inputs: those of the split, then the transformed ones.
        y: [V * n] int64, the label of each id.
        storage_index: [V * n] int64, the position of each id in x, -1 if it is not stored; None:
            the id itself.
        view_of: the view of each concept.
    """

    x: np.ndarray
    y: np.ndarray
    storage_index: np.ndarray | None
    view_of: tuple[int, ...]


def number_views(concepts: Sequence[Concept]) -> tuple[int, ...]:
    """Return the view of each concept.

    Concepts that only select examples share view 0; the others are numbered in order.

    >>> rotated, swapped = Concept(rotation=90.0), Concept(mapping=(1, 0))
    >>> number_views([rotated, Concept(labels=(1,)), swapped, Concept(labels=(0,), rotation=90.0)])
    (1, 0, 2, 1)
    """
    numbers: dict[tuple[object, _Transform], int] = {(None, _IDENTITY): 0}
    return tuple(
        numbers.setdefault((concept.mapping, _transform_of(concept)), len(numbers))
        for concept in concepts
    )


def make_views(
    split: DatasetSplit, concepts: Sequence[Concept], used: Sequence[np.ndarray], part: str
) -> ConceptViews:
    """Compute the labels of all ids, and the inputs of the ids that are used.

    Args:
        split: the original examples.
        concepts: one for each cluster.
        used: arrays of ids whose inputs are needed.
        part: the name of the split ("train" or "test"), so that example 5 of one split does not get
            the same noise as example 5 of the other.
    """
    size, view_of = len(split), number_views(concepts)
    views = [_concept_of(view, concepts, view_of) for view in range(max(view_of, default=0) + 1)]
    y = np.concatenate(
        [
            split.y if concept.mapping is None else np.asarray(concept.mapping)[split.y]
            for concept in views
        ]
    ).astype(np.int64)
    if len(views) == 1:
        return ConceptViews(split.x, y, None, view_of)
    needed = np.zeros((len(views), size), dtype=bool)
    for ids in used:
        needed.reshape(-1)[ids] = True
    stored, parts = size, [split.x]
    positions: dict[_Transform, np.ndarray] = {_IDENTITY: np.arange(size)}  # position of each index
    transforms = [_transform_of(concept) for concept in views]
    for transform in transforms:
        if transform not in positions:
            same = [other == transform for other in transforms]
            indices = np.flatnonzero(needed[same].any(axis=0))
            key = Key(0).fold_in("corruption", part)
            parts.append(_apply_transform(split.x, indices, transform, key))
            positions[transform] = np.full(size, -1, dtype=np.int64)
            positions[transform][indices] = stored + np.arange(len(indices))
            stored += len(indices)
    x = split.x if stored == size else np.concatenate(parts)
    storage_index = np.concatenate([positions[transform] for transform in transforms])
    return ConceptViews(x, y, storage_index, view_of)


def _concept_of(view: int, concepts: Sequence[Concept], view_of: Sequence[int]) -> Concept:
    """Return the first concept with this view."""
    return next(
        (c for c, number in zip(concepts, view_of, strict=True) if number == view), Concept()
    )


def _transform_of(concept: Concept) -> _Transform:
    return concept.rotation, concept.corruption, concept.severity, concept.max_pixel


def _apply_transform(
    x: np.ndarray, indices: np.ndarray, transform: _Transform, key: Key
) -> np.ndarray:
    """Rotate and then corrupt some images of x [n, c, h, w]."""
    rotation, corruption, severity, max_pixel = transform
    step = max(1, CHUNK_VALUES // math.prod(x.shape[1:]))
    transformed = np.empty((len(indices), *x.shape[1:]), dtype=x.dtype)
    for start in range(0, len(indices), step):
        chunk = indices[start : start + step]
        images = rotate_images(np.asarray(x[chunk]), rotation)
        if corruption:
            images = corrupt_images(
                images,
                corruption,
                severity,
                max_pixel,
                [key.fold_in(int(index)) for index in chunk],
            )
        transformed[start : start + step] = images
    return transformed


def rotate_images(x: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate images counterclockwise about their center. x: [n, c, h, w] -> the same shape.

    Multiples of 90 degrees only move pixels. Other angles interpolate between the four nearest
    pixels; pixels from outside the image are 0.

    >>> rotate_images(np.array([[[[1, 2], [3, 4]]]], dtype=np.uint8), 90).tolist()
    [[[[2, 4], [1, 3]]]]
    """
    quarters, rest = divmod(degrees, 90)
    return np.rot90(x, int(quarters), axes=(2, 3)) if rest == 0 else _interpolate(x, degrees)


def _interpolate(x: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate by bilinear interpolation at the original position of each pixel."""
    height, width = x.shape[2:]
    angle, center = math.radians(degrees), ((height - 1) / 2, (width - 1) / 2)
    down, right = np.meshgrid(
        np.arange(height) - center[0], np.arange(width) - center[1], indexing="ij"
    )
    row = math.cos(angle) * down + math.sin(angle) * right + center[0]  # [h, w]
    column = math.cos(angle) * right - math.sin(angle) * down + center[1]
    top, left = np.floor(row), np.floor(column)
    rotated = np.zeros(x.shape, dtype=np.float64)
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
        rotated += np.where(inside, weight, 0.0) * pixels
    return _as_pixels(rotated, x.dtype)


def corrupt_images(
    x: np.ndarray, corruption: str, severity: int, max_pixel: float, keys: Sequence[Key]
) -> np.ndarray:
    """Corrupt images by the formulas of `concept_rules.corrupt`, clip to 0 .. max_pixel and round.

    Args:
        x: [n, c, h, w].
        corruption: a key of `_CORRUPTIONS`.
        severity: 1 to 5.
        max_pixel: the largest pixel value.
        keys: one for each image.
    """
    corrupted = _CORRUPTIONS[corruption](x.astype(np.float64), severity, float(max_pixel), keys)
    return _as_pixels(corrupted.clip(0, max_pixel), x.dtype)


def _as_pixels(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Images in their type; rounded where it is that of whole numbers."""
    return (x if dtype.kind == "f" else np.rint(x)).astype(dtype)


def _noise(x: np.ndarray, severity: int, max_pixel: float, keys: Sequence[Key]) -> np.ndarray:
    noise = np.empty(x.shape)
    for index, key in enumerate(keys):  # Box and Muller
        radius = key.fold_in("radius").uniform(noise[index].size)
        angle = key.fold_in("angle").uniform(noise[index].size)
        noise[index] = (np.sqrt(-2.0 * np.log1p(-radius)) * np.cos(2.0 * math.pi * angle)).reshape(
            x.shape[1:]
        )
    return x + 0.05 * severity * max_pixel * noise


def _blur(x: np.ndarray, severity: int, max_pixel: float, keys: Sequence[Key]) -> np.ndarray:
    from scipy.ndimage import gaussian_filter  # slow to import

    sigma = severity / 4 * max(1.0, min(x.shape[2:]) / 32)
    return np.asarray(gaussian_filter(x, (0, 0, sigma, sigma), mode="nearest"))


def _contrast(x: np.ndarray, severity: int, max_pixel: float, keys: Sequence[Key]) -> np.ndarray:
    mean = x.mean(axis=(2, 3), keepdims=True)
    return np.asarray(mean + (1 - 0.18 * severity) * (x - mean))


def _brightness(x: np.ndarray, severity: int, max_pixel: float, keys: Sequence[Key]) -> np.ndarray:
    return x + 0.1 * severity * max_pixel


def _pixelate(x: np.ndarray, severity: int, max_pixel: float, keys: Sequence[Key]) -> np.ndarray:
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


def _invert(x: np.ndarray, severity: int, max_pixel: float, keys: Sequence[Key]) -> np.ndarray:
    return max_pixel - x


_CORRUPTIONS: dict[str, Callable[[np.ndarray, int, float, Sequence[Key]], np.ndarray]] = {
    "noise": _noise,
    "blur": _blur,
    "contrast": _contrast,
    "brightness": _brightness,
    "pixelate": _pixelate,
    "invert": _invert,
}
