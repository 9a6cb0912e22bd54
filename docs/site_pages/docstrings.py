"""Docstrings, written as in Google's guide, as Markdown."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

SECTIONS = ("Args", "Returns", "Raises", "Yields")
HEADINGS = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises", "Yields": "Yields"}


def prose(text: str) -> str:
    """A text whose code is between backticks, with the rest escaped for Markdown."""
    pieces = re.split(r"(``?[^`]+``?)", text)
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(r"([*<\[\]$|{}]|(?<!\w)_|_(?!\w))", r"\\\1", pieces[i])
    return "".join(pieces)


def cell(text: str) -> str:
    """A text in one cell of a table."""
    text = " ".join(prose(text).split())
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def code_cell(value: Any) -> str:
    """A value as code in one cell of a table; nothing for an empty one."""
    text = str(value)
    return f"`{text}`".replace("|", "\\|") if text else ""


def table(heading: list[str], rows: list[list[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def sections(docstring: str | None) -> dict[str, str]:
    """The sections of a docstring: "" is what stands before the first one."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(docstring or "").split("\n"):
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            name = line[:-1]
            found[name] = []
        elif name and line and not line.startswith(" "):
            name = ""  # a paragraph after a section belongs to the text
            found[""] += ["", line]
        else:
            found[name].append(line)
    return {
        name: textwrap.dedent("\n".join(lines)).strip("\n")
        for name, lines in found.items()
        if any(lines)
    }


def entries(section: str) -> dict[str, str]:
    """The entries `name: text` of a section, in which deeper lines continue the text."""
    found: dict[str, str] = {}
    name = ""
    for line in section.split("\n"):
        begun = re.match(r"([\w*.]+):\s*(.*)", line)
        if begun and not line.startswith(" "):
            name = begun[1]
            found[name] = begun[2]
        elif name:
            found[name] += " " + line.strip()
    return found


def body(text: str) -> str:
    """Paragraphs, indented blocks and doctests as Markdown."""
    parts = []
    for block in re.split(r"\n{2,}(?=\S)", text):
        if block.startswith(">>>"):
            parts.append(f"```pycon\n{block}\n```")
            continue
        head, _, code = block.partition("\n\n    ")
        parts.append(_lines(head))
        if code:
            parts.append(f"```text\n{textwrap.dedent('    ' + code)}\n```")
    return "\n\n".join(part for part in parts if part)


def _lines(text: str) -> str:
    """A paragraph; lines that are indented, as in a table of words, stay as they are."""
    if any(line.startswith("    ") for line in text.split("\n")):
        return f"```text\n{text}\n```"
    return prose(text)


def markdown(docstring: str | None) -> str:
    """A whole docstring: text, then a list of arguments, results and errors."""
    parts = []
    for name, text in sections(docstring).items():
        if not name:
            parts.append(body(text))
        elif name in ("Args", "Raises"):
            lines = [f"- `{key}`: {prose(value)}" for key, value in entries(text).items()]
            parts.append(f"**{HEADINGS[name]}**\n\n" + "\n".join(lines))
        else:
            parts.append(f"**{HEADINGS[name]}**\n\n{body(text)}")
    return "\n\n".join(parts)


def summary(docstring: str | None) -> str:
    """The first paragraph in one line."""
    return " ".join(sections(docstring).get("", "").partition("\n\n")[0].split())
