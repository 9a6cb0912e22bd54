"""Runs while the data drift, with a server and as a person asks for them: rows, label shares
and records follow the time steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.test_cli import remanence
from methods.drifting_task import (
    CLASSES,
    CLIENTS,
    STEPS,
    make_experiment,
    make_net,
    play_states,
    read_batches,
    read_rows,
)
from reference import federated
from rounds.drift_runs import SETTINGS, config_of, count, last_state, predict

from remanence.config import parse_experiment
from remanence.core.errors import InputError
from remanence.core.types import ModelState
from remanence.engines.processes import ProcessEngine
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment, build
from remanence.results.ledger import GLOBAL, MOMENTS
from remanence.results.run import Run
from remanence.rounds.loop import resume_run, start_run


def test_label_shares_follow_the_drift() -> None:
    experiment = build(config_of("fedavg+wsm"))
    everybody = np.arange(CLIENTS)
    source, population = experiment.dataset, experiment.task.population
    swap = {0: np.arange(4), 1: np.array([1, 0, 2, 3])}
    for step in range(STEPS):
        stats, client_data = experiment.client_stats(everybody, step), population.at(step)
        for client in range(CLIENTS):
            labels = swap[int(client_data.cluster[client])][
                source.train.y[client_data.train.for_client(client) % len(source.train)]
            ]
            assert stats.label_counts[client].tolist() == np.bincount(labels, minlength=4).tolist()
            assert (
                float(stats.size[client])
                == len(labels)
                == (10 if client_data.cluster[client] == 0 else 5)
            )
    assert (
        experiment.client_stats(everybody, 0).label_counts.tolist()
        != experiment.client_stats(everybody, 1).label_counts.tolist()
    )


@pytest.mark.parametrize(("method", "loss"), [("fedavg", "ce"), ("fedavg+wsm", "wsm")])
def test_a_server_under_drift_equals_plain_pytorch(method: str, loss: str) -> None:
    """Rows, label shares and weights of each time step; the model goes on."""
    experiment = make_experiment(method)
    batches, train = read_batches(experiment, {0: 1}), read_rows(experiment)("train")
    state = make_net().state_dict()
    setting = federated.Setting(
        rounds=6,
        cohort=CLIENTS,
        epochs=1,
        batch=4,
        loss=loss,
        lr=0.1,
        momentum=0.9,
        weight_decay=0.01,
    )
    for round in range(1, 7):
        trained, sizes = [], []
        for client in range(CLIENTS):
            x, y = train((round - 1) // 3, client)
            net = make_net()
            net.load_state_dict(state)
            places = [
                [int(((x == row).all(dim=1)).nonzero()[0, 0]) for row in rows]
                for rows, _ in batches(round, client, 0)
            ]
            federated.train_client(
                net,
                x,
                y,
                CLASSES,
                [np.array(place) for place in places],
                setting,
                0.1 * 0.9 ** (round - 1),
            )
            trained.append(
                {name: value.detach().clone() for name, value in net.state_dict().items()}
            )
            sizes.append(len(y))
        state = federated.average(trained, sizes)
    found = play_states(experiment, SequentialEngine(experiment.task))[0][-1].server.model.params
    assert max(float((found[name] - value).abs().max()) for name, value in state.items()) < 1e-10


def test_a_servers_line_is_a_mean_over_clients(tmp_path: Path) -> None:
    """Clusters of 7 and 3 clients: the global model's accuracy is 7/10 of that on concept 0 and
    3/10 of that on concept 1, at both time steps.
    """
    changes = {
        "clients.count": 10,
        "drift.schedule": "random(clusters=2, sizes='70:30')",
        "record.local": True,
        "drift.validation": 4,
    }
    run = start_run(config_of("fedavg", **changes), tmp_path / "run")
    assert [np.bincount(clusters).tolist() for clusters in run.metadata["clusters"]] == [[7, 3]] * 2
    merged = run.ledger.select(moment="merged", split="test", model=GLOBAL)
    for line in [line for line in run.metrics if line["split"] == "test"]:
        first, second = merged[merged["round"] == line["round"]]
        assert (first["owner"], second["owner"]) == (0, 1)
        accuracy = [
            int(record["correct"].sum()) / int(record["total"].sum()) for record in (first, second)
        ]
        assert line["accuracy"] == pytest.approx(0.7 * accuracy[0] + 0.3 * accuracy[1])
        loss = [float(record["loss"]) / int(record["total"].sum()) for record in (first, second)]
        assert line["loss"] == pytest.approx(0.7 * loss[0] + 0.3 * loss[1])
    # the model as the drift found it: on the rows of the old time step and of the new one
    records = run.ledger.select(moment="before_drift")
    assert set(zip(records["round"].tolist(), records["time_step"].tolist(), strict=True)) == {
        (4, 0)
    }
    old = run.ledger.select(moment="merged", split="valid", model=GLOBAL)
    (drifted,) = run.ledger.select(moment="before_drift", split="valid", model=GLOBAL)
    (ended,) = old[old["round"] == 3]
    assert drifted["correct"].tolist() == ended["correct"].tolist()
    before = run.ledger.select(moment="before", model=GLOBAL)
    met = before[(before["round"] == 4) & (before["split"] == 1) & (before["owner"] == -1)]
    assert met["time_step"].tolist() == [1]
    assert met["loss"].tolist() != [drifted["loss"]]
    tests = run.ledger.select(moment="before_drift", split="test", model=GLOBAL)
    assert tests["correct"].tolist() == merged[merged["round"] == 3]["correct"].tolist()


def test_examples_of_a_server_by_hand(tmp_path: Path) -> None:
    changes = {
        "record.examples": True,
        "record.confusion": True,
        "clients.sample": 3,
        "record.every": 3,
    }
    run = start_run(config_of("fedavg", **changes), tmp_path / "run")
    experiment, model = build(run.config), last_state(run).server.model
    assert run.examples is not None
    assert run.confusions is not None
    last = run.examples[run.examples["round"] == 6]
    assert set(run.examples["round"]) == {3, 6}
    assert {MOMENTS[moment] for moment in np.unique(last["moment"])} == {
        "before",
        "local",
        "merged",
    }
    merged = last[last["moment"] == MOMENTS.index("merged")]
    clients = np.unique(merged["client"])
    assert len(clients) == 3
    for client in clients.tolist():
        ids = np.sort(experiment.task.population.at(1).train.for_client(client))
        mine = merged[merged["client"] == client]
        labels, predicted, margins = predict(experiment, model, experiment.task.train, ids)
        assert mine["id"].tolist() == ids.tolist()
        assert mine["correct"].astype(bool).tolist() == (labels == predicted).tolist()
        assert mine["margin"].tolist() == pytest.approx(margins.tolist(), rel=1e-5)
    for concept, ids in enumerate(experiment.task.population.test_ids):
        labels, predicted, _ = predict(experiment, model, experiment.task.test, ids)
        found = run.confusions[
            (run.confusions["round"] == 6) & (run.confusions["owner"] == concept)
        ]
        assert found["confusion"].tolist() == [count(labels, predicted).tolist()]


def test_other_rounds_a_time_step_would_be_another_experiment(tmp_path: Path) -> None:
    start_run(config_of("local", rounds=1), tmp_path / "run")
    with pytest.raises(InputError, match="has 2 time steps of 1 rounds"):
        resume_run(tmp_path / "run", rounds=2)


# ----------------------------------------------------------------------------- pairs on all engines


@pytest.mark.parametrize(
    "make",
    [
        SequentialEngine,
        lambda task: VectorizedEngine(task, 2),
        lambda task: ProcessEngine(task, workers=2),
    ],
    ids=["sequential", "vectorized", "processes"],
)
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_pairs_by_hand(make: Callable[[Any], Any], split: str) -> None:
    """Model which[i] on the rows of owners[i], by the module itself."""
    experiment = build(config_of("fedavg"))
    task = experiment.task
    models = all_different(task.model.initial)
    which, owners = np.array([3, 0, 3, 5]), np.array([1, 0, 0, 1])
    client_data = task.population.at(1)
    parts = {
        "train": client_data.train.for_client,
        "valid": client_data.valid.for_client,
        "test": lambda concept: task.population.test_ids[concept],
    }[split]
    engine = make(task)
    try:
        scores = engine.score_pairs(models, which, owners, split, 1, examples=True)
    finally:
        engine.close()
    examples = task.test if split == "test" else task.train
    assert scores.examples is not None
    for pair, (number, owner) in enumerate(zip(which.tolist(), owners.tolist(), strict=True)):
        ids = np.sort(parts(owner))
        labels, predicted, margins = predict(experiment, models.select(number), examples, ids)
        assert scores.confusion[pair].tolist() == count(labels, predicted).tolist()
        mine = scores.examples.pair == pair
        assert scores.examples.ids[mine].tolist() == ids.tolist()
        assert scores.examples.correct[mine].tolist() == (labels == predicted).tolist()
        assert scores.examples.margin[mine].tolist() == pytest.approx(margins.tolist(), rel=1e-5)
        with torch.no_grad():
            logits = task.model.to_module(models.select(number))(
                examples.inputs(torch.from_numpy(ids))
            )
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="sum")
        assert float(scores.loss[pair]) == pytest.approx(float(loss), rel=1e-12)


def all_different(model: ModelState) -> ModelState:
    """As many models as clients."""
    return ModelState(
        {
            name: torch.stack([value * (0.5 + 0.2 * number) for number in range(CLIENTS)])
            for name, value in model.params.items()
        },
        {},
    )


# -------------------------------------------------------------------------- as a person asks for it


def test_one_command(tmp_path: Path) -> None:
    out = tmp_path / "run"
    line = [
        "--data",
        "digits",
        "--clients",
        "8",
        "--drift",
        "random(clusters=2)",
        "--time-steps",
        "2",
        "--rounds",
        "2",
        "--epochs",
        "1",
    ]
    done = remanence("run", *line, "--method", "hast(peers=2)", "--out", str(out))
    assert done.returncode == 0, done.stderr
    run = Run(out)
    assert run.finished
    assert [
        (entry["round"], entry["time_step"]) for entry in run.metrics if entry["split"] == "test"
    ] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    assert [sum(clusters) for clusters in run.metadata["clusters"]] == [4, 4]
    # random assignment draws new rows for everyone at both time steps; the classes are divided
    # between the clusters
    assert run.metadata["concepts"] == ["0, 1, 2, 3, 4", "5, 6, 7, 8, 9"]
    again = remanence("resume", str(out))
    assert again.returncode == 0, again.stderr


def show_clusters(**changes: Any) -> BuiltExperiment:
    base = {name: value for name, value in SETTINGS.items() if not name.startswith("drift")}
    return build(parse_experiment({}, base | {"method": "local"} | changes))


@pytest.mark.parametrize(
    ("sizes", "members"), [("70:30", [7, 3]), ("80:20", [8, 2]), ("50:50", [5, 5])]
)
def test_clusters_keep_their_sizes(sizes: str, members: list[int]) -> None:
    drift = {
        "drift.schedule": f"random(clusters=2, sizes='{sizes}')",
        "drift.time_steps": 4,
        "drift.concepts": "quantity(shares='1|0.5')",
    }
    experiment = show_clusters(
        **drift, **{"clients.count": 10, "drift.samples": 8, "drift.validation": 2}
    )
    clusters = [step.cluster for step in experiment.task.population.time_steps]
    assert [np.bincount(cluster).tolist() for cluster in clusters] == [members] * 4
    assert len({cluster.tobytes() for cluster in clusters}) > 1
    for step in experiment.task.population.time_steps:
        assert step.train.sizes.tolist() == [8 if cluster == 0 else 4 for cluster in step.cluster]


@pytest.mark.parametrize("clusters", [2, 4])
def test_a_staggered_run(tmp_path: Path, clusters: int) -> None:
    """Ten time steps of a round each with the published pattern, whose movers alone draw new
    rows.
    """
    drift = {
        "drift.schedule": f"staggered(clusters={clusters})",
        "drift.time_steps": 10,
        "drift.concepts": "label",
    }
    changes = {"clients.count": 10, "rounds": 1, "drift.samples": 8, "drift.validation": 3}
    run = start_run(
        config_of(
            "hast(peers=2, depth=1, finetune_epochs=1)", **drift, **changes, engine="vectorized"
        ),
        tmp_path / "run",
    )
    assert run.metadata["clusters"][3] == (
        [1, 1] + [0] * 8 if clusters == 2 else [1, 1, 1, 2, 2, 2, 0, 0, 3, 0]
    )
    population = build(run.config).task.population
    for before, after in zip(population.time_steps, population.time_steps[1:], strict=False):
        for client in range(10):
            same = np.array_equal(before.train.for_client(client), after.train.for_client(client))
            assert same == (before.cluster[client] == after.cluster[client])
    assert len([line for line in run.metrics if line["split"] == "test"]) == 10


def test_covariate_drift_by_rotation_on_digits(tmp_path: Path) -> None:
    """Upright and upside down: an image of cluster 1 is the source's, turned by 180 degrees,
    whoever holds it.
    """
    drift = {
        "drift.schedule": "rotation(clusters=2)",
        "drift.concepts": "rotate",
        "drift.samples": 30,
        "drift.validation": 10,
    }
    changes = {
        "data.name": "digits",
        "model": "",
        "clients.count": 4,
        "rounds": 1,
        "engine": "vectorized",
        "precision": "fp32",
    }
    run = start_run(config_of("hast(peers=1)", **drift, **changes), tmp_path / "run")
    experiment = build(run.config)
    source, train = experiment.dataset.train, experiment.task.train
    for step in range(2):
        client_data = experiment.task.population.at(step)
        for client in range(4):
            ids = client_data.train.for_client(client)
            seen = train._raw(torch.from_numpy(ids)).numpy()
            plain = source.x[ids % len(source)]
            assert np.array_equal(
                seen, plain[:, :, ::-1, ::-1] if client_data.cluster[client] else plain
            )
            assert (
                train.labels(torch.from_numpy(ids)).tolist() == source.y[ids % len(source)].tolist()
            )
    assert run.metadata["concepts"] == ["as they are", "rotated by 180 degrees"]


def test_covariate_drift_by_domain_on_pacs(
    tmp_path: Path, real_data: Callable[[str], Path]
) -> None:
    """Eight clients with 60 and 20 images each; there are too few for fresh ones at every time
    step, and the run says so.
    """
    root = real_data("PACS")
    drift = {
        "drift.schedule": "random(clusters=2)",
        "drift.concepts": "domain",
        "drift.samples": 60,
        "drift.validation": 20,
    }
    changes = {
        "data.name": "pacs",
        "data.dir": str(root),
        "model": "mlp(hidden=4)",
        "clients.count": 8,
        "rounds": 1,
        "precision": "fp32",
    }
    run = start_run(
        config_of(
            "hast(peers=2, depth=1, finetune_epochs=1)",
            **drift,
            **changes,
            **{"local.batch_size": 30},
        ),
        tmp_path / "run",
    )
    assert run.finished
    experiment = build(run.config)
    groups = experiment.dataset.train.groups
    assert groups is not None
    for client_data in experiment.task.population.time_steps:
        assert set(client_data.train.sizes) == {60}
        assert set(client_data.valid.sizes) == {20}
        for client in range(8):
            assert set(groups[client_data.train.for_client(client) % len(groups)]) == {
                int(client_data.cluster[client])
            }
    trained = {int(i) for step in experiment.task.population.time_steps for i in step.train.ids}
    assert not trained & {
        int(i) for step in experiment.task.population.time_steps for i in step.valid.ids
    }
    assert any("times on average" in note for note in run.metadata["drift_notes"])
