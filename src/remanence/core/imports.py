"""Constructors outside of this package: by import path, `package.module:name`, and by the entry
points of installed packages (group `remanence.parts`).

An import path runs code. One that a user types is imported; one from a file, a run folder or a
coordinator is refused before, by `find_import_path`, unless the user or the site allows code.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from remanence.core.errors import InputError, unknown

GROUP = "remanence.parts"  # each entry point is the constructor of a part, by name
_NAME = r"[A-Za-z_]\w*(?:\.\w+)*"
_PATH = re.compile(rf"{_NAME}:{_NAME}", re.ASCII)
# more than `_PATH` finds within an expression, so that nothing importable is overlooked
_WITHIN = re.compile(rf"(?<![\w./\-]){_NAME}:{_NAME}", re.ASCII)
_ANYWHERE = re.compile(rf"(?<![\w./\-]){_NAME}:[A-Za-z_]", re.ASCII)


def is_import_path(name: str) -> bool:
    """Whether a name without arguments is an import path, `package.module:name`.

    >>> is_import_path("my_package.nets:Net"), is_import_path("ray://host:1")
    (True, False)
    """
    return _PATH.fullmatch(name) is not None


def find_import_path(settings: Any) -> str | None:
    """The first text with an import path, in nested tables and lists of settings.

    >>> find_import_path({"local": {"lr": 0.1}, "methods": ["fedavg", "fedavg+mine:loss(a=1)"]})
    'fedavg+mine:loss(a=1)'
    """
    return next((text for text in _texts(settings) if _ANYWHERE.search(text)), None)


def import_paths(settings: Any) -> set[str]:
    """All import paths in nested tables and lists of settings.

    >>> import_paths({"method": "fedavg+mine:loss(a=1)", "model": "mine:Net"}) == {
    ...     "mine:loss", "mine:Net"}
    True
    """
    return {path for text in _texts(settings) for path in _WITHIN.findall(text)}


def _texts(settings: Any) -> Iterator[str]:
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, Mapping):
        for value in settings.values():
            yield from _texts(value)
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _texts(value)


def import_constructor(path: str, kind: str) -> Callable[..., Any]:
    """Import a class or function.

    Args:
        path: `package.module:name`. A file in the current folder can be imported by its name.
        kind: What it makes, for errors: "method".
    """
    module_name, _, attribute = path.partition(":")
    folder = os.getcwd()
    # a user's own file beside the experiment, as `python -m` would find it
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            found = getattr(found, name)
    except ImportError as error:
        raise InputError(
            f"{kind} {path}: cannot import {module_name} ({error}); the path is package.module:name"
        ) from error
    except AttributeError:
        raise InputError(f"{kind} {path}: {module_name} has no {attribute}") from None
    if not callable(found):
        raise InputError(f"{kind} {path}: {attribute} is not a class or function to call")
    return found  # type: ignore[no-any-return]


@functools.cache
def installed_parts() -> Mapping[str, EntryPoint]:
    """The entry points of the group `remanence.parts`, by name; nothing is imported."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def find_constructor(
    name: str, table: Mapping[str, Callable[..., Any]], kind: str
) -> Callable[..., Any]:
    """The constructor of a name: from the table, by import path or, for methods and what is joined
    to them, from an installed package.

    Raises:
        InputError: The name is unknown, or its code cannot be imported.
    """
    if name in table:  # an installed package cannot take the place of a name of ours
        return table[name]
    if is_import_path(name):
        return import_constructor(name, kind)
    if kind == "method" and name in installed_parts():
        entry = installed_parts()[name]
        return import_constructor(f"{entry.module}:{entry.attr}", kind)
    raise unknown(kind, name, table)
