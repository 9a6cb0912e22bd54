"""How often an attack gets its way: models on test rows made for it, such as test images with a
backdoor's mark.

Accuracy shows nothing of a backdoor, so it is measured apart, on every recorded round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from remanence.attacks.adversary import Adversary
from remanence.attacks.poison import data_info
from remanence.core.types import ModelState
from remanence.data.dataset import ArrayDataset
from remanence.engines.sequential import SequentialEngine
from remanence.training.task import TrainingTask

# models, stacked [m, ...] -> share of the made rows on which the attack gets its way [m]
Success = Callable[[ModelState], np.ndarray]


def attack_success(
    task: TrainingTask, source: ArrayDataset, adversary: Adversary
) -> Success | None:
    """A measure of the attacks in an experiment, all their rows together; None where no attack
    has a goal that can be seen on test rows.
    """
    made = (
        adversary.success_examples(source.test.x, source.test.y, data_info(source))
        if adversary.attacks
        else {}
    )
    rows = [pair for pair in made.values() if len(pair[1])]
    if not rows:
        return None
    x, y = (np.concatenate([pair[column] for pair in rows]) for column in (0, 1))
    examples = replace(
        task.test,
        x=torch.from_numpy(x).to(task.test.x),
        y=torch.from_numpy(y).to(task.test.y),
        storage_index=None,
    )
    everything = (np.arange(len(y)),)
    judge = SequentialEngine(
        replace(task, test=examples, population=replace(task.population, test_ids=everything))
    )

    def measure(models: ModelState) -> np.ndarray:
        confusion = judge.score(models, "test").confusion[:, 0].numpy()  # [m, C, C]
        return np.asarray(np.trace(confusion, axis1=1, axis2=2) / len(y))

    return measure
