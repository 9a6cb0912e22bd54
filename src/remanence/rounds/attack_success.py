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
from remanence.attacks.poison import know
from remanence.core.types import Start
from remanence.data.source import Source
from remanence.engines.sequential import Loop
from remanence.training.client_step import Task

# models, stacked [m, ...] -> share of the made rows on which the attack gets its way [m]
Success = Callable[[Start], np.ndarray]


def watch_success(task: Task, source: Source, adversary: Adversary) -> Success | None:
    """A measure of the attacks in an experiment, all their rows together; None where no attack
    has a goal that can be seen on test rows.
    """
    made = (
        adversary.show_success(source.test.x, source.test.y, know(source))
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
        place=None,
    )
    everything = (np.arange(len(y)),)
    judge = Loop(
        replace(task, test=examples, population=replace(task.population, tests=everything))
    )

    def measure(models: Start) -> np.ndarray:
        confusion = judge.score(models, "test").confusion[:, 0].numpy()  # [m, C, C]
        return np.asarray(np.trace(confusion, axis1=1, axis2=2) / len(y))

    return measure
