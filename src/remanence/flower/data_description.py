"""Describes the sites' examples, for a coordinator that has no data.

[data]
name = "sites(kind='image', shape='1x28x28', classes='cat dog', mean='33.3', std='78.6')"
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from remanence.config import Experiment
from remanence.core import expressions
from remanence.core.errors import InputError
from remanence.core.expressions import PlainText
from remanence.data.dataset import INPUT_KINDS, INPUT_TYPES, ArrayDataset, DatasetSplit

NAME = "sites"


class Description(NamedTuple):
    """What the sites' examples look like. The dataset holds a few zeros, to check that a model
    accepts their shape.
    """

    source: ArrayDataset
    mean: tuple[float, ...]  # empty: every site uses its own data's
    std: tuple[float, ...]


def sites(
    clients: int,
    *,
    kind: PlainText = "image",
    shape: PlainText = "",
    classes: PlainText = "",
    mean: PlainText = "",
    std: PlainText = "",
) -> Description:
    """Describe the examples at the sites.

    Args:
        clients: How many clients there are.
        kind: "image", "table", "tokens", "sequence" or "volume".
        shape: The shape of one example, such as 1x28x28 (channels first).
        classes: The names of the classes, separated by spaces, or how many there are.
        mean: By channel or column, in raw units, for all sites to normalize with; empty: every site
            uses its own data's.
        std: As `mean`.
    """
    if kind not in INPUT_KINDS:
        raise InputError(f"data sites: kind must be one of {', '.join(INPUT_KINDS)}, not {kind!r}")
    sides = shape.split("x")
    valid = all(side.isascii() and side.isdigit() and int(side) > 0 for side in sides)
    if not valid or len(sides) != INPUT_KINDS[kind] - 1:
        raise InputError(
            f"data sites: shape must be that of one {kind} example, such as"
            f" {'1x28x28' if kind == 'image' else '20'}, not {shape!r}"
        )
    words = classes.split()
    names = (
        tuple(map(str, range(int(words[0]))))
        if len(words) == 1 and words[0].isdigit()
        else tuple(words)
    )
    if len(names) < 2:
        raise InputError(
            "data sites: classes must be two names or more, separated by spaces, or how many"
            f" there are, not {classes!r}"
        )
    means = _numbers(mean, "mean", int(sides[0]))
    stds = _numbers(std, "std", int(sides[0]))
    if bool(means) != bool(stds) or any(value <= 0 for value in stds):
        raise InputError(
            "data sites: give both mean and std, or neither; every std must be above 0"
        )
    count = max(2, len(names)) * clients
    x = np.zeros((count, *map(int, sides)), dtype=INPUT_TYPES[kind][0])
    placeholder = DatasetSplit(x, np.arange(count, dtype=np.int64) % len(names))
    return Description(
        ArrayDataset(
            NAME, kind, names, placeholder, placeholder, note="The examples are at the sites."
        ),
        means,
        stds,
    )


def describe_data(config: Experiment) -> Description | None:
    """The description that an experiment gives in place of data; None if it names a dataset."""
    if config.data.name.partition("(")[0].strip() != NAME:
        return None
    if config.clients.count is None:
        raise InputError(
            "data sites: set the number of clients of all sites, such as clients.count=3;"
            " every site.toml lists the site's own"
        )
    description: Description = expressions.instantiate(
        expressions.parse_call(config.data.name), {NAME: sites}, "dataset", config.clients.count
    )
    return description


def _numbers(text: str, what: str, count: int) -> tuple[float, ...]:
    try:
        values = tuple(float(word) for word in text.split())
    except ValueError:
        values = (math.nan,)
    if not all(math.isfinite(value) for value in values) or len(values) not in (0, count):
        raise InputError(
            f"data sites: {what} must be {count} numbers separated by spaces, not {text!r}"
        )
    return values
