"""`check_model`."""

from __future__ import annotations

import copy

import torch
from torch import nn

from remanence.core import pytree
from remanence.core.errors import InputError
from remanence.core.process_state import preserve_process_state
from remanence.core.rng import Key
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing.running import (
    TOLERANCE,
    check_equal_replies,
    train,
)
from remanence.testing.toy_task import (
    EQUAL,
    dataset_for,
    max_rel_diff,
    small_experiment,
)
from remanence.training.task import TrainingTask


@preserve_process_state()
def check_model(module: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """Check that a network can be trained as a pure function of its parameters, and in a stack.

    >>> check_model(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (3, 2, 2), 3)

    Args:
        module: The network; it is not changed.
        shape: The shape of one example: (channels, height, width), (columns,) or, for a network
            that begins with an embedding, (length,).
        classes: The number of classes.

    Raises:
        AssertionError: With a sentence that names the first problem and its cause.
    """
    if len(shape) not in (1, 3):
        raise InputError(
            f"check_model cannot make examples of shape {shape}: give (channels, height,"
            " width), (columns,) or (length,)"
        )
    before, name = copy.deepcopy(module.state_dict()), type(module).__name__
    changes = EQUAL | {"local.optimizer": "sgd(lr=0.01)"}
    experiment = small_experiment(
        "fedavg", changes, module=module, source=dataset_for(module, shape, classes)
    )
    task, work = experiment.task, make_work(experiment, first_state(experiment), 1)
    _check_predictions(task, name)
    replies = train(SequentialEngine(task), work, name)
    finite = pytree.finite(
        {"params": replies.params, "buffers": replies.buffers}, replies.num_clients
    )
    assert bool(finite.all()), (
        f"{name} has NaN or infinite weights after a few steps at a small learning rate: check"
        " its initial values"
    )
    _check_all_used(task, name)
    try:
        stacked = train(VectorizedEngine(task, 3), work, name)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise AssertionError(
            f"{name} cannot be stacked by torch.vmap ({reason}): rewrite that operation,"
            " or use engine=sequential only"
        ) from error
    check_equal_replies(stacked, replies, f"{name} trains differently in a stack")
    changed = [
        key for key, value in module.state_dict().items() if not torch.equal(value, before[key])
    ]
    assert not changed, (
        f"{name} is changed by being used, at {changed[0]}: its forward must not write to its"
        " own tensors"
    )


def _check_predictions(task: TrainingTask, name: str) -> None:
    """A prediction is a function of one example."""
    x = task.train.inputs(torch.arange(4))
    with torch.no_grad():
        once, again = (task.model.predict(task.model.initial, x).logits for _ in range(2))
        alone = torch.cat(
            [task.model.predict(task.model.initial, one).logits for one in torch.split(x, 1)]
        )
    assert bool(torch.isfinite(once).all()), (
        f"{name} gives NaN or infinity for ordinary examples: check its initial values and its"
        " logarithms"
    )
    assert torch.equal(once, again), (
        f"{name} gives two outputs for the same examples: it draws random numbers or keeps"
        " state of its own; take that out"
    )
    gap = max_rel_diff({"logits": alone}, {"logits": once})[1]
    assert gap <= TOLERANCE, (
        f"{name} in evaluation mode lets the examples of a batch influence each other"
        f" (by {gap:.1e}): predict each example alone"
    )


def _check_all_used(task: TrainingTask, name: str) -> None:
    """Every parameter must have a gradient: an unused one would be sent and averaged in vain."""
    start, x = task.model.initial, task.train.inputs(torch.arange(4))
    leaves = {place: value.clone().requires_grad_() for place, value in start.params.items()}
    out, _ = task.model.apply(leaves, start.buffers, x, Key(0).tensor())
    gradients = torch.autograd.grad(out.logits.sum(), list(leaves.values()), allow_unused=True)
    unused = [place for place, gradient in zip(leaves, gradients, strict=True) if gradient is None]
    assert not unused, f"{name} never uses its parameter {unused[0]}: use it or take it out"
