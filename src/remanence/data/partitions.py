"""Partitions: which client gets which training examples.

Each function below is a constructor; the partition it returns is a pure function of labels, groups
and a key. It returns one ascending array of indices for each client; no example belongs to two
clients. `structured_partitions.py` has the partitions that follow label clusters, writers and
domains. `splits.split_train_valid` then splits off each client's validation examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from remanence.core.errors import InputError
from remanence.core.rng import Key

# (labels [n], groups [n] or None, number of clients or None, number of classes, key)
# -> the indices of each client's examples
Partition = Callable[[np.ndarray, np.ndarray | None, int | None, int, Key], list[np.ndarray]]


def partition_error(name: str, problem: str, cure: str) -> InputError:
    """Return the error for a partition that cannot be made."""
    return InputError(f"partition {name!r} {problem}: {cure}")


def count_clients(name: str, size: int, clients: int | None) -> int:
    """Check the number of clients for `size` training examples and return it."""
    if clients is None:
        raise partition_error(name, "needs a number of clients", "set clients.count")
    if not 1 <= clients <= size:
        raise partition_error(
            name,
            f"cannot divide {size} training examples over {clients} clients",
            f"give from 1 to {size} clients",
        )
    return clients


def indices_by_client(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """Group examples by client.

    Args:
        owner: [n] the client of each example, -1 for none.
        clients: the number of clients.
    """
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(clients + 1))
    return [order[ends[client] : ends[client + 1]] for client in range(clients)]


def draw_by_counts(labels: np.ndarray, counts: np.ndarray, key: Key) -> list[np.ndarray]:
    """Draw random examples so that client k gets counts[k, c] of class c."""
    owner = np.full(len(labels), -1, dtype=np.int64)
    for label in range(counts.shape[1]):
        members = np.flatnonzero(labels == label)
        members = members[key.fold_in("class", label).permutation(len(members))]
        taken = int(counts[:, label].sum())
        owner[members[:taken]] = np.repeat(np.arange(len(counts)), counts[:, label])
    return indices_by_client(owner, len(counts))


def iid() -> Partition:
    """Every client gets a random part of the examples; sizes differ by at most one (McMahan et al.
    2017, IID).
    """

    def partition(
        labels: np.ndarray, groups: np.ndarray | None, clients: int | None, classes: int, key: Key
    ) -> list[np.ndarray]:
        order = key.fold_in("iid").permutation(len(labels))
        return [
            np.sort(part)
            for part in np.array_split(order, count_clients("iid", len(labels), clients))
        ]

    return partition


def dirichlet(*, alpha: float = 0.1, samples: int = 0) -> Partition:
    """Each client's label mix is drawn from Dirichlet(alpha), and all clients are equally large
    (Legate 2022; Hsu, Qi and Brown 2019).

    A client draws its examples without replacement; when a class runs out, its mix is renormalized
    over the classes that are left. One client after the other draws all its examples, in random
    order, as in Legate's code. Others let clients take turns, example by example (Acar et al. 2021;
    InnerDirichletPartitioner of Flower Datasets): classes then run out for all of them, and labels
    are less skewed at the same alpha.

    Args:
        alpha: the concentration: small values give clients few classes.
        samples: the size of a client; 0: the number of examples divided by the clients.
    """
    _check_alpha("dirichlet", alpha)
    if samples < 0:
        raise partition_error(
            "dirichlet",
            f"cannot give each client {samples} samples",
            "give a positive number, or 0 for an equal share of all",
        )

    def partition(
        labels: np.ndarray, groups: np.ndarray | None, clients: int | None, classes: int, key: Key
    ) -> list[np.ndarray]:
        clients = count_clients("dirichlet", len(labels), clients)
        if samples * clients > len(labels):
            raise partition_error(
                "dirichlet",
                f"cannot give {clients} clients {samples} samples each out of {len(labels)}",
                "lower samples or clients",
            )
        size = samples or len(labels) // clients
        pool = np.bincount(labels, minlength=classes)
        draw = key.fold_in("dirichlet").generator()
        log_mix = _log_dirichlet(draw, alpha, (clients, classes))
        counts = np.zeros((clients, classes), dtype=np.int64)
        for client in draw.permutation(clients):
            counts[client] = _draw_counts(draw, log_mix[client], pool, size)
            pool = pool - counts[client]
        return draw_by_counts(labels, counts, key.fold_in("rows"))

    return partition


def _draw_counts(
    draw: np.random.Generator, log_mix: np.ndarray, pool: np.ndarray, size: int
) -> np.ndarray:
    """Draw the number of examples of each class that a client takes from the pool [C]. A pass that
    falls short empties a class, so C passes are enough.
    """
    counts = np.zeros_like(pool)
    while (missing := size - int(counts.sum())) > 0:
        left = np.flatnonzero(pool > counts)
        mix = np.exp(log_mix[left] - log_mix[left].max())
        # what a class cannot give is drawn again from the others: the same distribution as drawing
        # one by one
        wanted = draw.multinomial(missing, mix / mix.sum())
        counts[left] += np.minimum(wanted, (pool - counts)[left])
    return counts


def _log_dirichlet(draw: np.random.Generator, alpha: float, shape: tuple[int, int]) -> np.ndarray:
    """Draw logarithms of Dirichlet(alpha) variables in the last axis, up to a constant: small alpha
    does not underflow.

    A gamma variable of shape alpha is one of shape alpha + 1 times U ** (1 / alpha) (Marsaglia and
    Tsang 2000).
    """
    uniform = 1.0 - draw.random(shape)  # in (0, 1]
    return np.asarray(np.log(draw.standard_gamma(alpha + 1.0, shape)) + np.log(uniform) / alpha)


def dirichlet_by_class(*, alpha: float = 0.1, minimum: int = 10) -> Partition:
    """Each class is split over the clients by Dirichlet(alpha), so clients differ in size
    (Yurochkin et al. 2019; Li et al. 2022).

    It is the DirichletPartitioner of Flower Datasets without self-balancing, except that small
    clients are filled up here, and there everything is drawn again.

    Args:
        alpha: the concentration: small values give clients few classes.
        minimum: clients with fewer examples get random ones from the largest client, one at a time.
    """
    _check_alpha("dirichlet_by_class", alpha)
    if minimum < 0:
        raise partition_error(
            "dirichlet_by_class",
            f"cannot guarantee {minimum} examples a client",
            "give minimum 0 or more",
        )

    def partition(
        labels: np.ndarray, groups: np.ndarray | None, clients: int | None, classes: int, key: Key
    ) -> list[np.ndarray]:
        clients = count_clients("dirichlet_by_class", len(labels), clients)
        if clients * minimum > len(labels):
            raise partition_error(
                "dirichlet_by_class",
                f"cannot guarantee {minimum} of {len(labels)} examples to each of {clients}"
                " clients",
                "lower minimum or clients",
            )
        draw = key.fold_in("dirichlet_by_class").generator()
        log_mix = _log_dirichlet(draw, alpha, (classes, clients))
        mix = np.exp(log_mix - log_mix.max(axis=1, keepdims=True))
        ends = np.cumsum(mix, axis=1) / mix.sum(axis=1, keepdims=True)
        ends[:, -1] = 1.0
        cuts = np.floor(ends * np.bincount(labels, minlength=classes)[:, None] + 0.5).astype(
            np.int64
        )
        counts = np.diff(cuts, axis=1, prepend=0).T  # [clients, classes]
        _fill_up(counts, minimum, draw)
        return draw_by_counts(labels, counts, key.fold_in("rows"))

    return partition


def _fill_up(counts: np.ndarray, minimum: int, draw: np.random.Generator) -> None:
    """Move examples from the largest client until all have `minimum`. The largest has more than
    that as long as another has less.
    """
    sizes = counts.sum(axis=1)
    for client in np.flatnonzero(sizes < minimum):
        while sizes[client] < minimum:
            donor = int(sizes.argmax())
            label = int(
                np.searchsorted(np.cumsum(counts[donor]), draw.integers(sizes[donor]), side="right")
            )
            counts[donor, label] -= 1
            counts[client, label] += 1
            sizes[donor] -= 1
            sizes[client] += 1


def shards(*, per_client: int = 2) -> Partition:
    """Examples sorted by label are cut into equal shards, and every client gets random ones
    (McMahan et al. 2017).

    Args:
        per_client: the number of shards of a client.
    """
    if per_client < 1:
        raise partition_error(
            "shards", f"cannot give {per_client} shards a client", "give per_client 1 or more"
        )

    def partition(
        labels: np.ndarray, groups: np.ndarray | None, clients: int | None, classes: int, key: Key
    ) -> list[np.ndarray]:
        clients = count_clients("shards", len(labels), clients)
        if clients * per_client > len(labels):
            raise partition_error(
                "shards",
                f"cannot cut {len(labels)} examples into {clients} x {per_client} shards",
                "lower per_client or clients",
            )
        by_label = np.lexsort((key.fold_in("shards", "rows").bits(len(labels)), labels))
        pieces = np.array_split(by_label, clients * per_client)
        order = key.fold_in("shards", "order").permutation(len(pieces)).reshape(clients, per_client)
        return [np.sort(np.concatenate([pieces[piece] for piece in chosen])) for chosen in order]

    return partition


def quantity(*, power: float = 1.5, sigma: float = 0.0, minimum: int = 1) -> Partition:
    """All clients have the same label mix, up to rounding, and different sizes: quantity skew.

    No published scheme: papers draw sizes from a power law (the default) or a log-normal
    distribution (`sigma`), as Li et al. 2020 (FedProx) do for their synthetic data and for MNIST,
    but with other label mixes.

    Args:
        power: beyond the minimum, sizes are proportional to rank ** -power, with random ranks.
        sigma: if above 0, sizes are proportional to exp(sigma * a standard normal number) instead.
        minimum: the number of examples that every client gets at least.
    """
    if not (
        math.isfinite(power) and math.isfinite(sigma) and power >= 0 and sigma >= 0 and minimum >= 0
    ):
        raise partition_error(
            "quantity",
            f"cannot use power={power}, sigma={sigma}, minimum={minimum}",
            "give finite numbers of 0 or more",
        )

    def partition(
        labels: np.ndarray, groups: np.ndarray | None, clients: int | None, classes: int, key: Key
    ) -> list[np.ndarray]:
        clients = count_clients("quantity", len(labels), clients)
        spare = len(labels) - clients * minimum
        if spare < 0:
            raise partition_error(
                "quantity",
                f"cannot guarantee {minimum} of {len(labels)} examples to each of"
                f" {clients} clients",
                "lower minimum or clients",
            )
        key = key.fold_in("quantity")
        log_weight = -power * np.log(key.fold_in("ranks").permutation(clients) + 1.0)
        if sigma > 0:
            log_weight = sigma * key.fold_in("sizes").generator().standard_normal(clients)
        weight = np.exp(log_weight - log_weight.max())
        ends = np.floor(spare * np.cumsum(weight) / weight.sum() + 0.5).astype(
            np.int64
        ) + minimum * np.arange(1, clients + 1)
        return [np.sort(part) for part in np.split(_interleave(labels, key), ends[:-1])]

    return partition


def _interleave(labels: np.ndarray, key: Key) -> np.ndarray:
    """Order examples so that every contiguous part has the class proportions of the whole, up to
    about one example a class.
    """
    sizes = np.bincount(labels)
    order = np.lexsort((key.fold_in("rows").bits(len(labels)), labels))
    rank = np.arange(len(labels)) - (np.cumsum(sizes) - sizes)[labels[order]]
    # without offsets, all classes would have an example at the same positions
    offset = key.fold_in("offsets").uniform(len(sizes))
    return order[np.argsort((rank + offset[labels[order]]) / sizes[labels[order]], kind="stable")]


def _check_alpha(name: str, alpha: float) -> None:
    # also false for NaN; outside, logarithms of draws leave the range of float64
    if not 1e-9 <= alpha <= 1e9:
        raise partition_error(
            name,
            f"cannot use alpha={alpha}",
            "give a number above 0, such as 0.1 (small values: clients differ much)",
        )
