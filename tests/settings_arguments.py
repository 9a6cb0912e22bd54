"""Writes `config/arguments.py`, the keyword arguments of `rem.run` as types, from the settings.

    python tests/settings_arguments.py

`tests/test_arguments.py` checks that the file is what this writes.
"""

from __future__ import annotations

import textwrap
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from remanence.config.keys import FLAGS, all_settings, sections
from remanence.config.keywords import argument_names, describe_argument

FILE = Path(__file__).parents[1] / "src" / "remanence" / "config" / "arguments.py"
OWN = ("method", "model", "data")  # parameters of `rem.run` that also take objects
HEAD = '''"""The settings as keyword arguments, for editors and type checkers.

Written by `tests/settings_arguments.py` from the settings; change those, and run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from remanence.config.settings import (
'''


def render() -> str:
    names = [name for name in argument_names() if name not in (*OWN, "seed")]
    imported = sorted(section.__name__ for section in sections().values())
    head = HEAD + "".join(f"    {name},\n" for name in imported) + ")\n"
    return head + "".join(
        [
            render_class(
                "CommonSettings",
                "TypedDict, total=False",
                "What all runs of a comparison share.",
                names,
            ),
            render_class(
                "RunSettings",
                "CommonSettings, total=False",
                "What `rem.run` takes, besides objects.",
                ["seed"],
            ),
            render_class(
                "Settings",
                "RunSettings, total=False",
                "All settings of an `Experiment`.",
                list(OWN),
            ),
        ]
    )


def render_class(name: str, bases: str, docstring: str, fields: list[str]) -> str:
    lines = ["", "", f"class {name}({bases}):", f'    """{docstring}"""']
    for field in fields:
        lines += ["", *wrap_type(field, type_of(field)), *document(describe_argument(field))]
    return "\n".join(lines) + "\n"


def wrap_type(name: str, members: list[str]) -> list[str]:
    line = f"    {name}: {' | '.join(members)}"
    if len(line) <= 100:
        return [line]
    return [
        f"    {name}: (",
        f"        {members[0]}",
        *(f"        | {m}" for m in members[1:]),
        "    )",
    ]


def document(text: str) -> list[str]:
    text = text.replace("\\", "\\\\")
    if len(text) <= 90:
        return [f'    """{text}"""']
    lines = textwrap.wrap(text, 96, break_on_hyphens=False, initial_indent='"""')
    return [*(f"    {line}" for line in lines), '    """']


def type_of(name: str) -> list[str]:
    """The members of a union: of the flag or setting, and of the section of this name."""
    setting = all_settings().get(FLAGS.get(name, name))
    members = [] if setting is None else members_of(setting.annotation)
    if name in sections():
        members += [sections()[name].__name__, "Mapping[str, Any]"]
    return [*(m for m in members if m != "None"), "None"]


def members_of(annotation: Any) -> list[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return members_of(get_args(annotation)[0])
    if origin is Literal:
        values = ", ".join('"' + value + '"' for value in get_args(annotation))
        return [f"Literal[{values}]"]
    if origin in (Union, types.UnionType):
        found = [member for part in get_args(annotation) for member in members_of(part)]
        found = list(dict.fromkeys(found))
        return [m for m in found if m != "int"] if "float" in found else found
    return ["None" if annotation is type(None) else annotation.__name__]


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
