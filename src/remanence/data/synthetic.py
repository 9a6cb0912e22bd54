"""Generated data of any size: class prototypes with Gaussian noise, and token sequences. They
depend on their own `seed`, not on that of an experiment.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from remanence.core.errors import InputError
from remanence.core.expressions import PlainText
from remanence.core.memory import check_memory
from remanence.core.rng import Key
from remanence.data.dataset import (
    CLASS_BYTES,
    ArrayDataset,
    DatasetSplit,
    dataset_bytes,
    validate,
)

CHUNK_VALUES = 1 << 22


def synthetic(
    root: Path | None,
    *,
    samples: int = 10_000,
    classes: int = 10,
    features: int = 32,
    shape: PlainText = "",
    test: float = 0.2,
    spread: float = 1.0,
    seed: int = 0,
) -> ArrayDataset:
    """Each class is a point drawn from a standard normal distribution; an example is this point
    plus `spread` times standard normal noise.

    Args:
        root: not used.
        samples: training and test examples together.
        classes: the number of classes; each has the same number of examples, up to one.
        features: the number of columns of the table.
        shape: makes images instead, such as "3x32x32", with pixels 128 + 32 times a feature,
            clipped to 0 .. 255.
        test: the fraction of test examples.
        spread: the standard deviation of the noise.
        seed: the data are a function of it.
    """
    sides = _parse_shape(shape) if shape else (features,)
    sizes = _split_sizes("synthetic", samples, classes, test)
    if features < 1 or not (math.isfinite(spread) and spread >= 0):
        raise InputError(
            f"dataset 'synthetic' cannot have {features} features or a spread of {spread}:"
            " give one feature or more and a spread from 0 up"
        )
    dtype = np.dtype(np.uint8 if shape else np.float32)
    width = math.prod(sides)
    some = min(samples, max(1, CHUNK_VALUES // width))  # examples that are drawn at a time
    drawing = width * (4 * classes + 12 * some)
    _check_bytes("synthetic", samples, width * dtype.itemsize, classes, drawing)
    key = Key(seed).fold_in("synthetic")
    prototypes = (
        key.fold_in("prototypes").generator().standard_normal((classes, width), dtype=np.float32)
    )
    splits = []
    for part, size in zip(("train", "test"), sizes, strict=True):
        x = np.empty((size, width), dtype=dtype)
        y = key.fold_in(part, "labels").permutation(size) % classes
        _fill(x, y, prototypes, spread, key.fold_in(part, "noise"))
        splits.append(DatasetSplit(x.reshape(size, *sides), y))
    note = (
        f"Gaussian noise of spread {spread:g} around one prototype a class, made with seed {seed}."
    )
    return validate(
        ArrayDataset(
            "synthetic",
            "image" if shape else "table",
            _names(classes),
            splits[0],
            splits[1],
            note=note,
        )
    )


def _fill(x: np.ndarray, y: np.ndarray, prototypes: np.ndarray, spread: float, key: Key) -> None:
    """Write prototypes plus noise into x [n, d], in chunks; x has the dtype of images or tables."""
    step = max(1, CHUNK_VALUES // x.shape[1])
    for start in range(0, len(y), step):
        labels = y[start : start + step]
        noise = key.fold_in(start).generator()
        values = noise.standard_normal((len(labels), x.shape[1]), dtype=np.float32)
        values *= np.float32(spread)
        values += prototypes[labels]
        if x.dtype == np.uint8:
            values *= 32
            values += 128
            np.clip(np.rint(values, out=values), 0, 255, out=values)
        x[start : start + step] = values


def tokens(
    root: Path | None,
    *,
    samples: int = 10_000,
    classes: int = 10,
    length: int = 64,
    vocabulary: int = 1_000,
    test: float = 0.2,
    seed: int = 0,
) -> ArrayDataset:
    """Sequences of independent tokens; each class has its own token frequencies, proportional to
    exp(standard normal numbers).

    Args:
        root: not used.
        samples: training and test examples together.
        classes: the number of classes.
        length: tokens of a sequence.
        vocabulary: the number of different tokens.
        test: the fraction of test examples.
        seed: the data are a function of it.
    """
    sizes = _split_sizes("tokens", samples, classes, test)
    if length < 1 or not 2 <= vocabulary <= 1_000_000:
        raise InputError(
            f"dataset 'tokens' cannot have length {length} and a vocabulary of"
            f" {vocabulary}: give length >= 1 and 2 to 10^6 tokens"
        )
    # and the examples of one class at a time, as floats and as tokens
    class_bytes = 32 * classes * vocabulary + 24 * -(-samples // classes) * length
    _check_bytes("tokens", samples, 8 * length, classes, class_bytes)
    key = Key(seed).fold_in("tokens")
    frequencies = np.exp(
        key.fold_in("frequencies").generator().standard_normal((classes, vocabulary))
    )
    steps = np.cumsum(frequencies, axis=1)
    splits = []
    for part, size in zip(("train", "test"), sizes, strict=True):
        x = np.empty((size, length), dtype=np.int64)
        y = key.fold_in(part, "labels").permutation(size) % classes
        for label in range(classes):
            members = np.flatnonzero(y == label)
            draws = key.fold_in(part, "draws", label).generator().random((len(members), length))
            draws *= steps[label, -1]
            x[members] = np.minimum(
                np.searchsorted(steps[label], draws, side="right"), vocabulary - 1
            )
        splits.append(DatasetSplit(x, y))
    note = (
        f"Random sequences of {length} tokens out of {vocabulary}; each class has its own"
        f" token frequencies; made with seed {seed}."
    )
    return validate(
        ArrayDataset("tokens", "tokens", _names(classes), splits[0], splits[1], note=note)
    )


def _split_sizes(name: str, samples: int, classes: int, test: float) -> tuple[int, int]:
    if classes < 2 or not 0 < test < 1:
        raise InputError(
            f"dataset {name!r} cannot have {classes} classes and a test fraction of {test}:"
            " give 2 classes or more and a number from 0 to 1"
        )
    held = round(samples * test)
    if min(held, samples - held) < classes:
        raise InputError(
            f"dataset {name!r} with {samples} samples and test={test:g} cannot have each of"
            f" {classes} classes in both parts: give more"
        )
    return samples - held, held


def _check_bytes(name: str, samples: int, example: int, classes: int, drawing: int) -> None:
    parts = {
        **dataset_bytes(samples, samples * example),
        "what the classes are drawn from": drawing,
        "the class names": classes * CLASS_BYTES,
    }
    check_memory(f"dataset {name!r}", parts, "give fewer samples, classes or columns")


def _parse_shape(shape: str) -> tuple[int, ...]:
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})x([1-9]\d{0,4})", shape)
    if not match:
        raise InputError(
            f"dataset 'synthetic' cannot make images of shape {shape!r}: write channels x"
            " height x width, such as '3x32x32'"
        )
    return tuple(int(side) for side in match.groups())


def _names(classes: int) -> tuple[str, ...]:
    return tuple(str(label) for label in range(classes))
