"""FedDrift: several global models, one for each concept. Clients whose data fit no model start a
new one, and models with similar losses are merged.

Jothimurugesan, Hsieh, Wang, Joshi, Gibbons, "Federated learning under distributed concept drift",
AISTATS 2023, algorithm 1 and section 4.

    step                                        slot                     function
    losses of all models on all clients' data   model_assignment         measured by the round
    drift detected: a new model                 model_assignment.decide  decide
    distances between models                    model_assignment.decide  measure_distances
    hierarchical clustering                     model_assignment.decide  merge
    FedAvg of each model by its clients         (default)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from remanence.core.compose import part
from remanence.core.declarations import DRIFT, Remedy
from remanence.core.errors import InputError
from remanence.core.expressions import PlainText
from remanence.core.pytree import Tree
from remanence.core.ranges import check_range
from remanence.core.slots import AssignmentDecision, ModelAssignment, Part
from remanence.core.types import TaskInfo


@part
def feddrift(*, delta: float = 0.1, measure: PlainText = "loss") -> Part:
    """At every time step each client takes the model with the lowest loss on its new data, or
    starts a new one; then models at a distance below delta are merged.

    A client starts a new model where the lowest loss exceeds that of the time step before by more
    than delta. The new model is a copy of the best one, and the client trains it alone for one time
    step. Clients train on the data of the current time step only. Losses are known from the first
    decision on, so the first drift that can start a new model is that to the third time step.

    Args:
        delta: Increase of the loss that starts a new model, and the distance below which models
            are merged.
        measure: "loss" (the paper), or "accuracy" (the authors' code, with delta from .04 to .20 by
            dataset), which uses the error rate in place of the loss.
    """
    check_range(delta > 0, "feddrift", "delta", "above 0", delta)
    if measure not in ("loss", "accuracy"):
        raise InputError(f"feddrift: measure is loss or accuracy, not {measure!r}")
    return Part(
        "feddrift",
        hyper={"delta": delta},
        static=("measure",),
        addresses=(
            Remedy(
                DRIFT,
                "keeps a global model for every concept, so that one concept's clients do not"
                " unlearn another's",
            ),
        ),
        model_assignment=ModelAssignment(init_state, decide, measure),
        payload_description="the loss of every global model on its data, at every time step",
    )


def init_state(info: TaskInfo) -> Tree:
    """Without a decision before, the last loss is infinite: no loss exceeds it."""
    return {"last": torch.full((info.num_clients,), torch.inf, dtype=torch.float64)}


def decide(
    losses: np.ndarray, uses: np.ndarray, sizes: np.ndarray, state: Tree, hyper: dict[str, Tensor]
) -> AssignmentDecision:
    """The decision of one time step.

    Args:
        losses: [K, M] of every model on every client's new data.
        uses: [K] the model of each client so far; not read.
        sizes: [K] the clients' numbers of examples.
        state: The lowest loss of each client at the time step before.
        hyper: delta.
    """
    delta, models = float(hyper["delta"].double()), losses.shape[1]
    best, lowest = losses.argmin(axis=1), losses.min(axis=1)
    drifted = np.flatnonzero(lowest > state["last"].cpu().numpy() + delta)
    chosen = best.copy()
    # each alone with a copy of its best model
    chosen[drifted] = models + np.arange(len(drifted))
    settled = np.setdiff1d(np.arange(len(losses)), drifted)
    groups = merge(
        [int(m) for m in np.unique(chosen[settled])],
        measure_distances(losses, chosen, sizes, settled),
        delta,
    )
    # kept, because their concept may return
    idle = [[model] for model in range(models) if not any(model in group for group in groups)]
    kept = sorted([*groups, *idle])  # older models come first and win ties
    mixing = np.zeros((len(kept) + len(drifted), models))
    number: dict[int, int] = {}  # of a model as clients chose it -> its row
    for place, group in enumerate(kept):
        weights = np.array(
            [sizes[settled][chosen[settled] == model].sum() for model in group], dtype=np.float64
        )
        mixing[place, group] = weights / weights.sum() if len(group) > 1 else 1.0
        number |= dict.fromkeys(group, place)
    for place, client in enumerate(drifted.tolist(), start=len(kept)):
        mixing[place, best[client]] = 1.0
        number[models + place - len(kept)] = place
    return AssignmentDecision(
        np.array([number[int(model)] for model in chosen]),
        mixing,
        {"last": torch.from_numpy(lowest)},
    )


def measure_distances(
    losses: np.ndarray, chosen: np.ndarray, sizes: np.ndarray, settled: np.ndarray
) -> dict[tuple[int, int], float]:
    """The distance of every pair of models: the larger of the two increases of the loss on the
    other model's data, at least 0.
    """
    used = [int(model) for model in np.unique(chosen[settled])]
    # loss of every model on all examples of the clients that use model i
    on = {
        i: np.average(
            losses[settled][chosen[settled] == i],
            axis=0,
            weights=sizes[settled][chosen[settled] == i],
        )
        for i in used
    }
    return {
        (i, j): max(on[i][j] - on[i][i], on[j][i] - on[j][j], 0.0)
        for i in used
        for j in used
        if i < j
    }


def merge(
    models: list[int], distances: dict[tuple[int, int], float], delta: float
) -> list[list[int]]:
    """Complete linkage: the two closest groups become one while even their farthest members are
    closer than delta.

    >>> merge([0, 1, 2], {(0, 1): 0.1, (0, 2): 0.5, (1, 2): 0.2}, 0.3)
    [[0, 1], [2]]
    """
    groups = [[model] for model in models]

    def apart(a: list[int], b: list[int]) -> float:
        return max(distances[min(i, j), max(i, j)] for i in a for j in b)

    while len(groups) > 1:
        pairs = [
            (apart(a, b), x, y) for x, a in enumerate(groups) for y, b in enumerate(groups) if x < y
        ]
        distance, x, y = min(pairs)
        if distance >= delta:
            break
        groups[x] = sorted(groups[x] + groups.pop(y))
    return groups
