"""Schedules of drift: which cluster each client is in at each time step. Each is a constructor;
what it returns is a pure function of a key.

A cluster is a distribution of examples; what its examples look like is said in `concepts.py`.
Clients that are in different clusters at one time make a shift, clients that change clusters over
time a drift. A user's own table is read in `read_table` below, and trusted in nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data.files import size_of

LIMIT = 8 << 20  # bytes of a user's table: a hundred thousand clients over ten time steps
LONG_FORM = ("time_step", "client", "cluster")

# Jothimurugesan et al. 2022, as the thesis of HAST doubles them: a word a time step, a digit a
# client; client k takes digit k % 10
STAGGERED = {
    2: "0000000000 0000000000 0000000000 1100000000 1111100000 1111110000 1111111100"
    " 1111111100 1111111111 1111111111",
    4: "0000000000 0000000000 1112220000 1112220030 2211222130 2221232130 2321133133"
    " 3323133213 3033313213 0033312223",
}


@dataclass(frozen=True)
class DriftSchedule:
    """Who is in which cluster, when: call it with the numbers of clients and time steps and a
    key. -> [T, K] int64, all below `clusters`
    """

    clusters: int  # also those that no client visits in the time steps asked for
    assign: Callable[[int, int, Key], np.ndarray]
    clients: int | None = None  # the only number of clients it is written for; None: any
    steps: int | None = None  # the most time steps it is written for; None: any

    def __call__(self, clients: int, steps: int, key: Key) -> np.ndarray:
        return self.assign(clients, steps, key)


def option_error(name: str, problem: str, cure: str) -> InputError:
    """The sentence for a schedule that cannot be made."""
    return InputError(f"drift {name!r} {problem}: {cure}")


def changed_clients(assignment: np.ndarray) -> np.ndarray:
    """Who is in another cluster than the time step before: [T, K] -> bool [T, K]. Nobody has moved
    at the first time step.

    >>> changed_clients(np.array([[0, 0], [0, 1], [1, 1]])).tolist()
    [[False, False], [False, True], [True, False]]
    """
    changed = np.zeros(assignment.shape, dtype=bool)
    changed[1:] = assignment[1:] != assignment[:-1]
    return changed


def divide_clients(clients: int, ratios: Sequence[int]) -> list[int]:
    """How many clients each cluster has: its share, rounded by largest remainders, ties to the
    first.

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


def none(*, clusters: int = 1, sizes: str = "") -> DriftSchedule:
    """No drift: every client stays in its cluster. With more than one cluster this is a shift.

    Clusters hold consecutive clients. `sizes` are the ratios of their numbers, such as "70:30";
    without it they are equal.
    """
    blocks = _plan_blocks("none", clusters, sizes)
    return DriftSchedule(clusters, lambda clients, steps, key: np.tile(blocks(clients), (steps, 1)))


def random(*, clusters: int = 2, sizes: str = "") -> DriftSchedule:
    """A fresh random assignment at every time step but the first, where clusters hold consecutive
    clients (Klefbom and Örtenberg Toftås 2023).

    Every cluster keeps its number of clients. `sizes` are the ratios of these numbers, such as
    "70:30"; without it they are equal.
    """
    blocks = _plan_blocks("random", clusters, sizes)

    def assign(clients: int, steps: int, key: Key) -> np.ndarray:
        start = blocks(clients)
        shuffled = [
            start[key.fold_in("random", step).permutation(clients)] for step in range(1, steps)
        ]
        return np.stack([start, *shuffled])

    return DriftSchedule(clusters, assign)


def rotation(*, clusters: int = 2, every: int = 1, sizes: str = "") -> DriftSchedule:
    """Every `every` time steps each client moves on to the next cluster, from the last to the
    first. It starts as `none` does.
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

    There are patterns of ten time steps for 2 and for 4 clusters, each for ten clients; client k
    follows the pattern of client k % 10.
    """
    if clusters not in STAGGERED:
        raise option_error(
            "staggered",
            f"has no pattern for clusters={clusters}",
            "give 2 or 4, or write a pattern of your own for table(path='...')",
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

    return DriftSchedule(clusters, assign, steps=len(pattern))


def table(*, path: str = "") -> DriftSchedule:
    """A schedule of your own from a CSV file; with fewer time steps than it has, the first are
    taken.

    Either a plain matrix of cluster numbers, a line a time step and a column a client, or lines
    below the header time_step,client,cluster. All numbers count from 0.
    """
    if not path:
        raise option_error("table", "needs to know what to read", "write table(path='FILE.csv')")
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

    return DriftSchedule(int(cells.max()) + 1, assign, clients=cells.shape[1], steps=len(cells))


DRIFT_SCHEDULES: dict[str, Callable[..., DriftSchedule]] = {
    "none": none,
    "random": random,
    "rotation": rotation,
    "staggered": staggered,
    "table": table,
}


def _plan_blocks(name: str, clusters: int, sizes: str) -> Callable[[int], np.ndarray]:
    """Check what was written; the function then gives consecutive clients the same cluster. ->
    [K] int64
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


def read_table(path: Path) -> np.ndarray:
    """A user's table as [T, K] int64, or a sentence with the line that is wrong. Cells are
    separated by commas, semicolons or tabs.
    """

    def damaged(line: int, found: str, cure: str) -> InputError:
        return InputError(f"line {line} of the drift table {path} {found}: {cure}")

    lines = _read_lines(path)
    mark = next((mark for mark in (",", ";", "\t") if mark in lines[0][1]), ",")
    rows = [(number, [cell.strip() for cell in line.split(mark)]) for number, line in lines]
    header = [cell.lower() for cell in rows[0][1]]
    long = sorted(header) == sorted(LONG_FORM)
    for number, cells in rows:
        if len(cells) != len(header):
            raise damaged(
                number,
                f"has {len(cells)} cells where line {rows[0][0]} has {len(header)}",
                "give every line the same cells",
            )
    if long and len(rows) == 1:
        raise damaged(
            rows[0][0],
            "is a header with nothing below it",
            "write a line for each time step and client",
        )
    for number, cells in rows[long:]:
        wrong = [cell for cell in cells if not re.fullmatch(r"\d{1,9}", cell, re.ASCII)]
        if wrong:
            cure = f"write whole numbers from 0, below no other header than {','.join(LONG_FORM)}"
            raise damaged(
                number,
                f"has {wrong[0][:20]!r} where a number belongs"
                if wrong[0]
                else "has an empty cell",
                cure,
            )
    numbers = [number for number, _ in rows[long:]]
    # [lines, cells]
    values = np.array([[int(cell) for cell in cells] for _, cells in rows[long:]], dtype=np.int64)
    clusters = values[:, [header.index("cluster")]] if long else values
    used = np.unique(clusters)
    if len(used) <= used[-1]:
        gap = int(np.argmax(used != np.arange(len(used))))
        line = numbers[int(np.argmax((clusters == used[gap]).any(axis=1)))]
        cure = "number the clusters 0, 1, 2, ... without a gap"
        raise damaged(
            line, f"names cluster {used[gap]}, but no client is ever in cluster {gap}", cure
        )
    return (
        _spread(values[:, [header.index(name) for name in LONG_FORM]], numbers, damaged)
        if long
        else values
    )


def _spread(
    triples: np.ndarray, numbers: list[int], damaged: Callable[[int, str, str], InputError]
) -> np.ndarray:
    """From (time step, client, cluster) [n, 3] to [T, K]; every pair of time step and client
    must be there once.
    """
    steps, clients = int(triples[:, 0].max()) + 1, int(triples[:, 1].max()) + 1
    place = triples[:, 0] * clients + triples[:, 1]
    order = np.argsort(place, kind="stable")
    twice = np.flatnonzero(np.diff(place[order]) == 0)
    if len(twice):
        again = int(order[twice + 1].min())
        step, client = triples[again, :2].tolist()
        raise damaged(
            numbers[again],
            f"places client {client} at time step {step} a second time",
            "remove one of the two lines",
        )
    # so a cell is missing; compared before anything of that size is made
    if len(triples) != steps * clients:
        absent = int(np.argmax(np.append(place[order], -1) != np.arange(len(place) + 1)))
        cure = f"write a line for each of {steps} time steps and {clients} clients"
        raise damaged(
            numbers[-1],
            f"is the last, and client {absent % clients} is nowhere at time step"
            f" {absent // clients}",
            cure,
        )
    return np.asarray(triples[order, 2].reshape(steps, clients))


def _read_lines(path: Path) -> list[tuple[int, str]]:
    """The lines that are not empty, with their numbers from 1."""
    try:
        if not path.is_file():
            raise InputError(
                f"the drift table {path} was not found: correct path in table(path='...')"
            )
        with path.open("rb") as file:
            raw = file.read(LIMIT + 1)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise InputError(
            f"the drift table {path} cannot be read ({error.strerror}): check that you may read it"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"the drift table {path} is not text: save it as CSV in UTF-8") from error
    if len(raw) > LIMIT:
        raise InputError(
            f"the drift table {path} is larger than {size_of(LIMIT)}: give a file with fewer"
            " time steps or clients"
        )
    lines = [
        (number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()
    ]
    if not lines:
        raise InputError(f"the drift table {path} is empty: write a line for each time step")
    return lines
