"""Experiments as text: reads files and assignments, and writes TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from remanence.config.settings import ExperimentSettings
from remanence.core import expressions
from remanence.core.errors import InputError
from remanence.core.imports import find_import_path

LARGEST_FILE = 1_000_000  # bytes; experiment files are written by hand


def read_file(path: Path, allow_code: bool = True) -> dict[str, Any]:
    """Read an experiment file as nested dictionaries, without checking the keys.

    Args:
        path: The experiment file.
        allow_code: Accept import paths, `package.module:name`.

    Raises:
        InputError: The file is missing or is not TOML, or it names Python code without
            `allow_code`.
    """
    if path.is_dir():
        raise InputError(
            f"{path} is a folder, not an experiment file: to continue a run, use remanence"
            f" resume {path}"
        )
    tree = read_toml(
        path,
        "an experiment file",
        "check the name, or give every setting as a flag (remanence run --help)",
    )
    if not allow_code:
        forbid_code(tree, path)
    return tree


def forbid_code(settings: Any, path: Path) -> None:
    """Raise `InputError` if any setting that a file or folder holds names Python code to import.

    A file from another person must not decide which code runs; the user has to allow it.

    Args:
        settings: Texts in nested tables and lists.
        path: The file or folder, for the error.
    """
    text = find_import_path(settings)
    if text is not None:
        raise InputError(
            f"{path} imports and runs Python code ({text}): review that code, then add --allow-code"
            " (in Python allow_code=True)"
        )


def read_toml(path: Path, kind: str, hint: str) -> dict[str, Any]:
    """Read a short TOML file that was written by hand.

    Args:
        path: The file.
        kind: What the file is, with its article, for errors: "an experiment file".
        hint: What to do if the file does not exist, for errors.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise InputError(f"{path} is larger than {LARGEST_FILE} bytes: {kind} is a short text")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"no {kind.partition(' ')[2]} at {path}: {hint}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Parse assignments of `--set`.

    >>> parse_assignments(["local.batch_size=16", "method=fedavg+wsm"])
    {'local.batch_size': 16, 'method': 'fedavg+wsm'}
    """
    changes = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InputError(
                f"--set {text!r} has no value: write --set key=value, such as"
                " --set local.batch_size=16"
            )
        changes[key.strip()] = parse_value(value.strip())
    return changes


def parse_value(text: str) -> Any:
    """Parse a value as TOML; text that is not TOML is returned as it is.

    >>> parse_value("0.1"), parse_value("true"), parse_value("iid")
    (0.1, True, 'iid')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def write_toml(
    experiment: ExperimentSettings, extra: Mapping[str, Any], defaults: bool = True
) -> str:
    """Return the experiment and extra tables as TOML, without entries that are None.

    Args:
        experiment: The experiment.
        extra: More tables.
        defaults: Also write settings that have their default value.
    """
    settings = experiment.model_dump(mode="json", exclude_defaults=not defaults)
    return tomli_w.dumps(_without_none(settings) | _without_none(extra))


def optimizer_call(experiment: ExperimentSettings) -> expressions.Call:
    """Return the optimizer of the clients, with `local.lr` as its learning rate where given."""
    call = expressions.parse_call(experiment.local.optimizer)
    if experiment.local.lr is None:
        return call
    return expressions.Call(call.name, {**call.arguments, "lr": experiment.local.lr})


def _without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in tree.items()
        if value is not None
    }
