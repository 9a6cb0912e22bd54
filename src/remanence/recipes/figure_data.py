"""The data of the figures of the papers, as CSV: one function for each kind of figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from remanence.metrics.forgetting import (
    client_forgetting,
    client_forgetting_rounds,
    forgetting_curve,
    local_forgetting,
)
from remanence.metrics.groups import class_curve, deviation_of
from remanence.recipes.measures import nearest_round
from remanence.results.ledger import GLOBAL
from remanence.results.run import Run

FIGURE, PICTURE = "figure.csv", "figure.png"

# (row, column) -> its runs, one for each seed
FigureCells = Mapping[tuple[str, str], Sequence[Run]]
FigureRows = Iterator[Sequence[Any]]


def curves(row: str, column: str, runs: Sequence[Run]) -> FigureRows:
    """Test accuracy over rounds, mean and deviation over seeds."""
    for round, mean, deviation in _over_seeds(runs, "accuracy"):
        yield row, column, round, mean, deviation


def curves_with_loss(row: str, column: str, runs: Sequence[Run]) -> FigureRows:
    """Test accuracy and test loss over rounds, means and deviations over seeds."""
    losses = {round: line for round, *line in _over_seeds(runs, "loss")}
    for round, mean, deviation in _over_seeds(runs, "accuracy"):
        yield row, column, round, mean, deviation, *losses.get(round, (None, None))


def heatmap(row: str, column: str, runs: Sequence[Run], *, at: float = 1.0) -> FigureRows:
    """Accuracy of client k's model on client i's data in one round: before and after local
    training, and the difference (positive: forgotten).

    Args:
        at: The round, as a share of the training: the recorded one that is nearest.
    """
    for run in runs[:1]:
        known = client_forgetting_rounds(run.ledger)
        if not known:
            continue
        found = client_forgetting(run.ledger, nearest_round(known, at, run.config.total_rounds))
        for k, model in enumerate(found.clients):
            for i, owner in enumerate(found.clients):
                yield (
                    row,
                    column,
                    found.round,
                    int(model),
                    int(owner),
                    found.before[i],
                    found.after[k, i],
                    found.difference[k, i],
                )


def partition(row: str, column: str, runs: Sequence[Run]) -> FigureRows:
    """The number of examples of each class at each client."""
    for run in runs[:1]:
        for client, counts in enumerate(run.metadata["label_counts"]):
            for name, count in zip(run.metadata["class_names"], counts, strict=True):
                yield row, column, client, name, count


def cdf(row: str, column: str, runs: Sequence[Run]) -> FigureRows:
    """Distribution of forgetting: the values in ascending order, each with the share of values that
    are not larger. Global values are those of rounds and need runs that recorded every round; local
    values are those of local models.
    """
    every_round = [run for run in runs if run.config.record.every == 1]
    scores = {"global": [value for run in every_round for value in forgetting_curve(run).values()]}
    scores["local"] = [
        float(value)
        for run in runs
        for value in local_forgetting(run.ledger).value
        if not np.isnan(value)
    ]
    for kind, values in scores.items():
        for place, value in enumerate(sorted(values), start=1):
            yield row, column, kind, value, place / len(values)


def drift(row: str, column: str, runs: Sequence[Run]) -> FigureRows:
    """The cluster of each client at each time step."""
    for run in runs[:1]:
        for step, clusters in enumerate(run.metadata["clusters"]):
            for client, cluster in enumerate(clusters):
                yield row, column, step, client, cluster


def classes(row: str, column: str, runs: Sequence[Run]) -> FigureRows:
    """The accuracy of every class over rounds."""
    for run in runs[:1]:
        rounds, shares = class_curve(run)
        for round, line in zip(rounds.tolist(), shares.tolist(), strict=True):
            for name, share in zip(run.metadata["class_names"], line, strict=True):
                yield row, column, round, name, share


def one_round(row: str, column: str, runs: Sequence[Run]) -> FigureRows:
    """Accuracy by class in the last recorded round: of the global model before it, of every
    client's model after local training, and of the global model after it.
    """
    for run in runs[:1]:
        local = run.ledger.select(moment="local", split="test")
        if not len(local):
            continue
        round = int(local["round"].max())
        for moment in ("before", "local", "merged", "refined"):
            records = run.ledger.select(moment=moment, split="test")
            for record in records[records["round"] == round]:
                who = "global" if record["model"] == GLOBAL else f"client {record['model']}"
                for name, right, total in zip(
                    run.metadata["class_names"], record["correct"], record["total"], strict=True
                ):
                    yield row, column, round, moment, who, name, right / total if total else None


KINDS: dict[str, tuple[Callable[..., FigureRows], tuple[str, ...]]] = {
    "cdf": (cdf, ("row", "column", "kind", "forgetting", "share_at_most")),
    "classes": (classes, ("row", "column", "round", "class", "accuracy")),
    "curves": (curves, ("row", "column", "round", "accuracy", "deviation")),
    "curves_with_loss": (
        curves_with_loss,
        ("row", "column", "round", "accuracy", "deviation", "loss", "loss_deviation"),
    ),
    "drift": (drift, ("row", "column", "time_step", "client", "cluster")),
    "heatmap": (
        heatmap,
        ("row", "column", "round", "model", "data", "before", "after", "forgotten"),
    ),
    "one_round": (one_round, ("row", "column", "round", "moment", "model", "class", "accuracy")),
    "partition": (partition, ("row", "column", "client", "class", "examples")),
}


def figure_csv(figure_kind: str, cells: FigureCells, **options: Any) -> str:
    """Return the data of a figure as CSV.

    Args:
        figure_kind: One of `KINDS`.
        cells: The runs.
        options: Of the kind, such as `at` of a heat map.
    """
    rows_of, fields = KINDS[figure_kind]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    seen: set[tuple[str, ...]] = set()
    for (row, column), runs in cells.items():
        folders = (row, *(str(run.folder) for run in runs))
        if not runs or folders in seen:  # another measure of the same runs
            continue
        seen.add(folders)
        for line in rows_of(row, column, runs, **options):
            writer.writerow([_write(value) for value in line])
    return text.getvalue()


def _over_seeds(
    runs: Sequence[Run], value: str
) -> Iterator[tuple[int, float | None, float | None]]:
    """A column of metrics.jsonl: the rounds, with mean and deviation over the runs."""
    points = [dict(zip(*run.curve(value=value), strict=True)) for run in runs]
    for round in sorted({round for found in points for round in found}):
        values = [found[round] for found in points if round in found]
        yield round, sum(values) / len(values), deviation_of(values)


def _write(value: Any) -> Any:
    if value is None or value != value:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
