"""Settings as keyword arguments: the signature and the docstring of functions that take them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from remanence.config.keys import FLAGS, all_settings, describe, sections
from remanence.config.settings import ExperimentSettings

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
WIDTH = 92  # of a docstring without its indentation


def with_settings(arguments: type) -> Callable[[Decorated], Decorated]:
    """Decorate a function, or a class, whose last parameter is `**flags: Unpack[...]`. Its
    signature and its docstring then name every setting, for `help` and for completion.

    Args:
        arguments: The `TypedDict` of these settings, see `arguments`.
    """

    def decorate(function: Decorated) -> Decorated:
        names = [name for name in argument_names() if name in arguments.__annotations__]
        call = function.__init__ if inspect.isclass(function) else function
        signature = inspect.signature(call)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        own = [p for p in own if p.name != "self"]
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=arguments.__annotations__[name].__forward_arg__,
            )
            for name in names
        ]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *more]
        )
        function.__doc__ = _add_arguments(function.__doc__ or "", names)
        return function

    return decorate


def argument_names() -> list[str]:
    """The flags, then the settings and the sections without a flag."""
    fields = ExperimentSettings.model_fields
    return list(dict.fromkeys([*FLAGS, *sorted(fields, key=lambda name: name in sections())]))


def describe_argument(name: str) -> str:
    """What a keyword argument is: a flag, a setting, or a whole section."""
    if name in FLAGS or name in all_settings():
        return describe(all_settings()[FLAGS.get(name, name)])
    text = ExperimentSettings.model_fields[name].description or ""
    return f"{text.removesuffix('.')}, as a section."


def _add_arguments(docstring: str, names: list[str]) -> str:
    """Add the settings below the line that describes `**flags`."""
    lines = inspect.cleandoc(docstring).split("\n")
    place = next(number for number, line in enumerate(lines) if line.startswith("    **"))
    while place + 1 < len(lines) and lines[place + 1].startswith("     "):
        place += 1
    return "\n".join([*lines[: place + 1], *_list_arguments(names), *lines[place + 1 :]])


def _list_arguments(names: list[str]) -> Iterator[str]:
    for name in names:
        yield from textwrap.wrap(
            f"{name}: {describe_argument(name)}",
            WIDTH,
            initial_indent="    ",
            subsequent_indent="        ",
            break_on_hyphens=False,
        )
