"""Partitions that follow structure: clusters of clients with labels of their own, and one
client a writer, user or domain.
"""

from __future__ import annotations

import itertools
import re

import numpy as np

from remanence.core.rng import Key
from remanence.data.partitions import Partition, count_clients, partition_error, rows_by_client


def label_clusters(
    *, clients: str = "2:3:4", classes: str = "3:3:4", samples: int = 0
) -> Partition:
    """Clusters of clients with disjoint labels and equally many examples at every client (Hong et
    al. 2022).

    `clients` says how many clients each cluster has, "2:3:4". `classes` says how many labels,
    "3:3:4", counted from label 0, or which ones, "0,1|2,3|8,9"; labels in no cluster are left out.
    `samples` is the size of a client; 0 takes the largest that all can have. Clients are numbered
    cluster by cluster.
    """
    members = (
        [int(count) for count in clients.split(":")]
        if re.fullmatch(r"\d{1,6}(:\d{1,6})*", clients)
        else []
    )
    if not members or 0 in members:
        raise partition_error(
            "label_clusters",
            f"cannot read clients={clients!r}",
            "write how many clients each cluster has, such as '2:3:4'",
        )
    label_sets = _label_sets(classes)
    if len(label_sets) != len(members):
        raise partition_error(
            "label_clusters",
            f"has {len(members)} clusters in {clients!r} but {len(label_sets)} in {classes!r}",
            "give both for each cluster",
        )
    if samples < 0:
        raise partition_error(
            "label_clusters",
            f"cannot give each client {samples} samples",
            "give a positive number, or 0 for as many as possible",
        )
    total, known = sum(members), 1 + max(max(labels) for labels in label_sets)

    def share(
        labels: np.ndarray,
        groups: np.ndarray | None,
        clients_asked: int | None,
        classes_there: int,
        key: Key,
    ) -> list[np.ndarray]:
        if clients_asked not in (None, total):
            raise partition_error(
                "label_clusters",
                f"has {clients} = {total} clients but clients.count is {clients_asked}",
                "make them equal",
            )
        if known > classes_there:
            raise partition_error(
                "label_clusters",
                f"uses label {known - 1} of {classes!r} but the data have labels 0 to"
                f" {classes_there - 1}",
                "correct classes",
            )
        pools = [np.flatnonzero(np.isin(labels, list(wanted))) for wanted in label_sets]
        room = [len(pool) // count for pool, count in zip(pools, members, strict=True)]
        size = samples or min(room)
        tightest = int(np.argmin(room))
        if not 1 <= size <= room[tightest]:
            short = (
                f"cluster {tightest} has {len(pools[tightest])} examples for"
                f" {members[tightest]} clients"
            )
            raise partition_error(
                "label_clusters",
                f"cannot give each client {max(1, size)} examples because {short}",
                "lower samples or change the clusters",
            )
        shares = []
        for number, (pool, count) in enumerate(zip(pools, members, strict=True)):
            order = pool[key.fold_in("label_clusters", number).permutation(len(pool))]
            shares += [
                np.sort(order[client * size : (client + 1) * size]) for client in range(count)
            ]
        return shares

    return share


def _label_sets(classes: str) -> list[tuple[int, ...]]:
    if re.fullmatch(r"\d{1,4}(:\d{1,4})*", classes):
        ends = np.cumsum([0, *(int(count) for count in classes.split(":"))]).tolist()
        sets = [tuple(range(start, end)) for start, end in itertools.pairwise(ends)]
    elif re.fullmatch(r"\d{1,4}(,\d{1,4})*(\|\d{1,4}(,\d{1,4})*)*", classes):
        sets = [tuple(int(label) for label in part.split(",")) for part in classes.split("|")]
    else:
        cure = (
            "write how many labels each cluster has, such as '3:3:4', or which, such as '0,1|2,3'"
        )
        raise partition_error("label_clusters", f"cannot read classes={classes!r}", cure)
    every = [label for labels in sets for label in labels]
    if len(set(every)) != len(every) or not all(sets):
        raise partition_error(
            "label_clusters",
            f"has a label in two clusters or a cluster without labels in classes={classes!r}",
            "give each its own labels",
        )
    return sets


def by_group(*, minimum: int = 1, limit: int = 0, spread: bool = False) -> Partition:
    """One client a group: a writer, a user, a domain.

    Groups with fewer than `minimum` examples are left out; a client keeps at most `limit` examples,
    drawn at random (0: all). With fewer clients than groups, that many groups are drawn. With more,
    `spread` gives each group equally many clients, the larger groups one more where needed, and
    cuts each group at random into equal parts. Clients are numbered group by group.
    """
    if minimum < 1 or limit < 0 or 0 < limit < minimum:
        raise partition_error(
            "by_group",
            f"cannot use minimum={minimum} and limit={limit}",
            "give minimum 1 or more and limit 0 or at least minimum",
        )

    def share(
        labels: np.ndarray, groups: np.ndarray | None, clients: int | None, classes: int, key: Key
    ) -> list[np.ndarray]:
        if groups is None:
            raise partition_error(
                "by_group",
                "needs data with writers, users or domains, which these have not",
                "choose such a dataset or another partition",
            )
        if clients is not None:
            count_clients("by_group", len(labels), clients)
        key = key.fold_in("by_group")
        names, sizes = np.unique(groups, return_counts=True)
        names, sizes = names[sizes >= minimum], sizes[sizes >= minimum]
        if not len(names):
            raise partition_error(
                "by_group", f"found no group with {minimum} examples or more", "lower minimum"
            )
        clients = len(names) if clients is None else clients
        if clients > len(names) and not spread:
            cure = (
                "ask for fewer clients, or write by_group(spread=true) to give a group several"
                " clients"
            )
            raise partition_error(
                "by_group",
                f"has {len(names)} groups of at least {minimum} examples for {clients} clients",
                cure,
            )
        if clients <= len(names):
            chosen = key.fold_in("groups").choice(len(names), clients)
            names, sizes = names[chosen], sizes[chosen]
        parts = np.full(len(names), clients // len(names))
        parts[np.argsort(-sizes, kind="stable")[: clients % len(names)]] += 1
        if (sizes // parts < minimum).any():
            tight = int(np.argmin(sizes // parts))
            raise partition_error(
                "by_group",
                f"cannot cut group {names[tight]} with {sizes[tight]} examples into"
                f" {parts[tight]} clients of {minimum}",
                "lower clients",
            )
        place = np.minimum(np.searchsorted(names, groups), len(names) - 1)
        members = rows_by_client(np.where(names[place] == groups, place, -1), len(names))
        shares = []
        for name, count, rows in zip(names.tolist(), parts.tolist(), members, strict=True):
            order = rows[key.fold_in("rows", name).permutation(len(rows))]
            shares += [np.sort(part[: limit or None]) for part in np.array_split(order, count)]
        return shares

    return share
