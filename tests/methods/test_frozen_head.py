"""The frozen head against plain PyTorch, by hand, and beside other methods."""

from __future__ import annotations

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
from reference import fedbabu as witness
from torch import nn

from remanence.core.errors import InputError
from remanence.core.slots import Method
from remanence.data.dataset import ArrayDataset, DatasetSplit
from remanence.engines.sequential import SequentialEngine
from remanence.losses import wsm
from remanence.methods import fedprox
from remanence.methods.frozen_head import frozen_head
from remanence.testing import check_method
from remanence.testing.toy_task import run_rounds, small_experiment


def two_clients() -> ArrayDataset:
    """A has the rows 1 and 3 of class 0, B the row 1 of class 1."""
    train = DatasetSplit(
        np.array([[1.0], [3.0], [1.0]], dtype=np.float32), np.array([0, 0, 1]), np.array([0, 0, 1])
    )
    return ArrayDataset(
        "two", "table", ("0", "1"), train, DatasetSplit(train.x, train.y), group_names=("A", "B")
    )


TWO = {
    "data.partition": "by_group",
    "data.validation": 0.0,
    "data.normalize": False,
    "clients.count": 2,
    "clients.sample": 2,
    "local.optimizer": "sgd(lr=0.1)",
}


def two_layers(body: float, head: tuple[float, float]) -> nn.Module:
    """Logits head_c * body * x."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)).double()
    with torch.no_grad():
        net[0].weight.fill_(body)
        net[1].weight.copy_(torch.tensor(head).reshape(2, 1))
    return net


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_three_rounds_equal_plain_pytorch(kind: str) -> None:
    experiment = make_experiment(frozen_head(), kind)
    plain, net = in_plain_tensors(experiment), make_net(kind)
    head = net.get_submodule("2" if kind == "mlp" else "head")
    wanted = witness.train(net, head, plain.x, plain.y, CLASSES, plain.rows, plain.setting)
    assert largest_gap(play_all(experiment), wanted, kind) < 1e-10


def test_two_clients_by_hand() -> None:
    """Body w = 0, head (1, -1): logits (wx, -wx), probabilities 1/2, and dL/dw = -x for class 0, +x
    for class 1.

    One step at rate 0.1 on all rows: A goes to 0.1 * (1 + 3)/2 = 0.2, B to -0.1 * 1; the mean by
    size is (2 * 0.2 - 0.1)/3 = 0.1. The head's gradient holds the factor wx = 0 in this step, so a
    second round is needed to see that it stays: then wx is not 0.
    """
    experiment = small_experiment(
        frozen_head(), TWO, module=two_layers(0.0, (1.0, -1.0)), source=two_clients()
    )
    state, lines = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    assert float(state.server.model.params["0.weight"]) == pytest.approx(0.1, abs=1e-15)
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    assert torch.equal(
        state.server.model.params["1.weight"], torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    )
    one_weight_and_a_size = 8 + 8
    assert lines[0]["bytes_up"] == 2 * one_weight_and_a_size


@pytest.mark.parametrize("method", [fedprox(mu=0.1) + frozen_head(), frozen_head() + wsm()])
def test_the_head_keeps_its_bits_beside_other_methods(method: Method) -> None:
    experiment = make_experiment(method, "conv")
    model, initial = play_all(experiment).server.model, experiment.task.model.initial
    for name, value in model.params.items():
        assert torch.equal(value, initial.params[name]) == name.startswith("head.")


def test_contract() -> None:
    check_method(frozen_head())


def test_a_model_without_a_classifier_is_refused() -> None:
    """A convolution as the last layer: there is no linear layer with one output a class."""
    net = nn.Sequential(
        nn.Unflatten(1, (5, 1)), nn.Conv1d(5, 6, 1), nn.Tanh(), nn.Conv1d(6, 4, 1), nn.Flatten()
    )
    with pytest.raises(
        InputError,
        match="frozen_head needs a model with a classifier of its own, and this one has no"
        " linear layer with 4 outputs",
    ):
        small_experiment(frozen_head(), module=net)


def test_a_model_that_is_all_classifier_is_refused() -> None:
    with pytest.raises(InputError, match="leaves nothing to train"):
        small_experiment(frozen_head(), module=nn.Linear(5, 4))
