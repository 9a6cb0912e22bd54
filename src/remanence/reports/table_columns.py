"""The columns of a report's tables: headings, explanations, and the text of a cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remanence.core.errors import unknown
from remanence.metrics.summary_rows import MethodRow

MISSING = "–"  # stands for a missing number
DRIFT = "Drift and peers"  # the caption of their table


def percent(share: float | None, digits: int = 1) -> str:
    """A share as a percentage, without the sign.

    >>> percent(0.8125), percent(None)
    ('81.2', '–')
    """
    return MISSING if share is None else f"{100 * share:.{digits}f}"


def _describe_recovery(row: MethodRow) -> str:
    if row.never_recovered is None or row.robustness is None:
        return MISSING
    return (
        MISSING if row.recovery is None else f"{row.recovery:.1f}"
    ) + f" ({percent(row.never_recovered, 0)} % never)"


def readable_bytes(count: float | None) -> str:
    """A number of bytes with its unit.

    >>> readable_bytes(1_240_000), readable_bytes(12)
    ('1.2 MB', '12 B')
    """
    if count is None:
        return MISSING
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def readable_seconds(seconds: float | None) -> str:
    """A duration with its unit.

    >>> readable_seconds(0.0123), readable_seconds(4.56), readable_seconds(180.0)
    ('12 ms', '4.6 s', '3.0 min')
    """
    if seconds is None:
        return MISSING
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 99.5 else f"{seconds / 60:.1f} min"


@dataclass(frozen=True)
class Column:
    """A column of numbers."""

    heading: str
    short: str  # heading in a terminal; empty: not shown there
    explanation: str
    cell: Callable[[MethodRow], str]
    # a column is shown if at least one row needs it
    needed: Callable[[MethodRow], bool] = lambda row: True
    theme: str = ""  # columns with a theme have their own table in the page
    legend: str = ""  # of `short`, in a terminal; empty where the heading is enough


COLUMNS = (
    Column(
        "Seeds",
        "seeds",
        "runs that differ only in their seed",
        lambda row: f"{row.seeds}" if row.seeds == row.planned else f"{row.seeds} of {row.planned}",
    ),
    Column(
        "Test accuracy, %",
        "accuracy %",
        "at the last recorded round: mean and sample standard deviation over seeds",
        lambda row: (
            percent(row.accuracy)
            + (f" ± {percent(row.deviation)}" if row.deviation is not None else "")
        ),
    ),
    Column(
        "Best round, %",
        "best",
        "test accuracy at each seed's best round",
        lambda row: percent(row.best),
        legend="accuracy at the best round",
    ),
    Column(
        "Macro F1, %",
        "F1",
        "mean over classes of the F1 score",
        lambda row: percent(row.macro_f1),
        legend="macro F1",
    ),
    Column(
        "Worst class, %",
        "worst",
        "lowest accuracy of a class",
        lambda row: percent(row.worst_class),
        legend="lowest accuracy of a class",
    ),
    Column(
        "Forgetting, points a round",
        "forgot",
        "accuracy that classes lose from one recorded round to the next, averaged over classes and"
        " rounds; gains count as 0",
        lambda row: percent(row.forgetting, 2),
        legend="points that a class loses between recorded rounds",
    ),
    Column(
        "Local forgetting, points",
        "",
        "accuracy that local training loses of the received model, averaged over classes and"
        " recorded local models; gains count as 0",
        lambda row: percent(row.local_forgetting, 2),
        lambda row: row.local_forgetting is not None,
    ),
    Column(
        "Performance, %",
        "perform",
        "accuracy at the end of each time step, averaged over clients and time steps",
        lambda row: percent(row.performance),
        lambda row: row.performance is not None,
        DRIFT,
        "accuracy at the end of a time step",
    ),
    Column(
        "Robustness, points",
        "drop",
        "accuracy at the end of a time step minus the lowest in the next, averaged over clients"
        " and time steps; lower is better",
        lambda row: percent(row.robustness),
        lambda row: row.robustness is not None,
        DRIFT,
        "points lost after a drift, at worst",
    ),
    Column(
        "Convergence, rounds",
        "rounds",
        "rounds until a client has 90 % of its gain in a time step",
        lambda row: MISSING if row.convergence is None else f"{row.convergence:.1f}",
        lambda row: row.convergence is not None,
        DRIFT,
        "rounds to 90 % of a time step's gain",
    ),
    Column(
        "Recovery, rounds",
        "",
        "rounds after a drift until a client reaches its accuracy before the drift; in brackets the"
        " share that does not within the time step",
        _describe_recovery,
        lambda row: _describe_recovery(row) != MISSING,
        DRIFT,
    ),
    Column(
        "Time average, %",
        "",
        "accuracy averaged over all rounds",
        lambda row: percent(row.time_averaged),
        lambda row: row.time_averaged is not None,
        DRIFT,
    ),
    Column(
        "Worst client, %",
        "",
        "lowest accuracy of a client on its own data at the last recorded round; in brackets the"
        " mean of the lowest tenth",
        lambda row: (
            percent(row.worst_client)
            + (f" ({percent(row.bottom_decile)})" if row.bottom_decile is not None else "")
        ),
        lambda row: row.worst_client is not None,
        DRIFT,
    ),
    Column(
        "Forgetting of previous clusters, points",
        "",
        "accuracy that clients have lost on clusters since they left them; negative: gained",
        lambda row: percent(row.previous_concepts),
        lambda row: row.previous_concepts is not None,
        DRIFT,
    ),
    Column(
        "Same cluster, %",
        "",
        "share of peer selections within the client's own cluster",
        lambda row: percent(row.same_cluster, 0),
        lambda row: row.same_cluster is not None,
        DRIFT,
    ),
    Column(
        "Validation, %",
        "valid",
        "accuracy on the clients' validation examples at the last recorded round",
        lambda row: percent(row.validation),
        legend="accuracy on validation examples",
    ),
    Column(
        "Communication a round",
        "",
        "bytes sent by clients and server",
        lambda row: readable_bytes(row.bytes_per_round),
    ),
    Column(
        "Time a round",
        "",
        "wall-clock time of a round",
        lambda row: readable_seconds(row.seconds_per_round),
    ),
    Column(
        "Rejected",
        "",
        "replies that failed the checks of the server, over all seeds",
        lambda row: str(row.rejected),
    ),
)
ACCURACY = COLUMNS[1]
# not shown in a narrow terminal, in this order
DROP_ORDER = ("F1", "valid", "best", "worst", "forgot", "rounds", "drop")


def columns_for(rows: Sequence[MethodRow], names: Sequence[str] | None = None) -> list[Column]:
    """The columns that at least one of these rows needs, or those that are named.

    Args:
        rows: Of the table.
        names: Headings, as a report or a terminal has them, with or without the unit.
    """
    if names is not None:
        known = {
            key: column
            for column in COLUMNS
            for key in (column.heading, column.heading.partition(",")[0], column.short)
        }
        lower = {key.lower(): column for key, column in known.items() if key}
        for name in names:
            if name.lower() not in lower:
                raise unknown("column", name, known.keys() - {""})
        return [lower[name.lower()] for name in names]
    return [column for column in COLUMNS if not rows or any(column.needed(row) for row in rows)]
