"""Experiments as data: TOML, flags and keyword arguments in, one frozen and checked `Experiment` out.

`settings` declares every setting with its type, default and description. `parse` reads files, flags
and assignments, checks them and writes TOML. Every setting has one dotted key, such as
`local.batch_size`; flags are short names of keys, and `--set key=value` reaches all of them.

This package imports only `core`, and never torch: the command line checks an experiment before
torch is loaded. Start with `settings.Experiment` and `parse.parse_experiment`.
"""

from remanence.config.parse import (
    LARGEST_FILE,
    changes_from_flags,
    forbid_import_path,
    is_import_path,
    optimizer_call,
    parse_assignments,
    parse_experiment,
    parse_value,
    read_file,
    read_toml,
    write_toml,
)
from remanence.config.settings import (
    ENGINES,
    FLAGS,
    Experiment,
    Natural,
    Number,
    RaySettings,
    Section,
    all_keys,
    all_settings,
)

__all__ = [
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
    "forbid_import_path",
    "is_import_path",
    "optimizer_call",
    "parse_assignments",
    "parse_experiment",
    "parse_value",
    "read_file",
    "read_toml",
    "write_toml",
]
