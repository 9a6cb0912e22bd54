"""Checks that a model can be trained on the data of an experiment, with its settings."""

from __future__ import annotations

import numpy as np
import torch

from remanence.config import Experiment
from remanence.core.compose import ComposedMethod, describe
from remanence.core.declarations import CLIENT
from remanence.core.errors import InputError
from remanence.experiment.privacy_checks import model_mechanism
from remanence.training.task import TrainingTask


def check_task(task: TrainingTask) -> None:
    """Refuse a task that trains nothing, has batches that its model cannot be trained on, or
    has settings that a part of its method cannot use.
    """
    if not all(task.trained_params(phase) for phase in task.phases):
        raise InputError(
            f"method {describe(task.method.method)} leaves nothing to train: every parameter"
            " of the model is frozen"
        )
    if task.model.depends_on_batch and has_batch_of_one(task):
        one = task.train.inputs(torch.zeros(1, dtype=torch.int64, device=task.info.device))
        try:
            task.model.apply(
                *task.model.initial, one, torch.zeros((), dtype=torch.int64, device=one.device)
            )
        except ValueError as error:
            raise InputError(
                "some client has a batch of a single example, on which batch norm cannot"
                f" train ({error}):"
                " change local.batch_size, set local.drop_last=true, or use a model with group norm"
            ) from None
    for p in task.method.parts:
        if p.validate is not None:
            p.validate(task.optimizer, task.info)


def has_batch_of_one(task: TrainingTask) -> bool:
    """Whether a client trains on a batch of a single example."""
    for step in task.population.time_steps:
        for size in np.unique(step.train.sizes):
            batch = min(task.batch_size, int(size))
            if batch == 1 or (size % batch == 1 and not task.drop_last):
                return True
    return False


def can_be_late(config: Experiment) -> bool:
    """Whether replies can be late in simulated time: after a deadline, or after enough others."""
    return config.round.deadline != "none" or config.round.over_selection > 1


def check_stragglers(config: Experiment, method: ComposedMethod) -> None:
    """Refuse settings for late replies that a method cannot use."""
    if not method.has_server and config.round.min_replies > 1:
        raise InputError(
            "round.min_replies has no meaning without a server, where every client keeps its own"
            " model: leave it out"
        )
    if not method.has_server and config.round.over_selection > 1:
        raise InputError(
            "round.over_selection has no meaning without a server, which would wait for a"
            " number of replies: leave it out"
        )
    if method.has_several_models and can_be_late(config) and config.round.late == "use":
        raise InputError(
            "round.late=use is for methods with one server model, to which a late reply can"
            " be added: use round.late=discard"
        )
    if can_be_late(config) and config.round.late == "use" and config.round.staleness > 0:
        # the weights of a round sum to 1: a client on time would have more than the noise of a
        # mechanism hides
        hides_clients = model_mechanism(method, CLIENT)
        for p in method.parts:
            if p.equal_weights or p is hides_clients:
                raise InputError(
                    f"{p.name} needs replies of equal weight, and round.staleness gives late ones"
                    " less: set round.staleness=0, or round.late=discard"
                )


def sample_size(config: Experiment, clients: int) -> int:
    """The number of clients that a round samples from `clients`."""
    sample = clients if config.clients.sample is None else config.clients.sample
    return max(1, round(sample * clients)) if isinstance(sample, float) else sample


def checked_sample_size(config: Experiment, clients: int) -> int:
    """As `sample_size`; refuses a sample that there are too few clients for."""
    size = sample_size(config, clients)
    if size > clients:
        raise InputError(f"clients.sample={size} is more than the {clients} clients there are")
    if config.round.min_replies > size:
        raise InputError(
            f"round.min_replies={config.round.min_replies} can never be reached: a round samples"
            f" {size} clients"
        )
    return size
