"""FedBABU against plain PyTorch: the body of all, and the fine-tuned model of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from methods.test_frozen_head import TWO, two_clients, two_layers
from reference import fedbabu as witness
from torch import nn

from remanence.core.errors import InputError
from remanence.methods.fedbabu import fedbabu
from remanence.rounds import personalization
from remanence.rounds.loop import start_run
from remanence.rounds.setup import first_state
from remanence.testing import check_method
from remanence.testing.toy_task import small_experiment


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_three_rounds_equal_plain_pytorch(kind: str) -> None:
    experiment = make_experiment(fedbabu(finetune_epochs=1), kind)
    plain, net = in_plain_tensors(experiment), make_net(kind)
    head = net.get_submodule("2" if kind == "mlp" else "head")
    wanted = witness.train(net, head, plain.x, plain.y, CLASSES, plain.rows, plain.setting)
    assert largest_gap(play_all(experiment), wanted, kind) < 1e-10


@pytest.mark.parametrize(
    ("part", "kind"), [("all", "mlp"), ("head", "mlp"), ("body", "mlp"), ("all", "conv")]
)
def test_fine_tuned_models_equal_plain_pytorch(tmp_path: Path, part: str, kind: str) -> None:
    """After the last round: right answers and loss of every client on its own validation rows.
    Batch norm's statistics go on while it is fine-tuned.
    """
    method = fedbabu(finetune_epochs=2, part=part)
    experiment = make_experiment(method, kind)
    plain, valid, net = (
        in_plain_tensors(experiment),
        experiment.task.population.at(0).valid,
        make_net(kind),
    )
    head_path = "2" if kind == "mlp" else "head"
    state = witness.train(
        net, net.get_submodule(head_path), plain.x, plain.y, CLASSES, plain.rows, plain.setting
    )
    in_head = {name: name.startswith(f"{head_path}.") for name, _ in net.named_parameters()}
    tuned = [name for name in in_head if part == "all" or in_head[name] == (part == "head")]
    run = start_run(experiment.config, tmp_path / "run", method=method, module=make_net(kind))
    records = {
        int(record["model"]): record
        for record in run.ledger.select(moment="personal")
        if record["round"] == 3
    }
    right, losses = 0, 0.0
    holders = [client for client in range(6) if len(valid.for_client(client))]
    assert sorted(records) == holders
    for client in holders:
        model = witness.personalize(
            net, state, tuned, plain.x, plain.y, plain.rows[client], client, 2, plain.setting
        )
        correct, loss = witness.count(
            model, plain.x[valid.for_client(client)], plain.y[valid.for_client(client)]
        )
        assert records[client]["correct"].sum() == correct
        assert records[client]["loss"] == pytest.approx(loss, abs=1e-10)
        right, losses = right + correct, losses + loss
    line = run.metrics[-1]
    assert (line["model"], line["split"]) == ("personal", "valid")
    assert line["accuracy"] == pytest.approx(right / len(valid.ids), abs=1e-15)
    assert line["loss"] == pytest.approx(losses / len(valid.ids), abs=1e-10)


HAND: list[Any] = [
    # w = 0, head (1, -1): dL/dw = -x for class 0 and +x for class 1, so A goes to 0.1 * 2 and B to
    # -0.1 * 1; the head's gradient has the factor wx = 0
    (0.0, (1.0, -1.0), "body", [(0.2, 1.0, -1.0), (-0.1, 1.0, -1.0)]),
    (0.0, (1.0, -1.0), "all", [(0.2, 1.0, -1.0), (-0.1, 1.0, -1.0)]),
    (0.0, (1.0, -1.0), "head", [(0.0, 1.0, -1.0), (0.0, 1.0, -1.0)]),
    # w = 1, head (0, 0): features x, probabilities 1/2, dL/dh = (-x/2, x/2) for class 0, so A goes
    # to 0.1 * 2/2 and B to -0.1 * 1/2; dL/dw has the factor h
    (1.0, (0.0, 0.0), "head", [(1.0, 0.1, -0.1), (1.0, -0.05, 0.05)]),
    (1.0, (0.0, 0.0), "all", [(1.0, 0.1, -0.1), (1.0, -0.05, 0.05)]),
    (1.0, (0.0, 0.0), "body", [(1.0, 0.0, 0.0), (1.0, 0.0, 0.0)]),
]


@pytest.mark.parametrize(("body", "head", "part", "wanted"), HAND)
def test_two_clients_by_hand(
    body: float, head: tuple[float, float], part: str, wanted: list[tuple[float, float, float]]
) -> None:
    """Logits h_c * w * x; A holds x = 1, 3 of class 0 and B x = 1 of class 1; one step at rate
    0.1 on all rows, from the global model before any round.
    """
    experiment = small_experiment(
        fedbabu(finetune_epochs=1, part=part),
        TWO,
        module=two_layers(body, head),
        source=two_clients(),
    )
    state = first_state(experiment)
    models = personalization.make_models(
        experiment, personalization.make_finetune_engine(experiment), state, np.arange(2)
    )
    found = [
        (
            *models.params["0.weight"][client].flatten().tolist(),
            *models.params["1.weight"][client].flatten().tolist(),
        )
        for client in (0, 1)
    ]
    assert found == [pytest.approx(numbers, abs=1e-15) for numbers in wanted]
    assert torch.equal(
        state.server.model.params["1.weight"].flatten(), torch.tensor(head, dtype=torch.float64)
    )


def test_contract() -> None:
    check_method(fedbabu(finetune_epochs=1))


def test_refusals() -> None:
    with pytest.raises(
        InputError, match="fedbabu: finetune_epochs must be a number of at least 1, not 0"
    ):
        fedbabu(finetune_epochs=0)
    with pytest.raises(
        InputError, match="fedbabu: part must be one of all, head, body, not 'neck'"
    ):
        fedbabu(part="neck")
    net = nn.Sequential(
        nn.Unflatten(1, (5, 1)), nn.Conv1d(5, 6, 1), nn.Tanh(), nn.Conv1d(6, 4, 1), nn.Flatten()
    )
    with pytest.raises(InputError, match="fedbabu needs a model with a classifier of its own"):
        small_experiment(fedbabu(), module=net)
