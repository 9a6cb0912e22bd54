"""FedReg against its witness, against numbers worked by hand, in its first step, and what it
refuses.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from methods.unequal import (
    SETTING,
    distance,
    global_values,
    make_experiment,
    make_net,
    play_loop,
    the_data,
)
from reference import fedreg as witness
from torch import Tensor

from remanence.aggregators.mean import uniform_weights
from remanence.core.errors import InputError
from remanence.core.slots import Part
from remanence.core.types import Batch, ModelState, Output
from remanence.losses import wsm
from remanence.methods.fedreg import fedreg
from remanence.models import text
from remanence.testing import check_method
from remanence.testing.toy_task import dataset_for, small_experiment


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize(
    ("gamma", "beta", "eta_s", "eta_p"), [(0.4, 0.5, 0.02, 0.002), (0.9, 0.8, 0.3, 4.0)]
)
def test_equals_plain_pytorch(
    kind: str, gamma: float, beta: float, eta_s: float, eta_p: float
) -> None:
    """The second setting moves the inputs so far that both projections are at work."""
    experiment = make_experiment(fedreg(gamma=gamma, beta=beta, eta_s=eta_s, eta_p=eta_p), kind)
    against = {"pseudo": 0, "perturbed": 0}
    wanted = witness.train(
        make_net(kind), *the_data(experiment), SETTING, gamma, beta, eta_s, eta_p, against
    )
    assert against["pseudo"] > 5, "a projection that is never subtracted proves nothing"
    assert eta_p < 0.1 or against["perturbed"] > 5
    assert distance(global_values(play_loop(experiment)), wanted) < 1e-10


@pytest.mark.parametrize("method", [fedreg(), fedreg(gamma=0.25, eta_s=0.1) + wsm()])
def test_every_engine_can_carry_it(method: Any) -> None:
    check_method(method)


# ------------------------------------------------------------------------------------------ by hand


class Lender:
    """Lends given gradients and notes at which points and on which rows it was asked."""

    def __init__(self, g: list[float], s: list[float], p: list[float]):
        self.answers = {"batch": vector(g), "pseudo": vector(s), "perturbed": vector(p)}
        self.asked: dict[str, tuple[list[float], Batch]] = {}
        self.climbed: list[tuple[list[float], float]] = []

    def grad(self, params: dict[str, Tensor], batch: Batch, wrt: str = "params") -> Any:
        if wrt == "inputs":
            self.climbed.append((params["w"].tolist(), float(batch.x)))
            return torch.full_like(batch.x, -0.01)
        name = "pseudo" if batch.y.dim() == 2 else "batch" if float(batch.x) == 1 else "perturbed"
        self.asked[name] = (params["w"].tolist(), batch)
        return {"w": self.answers[name]}

    def forward(self, model: ModelState, x: Tensor) -> Output:
        self.remembered = (model, float(x))
        return Output(torch.zeros(1, 2), torch.zeros(1, 2))


def vector(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def take_gradient(lender: Lender) -> tuple[list[float], Batch, ModelState]:
    """One gradient at w = (1, 2) with w_old = (0, 1) on one row of input 1. -> the gradient,
    the batch, the received model
    """
    gradient = fedreg(gamma=0.25, beta=0.5, eta_s=0.02, eta_p=0.002).gradient
    assert gradient is not None
    numbers = {"gamma": 0.25, "beta": 0.5, "eta_s": 0.02, "eta_p": 0.002}
    old = ModelState({"w": vector([0.0, 1.0]), "frozen": vector([7.0])}, {})
    ctx: Any = SimpleNamespace(
        start=old, hyper={name: vector([number])[0] for name, number in numbers.items()}
    )
    batch = Batch(vector([1.0]), torch.tensor([1]), vector([1.0]), torch.tensor([3]))
    result = gradient({"w": vector([1.0, 2.0])}, batch, lender, ctx)  # type: ignore[arg-type]
    return result["w"].tolist(), batch, old


def test_points_and_rows_by_hand() -> None:
    """At gamma = 1/4: (1, 2) / 4 + 3 (0, 1) / 4 = (0.25, 1.25); at beta = 1/2: (0.5, 1.5). The
    gradient of the input is negative, so ten steps of 0.02 lead from 1 to 0.8, and one of 0.002 to
    0.998. Pseudo data have the received model's softmax as label, here (1/2, 1/2); the others have
    their own.
    """
    lender = Lender([1.0, 0.0], [1.0, 0.0], [1.0, 0.0])
    _, batch, old = take_gradient(lender)
    assert all(at == [0.0, 1.0] for at, _ in lender.climbed)
    assert [x for _, x in lender.climbed] == pytest.approx(
        [1 - 0.02 * step for step in range(10)] + [1.0], abs=1e-15
    )
    assert lender.asked["batch"][0] == [0.25, 1.25]
    assert lender.asked["pseudo"][0] == lender.asked["perturbed"][0] == [0.5, 1.5]
    assert float(lender.asked["pseudo"][1].x) == pytest.approx(0.8, abs=1e-15)
    assert lender.asked["pseudo"][1].y.tolist() == [[0.5, 0.5]]
    assert lender.remembered == (old, pytest.approx(0.8, abs=1e-15))
    assert float(lender.asked["perturbed"][1].x) == pytest.approx(0.998, abs=1e-15)
    assert lender.asked["perturbed"][1].y.tolist() == [1]
    assert batch.x.tolist() == [1.0], "the batch must stay as it was"
    assert batch.y.tolist() == [1], "the batch must stay as it was"


@pytest.mark.parametrize(
    ("s", "p", "wanted"),
    [
        # <g, s> = 2 and <g, p> = 3: nothing is forgotten, nothing changes
        ([2.0, 0.0], [3.0, 0.0], [1.0, -2.0]),
        # <g, s> / |s|^2 = -1 / 0.25 = -4, and (1, -2) + 4 (0, 0.5) = (1, 0): at right angles to s
        ([0.0, 0.5], [1.0, 0.0], [1.0, 0.0]),
        # the same for perturbed data: -4 / 4 = -1, and (1, -2) + (0, 2)
        ([1.0, 0.0], [0.0, 2.0], [1.0, 0.0]),
        # both: -1 for (-1, 0) and -1 for (0, 2): (1, -2) + (-1, 0) + (0, 2)
        ([-1.0, 0.0], [0.0, 2.0], [0.0, 0.0]),
        # both are projections of g: -1/2 each, so (1, -2) + (1, 1)
        ([1.0, 1.0], [1.0, 1.0], [2.0, -1.0]),
        ([0.0, 0.0], [0.0, 0.0], [1.0, -2.0]),  # no memory, no division by zero
        # rounding is no memory: -2e-17 over the floor of 1e-8 is nothing
        ([0.0, 1e-17], [1.0, 0.0], [1.0, -2.0]),
    ],
)
def test_projections_by_hand(s: list[float], p: list[float], wanted: list[float]) -> None:
    """g = (1, -2)."""
    assert take_gradient(Lender([1.0, -2.0], s, p))[0] == pytest.approx(wanted, abs=1e-14)


def test_two_clients_count_alike() -> None:
    """30 rows and 1 row: the same weight, whatever the size."""
    replies: Any = SimpleNamespace(weight=vector([30.0, 1.0]))
    srv: Any = None
    assert uniform_weights(replies, srv).tolist() == [1.0, 1.0]


def test_with_one_local_step_it_is_fedavg_with_equal_weights() -> None:
    """In the first step w = w_old: both mixed points are w_old, the memory's own answers have
    no gradient, and the perturbed rows' is g itself.
    """
    alike = Part("alike", client_weights=uniform_weights)
    changes: dict[str, Any] = {"local.steps": 1, "local.epochs": 0}
    states = [
        global_values(play_loop(make_experiment(method, "mlp", **changes)))
        for method in (fedreg(eta_p=0.0), alike, "fedavg")
    ]
    assert distance(states[0], states[1]) < 1e-12
    assert distance(states[0], states[2]) > 1e-3


# ----------------------------------------------------------------------------------------- refusals


def test_refuses_tokens_before_any_work() -> None:
    network = text((7,), 3, vocabulary=20)
    with pytest.raises(
        InputError,
        match="fedreg moves inputs along their gradient, and tokens have no gradient",
    ):
        small_experiment(fedreg(), module=network, source=dataset_for(network, (7,), 3))


def test_refuses_whole_numbers() -> None:
    """A network of someone's own may read whole numbers without an embedding."""
    gradient = fedreg().gradient
    assert gradient is not None
    batch = Batch(torch.tensor([[1, 2]]), torch.tensor([0]), torch.ones(1), torch.tensor([0]))
    nobody: Any = None
    with pytest.raises(InputError, match="tokens have no gradient"):
        gradient({}, batch, nobody, nobody)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": 1.5}, "gamma"),
        ({"beta": -0.1}, "beta"),
        ({"eta_s": -1.0}, "eta_s"),
        ({"eta_p": float("nan")}, "eta_p"),
        ({"ascent": 0}, "ascent"),
    ],
)
def test_refuses(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=f"fedreg: {name} must be a number"):
        fedreg(**arguments)
