"""An experiment whose coordinator has no data at all: what examples look like is written down
instead.

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
from remanence.data.dataset import INPUT_KINDS, ArrayDataset, DatasetSplit

NAME = "sites"
DTYPES = {"image": np.uint8, "table": np.float32, "tokens": np.int64}


class Description(NamedTuple):
    """What examples look like. The few that stand in the source are zeros, there for a model to
    try its shapes on.
    """

    source: ArrayDataset
    mean: tuple[float, ...]  # empty: every site uses its own
    std: tuple[float, ...]


def sites(
    clients: int,
    *,
    kind: str = "image",
    shape: str = "",
    classes: str = "",
    mean: str = "",
    std: str = "",
) -> Description:
    """What the examples at the sites look like.

    kind: image, table or tokens. shape: of one example, such as 1x28x28 (channels first). classes:
        their names, separated by spaces, or how many there are.
    mean, std: by channel or column, in raw units, to which all sites normalize; without them every
        site uses its own.
    """
    if kind not in INPUT_KINDS:
        raise InputError(f"data sites: kind must be one of {', '.join(INPUT_KINDS)}, not {kind!r}")
    sides = shape.split("x")
    if (
        not all(side.isascii() and side.isdigit() and int(side) > 0 for side in sides)
        or len(sides) != INPUT_KINDS[kind] - 1
    ):
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
    numbers = [_numbers(text, what, int(sides[0])) for text, what in ((mean, "mean"), (std, "std"))]
    if bool(numbers[0]) != bool(numbers[1]) or any(value <= 0 for value in numbers[1]):
        raise InputError(
            "data sites: mean and std belong together, and a std is above 0: give both or neither"
        )
    rows = max(2, len(names)) * clients
    x = np.zeros((rows, *map(int, sides)), dtype=DTYPES[kind])
    stand_in = DatasetSplit(x, np.arange(rows, dtype=np.int64) % len(names))
    return Description(
        ArrayDataset(NAME, kind, names, stand_in, stand_in, note="The examples are at the sites."),
        *numbers,
    )


def describe_data(spec: Experiment) -> Description | None:
    """The description an experiment gives in place of data; None where its coordinator has some."""
    if spec.data.name.partition("(")[0].strip() != NAME:
        return None
    if spec.clients.count is None:
        raise InputError(
            "data sites: say how many clients there are in all, such as clients.count=3;"
            " every site's site.toml says which of them it has"
        )
    found: Description = expressions.instantiate(
        expressions.parse_call(spec.data.name), {NAME: sites}, "dataset", spec.clients.count
    )
    return found


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
