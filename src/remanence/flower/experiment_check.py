"""Checks the experiment of a message before a site builds it: it names no file and no code.

A coordinator decides what clients train, never which files a site opens or what it imports. So
every text of an experiment has to be declared:

- a setting with a closed list of values (`Literal`) has no other values;
- a setting that is an expression is in `EXPRESSIONS` with the table of its names, and the options
  of each name are numbers, truth values or texts of the type `core.expressions.PlainText`;
- any other text, such as that of a folder or of a setting added later, has its default value.

The one exception is code that is named as `package.module:name`, or by the entry point of a package
installed at the site, at a site whose policy allows code. Its options are numbers and truth values,
because nothing declares its texts.
"""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from remanence.attacks import ATTACKS
from remanence.config import Experiment, all_settings, parse_experiment, read_file
from remanence.core import expressions
from remanence.core.errors import InputError, unknown
from remanence.core.expressions import Call
from remanence.core.imports import find_import_path, installed_parts, is_import_path
from remanence.data import DATASETS, PARTITIONS
from remanence.data.concept_rules import CONCEPTS
from remanence.data.drift_schedules import DRIFT_SCHEDULES
from remanence.experiment.system import DEADLINES, SPEEDS
from remanence.flower import data_description
from remanence.methods import PARTS
from remanence.models import MODELS
from remanence.optimizers import LR_SCHEDULES, OPTIMIZERS
from remanence.peers.availability import AVAILABILITIES
from remanence.peers.topology import TOPOLOGIES

# by key: the names that an expression may have, with the functions that declare their options
EXPRESSIONS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "method": PARTS,
    "model": MODELS,
    "attack": ATTACKS,
    "data.name": DATASETS | {data_description.NAME: data_description.sites},
    "data.partition": PARTITIONS,
    "clients.availability": AVAILABILITIES,
    "clients.speed": SPEEDS,
    "drift.schedule": DRIFT_SCHEDULES,
    "drift.concepts": CONCEPTS,
    "peers.topology": TOPOLOGIES,
    "local.optimizer": OPTIMIZERS,
    "local.schedule": LR_SCHEDULES,
    "round.deadline": DEADLINES,
}


class NamesFileOrCode(InputError):
    """A text of an experiment names a file or code, or may do so."""


def check_experiment(config: Experiment, allow_code: bool = False) -> None:
    """Check that no text of an experiment names a file or code; opens and builds nothing.

    Args:
        config: The experiment of a message.
        allow_code: Accept code, `package.module:name`.

    Raises:
        NamesFileOrCode: A text names a file or code, or is not declared.
        InputError: An expression cannot be read, or has a name that no table has.
    """
    for key, value, closed in _texts(config.model_dump()):
        setting = all_settings().get(key)
        if closed or (setting is not None and value == setting.default):
            continue
        if key not in EXPRESSIONS or not isinstance(value, str):
            raise NamesFileOrCode(
                f"{key}={value!r} may name a file, and sites open none that an experiment names:"
                " leave it out"
            )
        for call in _calls(value):
            _check_call(key, call, allow_code)


def read_at_site(path: Path, allow_code: bool) -> Experiment:
    """Read the file of an experiment at a site, whose policy says whether it may name code."""
    settings = read_file(path)
    text = find_import_path(settings)
    if text is not None and not allow_code:
        raise NamesFileOrCode(
            f"{path} imports and runs Python code ({text}), but this site does not allow that"
            " (policy.code)"
        )
    return parse_experiment(settings)


def _texts(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Every value that is not a number: its key, the value, and whether its setting has a closed
    list of values.
    """
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _texts(value, f"{key}.")
        elif not isinstance(value, int | float | None):
            setting = all_settings().get(key)
            yield key, value, setting is not None and _is_closed(setting.annotation)


def _is_closed(kind: Any) -> bool:
    items = [item for item in typing.get_args(kind) if item is not Ellipsis]
    if typing.get_origin(kind) is tuple:
        return all(map(_is_closed, items))
    return typing.get_origin(kind) is Literal


def _calls(text: str) -> list[Call]:
    """The calls of an expression; none where it is empty or a number, as a deadline can be."""
    with contextlib.suppress(ValueError):
        float(text or "0")
        return []
    return expressions.parse_parts(text)


def _check_call(key: str, call: Call, allow_code: bool) -> None:
    table = EXPRESSIONS[key]
    is_code = is_import_path(call.name) or (
        call.name not in table and key == "method" and call.name in installed_parts()
    )
    if is_code and not allow_code:
        raise NamesFileOrCode(
            f"the experiment imports and runs Python code ({key}={call.name}), but this site does"
            " not allow that (policy.code)"
        )
    if not is_code and call.name not in table:
        raise unknown(key, call.name, table)
    options = {} if is_code else expressions.options_of(table[call.name])
    call = call if is_code else expressions.name_arguments(call, options, key)
    for name, value in call.arguments.items():
        declared = name in options and options[name].names_nothing
        if not declared and not (is_code and _is_number(value)):
            raise NamesFileOrCode(
                f"{key}: {name} of {call.name} may name a file, and sites open none that an"
                " experiment names: leave it out"
            )


def _is_number(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_number, value))
    return isinstance(value, int | float | None)
