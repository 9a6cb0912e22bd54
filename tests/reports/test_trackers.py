from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from diagnosis.small_runs import write_small_run
from reports.rich_runs import write_comparison, write_peers_run

from remanence.cli.main import app
from remanence.core.errors import InputError
from remanence.reports.trackers import export_scalars, read_scalars, store_address
from remanence.results.run import Run


def collect(run: Run) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for scalar in read_scalars(run):
        found.setdefault(scalar.name, []).append((scalar.round, round(scalar.value, 6)))
    return found


def test_scalars_by_hand(tmp_path: Path) -> None:
    """From 0.8, 0.4 to 0.7, 0.6; local training loses 0.1 and merging gains 0.15, as worked out
    in the tests of the diagnosis; rounds take 2 seconds each.
    """
    run = write_small_run(tmp_path / "run")
    found = collect(run)
    assert found["accuracy/test"] == [(1, 0.6), (2, 0.65)]
    assert found["class accuracy/000 cat"] == [(1, 0.8), (2, 0.7)]
    assert found["class accuracy/001 dog"] == [(1, 0.4), (2, 0.6)]
    assert found["forgetting/since the recorded round before"] == [(2, 0.05)]  # (0.1 + 0) / 2
    assert found["lost/local"] == [(2, 0.1)]
    assert found["lost/aggregation"] == [(2, -0.15)]
    assert found["round/seconds"] == [(1, 2.0), (2, 2.0)]
    assert [scalar.seconds for scalar in read_scalars(run) if scalar.name == "accuracy/test"] == [
        2.0,
        4.0,
    ]


def test_own_models_have_their_numbers(tmp_path: Path) -> None:
    found = collect(write_peers_run(tmp_path / "run"))
    assert len(found["worst_client/test"]) == 12
    assert {
        "lost/mixing",
        "lost/local",
        "same_cluster_share/test",
        "accuracy/valid",
    } <= found.keys()


def test_hostile_names_become_harmless(tmp_path: Path) -> None:
    names = list(
        collect(
            write_small_run(tmp_path / "run", class_names=("../../etc/passwd", ".._.._etc_passwd"))
        )
    )
    assert all(re.fullmatch(r"[A-Za-z0-9 _.-]+/[A-Za-z0-9 _.-]+", name) for name in names)
    # classes stay apart by their numbers
    assert sum(name.endswith(".._.._etc_passwd") for name in names) == 2


def test_tensorboard_round_trip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not installed: pip install 'remanence-fl[track]'"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    comparison = write_comparison(
        tmp_path / "both", [{"label": "a", "seed": 0}, {"label": "a", "seed": 1}]
    )
    app(
        [
            "export",
            str(comparison.folder),
            "--format",
            "tensorboard",
            "--out",
            str(tmp_path / "events"),
        ],
        standalone_mode=False,
    )
    folders = capsys.readouterr().out.splitlines()
    assert folders == [str(tmp_path / "events" / f"both cell{number}") for number in (0, 1)]
    events = EventAccumulator(folders[1])
    events.Reload()
    read = [(event.step, event.value) for event in events.Scalars("accuracy/test")]
    assert read == [
        (line["round"], pytest.approx(line["accuracy"]))
        for line in comparison.runs[1].metrics
        if line["split"] == "test"
    ]
    times = [event.wall_time for event in events.Scalars("accuracy/test")]
    assert times[-1] - times[0] == pytest.approx(0.5 * 5, abs=1e-3)  # six rounds of half a second
    with pytest.raises(InputError, match="every point twice"):
        export_scalars([comparison], tmp_path / "events", "tensorboard")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow about what it uses itself
def test_mlflow_round_trip(tmp_path: Path) -> None:
    pytest.importorskip(
        "mlflow", reason="mlflow is not installed: pip install 'remanence-fl[mlflow]'"
    )
    pytest.importorskip(
        "sqlalchemy",
        reason="mlflow is installed without its database: pip install 'remanence-fl[mlflow]'",
    )
    from mlflow.tracking import MlflowClient

    run = write_small_run(tmp_path / "my run", method="fedprox(mu=0.1)")
    assert export_scalars([run], tmp_path / "store", "mlflow") == [tmp_path / "store" / "mlflow.db"]
    client = MlflowClient(tracking_uri=store_address(tmp_path / "store"))
    experiment = client.get_experiment_by_name("my run")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.params["method"] == "fedprox(mu=0.1)"
    assert "data.dir" not in found.data.params  # a path on the user's disk
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "accuracy/test")
    assert sorted((point.step, point.value) for point in history) == [
        (1, pytest.approx(0.6)),
        (2, pytest.approx(0.65)),
    ]


def test_mistakes_get_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_small_run(tmp_path / "run")
    with pytest.raises(InputError, match="did you mean tensorboard"):
        export_scalars([run], tmp_path / "out", "tensorbord")
    with pytest.raises(InputError, match="is a file: --out names a folder"):
        export_scalars([run], run.folder / "experiment.toml", "tensorboard")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "experiment.toml").write_text('method = "fedavg"\n')
    with pytest.raises(InputError, match="no recorded round yet"):
        export_scalars([Run(tmp_path / "empty")], tmp_path / "out", "mlflow")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match=re.escape("pip install 'remanence-fl[track]'")):
        export_scalars([run], tmp_path / "out", "tensorboard")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=re.escape("pip install 'remanence-fl[mlflow]'")):
        export_scalars([run], tmp_path / "out", "mlflow")
    assert not (tmp_path / "out").exists()
