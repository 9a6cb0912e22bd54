"""Topologies: which clients can reach each other. Each constructor returns a pure function of a
key, which is called once for a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from remanence.core.errors import InputError
from remanence.core.memory import check_memory
from remanence.core.rng import Key

# (clients, key) -> [K, K] bool, symmetric, False on the diagonal
Topology = Callable[[int, Key], np.ndarray]

LARGEST_FILE = 64_000_000  # bytes of an edge list


def full() -> Topology:
    """Every client can reach every other."""
    return lambda clients, key: ~np.eye(clients, dtype=bool)


def ring(*, neighbors: int = 1) -> Topology:
    """Clients in a circle; each can reach `neighbors` clients on either side.

    Args:
        neighbors: Neighbors on either side.
    """
    if neighbors < 1:
        raise InputError(f"topology ring: neighbors must be at least 1, not {neighbors}")

    def draw(clients: int, key: Key) -> np.ndarray:
        apart = np.abs(np.subtract.outer(np.arange(clients), np.arange(clients)))
        around = np.minimum(apart, clients - apart)
        return np.asarray((around > 0) & (around <= neighbors))

    return draw


def regular(*, degree: int = 4) -> Topology:
    """A random graph in which every client has `degree` neighbors.

    Drawn by switching: starting from a circle of that degree, two random edges a-b and c-d are
    replaced by a-d and c-b, many times, except where an edge would be doubled. The direction of
    the second edge is random too, because otherwise some graphs could not be reached.

    Args:
        degree: Neighbors of a client.
    """
    if degree < 1:
        raise InputError(f"topology regular: degree must be at least 1, not {degree}")

    def draw(clients: int, key: Key) -> np.ndarray:
        if degree >= clients or clients * degree % 2:
            cure = "choose a smaller degree, such that clients times degree is even"
            raise InputError(
                f"topology regular: {clients} clients cannot have {degree} neighbors each: {cure}"
            )
        joined = (
            ring(neighbors=degree // 2)(clients, key)
            if degree > 1
            else np.zeros((clients, clients), dtype=bool)
        )
        if degree % 2:  # the number of clients is even: join each to the one opposite
            opposite = (np.arange(clients) + clients // 2) % clients
            joined[np.arange(clients), opposite] = True
        edges = np.argwhere(np.triu(joined)).tolist()
        draws = key.fold_in("regular").bits(20 * len(edges) * 3).reshape(-1, 3) % np.array(
            [len(edges), len(edges), 2], dtype=np.uint64
        )
        for one, other, turned in draws.tolist():
            (a, b), (c, d) = edges[int(one)], edges[int(other)][:: -1 if turned else 1]
            if len({a, b, c, d}) < 4 or joined[a, d] or joined[c, b]:
                continue
            for pair, value in (((a, b), False), ((c, d), False), ((a, d), True), ((c, b), True)):
                joined[pair] = joined[pair[::-1]] = value
            edges[int(one)], edges[int(other)] = [a, d], [c, b]
        return joined

    return draw


def erdos_renyi(*, p: float = 0.2) -> Topology:
    """Every pair is joined with probability p. A client without neighbors trains alone.

    Args:
        p: Probability that two clients are joined.
    """
    if not 0 <= p <= 1:
        raise InputError(f"topology erdos_renyi: p is a probability, not {p}")

    def draw(clients: int, key: Key) -> np.ndarray:
        drawn = np.triu(
            key.fold_in("erdos_renyi").uniform(clients * clients).reshape(clients, clients) < p, k=1
        )
        return drawn | drawn.T

    return draw


def edges(*, path: str = "") -> Topology:
    """A graph from a text file: the numbers of two clients in each line, separated by a comma or a
    space. Edges have no direction.

    Args:
        path: The file.
    """
    if not path:
        raise InputError("topology edges: needs a file: write edges(path='graph.csv')")

    def draw(clients: int, key: Key) -> np.ndarray:
        joined = np.zeros((clients, clients), dtype=bool)
        for number, line in enumerate(_read_lines(Path(path)), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            found = re.fullmatch(r"\s*(\d{1,9})\s*[,;\s]\s*(\d{1,9})\s*", line)
            if not found:
                raise InputError(
                    f"topology edges: line {number} of {path} is not two clients' numbers:"
                    " write one edge a line, such as 0,3"
                )
            a, b = int(found[1]), int(found[2])
            if a == b or max(a, b) >= clients:
                raise InputError(
                    f"topology edges: line {number} of {path} joins {a} and {b}: clients"
                    f" are numbered 0 to {clients - 1} and differ"
                )
            joined[a, b] = joined[b, a] = True
        if not joined.any():
            raise InputError(f"topology edges: {path} holds no edge: write one a line, such as 0,3")
        return joined

    return draw


def _read_lines(path: Path) -> list[str]:
    try:
        if path.exists() and not path.is_file():  # a pipe or a device could be read forever
            raise InputError(f"topology edges: {path} is not a regular file: check the name")
        if path.stat().st_size > LARGEST_FILE:
            raise InputError(
                f"topology edges: {path} is larger than {LARGEST_FILE} bytes: an edge list is"
                " a short text"
            )
        # a line has four characters or more and becomes a text
        check_memory(f"topology edges: {path}", {"its lines": 30 * path.stat().st_size})
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"topology edges: cannot read {path} ({type(error).__name__}): check the name"
        ) from None


TOPOLOGIES: dict[str, Callable[..., Topology]] = {
    "edges": edges,
    "erdos_renyi": erdos_renyi,
    "full": full,
    "regular": regular,
    "ring": ring,
}
