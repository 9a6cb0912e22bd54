"""Early stopping of clients without a server: a client keeps its best model, and stops training
when its validation loss has not improved for some rounds.

The accuracy of the current models is recorded from the same evaluation. A client that does not take
part keeps its model, and so its accuracy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from remanence.core.engine import Engine
from remanence.training.state import ClientModels
from remanence.training.task import TrainingTask


def update_early_stopping(
    engine: Engine,
    client_models: ClientModels,
    clients: np.ndarray,
    time_step: int,
    patience: int,
) -> ClientModels:
    """Keep the models with the lowest loss so far on their clients' validation examples, and stop
    clients that have not improved for too long.

    Args:
        engine: Evaluates the models.
        client_models: After training.
        clients: The clients that took part in the round, also late and rejected ones.
        time_step: Of the round.
        patience: A client stops after more than this many rounds without a better model; 0: it
            never stops. A client without validation examples keeps its last model and never stops.
    """
    if not len(clients):
        return client_models
    scores = engine.score_pairs(client_models.models, clients, clients, "valid", time_step)
    index = torch.from_numpy(clients)
    loss = scores.mean_loss()
    # a client without validation examples has the loss NaN, and its newest model is kept
    examples = scores.confusion.sum(dim=(1, 2))
    correct = scores.confusion.diagonal(dim1=1, dim2=2).sum(dim=1)
    without_examples = examples == 0
    better = (loss < client_models.best_loss[index]) | without_examples
    improved = index[better]
    on_device = improved.to(next(iter(client_models.models.params.values())).device)
    rounds_since_best = client_models.rounds_since_best.index_copy(
        0, index, torch.where(better, 0, client_models.rounds_since_best[index] + 1)
    )
    early_stopped = client_models.early_stopped
    return replace(
        client_models,
        best=client_models.best.scatter(on_device, client_models.models.select(on_device)),
        best_loss=client_models.best_loss.index_copy(
            0, improved, loss[better].nan_to_num(nan=torch.inf)
        ),
        rounds_since_best=rounds_since_best,
        early_stopped=early_stopped | (rounds_since_best > patience) if patience else early_stopped,
        valid_accuracy=client_models.valid_accuracy.index_copy(
            0, index, torch.where(without_examples, -1.0, correct / examples.double())
        ),
    )


def reset_early_stopping(
    task: TrainingTask, engine: Engine, client_models: ClientModels, time_step: int
) -> ClientModels:
    """At a new time step: all clients train again, and their best models are evaluated on the new
    validation examples.
    """
    clients = np.arange(task.info.num_clients)
    scores = engine.score_pairs(client_models.best, clients, clients, "valid", time_step)
    return replace(
        client_models,
        best_loss=scores.mean_loss().nan_to_num(nan=torch.inf),
        rounds_since_best=torch.zeros_like(client_models.rounds_since_best),
        early_stopped=torch.zeros_like(client_models.early_stopped),
        valid_accuracy=torch.full_like(client_models.valid_accuracy, -1.0),
    )


def mean_valid_accuracy(client_models: ClientModels) -> float | None:
    """The mean over clients of the accuracy of their current models; None while no client has
    one.
    """
    known = client_models.valid_accuracy[client_models.valid_accuracy >= 0]
    return float(known.mean()) if len(known) else None
