"""`Experiment`: all settings of an experiment, checked; and how parts of one are put together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from pydantic import BaseModel, ConfigDict, ValidationError

from remanence.config.arguments import Settings
from remanence.config.keys import FLAGS, all_keys, sections
from remanence.config.keywords import with_settings
from remanence.config.parse import read_file, write_toml
from remanence.config.settings import MAX_ROUNDS, DriftSettings, ExperimentSettings, Section
from remanence.core.errors import InputError, nearest


@with_settings(Settings)
class Experiment(ExperimentSettings):
    """All settings of an experiment, checked and frozen.

        experiment = rem.Experiment(method="fedavg+wsm", clients=20, lr=0.05)
        experiment.local.batch_size      # by section, as in the file
        experiment["batch_size"]         # by the name of the flag, or "local.batch_size"
        experiment.replace(rounds=50)    # another one
        print(experiment.to_toml())      # as an experiment file

    A section is a mapping, and can be used together with flags:
    `Experiment(data={"name": "digits"}, partition="iid")`.

    Args:
        **settings: The settings; each one that is not given has its default.

    Raises:
        InputError: A setting is unknown, or a value or a combination of values is invalid.
    """

    model_config = ConfigDict(defer_build=False)  # pydantic would replace the signature later

    def __init__(self, /, **settings: Unpack[Settings]) -> None:
        self._fill(_nest(settings))

    def __getitem__(self, key: str) -> Any:
        """The value of a setting, by the name of its flag or by its dotted key."""
        dotted = FLAGS.get(key, key)
        if dotted not in all_keys():
            raise InputError(f"unknown key {key!r}: {nearest(key, {**FLAGS, **all_keys()})}")
        value: Any = self
        for name in dotted.split("."):
            value = getattr(value, name)
        return value

    def replace(self, **settings: Unpack[Settings]) -> Experiment:
        """The experiment with other values of some settings.

        Args:
            **settings: Those settings.
        """
        return parse_experiment(self.to_tree(), changes_from_flags(settings))

    def to_tree(self) -> dict[str, Any]:
        """The settings that were given, as nested dictionaries."""
        return self.model_dump(mode="json", exclude_unset=True)

    def to_toml(self, defaults: bool = False) -> str:
        """The experiment as the text of an experiment file.

        Args:
            defaults: Also write settings that have their default value.
        """
        return write_toml(self, {}, defaults=defaults)

    @classmethod
    def from_toml(cls, path: str | Path, allow_code: bool = False) -> Experiment:
        """Read an experiment file.

        Args:
            path: The file.
            allow_code: Accept settings that name Python code to import, `package.module:name`.
        """
        return parse_experiment(read_file(Path(path), allow_code))

    def _fill(self, tree: dict[str, Any]) -> None:
        """Set all fields from nested dictionaries, and check them."""
        local = tree.get("local")
        if isinstance(local, dict) and local.get("steps") and "epochs" not in local:
            tree = {**tree, "local": {**local, "epochs": 0}}
        try:
            BaseModel.__init__(self, **tree)
        except ValidationError as error:
            raise InputError(_explain(error)) from None
        for check in (_check_local_training, _check_sampling, _check_drift, _check_rounds):
            check(self)


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
    experiment = Experiment.__new__(Experiment)
    experiment._fill(tree)
    return experiment


def changes_from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the names of flags by dotted keys, sections by their keys, and leave out what is
    None.

    >>> changes_from_flags({"lr": 0.5, "clients": None, "data": {"dir": "files"}})
    {'local.lr': 0.5, 'data.dir': 'files'}
    """
    changes: dict[str, Any] = {}
    for name, value in flags.items():
        if isinstance(value, Section):
            value = value.model_dump(exclude_unset=True)
        if name in sections() and isinstance(value, Mapping):
            changes |= {f"{name}.{key}": inner for key, inner in value.items()}
        elif name in FLAGS or name in all_keys():
            changes |= {} if value is None else {FLAGS.get(name, name): value}
        elif name in sections():
            raise InputError(
                f"{name}={value!r} is a value, and {name} is a section such as {name}={{...}}:"
                f" {nearest(name, FLAGS)}"
            )
        else:
            known = {*FLAGS, *sections(), *(key for key in all_keys() if "." not in key)}
            raise InputError(f"unknown option {name!r}: {nearest(name, known)}")
    return changes


def _nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as nested dictionaries."""
    tree: dict[str, Any] = {}
    for key, value in changes_from_flags(settings).items():
        _set_key(tree, key, value)
    return tree


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


def _check_rounds(experiment: Experiment) -> None:
    if experiment.total_rounds > MAX_ROUNDS:
        raise InputError(
            f"rounds={experiment.rounds} in each of drift.time_steps={experiment.drift.time_steps}"
            f" are {experiment.total_rounds} rounds, and a run has at most {MAX_ROUNDS}: lower one"
            " of them"
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
