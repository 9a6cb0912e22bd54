"""The flags of an experiment, made from the settings in `remanence.config`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from remanence import config

# Groups of flags in --help, by the first part of a setting's key.
PANELS = {
    "data": "Data",
    "clients": "Clients",
    "drift": "Drift",
    "peers": "Without a server",
    "local": "Local training",
    "round": "Rounds",
    "rounds": "Rounds",
    "attack": "Clients",
    "record": "Recording",
    "engine": "Machine",
    "device": "Machine",
    "precision": "Machine",
    "deterministic": "Machine",
}
# These flags are parsed as TOML values: --sample is a number of clients or a fraction.
PARSED_AS_TEXT = ("sample",)


def with_flags(
    without: Collection[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command that has a parameter `flags`: the settings by dotted key.

    Args:
        without: Flags that the command does not have.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != "flags"]
        added = [_flag(name) for name in config.FLAGS if name not in without]

        def call(**arguments: Any) -> None:
            own_arguments = {p.name: arguments.pop(p.name) for p in own}
            command(**own_arguments, flags=_parse_flags(arguments))

        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*(p.replace(kind=p.KEYWORD_ONLY) for p in own), *added]
        )
        call.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
        call.__name__, call.__doc__ = command.__name__, command.__doc__
        return call

    return decorate


def read_settings(
    path: Path | None, flags: dict[str, Any], assignments: list[str] | None, allow_code: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of an experiment file, and the changes by flags and by --set."""
    base = config.read_file(path, allow_code) if path else {}
    return base, {**flags, **config.parse_assignments(assignments or [])}


def read_data_settings(
    what: str | None, flags: dict[str, Any], assignments: list[str] | None, allow_code: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same where the argument is an experiment file or names data as --data does."""
    if what is None or what.endswith(".toml"):
        return read_settings(Path(what) if what else None, flags, assignments, allow_code)
    return read_settings(None, {"data.name": what} | flags, assignments, allow_code)


def _flag(name: str) -> inspect.Parameter:
    setting = config.all_settings()[config.FLAGS[name]]
    kind = str if name in PARSED_AS_TEXT else _value_type(setting.annotation)
    option = typer.Option(
        "--" + name.replace("_", "-"),
        help=config.describe(setting),
        show_default=False,
        rich_help_panel=PANELS.get(config.FLAGS[name].partition(".")[0], "Experiment"),
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _value_type(annotation: Any) -> type:
    """The type of a setting without pydantic's constraints: float for a number of either type."""
    if isinstance(annotation, type):
        return annotation
    if get_origin(annotation) is Literal:
        return str
    if get_origin(annotation) is Annotated:
        return _value_type(get_args(annotation)[0])
    members = [_value_type(member) for member in get_args(annotation) if member is not type(None)]
    return float if float in members else members[0]


def _parse_flags(flags: dict[str, Any]) -> dict[str, Any]:
    for name in PARSED_AS_TEXT:
        if flags.get(name) is not None:
            flags[name] = config.parse_value(flags[name])
    return config.changes_from_flags(flags)
