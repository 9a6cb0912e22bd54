"""What a run folder stores about an experiment besides its settings: versions, data, and defaults
that depend on the machine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from remanence.attacks import Adversary
from remanence.config import Experiment
from remanence.core import expressions
from remanence.core.errors import InputError
from remanence.core.files import sha256
from remanence.core.hardware import describe_machine
from remanence.data.dataset import ArrayDataset
from remanence.experiment.data_setup import FederatedData, partition_text, site_names
from remanence.training.task import TrainingTask
from remanence.version import __version__

if TYPE_CHECKING:
    from remanence.experiment.build import BuiltExperiment

SHOWN_CLIENTS = 200  # clients whose label counts are stored for the report


def resolve_defaults(
    config: Experiment,
    dataset: ArrayDataset,
    model_name: str,
    clients: int,
    device: torch.device,
) -> Experiment:
    """The settings with every default that depends on the machine or the data, so that a resumed
    run uses the same.
    """
    directory = config.data.dir or os.environ.get("REMANENCE_DATA", "")
    return config.model_copy(
        update={
            "model": model_name,
            # worker processes, with a thread each, use all cores
            "threads": config.threads
            or (1 if config.engine == "processes" else torch.get_num_threads()),
            "device": str(device),
            "clients": config.clients.model_copy(update={"count": clients}),
            "data": config.data.model_copy(
                update={
                    "dir": str(Path(directory).resolve()) if directory else "",
                    "partition": partition_text(config, dataset),
                }
            ),
        }
    )


def run_metadata(
    config: Experiment,
    dataset: ArrayDataset,
    task: TrainingTask,
    data: FederatedData,
    adversary: Adversary,
) -> dict[str, Any]:
    """Versions, the machine, the data and the model's size."""
    clients = np.arange(min(task.info.num_clients, SHOWN_CLIENTS))
    label_counts = task.population.at(0).label_counts(clients, data.train.y, task.info.num_classes)
    shape = "x".join(str(side) for side in dataset.shape)
    sizes = (
        f"{len(dataset.train)} training and {len(dataset.test)} test examples of shape {shape},"
        f" {len(dataset.classes)} classes"
    )
    attackers = adversary.clients.tolist()
    return {
        "remanence": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": describe_machine(str(task.info.device)),
        "data": f"{dataset.name}: {sizes}. {dataset.note}".strip(),
        "class_names": list(dataset.classes),
        "clients": task.info.num_clients,
        "parameters": sum(p.numel() for p in task.model.initial.params.values()),
        "shape": list(dataset.shape),
        "kind": dataset.kind,
        "mean": [] if task.train.mean is None else task.train.mean.double().flatten().tolist(),
        "std": [] if task.train.std is None else task.train.std.double().flatten().tolist(),
        "label_counts": [" ".join(map(str, row)) for row in label_counts.tolist()],
        **({"client_names": names} if (names := site_names(dataset, data)) else {}),
        **({"attackers": " ".join(map(str, attackers))} if attackers else {}),
        "evaluated": "personal" if task.method.has_several_models else "global",
    } | _drift_metadata(config, task, data)


def _drift_metadata(config: Experiment, task: TrainingTask, data: FederatedData) -> dict[str, Any]:
    if not config.drift.schedule:
        return {}
    table = _drift_table(config)
    return {
        "rounds_per_step": config.rounds,
        "clusters": [
            " ".join(map(str, step.cluster.tolist())) for step in task.population.time_steps
        ],
        **({} if table is None else {"drift_table": sha256(table.read_bytes())}),
        "concepts": list(data.concepts),
        "drift_notes": list(data.notes),
    }


def _drift_table(config: Experiment) -> Path | None:
    """The file of a drift schedule that is read from one."""
    if not config.drift.schedule:
        return None
    call = expressions.parse_call(config.drift.schedule)
    return (
        Path(str(call.arguments["path"])).expanduser()
        if call.name == "table" and "path" in call.arguments
        else None
    )


def check_same_data(experiment: BuiltExperiment, stored: Mapping[str, Any]) -> None:
    """Refuse to resume a run whose data or drift have changed since it began.

    Args:
        experiment: Built now.
        stored: The metadata of the run folder.
    """
    now, table = experiment.metadata, _drift_table(experiment.config)
    drift = now.get("drift_table")
    if table is not None and stored.get("drift_table", drift) != drift:
        raise InputError(
            f"the drift table {table} has changed since the run began: put the old file back,"
            " or start anew"
        )
    label_counts = [[int(count) for count in row.split()] for row in now["label_counts"]]
    if (
        stored.get("label_counts") != label_counts
        or stored.get("class_names", now["class_names"]) != now["class_names"]
    ):
        raise InputError(
            f"the data {experiment.config.data.name} have changed since the run began: put the"
            " old ones back, or start anew"
        )
