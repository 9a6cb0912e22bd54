"""A job of `remanence bench` as files that any simulator can read: data, split, order of the
batches, and the weights to start from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from remanence.bench.jobs import JOBS, prepare
from remanence.core.engine import ClientWork
from remanence.data.batches import plan_batches
from remanence.experiment.build import BuiltExperiment

# The jobs of `remanence bench` with a tenth of their rates, which costs as much time: at the full
# rate, rounding alone moves the end of B2's round by 20% of
# its way, which would hide whether two simulators do the same; at a tenth it is 0.03%, while
# another order of batches still moves it by 6% or more.
GENTLY: dict[str, dict[str, Any]] = {
    "B": {"local.optimizer": "sgd(lr=0.005)"},
    "B2": {"local.optimizer": "sgd(lr=0.005)"},
    "A": {"local.optimizer": "adam(lr=0.0001)"},
}
QUICK = {"local.epochs": 1}


def write_job(name: str, folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Round 1 of that job. -> what was written into job.json"""
    experiment, state, work = prepare(JOBS[name], "cpu", "fp32", changes)
    task, local = experiment.task, experiment.config.local
    rows = task.population.at(work.time_step).train
    cohort = work.clients.tolist()
    settings = {
        "name": name,
        "changes": dict(changes),
        "model": JOBS[name].settings["model"],
        "shape": list(task.train.x.shape[1:]),
        "classes": task.info.num_classes,
        "clients": task.info.num_clients,
        "cohort": cohort,
        "sizes": rows.sizes[work.clients].tolist(),
        "batch": task.batch_size,
        "epochs": local.epochs,
        **optimizer_of(experiment, work),
    }
    plan: dict[str, np.ndarray] = {f"rows_{client}": rows.for_client(client) for client in cohort}
    for client, size in zip(cohort, settings["sizes"], strict=True):
        batches = plan_batches(
            work.key.fold_in("client", client, "plan", 0),
            size,
            task.batch_size,
            local.epochs,
            local.steps,
            local.drop_last,
        )
        plan[f"order_{client}"] = in_epochs(batches.indices, batches.batch_sizes, size)
    if task.train.mean is None or task.train.std is None:
        raise ValueError("the jobs for other simulators are made of images, which are normalized")
    plan |= {"mean": task.train.mean.numpy(), "std": task.train.std.numpy()}
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(settings))
    np.savez(folder / "plan.npz", **plan)
    np.savez(
        folder / "start.npz",
        **{key: value.numpy() for key, value in state.server.model.params.items()},
    )
    np.save(folder / "x.npy", task.train.x.numpy())
    np.save(folder / "y.npy", task.train.y.numpy())
    return settings


def in_epochs(rows: np.ndarray, widths: np.ndarray, size: int) -> np.ndarray:
    """Batches one after the other, as the epochs that they are made of. rows: [steps, batch];
    widths: [steps] -> [epochs, size]

    >>> in_epochs(np.array([[2, 0], [1, 1]]), np.array([2, 1]), 3)
    array([[2, 0, 1]])
    """
    return np.concatenate([row[:width] for row, width in zip(rows, widths, strict=True)]).reshape(
        -1, size
    )


def optimizer_of(experiment: BuiltExperiment, work: ClientWork) -> dict[str, Any]:
    """The client's optimizer as torch.optim calls it."""
    rule = dict(work.optimizer_hparams)
    if experiment.task.optimizer.name == "adam":
        return {
            "optimizer": "Adam",
            "optimizer_hparams": {"betas": [rule.pop("beta1"), rule.pop("beta2")], **rule},
        }
    return {"optimizer": "SGD", "optimizer_hparams": rule}
