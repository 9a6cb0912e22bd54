"""The pages of `remanence` and `remanence.extend`: every public name with its docstring."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import remanence
from remanence import extend
from remanence.core import slots
from site_pages.docstrings import cell, code_cell, markdown, summary, table

INTRODUCTIONS = {
    "remanence": (
        "The Python API",
        "```python\nimport remanence as rem\n```\n\nEvery public name of the package. Settings"
        " that a function takes as `**flags` and in `set` are listed in"
        " [All settings](settings.md).",
    ),
    "remanence.extend": (
        "Names for authors",
        "```python\nfrom remanence import extend\n```\n\nThe stable names for authors of methods"
        " and engines. [Write a method](../write-a-method.md) introduces them.",
    ),
}


def pages() -> dict[str, str]:
    """One page for each of the two modules."""
    return {
        "reference/python.md": _page(remanence),
        "reference/extend.md": _page(extend),
    }


def _page(module: ModuleType) -> str:
    title, introduction = INTRODUCTIONS[module.__name__]
    parts = [f"# {title}", introduction]
    constants = [name for name in module.__all__ if name.isupper()]
    for name in sorted(set(module.__all__) - set(constants), key=str.lower):
        parts.append(f"## {name.strip('_')}\n\n{describe(module, name)}")
    if constants:
        rows = [[code_cell(name), code_cell(repr(getattr(module, name)))] for name in constants]
        text = "Words of the declarations `Disclosure`, `Mechanism` and `Remedy`."
        parts.append(f"## Constants\n\n{text}\n\n{table(['name', 'value'], rows)}")
    if module is extend:
        rows = [[code_cell(n), code_cell(kind), cell(note)] for n, kind, note in slot_types()]
        text = "The functions that fill the slots of a `Part`, by the type of its field."
        heading = ["type", "arguments and result", "notes"]
        parts.append(f"## Functions of slots\n\n{text}\n\n{table(heading, rows)}")
    return "\n\n".join(parts) + "\n"


def slot_types() -> list[tuple[str, str, str]]:
    """The types of functions in `core/slots.py`: name, type, and the comment beside or above."""
    found, above = [], []
    source = re.sub(r"Callable\[\n\s*(.*)\n\]", r"Callable[\1]", inspect.getsource(slots))
    for line in source.split("\n"):
        if line.startswith("#"):
            above.append(line.lstrip("# "))
            continue
        defined = re.match(r"(\w+) = (Callable\[[^#]*\])(?:  # (.*))?$", line)
        if defined:
            note = " ".join([*above, defined[3] or ""]).strip()
            found.append((defined[1], defined[2].removeprefix("Callable"), note))
        above = []
    return found


def describe(module: ModuleType, name: str) -> str:
    """The entry of a public name."""
    value, path = getattr(module, name), f"{module.__name__}.{name}"
    if module is remanence and name in extend.__all__:
        return (
            f"`{path}`. {cell(summary(value.__doc__))} [Described here](extend.md#{name.lower()})."
        )
    if isinstance(value, ModuleType):
        return _describe_module(value, path)
    if inspect.isclass(value):
        return _describe_class(value, path)
    if inspect.isfunction(value):
        return _directive("function", path + signature(value), markdown(value.__doc__))
    kind = (
        f"A text, here `{value}`." if isinstance(value, str) else f"A name of the type `{value}`."
    )
    return _directive("data", path, re.sub(r"typing\.|collections\.abc\.", "", kind))


def _describe_module(value: ModuleType, path: str) -> str:
    functions = {
        key: found
        for key, found in vars(value).items()
        if inspect.isroutine(found) and found.__module__ == value.__name__ and key[0] != "_"
    }
    classes = {
        key: found
        for key, found in vars(value).items()
        if inspect.isclass(found)
        and found.__module__ == value.__name__
        and key[0] != "_"
        and key not in extend.__all__
    }
    text = [f"The module `{path}`.", markdown(value.__doc__)]
    text += [_directive("class", f"{path}.{k}", markdown(c.__doc__)) for k, c in classes.items()]
    text += [
        _directive("function", f"{path}.{k}{signature(f)}", markdown(f.__doc__))
        for k, f in functions.items()
    ]
    return "\n\n".join(text)


def _describe_class(value: type, path: str) -> str:
    head = path
    text = [markdown(_own_docstring(value))]
    fields = field_comments(value)
    protocol = getattr(value, "_is_protocol", False)
    if not (fields or protocol or issubclass(value, BaseException)):
        head += signature(value)
    if fields:
        rows = [[code_cell(n), code_cell(kind), cell(note)] for n, (kind, note) in fields.items()]
        text.append(table(["field", "type", "meaning"], rows))
    for key, member in vars(value).items():
        if key.startswith("_"):
            continue
        found = _member(path, key, member)
        if found:
            text.append(found)
    return _directive("class", head, "\n\n".join(text))


def _member(path: str, key: str, member: Any) -> str:
    if isinstance(member, property | functools.cached_property):
        function = member.fget if isinstance(member, property) else member.func
        return _directive("property", f"{path}.{key}", markdown(function.__doc__))
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    if inspect.isfunction(member):
        return _directive("method", f"{path}.{key}{signature(member)}", markdown(member.__doc__))
    return ""


def _own_docstring(value: type) -> str | None:
    """The docstring, unless Python made it from the signature."""
    text = value.__doc__
    return None if text is None or text.startswith(f"{value.__name__}(") else text


def field_comments(value: type) -> dict[str, tuple[str, str]]:
    """The fields of a dataclass or a named tuple: type, and the comment beside or above it."""
    if not (dataclasses.is_dataclass(value) or hasattr(value, "_fields")):
        return {}
    names = set(getattr(value, "__annotations__", {}))
    found: dict[str, tuple[str, str]] = {}
    above: list[str] = []
    for line in inspect.getsource(value).split("\n"):
        text = line.strip()
        if text.startswith("#"):
            above.append(text.lstrip("# "))
            continue
        field = re.match(r"    (\w+): (.*)", line)
        if field and field[1] in names:
            code, _, beside = field[2].partition("  # ")
            kind = re.sub(r" = .*", "", code)
            found[field[1]] = (kind, " ".join([*above, beside]).strip())
        above = []
    return found


def signature(function: Any) -> str:
    """The signature as text, without the names of modules and of objects in memory."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return "()"
    parameters = [
        parameter.replace(
            default=_shown(parameter.default, repr), annotation=_shown(parameter.annotation)
        )
        for name, parameter in found.parameters.items()
        if name not in ("self", "cls")
    ]
    result = _shown(found.return_annotation)
    return str(found.replace(parameters=parameters, return_annotation=result))


def _shown(value: Any, write: Callable[[Any], str] = str) -> Any:
    """A default or an annotation as it is shown in a signature."""
    return value if value is inspect.Parameter.empty else _Shown(write(value))


class _Shown:
    """A value that a signature shows as text."""

    def __init__(self, text: str):
        self.text = "..." if re.search(r"<|MISSING|mappingproxy", text) else text

    def __repr__(self) -> str:
        return self.text


def _directive(kind: str, head: str, text: str) -> str:
    """A Python object of Sphinx; the fence is longer than those inside."""
    colons = ":" * (2 + max([1, *(len(found) for found in re.findall(r"^:{3,}", text, re.M))]))
    return f"{colons}{{py:{kind}}} {head}\n{text}\n{colons}"
