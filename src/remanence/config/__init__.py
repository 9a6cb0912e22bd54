"""Experiments as data: files, flags and keyword arguments in, one checked `Experiment` out.

`settings` declares every setting with its type, default and description. `keys` has the dotted keys
of settings, such as `local.batch_size`, and the short names that flags have; `--set key=value`
reaches every key. `parse` reads files, flags and assignments, checks them and writes TOML.

This package imports only `core`, and never torch: the command line checks an experiment before
torch is loaded. Begin with `settings.Experiment` and `parse.parse_experiment`.
"""

from remanence.config.keys import FLAGS, all_keys, all_settings
from remanence.config.parse import (
    LARGEST_FILE,
    changes_from_flags,
    forbid_code,
    optimizer_call,
    parse_assignments,
    parse_experiment,
    parse_value,
    read_file,
    read_toml,
    write_toml,
)
from remanence.config.settings import (
    DEFAULT_PARTITION,
    ENGINES,
    Experiment,
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
    "Experiment",
    "Natural",
    "Number",
    "RaySettings",
    "Section",
    "all_keys",
    "all_settings",
    "changes_from_flags",
    "forbid_code",
    "optimizer_call",
    "parse_assignments",
    "parse_experiment",
    "parse_value",
    "read_file",
    "read_toml",
    "write_toml",
]
