"""Experiments as data: files, flags and keyword arguments in, one checked `Experiment` out.

`settings` declares every setting with its type, default and description, and `experiment` the
class that checks them together. `keys` has the dotted keys of settings, such as `local.batch_size`,
and the short names that flags have; `--set key=value` reaches every key. `parse` reads files and
assignments and writes TOML. `arguments` is written from the settings: the keyword arguments of
Python functions as types, which `keywords` adds to signatures and docstrings.

This package imports only `core`, and never torch: the command line checks an experiment before
torch is loaded. Begin with `settings`, then `experiment`.
"""

from remanence.config.arguments import CommonSettings, RunSettings, Settings
from remanence.config.experiment import Experiment, changes_from_flags, parse_experiment
from remanence.config.keys import FLAGS, all_keys, all_settings, describe
from remanence.config.keywords import with_settings
from remanence.config.parse import (
    LARGEST_FILE,
    forbid_code,
    optimizer_call,
    parse_assignments,
    parse_value,
    read_file,
    read_toml,
    write_toml,
)
from remanence.config.settings import (
    DEFAULT_PARTITION,
    ENGINES,
    Natural,
    Number,
    RaySettings,
    Section,
)

__all__ = [
    "DEFAULT_PARTITION",
    "ENGINES",
    "FLAGS",
    "LARGEST_FILE",
    "CommonSettings",
    "Experiment",
    "Natural",
    "Number",
    "RaySettings",
    "RunSettings",
    "Section",
    "Settings",
    "all_keys",
    "all_settings",
    "changes_from_flags",
    "describe",
    "forbid_code",
    "optimizer_call",
    "parse_assignments",
    "parse_experiment",
    "parse_value",
    "read_file",
    "read_toml",
    "with_settings",
    "write_toml",
]
