"""Partitions that follow structure in the data: clusters of clients with their own labels, and one
client for each writer, user or domain.
"""

from __future__ import annotations

import itertools
import re

import numpy as np

from remanence.core.expressions import PlainText
from remanence.core.rng import Key
from remanence.data.partitions import Partition, count_clients, indices_by_client, partition_error


def label_clusters(
    *, clients: PlainText = "2:3:4", classes: PlainText = "3:3:4", samples: int = 0
) -> Partition:
    """Clusters of clients with disjoint labels; all clients have the same size (Hong et al. 2022).

    Clients are numbered cluster by cluster.

    Args:
        clients: the number of clients of each cluster, such as "2:3:4".
        classes: the number of labels of each cluster, such as "3:3:4", counted from label 0, or the
            labels themselves, such as "0,1|2,3|8,9"; examples with other labels are not used.
        samples: the size of a client; 0: the largest that all clients can have.
    """
    counts = _parse_counts(clients)
    label_sets = _parse_label_sets(classes)
    if len(label_sets) != len(counts):
        raise partition_error(
            "label_clusters",
            f"has {len(counts)} clusters in {clients!r} but {len(label_sets)} in {classes!r}",
            "give both for each cluster",
        )
    if samples < 0:
        raise partition_error(
            "label_clusters",
            f"cannot give each client {samples} samples",
            "give a positive number, or 0 for as many as possible",
        )
    highest = max(max(labels) for labels in label_sets)

    def partition(
        labels: np.ndarray,
        groups: np.ndarray | None,
        num_clients: int | None,
        num_classes: int,
        key: Key,
    ) -> list[np.ndarray]:
        if num_clients not in (None, sum(counts)):
            raise partition_error(
                "label_clusters",
                f"has {clients} = {sum(counts)} clients but clients.count is {num_clients}",
                "make them equal",
            )
        if highest >= num_classes:
            raise partition_error(
                "label_clusters",
                f"uses label {highest} of {classes!r} but the data have labels 0 to"
                f" {num_classes - 1}",
                "correct classes",
            )
        pools = [np.flatnonzero(np.isin(labels, list(wanted))) for wanted in label_sets]
        size = _client_size(pools, counts, samples)
        parts = []
        for number, (pool, count) in enumerate(zip(pools, counts, strict=True)):
            order = pool[key.fold_in("label_clusters", number).permutation(len(pool))]
            parts += [np.sort(order[k * size : (k + 1) * size]) for k in range(count)]
        return parts

    return partition


def _parse_counts(clients: str) -> list[int]:
    """Return the number of clients of each cluster from "2:3:4"."""
    counts = []
    if re.fullmatch(r"\d{1,6}(:\d{1,6})*", clients):
        counts = [int(count) for count in clients.split(":")]
    if not counts or 0 in counts:
        raise partition_error(
            "label_clusters",
            f"cannot read clients={clients!r}",
            "write how many clients each cluster has, such as '2:3:4'",
        )
    return counts


def _client_size(pools: list[np.ndarray], counts: list[int], samples: int) -> int:
    """Return the size of every client: `samples`, or the most that every cluster can give."""
    limits = [len(pool) // count for pool, count in zip(pools, counts, strict=True)]
    size, smallest = samples or min(limits), int(np.argmin(limits))
    if not 1 <= size <= limits[smallest]:
        raise partition_error(
            "label_clusters",
            f"cannot give each client {max(1, size)} examples because cluster {smallest} has"
            f" {len(pools[smallest])} examples for {counts[smallest]} clients",
            "lower samples or change the clusters",
        )
    return size


def _parse_label_sets(classes: str) -> list[tuple[int, ...]]:
    """Return the labels of each cluster from "3:3:4" or "0,1|2,3"."""
    if re.fullmatch(r"\d{1,4}(:\d{1,4})*", classes):
        ends = np.cumsum([0, *(int(count) for count in classes.split(":"))]).tolist()
        sets = [tuple(range(start, end)) for start, end in itertools.pairwise(ends)]
    elif re.fullmatch(r"\d{1,4}(,\d{1,4})*(\|\d{1,4}(,\d{1,4})*)*", classes):
        sets = [tuple(int(label) for label in part.split(",")) for part in classes.split("|")]
    else:
        raise partition_error(
            "label_clusters",
            f"cannot read classes={classes!r}",
            "write how many labels each cluster has, such as '3:3:4', or which, such as '0,1|2,3'",
        )
    every = [label for labels in sets for label in labels]
    if len(set(every)) != len(every) or not all(sets):
        raise partition_error(
            "label_clusters",
            f"has a label in two clusters or a cluster without labels in classes={classes!r}",
            "give each its own labels",
        )
    return sets


def by_group(*, minimum: int = 1, limit: int = 0, spread: bool = False) -> Partition:
    """One client for each group: a writer, a user, a domain (Caldas et al. 2018, LEAF).

    With fewer clients than groups, that many groups are drawn. Clients are numbered group by group.

    Args:
        minimum: groups with fewer examples are not used.
        limit: the most examples of a client, drawn at random; 0: all.
        spread: with more clients than groups, cut each group at random into equal parts for several
            clients; larger groups get one client more where needed.
    """
    if minimum < 1 or limit < 0 or 0 < limit < minimum:
        raise partition_error(
            "by_group",
            f"cannot use minimum={minimum} and limit={limit}",
            "give minimum 1 or more and limit 0 or at least minimum",
        )

    def partition(
        labels: np.ndarray, groups: np.ndarray | None, clients: int | None, classes: int, key: Key
    ) -> list[np.ndarray]:
        if groups is None:
            raise partition_error(
                "by_group",
                "needs data with writers, users or domains, which these data do not have",
                "choose other data or another partition",
            )
        if clients is not None:
            count_clients("by_group", len(labels), clients)
        key = key.fold_in("by_group")
        names, sizes = _large_groups(groups, minimum)
        clients = len(names) if clients is None else clients
        if clients > len(names) and not spread:
            raise partition_error(
                "by_group",
                f"has {len(names)} groups of at least {minimum} examples for {clients} clients",
                "use fewer clients, or write by_group(spread=true) to give a group several clients",
            )
        if clients <= len(names):
            chosen = key.fold_in("groups").choice(len(names), clients)
            names, sizes = names[chosen], sizes[chosen]
        counts = _clients_of_groups(names, sizes, clients, minimum)
        position = np.minimum(np.searchsorted(names, groups), len(names) - 1)
        members = indices_by_client(np.where(names[position] == groups, position, -1), len(names))
        parts = []
        for name, count, indices in zip(names.tolist(), counts.tolist(), members, strict=True):
            order = indices[key.fold_in("rows", name).permutation(len(indices))]
            parts += [np.sort(part[: limit or None]) for part in np.array_split(order, count)]
        return parts

    return partition


def _large_groups(groups: np.ndarray, minimum: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the groups with at least `minimum` examples, and their sizes."""
    names, sizes = np.unique(groups, return_counts=True)
    names, sizes = names[sizes >= minimum], sizes[sizes >= minimum]
    if not len(names):
        raise partition_error(
            "by_group", f"found no group with {minimum} examples or more", "lower minimum"
        )
    return names, sizes


def _clients_of_groups(
    names: np.ndarray, sizes: np.ndarray, clients: int, minimum: int
) -> np.ndarray:
    """Return the number of clients of each group."""
    counts = np.full(len(names), clients // len(names))
    counts[np.argsort(-sizes, kind="stable")[: clients % len(names)]] += 1
    if (sizes // counts < minimum).any():
        smallest = int(np.argmin(sizes // counts))
        raise partition_error(
            "by_group",
            f"cannot cut group {names[smallest]} with {sizes[smallest]} examples into"
            f" {counts[smallest]} clients of {minimum}",
            "lower clients",
        )
    return counts
