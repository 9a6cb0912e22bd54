"""Poisoned rows get ids of their own: the same example may be in honest hands too, now or at
another time step, and must stay what it is there.

With n ids in all, the poisoned form of example i is the example n + i. Inputs are stored again only
where an attack changes them.
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


def data_info(source: ArrayDataset) -> DataInfo:
    """What attackers know of a data set; the brightest pixel of the training images, because
    some sets do not use all of 0 .. 255.
    """
    high = (
        source.train.x.max(axis=0) if source.kind == "table" else np.asarray(source.train.x.max())
    )
    return DataInfo(source.kind, len(source.classes), high)


def poison(
    views: ConceptViews,
    steps: Sequence[ClientData],
    attacks: Sequence[Attack],
    attackers: Mapping[str, np.ndarray],
    known: DataInfo,
    key: Key,
) -> tuple[ConceptViews, tuple[ClientData, ...]]:
    """The training examples and who holds them, after the attacks on data, one after the other.
    Validation rows stay honest: they measure.

    attackers: the clients of each attack, by its name; key: the experiment's. An example that
    several attackers hold at different times has the form the last of them by number gave it.
    """
    active = [attack for attack in attacks if attack.poison is not None]
    everybody = sorted({int(client) for attack in active for client in attackers[attack.name]})
    if not everybody:
        return views, tuple(steps)
    n = len(views.y)
    place = np.arange(n) if views.storage_index is None else views.storage_index
    new_place, new_y = place.copy(), views.y.copy()
    stored, parts = len(views.x), [views.x]
    for client in everybody:
        ids = np.unique(np.concatenate([step.train.for_client(client) for step in steps]))
        before = x = np.asarray(views.x[place[ids]])
        y = views.y[ids]
        for attack in active:
            if attack.poison is not None and client in attackers[attack.name]:
                x, y = attack.poison(x, y, known, key.fold_in("attack", attack.name, client))
        new_y[ids] = y
        if x is not before:
            new_place[ids] = stored + np.arange(len(ids))
            parts.append(x)
            stored += len(ids)
    x = views.x if len(parts) == 1 else np.concatenate(parts)
    poisoned = views._replace(
        x=x, y=np.concatenate([views.y, new_y]), storage_index=np.concatenate([place, new_place])
    )
    return poisoned, tuple(
        replace(step, train=_renumber(step.train, everybody, n)) for step in steps
    )


def _renumber(rows: PartitionIndices, clients: Sequence[int], shift: int) -> PartitionIndices:
    """The same rows, in which those of some clients are the poisoned forms."""
    ids = rows.ids.copy()
    for client in clients:
        ids[rows.offsets[client] : rows.offsets[client + 1]] += shift
    return PartitionIndices(ids, rows.offsets)
