"""The columns of a report's table: what they are called, what they mean, and how a number reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remanence.metrics.summary_rows import MethodRow

MISSING = "–"  # where there is no number
DRIFT = "Drift and peers"


def percent(share: float | None, digits: int = 1) -> str:
    """
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
    """
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
    """
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
    """A column of numbers: how it is called, and how a row's cell reads."""

    heading: str
    short: str  # for 80 characters; empty: left out there
    explanation: str
    cell: Callable[[MethodRow], str]
    # a column is left out where no row needs it
    needed: Callable[[MethodRow], bool] = lambda row: True
    theme: str = ""  # columns with a theme have a table of their own in the page


COLUMNS = (
    Column(
        "Seeds",
        "seeds",
        "runs that differ in their seed alone",
        lambda row: f"{row.seeds}" if row.seeds == row.planned else f"{row.seeds} of {row.planned}",
    ),
    Column(
        "Test accuracy, %",
        "accuracy %",
        "the last recorded round: mean and sample standard deviation over seeds",
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
    ),
    Column("Macro F1, %", "F1", "the mean over classes of F1", lambda row: percent(row.macro_f1)),
    Column(
        "Worst class, %",
        "worst",
        "the lowest accuracy of any class",
        lambda row: percent(row.worst_class),
    ),
    Column(
        "Forgotten a round, points",
        "forgot",
        "what classes lost from one recorded round to the next, averaged over classes and"
        " rounds; gains count as 0",
        lambda row: percent(row.forgetting, 2),
    ),
    Column(
        "Forgotten locally, points",
        "",
        "what a client's training loses of the model it received, averaged over classes"
        " and recorded local models; gains count as 0",
        lambda row: percent(row.local_forgetting, 2),
        lambda row: row.local_forgetting is not None,
    ),
    Column(
        "Performance, %",
        "perform",
        "accuracy at the end of each time step, averaged over clients and steps",
        lambda row: percent(row.performance),
        lambda row: row.performance is not None,
        DRIFT,
    ),
    Column(
        "Robustness, points",
        "drop",
        "accuracy at the end of a time step minus the worst in the next, averaged over"
        " clients and steps; lower is better",
        lambda row: percent(row.robustness),
        lambda row: row.robustness is not None,
        DRIFT,
    ),
    Column(
        "Convergence, rounds",
        "rounds",
        "rounds until a client has 90 % of what it gains in a time step",
        lambda row: MISSING if row.convergence is None else f"{row.convergence:.1f}",
        lambda row: row.convergence is not None,
        DRIFT,
    ),
    Column(
        "Recovery, rounds",
        "",
        "rounds after a drift until a client is back at its accuracy before; in brackets"
        " the share that never was within the time step",
        _describe_recovery,
        lambda row: _describe_recovery(row) != MISSING,
        DRIFT,
    ),
    Column(
        "Over time, %",
        "",
        "accuracy averaged over all rounds",
        lambda row: percent(row.time_averaged),
        lambda row: row.time_averaged is not None,
        DRIFT,
    ),
    Column(
        "Worst client, %",
        "",
        "the lowest accuracy of any client on its own data, last recorded round; in"
        " brackets the mean of the worst tenth",
        lambda row: (
            percent(row.worst_client)
            + (f" ({percent(row.bottom_decile)})" if row.bottom_decile is not None else "")
        ),
        lambda row: row.worst_client is not None,
        DRIFT,
    ),
    Column(
        "Left behind, points",
        "",
        "accuracy that clients lost on clusters they have left, since they left; negative: gained",
        lambda row: percent(row.previous_concepts),
        lambda row: row.previous_concepts is not None,
        DRIFT,
    ),
    Column(
        "Own cluster, %",
        "",
        "share of listening that went to the listener's own cluster",
        lambda row: percent(row.same_cluster, 0),
        lambda row: row.same_cluster is not None,
        DRIFT,
    ),
    Column(
        "Validation, %",
        "valid",
        "accuracy on the clients' validation rows, last recorded round",
        lambda row: percent(row.validation),
    ),
    Column(
        "Sent a round",
        "",
        "bytes up and down together",
        lambda row: readable_bytes(row.bytes_per_round),
    ),
    Column(
        "Time a round", "", "wall-clock time", lambda row: readable_seconds(row.seconds_per_round)
    ),
    Column(
        "Refused",
        "",
        "replies that the gate refused, over all seeds",
        lambda row: str(row.rejected),
    ),
)
ACCURACY = COLUMNS[1]
# left out of a narrow terminal, in this order
SPARED = ("F1", "valid", "best", "worst", "forgot", "rounds", "drop")


def columns_for(rows: Sequence[MethodRow]) -> list[Column]:
    """The columns that have something to say about these rows."""
    return [column for column in COLUMNS if not rows or any(column.needed(row) for row in rows)]
