"""FedBN against plain PyTorch, by hand, and its personal models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from methods.small_task import (
    CLASSES,
    in_plain_tensors,
    largest_gap,
    make_experiment,
    make_net,
    play_all,
)
from reference import fedbn as witness
from reference.fedbabu import count
from torch import Tensor, nn

from remanence.core.errors import InputError
from remanence.data.dataset import ArrayDataset, DatasetSplit
from remanence.engines.sequential import SequentialEngine
from remanence.methods.fedbn import fedbn
from remanence.rounds.loop import start_run
from remanence.testing import check_method, toy_task
from remanence.testing.toy_task import batch_norm_net, run_rounds, small_experiment


class LayerNormNet(nn.Module):
    """Normalization that clients of any size can train, on the built-in task."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.norm(self.body(x))))
        return logits


def test_three_rounds_equal_plain_pytorch() -> None:
    """The server's model, and the normalization that every client keeps."""
    experiment = make_experiment(fedbn(), "conv")
    plain, state = in_plain_tensors(experiment), play_all(experiment)
    wanted, own = witness.train(
        make_net("conv"), plain.x, plain.y, CLASSES, plain.rows, plain.setting
    )
    assert largest_gap(state, wanted, "conv") < 1e-10
    assert 3 < len(state.client_states) <= 6
    for client, kept in state.client_states.items():
        found = {**kept["personal"]["params"], **kept["personal"]["buffers"]}
        assert found.keys() == own[client].keys()
        assert (
            max(float((found[name] - value).abs().max()) for name, value in own[client].items())
            < 1e-10
        )
    scales = [kept["personal"]["params"]["body.1.weight"] for kept in state.client_states.values()]
    assert float((scales[0] - scales[1]).abs().max()) > 1e-3


def test_personal_models_equal_plain_pytorch(tmp_path: Path) -> None:
    """Every client's model is the server's with its own normalization; it is counted on the
    client's own validation rows.
    """
    experiment = make_experiment(fedbn(), "conv")
    plain, valid = in_plain_tensors(experiment), experiment.task.population.at(0).valid
    run = start_run(experiment.config, tmp_path / "run", method=fedbn(), module=make_net("conv"))
    wanted, own = witness.train(
        make_net("conv"), plain.x, plain.y, CLASSES, plain.rows, plain.setting
    )
    records = {
        int(record["model"]): record
        for record in run.ledger.select(moment="personal")
        if record["round"] == 3
    }
    right, loss = 0, 0.0
    for client in range(6):
        rows, net = valid.for_client(client), make_net("conv")
        if len(rows) == 0:
            assert client not in records
            continue
        net.load_state_dict({**wanted, **own[client]})
        here = count(net.eval(), plain.x[rows], plain.y[rows])
        assert (
            records[client]["owner"],
            records[client]["correct"].sum(),
            records[client]["total"].sum(),
        ) == (client, here[0], len(rows))
        assert records[client]["loss"] == pytest.approx(here[1], abs=1e-10)
        right, loss = right + here[0], loss + here[1]
    line = run.metrics[-1]
    assert (line["round"], line["model"], line["split"]) == (3, "personal", "valid")
    assert line["accuracy"] == pytest.approx(right / len(valid.ids), abs=1e-15)
    assert line["loss"] == pytest.approx(loss / len(valid.ids), abs=1e-10)


def test_statistics_by_hand() -> None:
    """A holds the inputs 1 and 3 (mean 2, variance 2), B 5 and 9 (mean 7, variance 8); one batch a
    round, momentum 0.1, the statistics start at 0 and 1.

    After two rounds: A 0.9 * 0.2 + 0.1 * 2 = 0.38 and 0.9 * 1.1 + 0.2 = 1.19; B 0.9 * 0.7 + 0.7 =
    1.33 and 0.9 * 1.7 + 0.8 = 2.33. The server has 0 and 1.
    """
    train = DatasetSplit(
        np.array([[1.0], [3.0], [5.0], [9.0]], dtype=np.float32),
        np.array([0, 1, 0, 1]),
        np.array([0, 0, 1, 1]),
    )
    source = ArrayDataset(
        "two", "table", ("0", "1"), train, DatasetSplit(train.x, train.y), group_names=("A", "B")
    )
    settings = {
        "data.partition": "by_group",
        "data.validation": 0.0,
        "data.normalize": False,
        "clients.count": 2,
        "clients.sample": 2,
    }
    net = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)).double()
    experiment = small_experiment(fedbn(), settings, module=net, source=source)
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    kept = [state.client_states[client]["personal"]["buffers"] for client in (0, 1)]
    assert [float(buffers["0.running_mean"]) for buffers in kept] == pytest.approx(
        [0.38, 1.33], abs=1e-14
    )
    assert [float(buffers["0.running_var"]) for buffers in kept] == pytest.approx(
        [1.19, 2.33], abs=1e-14
    )
    assert [float(state.server.model.buffers[f"0.running_{name}"]) for name in ("mean", "var")] == [
        0.0,
        1.0,
    ]


def test_normalization_does_not_travel() -> None:
    """BatchNormNet: 5 * 6 and 6 * 4 + 4 numbers of 8 bytes, and the number of examples."""
    experiment = small_experiment(fedbn(), toy_task.EQUAL, module=batch_norm_net())
    _, lines = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    assert lines[0]["bytes_up"] == 4 * ((30 + 28) * 8 + 8)


def test_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in task has no normalization: here it gets a network that has some."""
    monkeypatch.setitem(toy_task.SMALL, "model", "methods.test_fedbn:LayerNormNet")
    check_method(fedbn())


def test_statistics_alone_are_enough() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 4))
    experiment = small_experiment(fedbn(), toy_task.EQUAL, module=net)
    assert experiment.task.method.personal(experiment.task.info) == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }


def test_a_model_without_normalization_is_refused() -> None:
    with pytest.raises(
        InputError,
        match="fedbn keeps normalization layers local, and this model has none: choose one with"
        " them",
    ):
        small_experiment(fedbn(), {"model": "mlp(hidden=6)"})
