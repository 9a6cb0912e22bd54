"""Experiments from files, flags and assignments: reading, checking, and errors in one sentence."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from remanence.config.keys import FLAGS, all_keys
from remanence.config.settings import MAX_ROUNDS, DriftSettings, Experiment
from remanence.core import expressions
from remanence.core.errors import InputError, nearest
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


def parse_experiment(
    base: Mapping[str, Any] | None = None, changes: Mapping[str, Any] | None = None
) -> Experiment:
    """Check settings and return them as an `Experiment`.

    Args:
        base: Nested dictionaries, as read from an experiment file.
        changes: Values by dotted key, such as `{"local.batch_size": 16}`; they replace those of
            `base`.

    Raises:
        InputError: A key is unknown, or a value or a combination of values is invalid.
    """
    tree = _copy(base or {})
    for key, value in (changes or {}).items():
        _set_key(tree, key, value)
    local = tree.get("local")
    if isinstance(local, dict) and local.get("steps") and "epochs" not in local:
        local["epochs"] = 0
    try:
        experiment = Experiment.model_validate(tree)
    except ValidationError as error:
        raise InputError(_explain(error)) from None
    _check_local_training(experiment)
    _check_sampling(experiment)
    _check_drift(experiment)
    if experiment.total_rounds > MAX_ROUNDS:
        raise InputError(
            f"rounds={experiment.rounds} in each of drift.time_steps={experiment.drift.time_steps}"
            f" are {experiment.total_rounds} rounds, and a run has at most {MAX_ROUNDS}: lower one"
            " of them"
        )
    return experiment


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


def changes_from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the short names of `FLAGS` by dotted keys, and leave out flags that are None.

    >>> changes_from_flags({"lr": 0.5, "clients": None})
    {'local.lr': 0.5}
    """
    unknown = [name for name in flags if name not in FLAGS]
    if unknown:
        raise InputError(f"unknown option {unknown[0]!r}: {nearest(unknown[0], FLAGS)}")
    return {FLAGS[name]: value for name, value in flags.items() if value is not None}


def write_toml(experiment: Experiment, extra: Mapping[str, Any]) -> str:
    """Return the experiment and extra tables as TOML, without entries that are None."""
    return tomli_w.dumps(_without_none(experiment.model_dump(mode="json")) | _without_none(extra))


def optimizer_call(experiment: Experiment) -> expressions.Call:
    """Return the optimizer of the clients, with `local.lr` as its learning rate where given."""
    call = expressions.parse_call(experiment.local.optimizer)
    if experiment.local.lr is None:
        return call
    return expressions.Call(call.name, {**call.arguments, "lr": experiment.local.lr})


def _check_local_training(experiment: Experiment) -> None:
    local = experiment.local
    if (local.epochs > 0) == (local.steps > 0):
        raise InputError(
            f"local.epochs={local.epochs} and local.steps={local.steps}: exactly one of them must"
            " be above 0"
        )


def _check_sampling(experiment: Experiment) -> None:
    sample, count = experiment.clients.sample, experiment.clients.count
    if isinstance(sample, float) and sample > 1:
        raise InputError(
            f"clients.sample={sample} is neither a whole number of clients nor a fraction of"
            " at most 1"
        )
    if isinstance(sample, int) and count is not None and sample > count:
        raise InputError(
            f"clients.sample={sample} is more than clients.count={count}: a round cannot sample"
            " more clients than there are"
        )
    if experiment.clients.sampling == "poisson" and experiment.round.over_selection > 1:
        raise InputError(
            "clients.sampling=poisson and round.over_selection cannot be combined: Poisson sampling"
            " has no fixed number of replies to wait for; leave one out"
        )


def _check_drift(experiment: Experiment) -> None:
    if experiment.drift.schedule:
        return
    defaults = DriftSettings().model_dump()
    for name, value in experiment.drift.model_dump().items():
        if value != defaults[name]:
            raise InputError(
                f"drift.{name} has no effect without drift: add --drift"
                ' "random(clusters=2)" (drift.schedule), or leave it out'
            )


def _set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    if key not in all_keys():
        raise InputError(f"unknown key {key!r}: {nearest(key, all_keys())}")
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise InputError(f"{section} must be a section such as [{section}], not a value")
    tree[name] = value


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _copy(value) if isinstance(value, Mapping) else value for name, value in tree.items()
    }


def _without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in tree.items()
        if value is not None
    }


def _explain(error: ValidationError) -> str:
    """Turn the first error of pydantic into a sentence."""
    first = error.errors()[0]
    kind, value, limits = first["type"], first.get("input"), first.get("ctx", {})
    key = ".".join(str(part) for part in first["loc"] if not _is_union_member(part))
    if kind == "extra_forbidden":
        return f"unknown key {key!r}: {nearest(key, all_keys())}"
    expected = {
        "greater_than_equal": f"at least {limits.get('ge')}",
        "greater_than": f"above {limits.get('gt')}",
        "less_than": f"below {limits.get('lt')}",
        "less_than_equal": f"at most {limits.get('le')}",
        "literal_error": f"one of {str(limits.get('expected', '')).replace(chr(39), '')}",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "string_type": "a text",
        "bool_type": "true or false",
        "tuple_type": 'a list such as ["crop", "flip"]',
        "model_type": f"a section such as [{key}]",
    }.get(kind, first["msg"])
    return f"{key} must be {expected}, not {value!r}"


def _is_union_member(part: str | int) -> bool:
    """Whether a part of pydantic's location names a type of a union, not a key or an index."""
    return isinstance(part, str) and (
        "strict" in part or "[" in part or part in ("int", "float", "str")
    )
