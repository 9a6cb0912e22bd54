"""Export of a run's numbers over rounds as TensorBoard events or as an MLflow run.

Both are written from the run's folder, so that finished and unfinished runs can be exported. Names
are sanitized, since a class name may contain any characters and trackers use names in paths and
queries.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remanence.core.errors import InputError, unknown
from remanence.core.files import check_no_file, translate_disk_errors
from remanence.core.process_state import preserve_process_state
from remanence.core.safe_path import SafePath
from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.cached import decomposition_of
from remanence.metrics.forgetting import forgetting_curve
from remanence.metrics.groups import class_curve, group_runs, is_number, primary_model
from remanence.reports.setup_table import list_settings
from remanence.reports.theme import name_classes
from remanence.results.run import METRICS, RUNS, Comparison, Run

TRACKERS = ("tensorboard", "mlflow")
STORE, ARTIFACTS = "mlflow.db", "artifacts"
VALUES = (
    "accuracy",
    "loss",
    "macro_f1",
    "worst_client",
    "bottom_decile",
    "same_cluster_share",
)  # of a line of metrics.jsonl, for each split and model
COSTS = ("train_loss", "bytes_up", "bytes_down", "seconds", "replies")  # of a round
LONGEST_NAME = 200  # characters; MLflow takes 250
LONGEST_VALUE = 500  # of a setting


@dataclass(frozen=True)
class Scalar:
    """One number at one round."""

    name: str  # such as accuracy/test
    round: int
    value: float
    seconds: float  # from the start of the run to the end of the round


def export_scalars(
    results: Sequence[Run | Comparison], out: Path | SafePath, kind: str
) -> list[Path]:
    """Write runs, and all runs of comparisons, for a tracker into a folder; return the files."""
    if kind not in TRACKERS:
        raise unknown("format", kind, TRACKERS)
    runs = [
        run
        for result in results
        for run in (result.runs if isinstance(result, Comparison) else [result])
    ]
    out = SafePath.of(out)
    check_no_file(out.root, "--out names a folder")
    if not any(run.metrics for run in runs):
        raise InputError(
            f"{results[0].folder} has no recorded round yet: let it run for some rounds first"
        )
    write = write_tensorboard if kind == "tensorboard" else write_mlflow
    with translate_disk_errors(out):
        return list(dict.fromkeys(write(run, out) for run in runs if run.metrics))


def read_scalars(run: Run) -> Iterator[Scalar]:
    """Every number over rounds: metrics by split, accuracy by class, forgetting, change of accuracy
    by phase, and costs.
    """
    passed = _elapsed(run)
    for line in run.metrics:
        own = "" if line["model"] == primary_model(run) else f" {line['model']}"
        for value in VALUES:
            if is_number(line.get(value)):
                yield _scalar(f"{value}/{line['split']}{own}", line["round"], line[value], passed)
    for round, costs in sorted({line["round"]: line for line in reversed(run.metrics)}.items()):
        for value in COSTS:
            if is_number(costs.get(value)):
                yield _scalar(f"round/{value}", round, costs[value], passed)
    rounds, shares = class_curve(run)
    classes = [
        f"{index:03d} {name}"
        for index, name in enumerate(
            name_classes(run.metadata.get("class_names", []), shares.shape[1])
        )
    ]
    for round, row in zip(rounds.tolist(), shares, strict=True):
        for name, share in zip(classes, row.tolist(), strict=True):
            if is_number(share):
                yield _scalar(f"class accuracy/{name}", round, share, passed)
    for round, lost in forgetting_curve(run).items():
        yield _scalar("forgetting/since the recorded round before", round, lost, passed)
    parts = decomposition_of(run)
    for phase, part in (parts.parts if parts else {}).items():
        for round, value in zip(
            parts.round.tolist() if parts else [], nan_mean(part, axis=1).tolist(), strict=True
        ):
            if is_number(value):
                yield _scalar(f"lost/{phase}", round, value, passed)


def write_tensorboard(run: Run, out: SafePath) -> Path:
    """One folder of events, named after the run; open with `tensorboard --logdir OUT`."""
    try:
        import tensorboard  # noqa: F401
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "TensorBoard's files need one more package: pip install 'remanence-fl[track]'"
        ) from None
    folder = out / _name_run(run)
    if folder.list_names():
        raise InputError(
            f"{folder} exists already and TensorBoard would show every point twice: remove it,"
            " or choose another --out"
        )
    folder.make_folder()
    begun = _started(run)
    open_writer: Any = SummaryWriter  # untyped in torch
    writer = open_writer(str(folder))
    try:
        writer.add_text("settings", _as_markdown(_settings(run)), walltime=begun)
        for scalar in read_scalars(run):
            writer.add_scalar(
                scalar.name, scalar.value, scalar.round, walltime=begun + scalar.seconds
            )
    finally:
        writer.close()
    return folder.path


@preserve_process_state()
def write_mlflow(run: Run, out: SafePath) -> Path:
    """One MLflow run, with the settings as parameters, in the store that the folder holds; open
    with `mlflow ui --backend-store-uri sqlite:///OUT/mlflow.db`.
    """
    os.environ.setdefault(
        "MLFLOW_DISABLE_TELEMETRY", "true"
    )  # MLflow reports its use to its authors by default
    if importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("sqlalchemy") is None:
        raise InputError(
            "an MLflow store needs one more package: pip install 'remanence-fl[mlflow]'"
        )
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import MlflowClient

    out.make_folder()
    # MLflow opens both by their paths: links are refused before
    (out / STORE).is_regular_file()
    (out / ARTIFACTS).is_folder()
    client = MlflowClient(tracking_uri=store_address(out.path))
    home = run.folder.parent.parent if run.folder.parent.name == RUNS else run.folder
    name = _sanitize_name(home.resolve().name) or "remanence"
    known = client.get_experiment_by_name(name)
    experiment = (
        known.experiment_id
        if known
        else client.create_experiment(
            name, artifact_location=(out.path / ARTIFACTS).resolve().as_uri()
        )
    )
    begun = _started(run)
    started = client.create_run(experiment, start_time=int(1000 * begun), run_name=_name_run(run))
    metrics = [
        Metric(scalar.name, scalar.value, int(1000 * (begun + scalar.seconds)), scalar.round)
        for scalar in read_scalars(run)
    ]
    params = [Param(key, value[:LONGEST_VALUE]) for key, value in _settings(run)]
    tags = [
        RunTag("remanence", str(run.metadata.get("remanence", ""))),
        RunTag("folder", run.folder.resolve().name),
    ]
    for first in range(0, max(len(metrics), 1), 500):  # a store limits the size of a batch
        client.log_batch(started.info.run_id, metrics=metrics[first : first + 500])
    for first in range(0, max(len(params), 1), 90):
        client.log_batch(
            started.info.run_id, params=params[first : first + 90], tags=tags if first == 0 else []
        )
    client.set_terminated(
        started.info.run_id,
        "FINISHED" if run.finished else "RUNNING",
        end_time=int(1000 * (begun + _total(run))),
    )
    return (out / STORE).path


def store_address(out: Path) -> str:
    """Where MLflow keeps its runs: a database file in the folder, since newer versions reject plain
    files.
    """
    return f"sqlite:///{(out / STORE).resolve()}"


def _scalar(name: str, round: int, value: float, passed: dict[int, float]) -> Scalar:
    return Scalar(_sanitize_name(name), int(round), float(value), passed.get(int(round), 0.0))


def _sanitize_name(name: str) -> str:
    """A name of letters, digits and a few signs, which every tracker accepts.

    >>> _sanitize_name("class accuracy/003 cat <3 ../x")
    'class accuracy/003 cat _3 .._x'
    """
    first, slash, rest = name.partition("/")
    clean = [re.sub(r"[^A-Za-z0-9 _.-]", "_", " ".join(part.split())) for part in (first, rest)]
    return (clean[0] + slash + clean[1])[:LONGEST_NAME]


def _name_run(run: Run) -> str:
    folder = run.folder.resolve()
    name = (
        f"{folder.parent.parent.name} {folder.name}" if folder.parent.name == RUNS else folder.name
    )
    return _sanitize_name(name).replace("/", "_").lstrip(".") or "run"


def _settings(run: Run) -> list[tuple[str, str]]:
    """Every setting by its dotted name, as in the report, without paths."""
    return [(key, value) for key, value in list_settings(group_runs([run])) if value]


def _as_markdown(settings: Sequence[tuple[str, str]]) -> str:
    """An indented block, which Markdown shows as it is."""
    return "\n".join(f"    {key} = {' '.join(value.split())}" for key, value in settings)


def _elapsed(run: Run) -> dict[int, float]:
    """Seconds from the start of the run to the end of each round."""
    spent, passed = 0.0, {}
    for round, seconds in sorted(
        {int(line["round"]): line.get("seconds") for line in run.metrics}.items()
    ):
        spent += float(seconds) if seconds is not None and is_number(seconds) else 0.0
        passed[round] = spent
    return passed


def _total(run: Run) -> float:
    return max(_elapsed(run).values(), default=0.0)


def _started(run: Run) -> float:
    """When the run started: when the last line was written, minus the time of all rounds."""
    status = (run.files / METRICS).status()
    return (0.0 if status is None else status.st_mtime) - _total(run)
