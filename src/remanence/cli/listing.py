"""The tables of `remanence list`, and what `remanence data show` prints."""

from __future__ import annotations

import inspect
import json
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from pydantic.fields import FieldInfo

from remanence import data
from remanence.aggregators.robust import ROBUST
from remanence.attacks import ATTACKS
from remanence.config import FLAGS, Experiment, all_settings
from remanence.core import expressions
from remanence.core.errors import unknown
from remanence.core.imports import find_constructor, installed_parts
from remanence.data.concept_rules import CONCEPTS
from remanence.data.drift_schedules import DRIFT_SCHEDULES
from remanence.engines.table import ENGINES
from remanence.experiment.data_setup import PartitionTable, tabulate_partition
from remanence.experiment.system import SPEEDS
from remanence.losses import LOSSES
from remanence.methods import METHODS, PRIVACY
from remanence.models import MODELS
from remanence.optimizers import LR_SCHEDULES, OPTIMIZERS
from remanence.peers.availability import AVAILABILITIES
from remanence.peers.topology import TOPOLOGIES

AUTO = "Measures the engines briefly and takes the fastest one that can run the experiment."

TABLES: dict[str, Mapping[str, Callable[..., Any]]] = {
    "methods": METHODS,
    "losses": LOSSES,
    "aggregators": ROBUST,
    "privacy": PRIVACY,
    "attacks": ATTACKS,
    "models": MODELS,
    "data": data.DATASETS,
    "partitions": data.PARTITIONS,
    "drifts": DRIFT_SCHEDULES,
    "concepts": CONCEPTS,
    "topologies": TOPOLOGIES,
    "availabilities": AVAILABILITIES,
    "speeds": SPEEDS,
    "optimizers": OPTIMIZERS,
    "schedules": LR_SCHEDULES,
}
PARTS = ("methods", "losses", "aggregators", "privacy")  # tables whose entries are parts of methods

BLOCKS = " ▁▂▃▄▅▆▇█"
MAX_ROWS = 40  # clients that `data show` prints, one in each line
MAX_COLUMNS = 60  # clients in one line of a drift schedule


def entries(table: str) -> list[dict[str, Any]]:
    """Return the entries of a table: name, call with the default options, and description."""
    if table == "engines":
        engines = {"auto": AUTO} | {name: entry.description for name, entry in ENGINES.items()}
        return [
            {"name": name, "call": name, "options": {}, "description": description}
            for name, description in engines.items()
        ]
    if table == "settings":
        return [_setting(key, setting) for key, setting in all_settings().items()]
    if table not in TABLES:
        raise unknown("list", table, [*TABLES, "engines", "settings"])
    constructors = dict(TABLES[table])
    if table == "methods":  # those that installed packages bring
        constructors |= {
            name: find_constructor(name, constructors, "method") for name in installed_parts()
        }
    return [_entry(name, constructor, table) for name, constructor in sorted(constructors.items())]


def print_entries(table: str, as_json: bool) -> None:
    """Print the entries of a table, one in each line or as JSON."""
    found = entries(table)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    width = max(len(entry["call"]) for entry in found)
    for entry in found:
        payload = f" [sends {entry['payload']}]" if entry.get("payload") else ""
        separator = "  " if width < 60 else "\n    "
        call = f"{entry['call']:{width}s}" if width < 60 else entry["call"]
        print(f"{call}{separator}{entry['description']}{payload}")


def show_partition(experiment: Experiment, out: Path | None, as_json: bool) -> None:
    """Print the fraction of each class in each client's data; also write it as a page to `out`."""
    table = tabulate_partition(experiment)
    if as_json:
        print(json.dumps(table.to_json()))
        return
    _print_clients(table)
    if table.clusters:
        _print_schedule(table)
    if out is not None:
        from remanence.reports.page import write_partition

        print(write_partition(table, out))


def _setting(key: str, setting: FieldInfo) -> dict[str, Any]:
    default = "" if setting.default is None else tomli_w.dumps({key: setting.default})
    value = default.partition(" = ")[2].strip()
    flags = [f"--{flag.replace('_', '-')}" for flag, dotted in FLAGS.items() if dotted == key]
    return {
        "name": key,
        "call": f"{key} = {value}" if value else key,
        "options": {"default": setting.default, "flag": flags[0] if flags else None},
        "description": (setting.description or "") + (f" Flag: {flags[0]}." if flags else ""),
    }


def _entry(name: str, constructor: Callable[..., Any], table: str) -> dict[str, Any]:
    options = {
        o.name: None if o.default is inspect.Parameter.empty else o.default
        for o in expressions.options_of(constructor).values()
    }
    paragraphs = (inspect.getdoc(constructor) or "").strip().split("\n\n")
    entry = {
        "name": name,
        "call": str(expressions.Call(name, options)),
        "options": options,
        "description": " ".join(paragraphs[0].split()),
    }
    if table in PARTS:
        part = constructor()
        entry |= {"payload": part.payload_description, "needs_public_data": part.needs_public_data}
    return entry


def _print_clients(table: PartitionTable) -> None:
    """Print one line for each client: a column for each class, as high as its fraction."""
    counts, sizes = table.label_counts, table.label_counts.sum(axis=1)
    print(
        f"{table.title}: {len(sizes)} clients with {sizes.min()} to {sizes.max()} training examples"
        f" (median {int(np.median(sizes))}), {sum(table.validation)} validation examples,"
        f" {table.public} public examples"
    )
    names = ", ".join(table.classes[:12]) + (" ..." if len(table.classes) > 12 else "")
    print(f"columns: classes ({names}); height: fraction of the client's examples")
    for client, size in enumerate(sizes[:MAX_ROWS]):
        shares = counts[client] / size
        bars = "".join(BLOCKS[int(np.ceil(share * (len(BLOCKS) - 1)))] for share in shares)
        held = int((counts[client] > 0).sum())
        name = f" ({table.names[client]})" if table.names else ""
        print(f"client {client:4d} {size:7d}  {bars}  {held} classes{name}")
    if len(sizes) > MAX_ROWS:
        print(f"... and {len(sizes) - MAX_ROWS} more; --out FILE.html shows more of them")


def _print_schedule(table: PartitionTable) -> None:
    """Print the cluster of each client: one line for each time step, one letter for each client."""
    print("clusters over time, one letter for each client (the lines above show time step 0)")
    for step, row in enumerate(table.clusters):
        shown = "".join(_letter(cluster) for cluster in row[:MAX_COLUMNS])
        print(f"time step {step:3d}  {shown}{' ...' if len(row) > MAX_COLUMNS else ''}")
    for cluster, concept in enumerate(table.concepts):
        print(f"{_letter(cluster)}: {concept}")
    for note in table.notes:
        print(note)


def _letter(cluster: int) -> str:
    letters: Sequence[str] = string.ascii_uppercase + string.ascii_lowercase
    return letters[cluster] if cluster < len(letters) else "?"
