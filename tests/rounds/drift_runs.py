"""Small runs while the data drift, and what their models say row by row: for tests that look
into a run's folder.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from methods.drifting_task import CLASSES, CLIENTS, STEPS

from remanence.config import Experiment, parse_experiment
from remanence.core.types import ModelState
from remanence.experiment.build import BuiltExperiment
from remanence.results.checkpoint import CheckpointStore, fingerprint
from remanence.results.run import CHECKPOINTS, Run
from remanence.training.state import ClientModels, RunState

HAST = "hast(peers=2, tau=3, depth=1, finetune_epochs=1)"
SETTINGS: dict[str, Any] = {
    "data.name": "synthetic(samples=240, classes=4, features=6, test=0.25)",
    "model": "mlp(hidden=8)",
    "clients.count": CLIENTS,
    "drift.schedule": "random(clusters=2)",
    "drift.concepts": "swap+quantity(shares='1|0.5')",
    "drift.samples": 10,
    "drift.validation": 6,
    "drift.time_steps": STEPS,
    "rounds": 3,
    "local.batch_size": 4,
    "local.optimizer": "sgd(lr=0.2, momentum=0.5)",
    "engine": "sequential",
    "threads": 1,
    "precision": "fp64",
    "device": "cpu",
    "checkpoint.seconds": 0,
}


def config_of(method: str, **changes: Any) -> Experiment:
    return parse_experiment({}, SETTINGS | {"method": method} | changes)


def last_state(run: Run) -> RunState:
    state = CheckpointStore(run.folder / CHECKPOINTS, fingerprint(run.config)).load(
        torch.device("cpu"), lambda _: None
    )
    assert state is not None
    return state


def last_client_models(run: Run) -> ClientModels:
    client_models = last_state(run).client_models
    assert client_models is not None
    return client_models


def predict(
    experiment: BuiltExperiment, model: ModelState, examples: Any, ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By the module itself, row by row. -> labels, predictions, margins"""
    module, rows = experiment.task.model.to_module(model), torch.from_numpy(ids)
    with torch.no_grad():
        logits = module(examples.inputs(rows)).numpy()
    labels = examples.labels(rows).numpy()
    margins = [
        row[label] - max(np.delete(row, label)) for row, label in zip(logits, labels, strict=True)
    ]
    return labels, logits.argmax(axis=1), np.array(margins)


def count(labels: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    table = np.zeros((CLASSES, CLASSES), dtype=np.int64)
    for label, guess in zip(labels, predicted, strict=True):
        table[label, guess] += 1
    return table
