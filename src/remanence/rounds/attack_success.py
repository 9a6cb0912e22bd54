"""The success of attacks: models are evaluated on test examples made for the attack, such as images
with a backdoor's trigger. The accuracy does not show it.
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

# models, stacked [m, ...] -> share of these examples on which the attack succeeds [m]
Success = Callable[[ModelState], np.ndarray]


def attack_success(
    task: TrainingTask, source: ArrayDataset, adversary: Adversary
) -> Success | None:
    """A function that measures the success of an experiment's attacks on all their examples.

    Args:
        task: Evaluates the models.
        source: Its test examples are modified by the attacks.
        adversary: Holds the attacks.

    Returns:
        None where no attack has a goal that test examples can show.
    """
    modified = (
        adversary.success_examples(source.test.x, source.test.y, data_info(source))
        if adversary.attacks
        else {}
    )
    pairs = [pair for pair in modified.values() if len(pair[1])]
    if not pairs:
        return None
    x, y = (np.concatenate([pair[column] for pair in pairs]) for column in (0, 1))
    examples = replace(
        task.test,
        x=torch.from_numpy(x).to(task.test.x),
        y=torch.from_numpy(y).to(task.test.y),
        storage_index=None,
    )
    all_examples = (np.arange(len(y)),)
    engine = SequentialEngine(
        replace(task, test=examples, population=replace(task.population, test_ids=all_examples))
    )

    def measure(models: ModelState) -> np.ndarray:
        confusion = engine.score(models, "test").confusion[:, 0].numpy()  # [m, C, C]
        return np.asarray(np.trace(confusion, axis1=1, axis2=2) / len(y))

    return measure
