"""The axes of a grid: settings of the experiment such as `local.lr`, and options of methods such as
`fedprox.mu`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remanence.config import all_keys
from remanence.core.errors import InputError
from remanence.core.expressions import UNNAMED, Call, name_arguments, options_of, parse_parts
from remanence.core.imports import find_constructor
from remanence.methods import PARTS

# What validation data select. All other settings are conditions: each value has results of its own.
TUNED = "local."


@dataclass(frozen=True)
class GridSetting:
    """One combination of a grid's values for one method."""

    method: str  # with the options of this combination
    changes: Mapping[str, Any]  # settings by dotted key
    text: str  # all values, for labels
    condition: str  # the values that validation data do not select


def expand(method: str, grid: Mapping[str, Sequence[Any]]) -> list[GridSetting]:
    """Every combination of a grid's values for one method. Options of parts that the method does
    not have are left out.

    >>> [setting.method for setting in expand("fedprox+wsm", {"fedprox.mu": [0.1, 1.0]})]
    ['fedprox(mu=0.1)+wsm', 'fedprox(mu=1.0)+wsm']
    >>> len(expand("fedavg", {"fedprox.mu": [0.1, 1.0], "local.lr": [0.1, 0.01]}))
    2
    """
    calls = parse_parts(method)
    names = {short_name(call) for call in calls}
    used = {
        key: values
        for key, values in grid.items()
        if (part := _part_of(key)) is None or part in names
    }
    settings = []
    for values in itertools.product(*used.values()):
        chosen = dict(zip(used, values, strict=True))
        options = {key: value for key, value in chosen.items() if _part_of(key) is not None}
        conditions = {
            key: value
            for key, value in chosen.items()
            if key not in options and not key.startswith(TUNED)
        }
        settings.append(
            GridSetting(
                "+".join(str(_with_options(call, options)) for call in calls)
                if options
                else method,
                {key: value for key, value in chosen.items() if key not in options},
                _describe(chosen),
                _describe(conditions),
            )
        )
    return settings


def check_axes(methods: Sequence[str], grid: Mapping[str, Sequence[Any]]) -> None:
    """Refuse an axis that no method of the comparison has."""
    names = {short_name(call): None for method in methods for call in parse_parts(method)}
    for key in grid:
        part = _part_of(key)
        if part is not None and part not in names:
            raise InputError(f"the grid varies {key}, but no method of the comparison has {part}")
        owners = [n for n in names if n in PARTS and key in options_of(PARTS[n])]
        if owners and key not in all_keys():
            raise InputError(
                f"{key} is an option of {owners[0]}: write --grid {owners[0]}.{key}=..."
            )


def short_name(call: Call) -> str:
    """The name of a part in keys such as `fedprox.mu`: that of its function.

    >>> short_name(Call("my_package.my_file:feddyn"))
    'feddyn'
    """
    return call.name.rpartition(":")[2]


def _part_of(key: str) -> str | None:
    """The part whose option a key names; None for a setting of the experiment."""
    part, dot, _ = key.partition(".")
    sections = {name.partition(".")[0] for name in all_keys()}
    return part if dot and part not in sections else None


def _with_options(call: Call, options: Mapping[str, Any]) -> Call:
    own = {
        key.partition(".")[2]: value
        for key, value in options.items()
        if _part_of(key) == short_name(call)
    }
    if own and UNNAMED in call.arguments:
        call = name_arguments(call, options_of(find_constructor(call.name, PARTS, "method"), 0), "")
    return Call(call.name, {**call.arguments, **own})


def _describe(chosen: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.split('.')[-1]}={value}" for key, value in chosen.items())
