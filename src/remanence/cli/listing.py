"""What there is to choose from, read from the tables themselves; and the two data commands that
print.
"""

from __future__ import annotations

import inspect
import json
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from remanence import data
from remanence.aggregators.robust import ROBUST
from remanence.attacks import ATTACKS
from remanence.config import Experiment
from remanence.core import expressions
from remanence.core.errors import unknown
from remanence.core.rng import Key
from remanence.data.concepts import CONCEPTS
from remanence.data.drift_schedules import DRIFT_SCHEDULES
from remanence.experiment.data_setup import load_data, partition_data
from remanence.experiment.system import SPEEDS
from remanence.losses import LOSSES
from remanence.methods import METHODS, PRIVACY
from remanence.models import MODELS
from remanence.optimizers import LR_SCHEDULES, OPTIMIZERS
from remanence.peers.availability import AVAILABILITIES
from remanence.peers.topology import TOPOLOGIES

ENGINES = {
    "auto": "measures briefly and takes the fastest that can run the task",
    "sequential": "one client after the other by plain autograd: the oracle",
    "vectorized": "many clients as one batched computation, on the CPU or CUDA",
    "processes": "one process a core, for the CPU; clients one after the other or in stacks",
    "ray": "many machines and GPUs: clients spread over the workers of a Ray cluster",
    "flower": "real sites that keep their data: inside a Flower app, which remanence flower init"
    " writes",
}

TABLES: dict[str, Mapping[str, Callable[..., Any]]] = {
    "methods": METHODS,
    "objectives": LOSSES,
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

BLOCKS = " ▁▂▃▄▅▆▇█"
SHOWN = 40  # clients drawn in a terminal, one below the other
SHOWN_ACROSS = 60  # and side by side


def entries(what: str) -> list[dict[str, Any]]:
    """A list of one kind of thing: name, how to write it with its defaults, one sentence about
    it.
    """
    if what == "engines":
        return [
            {"name": name, "call": name, "options": {}, "about": about}
            for name, about in ENGINES.items()
        ]
    if what not in TABLES:
        raise unknown("list", what, [*TABLES, "engines"])
    return [_entry(name, constructor, what) for name, constructor in sorted(TABLES[what].items())]


def print_entries(what: str, as_json: bool) -> None:
    """Print a table: one line an entry, or JSON."""
    found = entries(what)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    width = max(len(entry["call"]) for entry in found)
    for entry in found:
        payload = f" [sends {entry['payload']}]" if entry.get("payload") else ""
        separator = "  " if width < 60 else "\n    "
        call = f"{entry['call']:{width}s}" if width < 60 else entry["call"]
        print(f"{call}{separator}{entry['about']}{payload}")


def _entry(name: str, constructor: Callable[..., Any], what: str) -> dict[str, Any]:
    options = {
        o.name: None if o.default is inspect.Parameter.empty else o.default
        for o in expressions.options_of(constructor).values()
    }
    paragraphs = (inspect.getdoc(constructor) or "").strip().split("\n\n")
    entry = {
        "name": name,
        "call": str(expressions.Call(name, options)),
        "options": options,
        "about": " ".join(paragraphs[0].split()),
    }
    if what in ("methods", "objectives", "aggregators", "privacy"):
        part = constructor()
        entry |= {"payload": part.payload_description, "needs_public_data": part.needs_public_data}
    return entry


def check_data(name: str, directory: str) -> str:
    """Read a source from end to end and say what is in it."""
    call = (
        expressions.parse_call(name)
        if not name.endswith(".npz") or "(" in name
        else expressions.Call("npz", {"path": name})
    )
    return data.check_dataset(call.name, Path(directory) if directory else None, call.arguments)


def show_partition(spec: Experiment, out: Path | None, as_json: bool) -> None:
    """Print, and where asked write, the share of each class in each client's data."""
    import numpy as np

    source = load_data(spec)
    division = partition_data(spec, source, Key(spec.seed))
    public, population = division.public, division.population
    everyone = np.arange(population.num_clients)
    holdings = population.at(0)
    counts = holdings.label_counts(everyone, division.train.y, len(source.classes))
    clusters = (
        [step.cluster.tolist() for step in population.time_steps] if spec.drift.schedule else []
    )
    if as_json:
        valid = holdings.valid.sizes.tolist()
        about = {
            "classes": list(source.classes),
            "label_counts": counts.tolist(),
            "validation": valid,
            "public": len(public),
        }
        print(
            json.dumps(
                about
                | (
                    {"clusters": clusters, "concepts": division.concepts, "notes": division.notes}
                    if clusters
                    else {}
                )
            )
        )
        return
    sizes = counts.sum(axis=1)
    held = (
        f"{population.num_clients} clients with {sizes.min()} to {sizes.max()} training examples"
        f" (median {int(np.median(sizes))})"
    )
    divided = spec.drift.schedule or spec.data.partition
    print(
        f"{source.name}, {divided}: {held}, {len(holdings.valid.ids)} kept for validation,"
        f" {len(public)} public"
    )
    names = ", ".join(source.classes[:12]) + (" ..." if len(source.classes) > 12 else "")
    print(f"a column a class ({names}); height: share of the client's examples")
    for client in everyone[:SHOWN]:
        shares = counts[client] / sizes[client]
        bars = "".join(BLOCKS[int(np.ceil(share * (len(BLOCKS) - 1)))] for share in shares)
        print(
            f"client {client:4d} {sizes[client]:7d}  {bars}  {int((counts[client] > 0).sum())}"
            " classes"
        )
    if population.num_clients > SHOWN:
        print(f"... and {population.num_clients - SHOWN} more; --out FILE.html draws them all")
    if clusters:
        _print_schedule(clusters, division.concepts, division.notes)
    if out is not None:
        from remanence.report.page import write_partition

        print(
            write_partition(
                counts.tolist(),
                list(source.classes),
                f"{source.name}, {divided}",
                out,
                clusters=clusters,
                concepts=division.concepts,
            )
        )


def _print_schedule(
    clusters: list[list[int]], concepts: Sequence[str], notes: Sequence[str]
) -> None:
    """Who is in which cluster when: a line a time step, a letter a client."""
    letters = string.ascii_uppercase + string.ascii_lowercase
    print("clusters over time, a letter a client; above: the shares of classes at time step 0")
    for step, row in enumerate(clusters):
        shown = "".join(
            letters[cluster] if cluster < len(letters) else "?" for cluster in row[:SHOWN_ACROSS]
        )
        print(f"time step {step:3d}  {shown}{' ...' if len(row) > SHOWN_ACROSS else ''}")
    for number, concept in enumerate(concepts):
        print(f"{letters[number] if number < len(letters) else '?'}: {concept}")
    for note in notes:
        print(note)
