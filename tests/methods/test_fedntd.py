"""FedNTD against its witness, against numbers worked by hand, and where it must equal FedAvg."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.unequal import (
    SETTING,
    distance,
    global_values,
    make_experiment,
    make_net,
    play_loop,
    the_data,
)
from reference import fedntd as witness
from torch import Tensor

from remanence.core.errors import InputError
from remanence.core.types import Batch, Output
from remanence.losses import wsm
from remanence.methods.fedntd import distill_not_true, fedntd, not_true
from remanence.testing import check_method


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize(("beta", "tau"), [(1.0, 1.0), (0.7, 3.0)])
def test_equals_plain_pytorch(kind: str, beta: float, tau: float) -> None:
    experiment = make_experiment(fedntd(beta=beta, tau=tau), kind)
    wanted = witness.train(make_net(kind), *the_data(experiment), SETTING, beta, tau)
    assert distance(global_values(play_loop(experiment)), wanted) < 1e-10


def test_beta_zero_is_fedavg_to_the_bit() -> None:
    plain, without = (
        play_loop(make_experiment(method, "conv")) for method in ("fedavg", fedntd(beta=0.0))
    )
    assert distance(global_values(without), global_values(plain)) == 0
    assert (
        distance(global_values(play_loop(make_experiment(fedntd(), "conv"))), global_values(plain))
        > 1e-3
    )


@pytest.mark.parametrize("method", [fedntd(), fedntd(beta=0.5, tau=2.0) + wsm()])
def test_every_engine_can_carry_it(method: Any) -> None:
    check_method(method)


def distilled(
    student: list[float], teacher: list[float], y: Tensor, beta: float = 1.0, tau: float = 1.0
) -> tuple[float, list[float]]:
    """-> the term of one row, and its gradient with respect to the student's logits"""
    logits = torch.tensor([student], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([teacher], dtype=torch.float64)
    hyper = {
        "beta": torch.tensor(beta, dtype=torch.float64),
        "tau": torch.tensor(tau, dtype=torch.float64),
    }
    ops: Any = SimpleNamespace(forward=lambda model: Output(targets, targets))
    ctx: Any = SimpleNamespace(hyper=hyper, start=None)
    rows = distill_not_true(
        Output(logits, logits), Batch(targets, y, torch.ones(1), torch.zeros(1)), ops, ctx
    )
    return float(rows.detach()), torch.autograd.grad(rows.sum(), logits)[0][0].tolist()


@pytest.mark.parametrize("y", [torch.tensor([1]), torch.tensor([[0.1, 0.8, 0.1]])])
def test_by_hand(y: Tensor) -> None:
    """True class 1, exp(z) = 1, 9, 3 for the student and 2, 5, 2 for the teacher: over the classes
    0 and 2 one says (1/4, 3/4), the other (1/2, 1/2).

    KL = 1/2 log((1/2) / (1/4)) + 1/2 log((1/2) / (3/4)) = 1/2 log 2 + 1/2 log(2/3) = 1/2 log(4/3),
    whatever stands at class 1. Its gradient is student less
    teacher: (-1/4, 0, 1/4). A soft target's largest entry is the true class.
    """
    term, gradient = distilled(
        [0.0, math.log(9), math.log(3)], [math.log(2), math.log(5), math.log(2)], y
    )
    assert term == pytest.approx(math.log(4 / 3) / 2, abs=1e-15)
    assert gradient == pytest.approx([-1 / 4, 0.0, 1 / 4], abs=1e-15)


def test_temperature_by_hand() -> None:
    """tau = 2 halves the logits: 0 and 2 log 3 against 0 and 0 give the same softmaxes as
    above, and beta * tau^2 = 0.5 * 4 = 2.
    """
    term, _ = distilled(
        [0.0, 7.0, 2 * math.log(3)], [0.0, -3.0, 0.0], torch.tensor([1]), beta=0.5, tau=2.0
    )
    assert term == pytest.approx(2 * math.log(4 / 3) / 2, abs=1e-15)


@given(st.integers(2, 6), st.integers(0, 5))
def test_all_classes_but_the_true_one_in_order(classes: int, true: int) -> None:
    true %= classes
    kept = not_true(torch.arange(float(classes)).repeat(2, 1), torch.tensor([true, true]))
    assert kept.tolist() == [[float(c) for c in range(classes) if c != true]] * 2


def test_far_logits_stay_finite() -> None:
    """Probabilities that underflow to 0 count as nothing: 0 * log 0 = 0."""
    term, gradient = distilled([0.0, 0.0, 2e4], [1e4, 0.0, -1e4], torch.tensor([1]))
    assert term == pytest.approx(2e4)
    assert gradient == pytest.approx([-1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"beta": -1.0}, "beta"), ({"tau": 0.0}, "tau"), ({"tau": float("nan")}, "tau")],
)
def test_refuses(arguments: dict[str, float], name: str) -> None:
    with pytest.raises(InputError, match=f"fedntd: {name} must be a number"):
        fedntd(**arguments)
