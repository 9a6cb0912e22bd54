"""Apply attacks on data before a run.

Poisoned examples get new ids, because a benign client may have the same example, now or at another
time step. With n ids in all, the poisoned form of example i is example n + i. Inputs are stored
again only if an attack changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from remanence.attacks.attack import Attack, DataInfo
from remanence.core.rng import Key
from remanence.data.concept_views import ConceptViews
from remanence.data.dataset import ArrayDataset
from remanence.data.population import ClientData, PartitionIndices


def data_info(dataset: ArrayDataset) -> DataInfo:
    """Return what attackers know of a dataset. The largest pixel is that of the training images,
    because some datasets do not use all of 0 .. 255.
    """
    x = dataset.train.x
    high = x.max(axis=0) if dataset.kind == "table" else np.asarray(x.max())
    return DataInfo(dataset.kind, len(dataset.classes), high)


def poison(
    views: ConceptViews,
    steps: Sequence[ClientData],
    attacks: Sequence[Attack],
    attackers: Mapping[str, np.ndarray],
    info: DataInfo,
    key: Key,
) -> tuple[ConceptViews, tuple[ClientData, ...]]:
    """Apply the attacks on data, one after the other. Validation examples are not poisoned.

    If several attackers have an example at different times, its poisoned form is that of the last
    attacker by number.

    Args:
        views: the training examples.
        steps: the examples of each client at each time step.
        attacks: all attacks; those without `poison` are skipped.
        attackers: the clients of each attack, by its name.
        info: what attackers know of the dataset.
        key: that of the experiment.

    Returns:
        The training examples with poisoned ones, and the examples of each client.
    """
    active = [attack for attack in attacks if attack.poison is not None]
    clients = sorted({int(client) for attack in active for client in attackers[attack.name]})
    if not clients:
        return views, tuple(steps)
    n = len(views.y)
    index = np.arange(n) if views.storage_index is None else views.storage_index
    new_index, new_y = index.copy(), views.y.copy()
    stored, parts = len(views.x), [views.x]
    for client in clients:
        ids = np.unique(np.concatenate([step.train.for_client(client) for step in steps]))
        before = x = np.asarray(views.x[index[ids]])
        y = views.y[ids]
        for attack in active:
            if attack.poison is not None and client in attackers[attack.name]:
                x, y = attack.poison(x, y, info, key.fold_in("attack", attack.name, client))
        new_y[ids] = y
        if x is not before:
            new_index[ids] = stored + np.arange(len(ids))
            parts.append(x)
            stored += len(ids)
    x = views.x if len(parts) == 1 else np.concatenate(parts)
    poisoned = views._replace(
        x=x, y=np.concatenate([views.y, new_y]), storage_index=np.concatenate([index, new_index])
    )
    return poisoned, tuple(
        replace(step, train=_shift_ids(step.train, clients, n)) for step in steps
    )


def _shift_ids(indices: PartitionIndices, clients: Sequence[int], shift: int) -> PartitionIndices:
    """Reindex the examples of some clients by their poisoned forms."""
    ids = indices.ids.copy()
    for client in clients:
        ids[indices.offsets[client] : indices.offsets[client + 1]] += shift
    return PartitionIndices(ids, indices.offsets)
