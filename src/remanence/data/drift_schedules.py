"""Drift schedules: the cluster of each client at each time step.

Each function below is a constructor; the schedule it returns is a pure function of a key. A cluster
is a group of clients whose data follow one concept (`concepts.py`). If clients are in different
clusters at one time, their data are shifted; if clients change clusters over time, they drift.
`schedule_table.py` reads schedules from CSV files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from remanence.core.errors import InputError
from remanence.core.expressions import PlainText
from remanence.core.rng import Key
from remanence.data.schedule_table import read_table

# The patterns of Jothimurugesan et al. 2022, doubled as in the thesis of HAST: one word a time
# step, one digit a client; client k takes digit k % 10.
STAGGERED = {
    2: "0000000000 0000000000 0000000000 1100000000 1111100000 1111110000 1111111100"
    " 1111111100 1111111111 1111111111",
    4: "0000000000 0000000000 1112220000 1112220030 2211222130 2221232130 2321133133"
    " 3323133213 3033313213 0033312223",
}


@dataclass(frozen=True)
class DriftSchedule:
    """The cluster of each client at each time step.

    Args:
        clusters: the number of clusters, including those that no client is in.
        assign: (clients, time steps, key) -> cluster numbers [T, K] int64.
        clients: the only number of clients the schedule is defined for; None: any.
        steps: the largest number of time steps it is defined for; None: any.
        resample: whose examples are drawn anew at a time step, unless the experiment says:
            "everyone", or "changed" for the clients that change their cluster.
    """

    clusters: int
    assign: Callable[[int, int, Key], np.ndarray]
    clients: int | None = None
    steps: int | None = None
    resample: str = "everyone"

    def __call__(self, clients: int, steps: int, key: Key) -> np.ndarray:
        """Return the cluster of each client at each time step. [T, K] int64"""
        return self.assign(clients, steps, key)


def option_error(name: str, problem: str, cure: str) -> InputError:
    """Return the error for a schedule that cannot be made."""
    return InputError(f"drift {name!r} {problem}: {cure}")


def changed_clients(assignment: np.ndarray) -> np.ndarray:
    """Find the clients that are in another cluster than at the time step before.

    >>> changed_clients(np.array([[0, 0], [0, 1], [1, 1]])).tolist()
    [[False, False], [False, True], [True, False]]

    Args:
        assignment: [T, K] cluster numbers.

    Returns:
        [T, K] bool; all False at the first time step.
    """
    changed = np.zeros(assignment.shape, dtype=bool)
    changed[1:] = assignment[1:] != assignment[:-1]
    return changed


def divide_clients(clients: int, ratios: Sequence[int]) -> list[int]:
    """Divide clients over clusters in these ratios, rounded by largest remainders; ties go to the
    first cluster.

    >>> divide_clients(50, [1, 1, 1, 1]), divide_clients(50, [70, 30])
    ([13, 13, 12, 12], [35, 15])
    """
    sizes, remainders = zip(
        *(divmod(clients * ratio, sum(ratios)) for ratio in ratios), strict=True
    )
    first = sorted(range(len(ratios)), key=lambda cluster: -remainders[cluster])[
        : clients - sum(sizes)
    ]
    return [size + (cluster in first) for cluster, size in enumerate(sizes)]


def none(*, clusters: int = 1, sizes: PlainText = "") -> DriftSchedule:
    """No drift: every client stays in its cluster. With several clusters, data are shifted.

    Args:
        clusters: the number of clusters; each has consecutive clients.
        sizes: the ratios of their numbers of clients, such as "70:30"; default: equal.
    """
    blocks = _plan_blocks("none", clusters, sizes)
    return DriftSchedule(clusters, lambda clients, steps, key: np.tile(blocks(clients), (steps, 1)))


def random(*, clusters: int = 2, sizes: PlainText = "") -> DriftSchedule:
    """A new random assignment at every time step (Klefbom and Örtenberg Toftås 2023).

    At the first time step clusters have consecutive clients. Every cluster keeps its number of
    clients.

    Args:
        clusters: the number of clusters.
        sizes: the ratios of their numbers of clients, such as "70:30"; default: equal.
    """
    blocks = _plan_blocks("random", clusters, sizes)

    def assign(clients: int, steps: int, key: Key) -> np.ndarray:
        start = blocks(clients)
        shuffled = [
            start[key.fold_in("random", step).permutation(clients)] for step in range(1, steps)
        ]
        return np.stack([start, *shuffled])

    return DriftSchedule(clusters, assign)


def rotation(*, clusters: int = 2, every: int = 1, sizes: PlainText = "") -> DriftSchedule:
    """All clients move to the next cluster, and from the last cluster to the first.

    Args:
        clusters: the number of clusters; at first each has consecutive clients.
        every: the number of time steps between two moves.
        sizes: the ratios of their numbers of clients, such as "70:30"; default: equal.
    """
    blocks = _plan_blocks("rotation", clusters, sizes)
    if every < 1:
        raise option_error(
            "rotation", f"cannot move clients every {every} time steps", "give every 1 or more"
        )
    return DriftSchedule(
        clusters,
        lambda clients, steps, key: (
            (blocks(clients) + np.arange(steps)[:, None] // every) % clusters
        ),
    )


def staggered(*, clusters: int = 2) -> DriftSchedule:
    """The published patterns in which clusters appear one after the other and clients move at
    different times (Jothimurugesan et al. 2022).

    Args:
        clusters: 2 or 4. Each pattern has ten time steps and ten clients; client k follows client
            k % 10 of the pattern.
    """
    if clusters not in STAGGERED:
        raise option_error(
            "staggered",
            f"has no pattern for clusters={clusters}",
            "give 2 or 4, or write your own pattern for table(path='...')",
        )
    # [10, 10]
    pattern = np.array(
        [[int(digit) for digit in word] for word in STAGGERED[clusters].split()], dtype=np.int64
    )

    def assign(clients: int, steps: int, key: Key) -> np.ndarray:
        if steps > len(pattern):
            raise option_error(
                "staggered",
                f"is written for {len(pattern)} time steps, not {steps}",
                f"ask for at most {len(pattern)}",
            )
        return pattern[:steps, np.arange(clients) % pattern.shape[1]]

    return DriftSchedule(clusters, assign, steps=len(pattern), resample="changed")


def table(*, path: str = "") -> DriftSchedule:
    """Your own schedule from a CSV file. An experiment with fewer time steps uses the first ones.

    Args:
        path: a file with a matrix of cluster numbers, one line a time step and one column a client,
            or with lines below the header time_step,client,cluster. All numbers count from 0.
    """
    if not path:
        raise option_error("table", "needs a path", "write table(path='FILE.csv')")
    cells = read_table(Path(path).expanduser())

    def assign(clients: int, steps: int, key: Key) -> np.ndarray:
        if clients != cells.shape[1]:
            raise option_error(
                "table",
                f"has {cells.shape[1]} clients in {path} but {clients} are asked for",
                f"set clients.count to {cells.shape[1]}",
            )
        if steps > len(cells):
            raise option_error(
                "table",
                f"has {len(cells)} time steps in {path} but {steps} are asked for",
                "add lines or ask for fewer",
            )
        return cells[:steps].copy()

    return DriftSchedule(
        int(cells.max()) + 1, assign, cells.shape[1], len(cells), resample="changed"
    )


DRIFT_SCHEDULES: dict[str, Callable[..., DriftSchedule]] = {
    "none": none,
    "random": random,
    "rotation": rotation,
    "staggered": staggered,
    "table": table,
}


def _plan_blocks(name: str, clusters: int, sizes: str) -> Callable[[int], np.ndarray]:
    """Check the options of a schedule.

    Returns:
        A function: number of clients -> the cluster of each, [K] int64, in consecutive blocks.
    """
    if clusters < 1:
        raise option_error(name, f"cannot have {clusters} clusters", "give clusters 1 or more")
    ratios = (
        [int(ratio) for ratio in sizes.split(":")]
        if re.fullmatch(r"\d{1,6}(:\d{1,6})*", sizes, re.ASCII)
        else []
    )
    if sizes and (not ratios or 0 in ratios):
        raise option_error(
            name,
            f"cannot read sizes={sizes!r}",
            "write the ratios of the clusters in whole numbers above 0, such as '70:30'",
        )
    if sizes and len(ratios) != clusters:
        raise option_error(
            name,
            f"has {len(ratios)} ratios in sizes={sizes!r} for {clusters} clusters",
            f"write clusters={len(ratios)} or correct sizes",
        )

    def assign(clients: int) -> np.ndarray:
        members = divide_clients(clients, ratios or [1] * clusters) if clients >= clusters else [0]
        if 0 in members:
            raise option_error(
                name,
                f"leaves a cluster of {sizes or clusters} without any of {clients} clients",
                "have more clients or fewer clusters",
            )
        return np.repeat(np.arange(clusters, dtype=np.int64), members)

    return assign
