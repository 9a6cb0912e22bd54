"""Runs without a server, read from their folders: resumed exactly, recorded correctly,
counted by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methods.drifting_task import CLIENTS, play_states
from rounds.drift_runs import HAST, config_of, count, last_client_models, last_state, predict
from rounds.test_resume import contents

from remanence.config import Experiment
from remanence.core.slots import PeerAverage
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import BuiltExperiment, build
from remanence.results.ledger import MOMENTS, PEER_COUNTS, SIMILARITY
from remanence.results.run import CONFUSIONS, EXAMPLES, PEERS, Run
from remanence.rounds.loop import resume_run, start_run
from remanence.rounds.peer_averaging import count_peer_bytes
from remanence.testing.toy_task import max_rel_diff, state_tree

EVERYTHING = {
    "record.local": True,
    "record.examples": True,
    "record.confusion": True,
    "record.every": 2,
    "peers.patience": 1,
}


def all_contents(folder: Path) -> dict[str, Any]:
    return contents(folder) | {
        name: (folder / name).read_bytes()
        for name in (PEERS, EXAMPLES, CONFUSIONS)
        if (folder / name).exists()
    }


class Dying:
    """Ends the process' work without warning after a round was played, before it is saved:
    files run ahead of the last checkpoint.
    """

    def __init__(self, after: int):
        self.after = after

    def start(self, title: str, done: int, total: int) -> None: ...
    def log(self, text: str) -> None: ...
    def prepare(self, text: str) -> None: ...
    def finish(self) -> None: ...
    def note(self, text: str) -> None: ...

    def round(self, line: dict[str, Any]) -> None:
        if line["round"] == self.after:
            raise ConnectionAbortedError("killed")


@pytest.fixture(scope="module", params=[HAST, f"{HAST}+moon", "feddrift(delta=0.2)"])
def straight(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Experiment, dict[str, Any]]:
    config = config_of(
        request.param, **EVERYTHING, **{"clients.availability": "random(offline=0.2)"}
    )
    folder = tmp_path_factory.mktemp("straight") / "run"
    start_run(config, folder)
    found = all_contents(folder)
    assert found["round"] == config.total_rounds
    assert {EXAMPLES, CONFUSIONS} <= set(found)
    assert (PEERS in found) == ("hast" in request.param)
    assert len(found["client_state"]) == (CLIENTS if "moon" in request.param else 0)
    return config, found


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_killed_and_resumed_is_straight_through_bit_by_bit(
    tmp_path: Path, straight: tuple[Experiment, dict[str, Any]], after: int
) -> None:
    """In the first round, in the middle of a time step, in its last round, and in the first one
    of the next: the checkpoint is of the round before.
    """
    config, wanted = straight
    with pytest.raises(ConnectionAbortedError):
        start_run(config, tmp_path / "run", progress=Dying(after))
    assert contents(tmp_path / "run")["round"] == after - 1
    resume_run(tmp_path / "run")
    assert all_contents(tmp_path / "run") == wanted


def test_a_checkpoint_holds_everything(tmp_path: Path) -> None:
    config = config_of(f"{HAST}+moon", **{"record.every": 5})
    run = start_run(config, tmp_path / "run")
    experiment = build(config)
    states, _ = play_states(experiment, SequentialEngine(experiment.task))
    assert max_rel_diff(state_tree(last_state(run)), state_tree(states[-1])) == ("", 0.0)
    # and of a round that is not recorded, whom everybody has listened to since the last record
    with pytest.raises(ConnectionAbortedError):
        start_run(config, tmp_path / "killed", progress=Dying(3))
    client_models = last_client_models(Run(tmp_path / "killed"))
    assert client_models.peer_counts.sum() == 2 * CLIENTS * (2 + 2)
    assert max_rel_diff(
        state_tree(last_state(Run(tmp_path / "killed"))), state_tree(states[2])
    ) == ("", 0.0)
    assert set(client_models.peers["hast"]) == {"similarity", "met"}


# ----------------------------------------------------------------------- what is written of clients' models


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, BuiltExperiment]:
    config = config_of(
        HAST,
        **{
            "record.local": True,
            "record.examples": True,
            "record.confusion": True,
            "record.every": 2,
        },
    )
    return start_run(config, tmp_path_factory.mktemp("recorded") / "run"), build(config)


def test_every_clients_best_model_on_every_concept(recorded: tuple[Run, BuiltExperiment]) -> None:
    run, experiment = recorded
    records, best = run.ledger.select(moment="personal", split="test"), last_client_models(run).best
    # rounds 2, 4, 6 by record.every, 3 as the last of its time step
    assert sorted(
        zip(
            records["round"].tolist(),
            records["model"].tolist(),
            records["owner"].tolist(),
            strict=True,
        )
    ) == [
        (round, client, concept)
        for round in (2, 3, 4, 6)
        for client in range(CLIENTS)
        for concept in range(2)
    ]
    assert set(records["weight"]) == {1 / CLIENTS}
    for record in records[records["round"] == 6]:
        client, concept = int(record["model"]), int(record["owner"])
        labels, predicted, _ = predict(
            experiment,
            best.select(client),
            experiment.task.test,
            experiment.task.population.test_ids[concept],
        )
        table = count(labels, predicted)
        assert record["correct"].tolist() == np.diagonal(table).tolist()
        assert record["total"].tolist() == table.sum(axis=1).tolist()
        assert record["predicted"].tolist() == table.sum(axis=0).tolist()


def test_the_line_speaks_of_each_clients_own_concept(recorded: tuple[Run, BuiltExperiment]) -> None:
    run, experiment = recorded
    records = run.ledger.select(moment="personal", split="test")
    for line in run.metrics:
        assert line["model"] == "personal"
        if line["split"] == "valid" or line["accuracy"] is None:
            continue
        cluster = experiment.task.population.at(line["time_step"]).cluster
        now = records[records["round"] == line["round"]]
        own = [
            now[(now["model"] == client) & (now["owner"] == cluster[client])][0]
            for client in range(CLIENTS)
        ]
        accuracies = [int(record["correct"].sum()) / int(record["total"].sum()) for record in own]
        losses = [float(record["loss"]) / int(record["total"].sum()) for record in own]
        assert line["accuracy"] == pytest.approx(np.mean(accuracies))
        assert line["loss"] == pytest.approx(np.mean(losses))
        assert line["worst_client"] == pytest.approx(min(accuracies))
        assert line["bottom_decile"] == pytest.approx(min(accuracies))  # a tenth of six is one
        assert line["spread"] == pytest.approx(np.std(accuracies))
        assert (
            line["replies"],
            line["offline"],
            line["early_stopped"],
            line["rejected"],
            line["abandoned"],
        ) == (CLIENTS, 0, 0, [], False)
        assert 0 <= line["same_cluster_share"] <= 1
    unrecorded = [line for line in run.metrics if line["accuracy"] is None]
    assert [(line["round"], line["split"]) for line in unrecorded] == [(1, "test"), (5, "test")]
    assert all(
        line["same_cluster_share"] is not None and line["bytes_up"] > 0 for line in unrecorded
    )


def test_validation_is_of_everybodys_best_model_on_its_own_rows(
    recorded: tuple[Run, BuiltExperiment],
) -> None:
    run, experiment = recorded
    best, client_data = last_client_models(run).best, experiment.task.population.at(1)
    right = 0
    for client in range(CLIENTS):
        labels, predicted, _ = predict(
            experiment,
            best.select(client),
            experiment.task.train,
            client_data.valid.for_client(client),
        )
        right += int((labels == predicted).sum())
    (line,) = [line for line in run.metrics if line["split"] == "valid" and line["round"] == 6]
    assert line["accuracy"] == pytest.approx(right / len(client_data.valid.ids))


def test_the_moments_of_a_round(tmp_path: Path) -> None:
    """before: as the last round left it; merged: after mixing; local: after training. Each
    client on its own concept.
    """
    run = start_run(
        config_of(
            "random(peers=2)",
            **{"record.local": True, "clients.availability": "never(clients='4')"},
        ),
        tmp_path / "run",
    )
    experiment = build(run.config)
    there = [0, 1, 2, 3, 5]
    for round in range(1, 7):
        cluster = experiment.task.population.at((round - 1) // 3).cluster
        for moment in ("before", "merged", "local"):
            records = run.ledger.select(moment=moment, split="test")
            now = records[records["round"] == round]
            assert now["model"].tolist() == there
            assert now["owner"].tolist() == cluster[there].tolist()
            assert now["weight"].tolist() == [1 / 5] * 5
    before, local, merged = (
        run.ledger.select(moment=moment, split="test") for moment in ("before", "local", "merged")
    )
    for round in (2, 3, 5, 6):  # within a time step
        assert (
            before[before["round"] == round]["correct"].tolist()
            == local[local["round"] == round - 1]["correct"].tolist()
        )
        assert before[before["round"] == round]["loss"].tolist() == pytest.approx(
            local[local["round"] == round - 1]["loss"].tolist()
        )
    client_models = last_client_models(run)
    last = local[local["round"] == 6]
    for record in last:
        client, concept = int(record["model"]), int(record["owner"])
        labels, predicted, _ = predict(
            experiment,
            client_models.models.select(client),
            experiment.task.test,
            experiment.task.population.test_ids[concept],
        )
        assert record["correct"].tolist() == np.diagonal(count(labels, predicted)).tolist()
    assert merged["loss"].tolist() != before["loss"].tolist()
    local_run = start_run(config_of("local", **{"record.local": True}), tmp_path / "local")
    first, second = (
        local_run.ledger.select(moment=moment, split="test")["loss"]
        for moment in ("before", "merged")
    )
    assert first.tolist() == second.tolist()  # no client averages


def test_the_tables_of_peer_counts_and_similarities(recorded: tuple[Run, BuiltExperiment]) -> None:
    run, experiment = recorded
    assert run.peers is not None
    counts, alike = (run.peers[run.peers["kind"] == kind] for kind in (PEER_COUNTS, SIMILARITY))
    # rounds 1 and 2 together, 3 alone as the last of its time step, 4 alone, 5 and 6 together; two
    # random and two similar peers each
    assert counts["round"].tolist() == alike["round"].tolist() == [2, 3, 4, 6]
    assert counts["time_step"].tolist() == [0, 0, 1, 1]
    assert counts["values"].sum(axis=2).tolist() == [
        [4.0 * rounds] * CLIENTS for rounds in (2, 1, 1, 2)
    ]
    assert not np.diagonal(counts["values"], axis1=1, axis2=2).any()
    assert (
        alike["values"][-1].tolist()
        == last_client_models(run).peers["hast"]["similarity"].float().tolist()
    )
    # what single rounds' lines say of the own cluster is what the tables say of all of them
    for record, rounds in zip(counts, ([1, 2], [3], [4], [5, 6]), strict=True):
        cluster = experiment.task.population.at(int(record["time_step"])).cluster
        shares = {
            line["round"]: line["same_cluster_share"]
            for line in run.metrics
            if line["split"] == "test"
        }
        own = record["values"][cluster[:, None] == cluster[None, :]].sum() / record["values"].sum()
        assert np.mean([shares[round] for round in rounds]) == pytest.approx(own)


def test_bytes_by_hand(tmp_path: Path) -> None:
    """mlp 6-8-4 has 6*8+8 = 56 and 8*4+4 = 36 numbers of 8 bytes. Six clients, two peers of a kind;
    a similarity of each client has 8 bytes.

    random: every peer sends its model. dac: and its similarities. hast: so do the random ones, and
        the similar ones send the classifier.
    """
    model, classifier, extra, pairs = 92 * 8, 36 * 8, CLIENTS * 8, CLIENTS * 2
    wanted = {
        "random(peers=2)": pairs * model,
        "dac(peers=2)": pairs * (model + extra),
        HAST: pairs * (model + extra) + pairs * classifier,
        "hast(peers=2, depth=0)": pairs * (model + extra),
        "local": 0,
    }
    for method, size in wanted.items():
        experiment = build(config_of(method))
        _, lines = play_states(experiment, SequentialEngine(experiment.task), rounds=1)
        assert (lines[0]["bytes_up"], lines[0]["bytes_down"]) == (size, size), method
    # in a ring of which one is away, four clients have one neighbor or two: 0-1-2-3-4-(5), ends
    # have one
    experiment = build(
        config_of(
            "random(peers=2)",
            **{"peers.topology": "ring", "clients.availability": "never(clients='5')"},
        )
    )
    _, lines = play_states(experiment, SequentialEngine(experiment.task), rounds=1)
    assert lines[0]["bytes_up"] == (1 + 2 + 2 + 2 + 1) * model


def test_a_candidate_that_is_not_averaged_has_sent_its_model() -> None:
    """Client 0 evaluates clients 1 and 2 and averages with 1 and 3; client 1 evaluates and selects
    none. Two candidates and client 3 send models, the candidates also their similarities.
    """
    task = build(config_of("dac(peers=2)")).task
    none = torch.full((CLIENTS - 1, 2), -1)
    candidates = torch.cat([torch.tensor([[1, 2]]), none])
    average = PeerAverage(torch.cat([torch.tensor([[1, 3]]), none]))
    model, extra = 92 * 8, CLIENTS * 8
    assert count_peer_bytes(task, (average,), candidates) == {
        "bytes_up": 3 * model + 2 * extra,
        "bytes_down": 3 * model + 2 * extra,
    }


def test_examples_and_confusions_of_clients_models(recorded: tuple[Run, BuiltExperiment]) -> None:
    """Every training row of every client at three moments of a recorded round; at the last one,
    by the module itself.
    """
    run, experiment = recorded
    assert run.examples is not None
    assert run.confusions is not None
    held = experiment.task.population.at(1).train
    for moment in ("before", "merged", "local"):
        rows = run.examples[
            (run.examples["round"] == 6) & (run.examples["moment"] == MOMENTS.index(moment))
        ]
        assert rows["client"].tolist() == np.repeat(np.arange(CLIENTS), held.sizes).tolist()
        assert (
            rows["id"].tolist()
            == np.concatenate(
                [np.sort(held.for_client(client)) for client in range(CLIENTS)]
            ).tolist()
        )
    client_models = last_client_models(run)
    for client in range(CLIENTS):
        mine = rows[rows["client"] == client]
        labels, predicted, margins = predict(
            experiment,
            client_models.models.select(client),
            experiment.task.train,
            np.sort(held.for_client(client)),
        )
        assert mine["correct"].astype(bool).tolist() == (labels == predicted).tolist()
        assert mine["margin"].tolist() == pytest.approx(margins.tolist(), rel=1e-5)
        assert ((mine["margin"] > 0) == mine["correct"]).all()
    tests = run.ledger.records[run.ledger.records["split"] == 0]
    assert len(run.confusions) == len(tests)
    for name in ("round", "time_step", "model", "owner", "moment"):
        assert run.confusions[name].tolist() == tests[name].tolist()
    assert (
        np.diagonal(run.confusions["confusion"], axis1=1, axis2=2).tolist()
        == tests["correct"].tolist()
    )
    assert run.confusions["confusion"].sum(axis=1).tolist() == tests["predicted"].tolist()


def test_evaluation_begins_with_the_first_round_that_is_named(tmp_path: Path) -> None:
    """Two time steps of three rounds, every other round: from the first of each, from the second,
    and without a first round those with even numbers; the ends of time steps always. The current
    models' validation is known of all rounds.
    """
    for first, evaluated in ((1, [1, 3, 4, 6]), (2, [2, 3, 5, 6]), (0, [2, 3, 4, 6])):
        config = config_of(HAST, **{"record.every": 2, "record.first": first})
        run = start_run(config, tmp_path / str(first))
        assert run.curve()[0] == evaluated
        assert run.curve(value="valid_accuracy")[0] == [1, 2, 3, 4, 5, 6]


def test_inputs_between_minus_one_and_one(tmp_path: Path) -> None:
    """The training inputs of digits are 0 to 16: middle 8, half the range 8."""
    for normalize, lowest, highest in (("range", -1, 1), (False, 0, 16)):
        experiment = build(
            config_of(
                HAST, **{"data.name": "digits", "data.normalize": normalize, "drift.concepts": ""}
            )
        )
        inputs = experiment.task.train.inputs(torch.arange(100))
        assert (float(inputs.min()), float(inputs.max())) == (lowest, highest)
