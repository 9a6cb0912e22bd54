"""Names with arguments, as users write them: `dirichlet(alpha=0.1)`, `fedprox(mu=0.1)+wsm`.

Methods, partitions, optimizers, schedules, models and data sources have the same grammar. No text
is evaluated as Python: values are numbers, words, quoted strings, true, false, none and lists of
these.

    sum    = call ("+" call)*
    call   = name [ "(" [ option ("," option)* ] ")" ]
    option = name "=" value; the first one also without a name, if it is a number: dirichlet(0.1)
    value  = number | "string" | word | "[" [ value ("," value)* ] "]"

A name is an entry of a table, or an import path such as `package.module:function`
(`core/imports.py`).
"""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from remanence.core.errors import InputError, nearest
from remanence.core.imports import find_constructor

LARGEST = 10**300  # numbers beyond it are rejected
LONGEST = 2000  # the most characters of an expression
UNNAMED = ""  # the name of a number that is written without one, until `name_arguments`

# The type of an option that is a text and names neither a file nor code. An option of the type
# `str` may name one: real sites decline an experiment that gives it a value.
PlainText = Annotated[str, "names neither a file nor code"]

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))
    | (?P<name>[A-Za-z_][\w.:\-/]*)
    | (?P<string>"[^"]*"|'[^']*')
    | (?P<sign>[()+,=\[\]])
    )""",
    re.VERBOSE | re.ASCII,
)
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Call:
    """A name with its arguments."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        inside = ", ".join(
            f"{name}={_write(value)}" if name else _write(value)
            for name, value in self.arguments.items()
        )
        return f"{self.name}({inside})" if inside else self.name


def parse_parts(text: str) -> list[Call]:
    """The calls of a sum.

    >>> [str(call) for call in parse_parts("fedprox(mu=0.1) + wsm")]
    ['fedprox(mu=0.1)', 'wsm']
    """
    reader = _Reader(text)
    calls = [reader.call()]
    while reader.accept("+"):
        calls.append(reader.call())
    reader.finish()
    return calls


def parse_call(text: str) -> Call:
    """One call."""
    calls = parse_parts(text)
    if len(calls) != 1:
        raise InputError(f"{text!r} is a sum: one name with its arguments was expected here")
    return calls[0]


def instantiate(call: Call, table: Mapping[str, Callable[..., Any]], kind: str, *given: Any) -> Any:
    """Call the constructor of that name with checked arguments.

    Args:
        call: The name and its keyword arguments.
        table: The constructors by name. A name that is an import path is imported.
        kind: What the table holds, for errors: "partition".
        given: Positional arguments, which come first.

    Raises:
        InputError: The name is unknown, or an argument is unknown, missing or of a wrong type.
    """
    constructor = find_constructor(call.name, table, kind)
    options = options_of(constructor, len(given))
    call = name_arguments(call, options, kind)
    for name in call.arguments:
        if name not in options:
            help_ = nearest(name, options) if options else "it takes none"
            raise InputError(f"{kind} {call.name!r} has no option {name!r}: {help_}")
    arguments = {
        name: _coerce(value, options[name], f"{kind} {call.name!r}: {name}")
        for name, value in call.arguments.items()
    }
    missing = [
        name
        for name, option in options.items()
        if option.default is inspect.Parameter.empty and name not in arguments
    ]
    if missing:
        raise InputError(
            f"{kind} {call.name!r} needs {' and '.join(missing)}: write"
            f" {call.name}({', '.join(f'{name}=...' for name in missing)})"
        )
    return constructor(*given, **arguments)


@dataclass(frozen=True)
class Option:
    """One keyword-only argument of a constructor."""

    name: str
    type: Any
    default: Any
    # its values are numbers, truth values or `PlainText`; False for what is not declared
    names_nothing: bool = False


def name_arguments(call: Call, options: Mapping[str, Option], kind: str) -> Call:
    """The call with the name of a leading number, which is the constructor's first option.

    >>> def dirichlet(*, alpha: float = 0.1): ...
    >>> str(name_arguments(parse_call("dirichlet(0.5)"), options_of(dirichlet), "partition"))
    'dirichlet(alpha=0.5)'
    """
    if UNNAMED not in call.arguments:
        return call
    first = next(iter(options.values()), None)
    if first is None or not {int, float} & set(_alternatives(first.type)):
        cure = f"write {call.name}({first.name}=...)" if first else "it takes none"
        raise InputError(f"{kind} {call.name!r} has no leading number: {cure}")
    if first.name in call.arguments:
        raise InputError(f"{kind} {call.name!r}: {first.name} is given twice")
    return Call(call.name, {name or first.name: value for name, value in call.arguments.items()})


def options_of(constructor: Callable[..., Any], given: int | None = None) -> dict[str, Option]:
    """The arguments of a constructor that a user may write in the brackets.

    Args:
        constructor: A function or class.
        given: How many arguments are given by position; those after them are options, too.
            Default: only keyword-only arguments are options, as in all constructors of ours.
    """
    function = constructor.__init__ if inspect.isclass(constructor) else constructor
    try:
        hints = typing.get_type_hints(function)
        declared = typing.get_type_hints(function, include_extras=True)
    except NameError:  # a type imported for type checkers only: its arguments are not checked
        hints = declared = {}
    parameters = list(inspect.signature(constructor).parameters.values())
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = set() if given is None else set(by_position[given:])
    return {
        p.name: Option(
            p.name, hints.get(p.name, Any), p.default, _names_nothing(declared.get(p.name, Any))
        )
        for p in parameters
        if p.kind is p.KEYWORD_ONLY or p.name in named
    }


def _names_nothing(kind: Any) -> bool:
    """Whether no value of a type can name a file or code."""
    items = [item for item in typing.get_args(kind) if item is not Ellipsis]
    if typing.get_origin(kind) in (tuple, list, typing.Union, types.UnionType) and items:
        return all(_names_nothing(item) for item in items)
    return kind in (int, float, bool, type(None), PlainText)


def _coerce(value: Any, option: Option, thing: str) -> Any:
    """Convert a value to the type of its option, or raise `InputError`."""
    kinds = _alternatives(option.type)
    if Any in kinds or (value is None and type(None) in kinds):
        return value
    if isinstance(value, bool):
        if bool in kinds:
            return value
    elif isinstance(value, int | float):
        if int in kinds and (isinstance(value, int) or value.is_integer()):
            return int(value)
        if float in kinds:
            return float(value)
        if str in kinds:  # hidden=200 means the same as hidden="200"
            return str(value)
    elif isinstance(value, str) and str in kinds:
        return value
    elif isinstance(value, list):
        lists = [kind for kind in kinds if typing.get_origin(kind) in (tuple, list)]
        if lists:
            item = (typing.get_args(lists[0]) or (Any,))[0]
            return tuple(
                _coerce(entry, Option(option.name, item, None), f"{thing}: each entry")
                for entry in value
            )
    wanted = " or ".join(_plain(kind) for kind in kinds if kind is not type(None))
    raise InputError(f"{thing} must be {wanted}, not {_write(value)}")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """int | None -> int, None; tuple[int, ...] stays one alternative."""
    return (
        typing.get_args(kind)
        if typing.get_origin(kind) in (typing.Union, types.UnionType)
        else (kind,)
    )


def _plain(kind: Any) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}.get(
        kind, "a list"
    )


def _write(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_write(item) for item in value)}]"
    if isinstance(value, str):
        if re.fullmatch(r"[A-Za-z_][\w.\-]*", value, re.ASCII) and value.lower() not in _WORDS:
            return value
        return f"'{value}'" if '"' in value else f'"{value}"'
    return repr(value)


class _Reader:
    """Reads tokens from left to right; error messages show the whole text."""

    def __init__(self, text: str):
        if len(text) > LONGEST:
            raise InputError(
                f"an expression of {len(text)} characters is too long: {LONGEST} at most"
            )
        self.text, self.tokens, place = text, [], 0
        while text[place:].strip():
            match = _TOKEN.match(text, place)
            if not match:
                raise InputError(
                    f"cannot read {text!r} at {text[place:].strip()[:12]!r}: expected a form"
                    " like fedprox(mu=0.1)+wsm"
                )
            self.tokens.append((match.lastgroup or "", match.group(match.lastgroup or 0)))
            place = match.end()
        self.position = 0

    def peek(self) -> tuple[str, str]:
        return (
            self.tokens[self.position] if self.position < len(self.tokens) else ("end", "its end")
        )

    def accept(self, sign: str) -> bool:
        if self.peek() == ("sign", sign):
            self.position += 1
            return True
        return False

    def expect(self, kind: str, wanted: str) -> str:
        found_kind, found = self.peek()
        if found_kind != kind:
            raise InputError(f"cannot read {self.text!r}: expected {wanted}, found {found}")
        self.position += 1
        return found

    def call(self) -> Call:
        name = self.expect("name", "a name")
        arguments: dict[str, Any] = {}
        if self.accept("("):
            while not self.accept(")"):
                if arguments:
                    self.comma()
                if not arguments and self.peek()[0] == "number":
                    arguments[UNNAMED] = self.value(0)
                    continue
                option = self.expect("name", "an option such as mu=0.1")
                if not self.accept("="):
                    raise InputError(
                        f"cannot read {self.text!r}: options are written name=value; {option}"
                        " has no value"
                    )
                if option in arguments:
                    raise InputError(f"cannot read {self.text!r}: {option} is given twice")
                arguments[option] = self.value(0)
        return Call(name, arguments)

    def comma(self) -> None:
        if not self.accept(","):
            raise InputError(
                f"cannot read {self.text!r}: expected a comma or a closing bracket, found"
                f" {self.peek()[1]}"
            )

    def value(self, depth: int) -> Any:
        kind, text = self.peek()
        if kind == "sign" and text == "[":
            if depth > 3:
                raise InputError(f"cannot read {self.text!r}: lists are nested too deeply")
            self.position += 1
            items: list[Any] = []
            while not self.accept("]"):
                if items:
                    self.comma()
                items.append(self.value(depth + 1))
            return items
        if kind not in ("number", "string", "name"):
            raise InputError(f"cannot read {self.text!r}: expected a value, found {text}")
        self.position += 1
        if kind == "string":
            return text[1:-1]
        if kind == "name":
            return _WORDS.get(text.lower(), text)
        number = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
        if abs(number) > LARGEST or math.isinf(number):
            raise InputError(
                f"cannot read {self.text!r}: {text[:20]} is larger than any number we can use"
            )
        return number

    def finish(self) -> None:
        if self.peek()[0] != "end":
            raise InputError(f"cannot read {self.text!r}: unexpected {self.peek()[1]!r}")


def split_top_level(text: str) -> list[str]:
    """Split at commas that are outside of brackets and quotes.

    >>> split_top_level("none,backdoor(target=1, clients='3, 7'),0.5")
    ['none', "backdoor(target=1, clients='3, 7')", '0.5']
    """
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote or sign in "'\"":
            quote = "" if sign == quote else quote or sign
        depth += 0 if quote else (sign in "([") - (sign in ")]")
        if sign == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return parts
