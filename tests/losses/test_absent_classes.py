"""Masked cross-entropy, FedLC and FedRS: against their witness, by hand, and how they differ
from TCE and from each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.unequal import (
    CLASSES,
    SETTING,
    distance,
    global_values,
    make_experiment,
    make_net,
    play_loop,
    the_data,
)
from reference import absent_classes as witness
from torch import Tensor
from torch.nn.functional import cross_entropy

from remanence.core.errors import InputError
from remanence.core.slots import Part
from remanence.core.types import Batch, ClientStats, Output
from remanence.losses.fedlc import calibrated, fedlc
from remanence.losses.fedrs import fedrs, restricted
from remanence.losses.masked_ce import masked, masked_ce
from remanence.losses.tce import truncated
from remanence.methods.fedprox import fedprox
from remanence.testing import check_method

PAIRS: dict[str, tuple[Callable[[], Part], witness.Loss]] = {
    "masked_ce": (masked_ce, witness.masked_cross_entropy),
    "fedlc": (lambda: fedlc(tau=0.7), witness.calibrated(0.7)),
    "fedrs": (lambda: fedrs(alpha=0.3), witness.restricted(0.3)),
}


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("name", PAIRS)
def test_equals_plain_pytorch(name: str, kind: str) -> None:
    make, loss = PAIRS[name]
    experiment = make_experiment(make(), kind)
    x, y, rows = the_data(experiment)
    assert any(len(set(y[mine].tolist())) < CLASSES for mine in rows), (
        "where nobody lacks a class there is nothing to see"
    )
    wanted = witness.train(make_net(kind), x, y, CLASSES, rows, SETTING, loss)
    assert distance(global_values(play_loop(experiment)), wanted) < 1e-10


def test_all_of_them_differ() -> None:
    """From each other and from their relatives: the agreements above are no accident."""
    found = [global_values(play_loop(make_experiment(make(), "mlp"))) for make, _ in PAIRS.values()]
    found += [
        global_values(play_loop(make_experiment(name, "mlp"))) for name in ("fedavg", "tce", "wsm")
    ]
    assert min(distance(a, b) for place, a in enumerate(found) for b in found[:place]) > 1e-3


@pytest.mark.parametrize(
    "method", [masked_ce(), fedlc(), fedrs(), fedprox(mu=0.1) + fedlc(tau=0.5)]
)
def test_every_engine_can_carry_it(method: Any) -> None:
    check_method(method)


# ------------------------------------------------------------------------------------------ by hand


def losses(
    function: Any, logits: Tensor, y: Tensor, counts: list[int], **hyper: float
) -> tuple[Tensor, Tensor]:
    """-> the loss of each row [B], the gradient of their sum with respect to the logits [B, C]"""
    logits = logits.clone().requires_grad_()
    numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in hyper.items()}
    stats = ClientStats(torch.tensor(float(sum(counts))), torch.tensor(counts, dtype=torch.float64))
    batch = Batch(logits.detach(), y, torch.ones(len(y)), torch.arange(len(y)))
    rows = function(Output(logits, logits), batch, SimpleNamespace(stats=stats, hyper=numbers))
    return rows.detach(), torch.autograd.grad(rows.sum(), logits)[0]


Z = torch.tensor([[0.0, math.log(2), math.log(9)]], dtype=torch.float64)  # exp(z) = 1, 2, 9
ONE = torch.tensor([1])


def test_masked_ce_by_hand() -> None:
    """Class 2 is absent: its logit becomes 0, and the denominator 1 + 2 + 1 = 4. For y = 1: log 4 -
    log 2 = log 2, with the gradient (1/4, 2/4 - 1, 0).

    TCE leaves the class out: log 3 - log 2, with the gradient (1/3, 2/3 - 1, 0).
    """
    rows, gradient = losses(masked, Z, ONE, [1, 2, 0])
    assert rows.tolist() == pytest.approx([math.log(2)], abs=1e-15)
    assert gradient[0].tolist() == pytest.approx([1 / 4, -1 / 2, 0.0], abs=1e-15)
    rows, gradient = losses(truncated, Z, ONE, [1, 2, 0])
    assert rows.tolist() == pytest.approx([math.log(3 / 2)], abs=1e-15)
    assert gradient[0].tolist() == pytest.approx([1 / 3, -1 / 3, 0.0], abs=1e-15)


def test_masked_ce_is_not_tce() -> None:
    """TCE does not see the level of the logits, and has nothing to teach a client of one class;
    masked cross-entropy does both.

    One class, y = 1, C = 3: -log(exp(z) / (exp(z) + 2)) with exp(z) = 2 is log 2, and its gradient
    is 2/4 - 1.
    """
    for function, moves in ((truncated, False), (masked, True)):
        low, high = (losses(function, Z + level, ONE, [1, 2, 0])[0] for level in (0.0, 1.0))
        assert (abs(float(high - low)) > 0.1) is moves
        rows, gradient = losses(function, Z, ONE, [0, 5, 0])
        assert rows.tolist() == pytest.approx([math.log(2) if moves else 0.0], abs=1e-15)
        assert gradient[0].tolist() == pytest.approx(
            [0.0, -1 / 2 if moves else 0.0, 0.0], abs=1e-15
        )


def test_fedlc_by_hand() -> None:
    """Counts 1, 16, 0 have margins tau, tau / 2 and infinity. With tau = 2 log 2: exp(z) becomes
    1/4, 2/2 and 0.

    For y = 1: log(5/4) - log 1, with the gradient (1/5, 4/5 - 1, 0).
    """
    rows, gradient = losses(calibrated, Z, ONE, [1, 16, 0], tau=2 * math.log(2))
    assert rows.tolist() == pytest.approx([math.log(5 / 4)], abs=1e-15)
    assert gradient[0].tolist() == pytest.approx([1 / 5, -1 / 5, 0.0], abs=1e-15)


def test_fedrs_by_hand() -> None:
    """Class 2 is absent: its logit log 9 becomes 1/2 log 9 = log 3. For y = 1: log(1 + 2 + 3) -
    log 2 = log 3; the gradient is (1/6, 2/6 - 1, alpha * 3/6).
    """
    rows, gradient = losses(restricted, Z, ONE, [1, 2, 0], alpha=0.5)
    assert rows.tolist() == pytest.approx([math.log(3)], abs=1e-15)
    assert gradient[0].tolist() == pytest.approx([1 / 6, -2 / 3, 1 / 4], abs=1e-15)


@pytest.mark.parametrize(
    ("function", "hyper"), [(masked, {}), (calibrated, {"tau": 0.7}), (restricted, {"alpha": 0.3})]
)
def test_soft_targets_are_means_of_hard_ones(function: Any, hyper: dict[str, float]) -> None:
    """Targets (1/4, 3/4, 0): the loss is linear in the target."""
    soft = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    both, gradient = losses(function, Z, soft, [3, 5, 0], **hyper)
    parts = [losses(function, Z, torch.tensor([c]), [3, 5, 0], **hyper) for c in (0, 1)]
    assert torch.allclose(both, 0.25 * parts[0][0] + 0.75 * parts[1][0], rtol=0, atol=1e-14)
    assert torch.allclose(gradient, 0.25 * parts[0][1] + 0.75 * parts[1][1], rtol=0, atol=1e-14)


logit_rows = st.lists(st.lists(st.floats(-20, 20), min_size=4, max_size=4), min_size=1, max_size=3)
held = st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(any)


@given(logit_rows, held)
def test_how_they_hang_together(values: list[list[float]], counts: list[int]) -> None:
    """fedrs(alpha=0) is masked_ce, fedrs(alpha=1) is cross-entropy, and where every class is
    held equally often all three are.
    """
    logits, own = (
        torch.tensor(values, dtype=torch.float64),
        next(c for c, n in enumerate(counts) if n),
    )
    y = torch.full((len(values),), own)
    plain = cross_entropy(logits, y, reduction="none")
    for wanted, found in zip(
        losses(masked, logits, y, counts),
        losses(restricted, logits, y, counts, alpha=0.0),
        strict=True,
    ):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
    assert torch.allclose(
        losses(restricted, logits, y, counts, alpha=1.0)[0], plain, rtol=0, atol=1e-12
    )
    for function, hyper in ((masked, {}), (calibrated, {"tau": 2.0}), (restricted, {"alpha": 0.2})):
        assert torch.allclose(
            losses(function, logits, y, [3] * 4, **hyper)[0], plain, rtol=0, atol=1e-12
        )


@given(logit_rows, held)
def test_without_calibration_fedlc_is_tce(values: list[list[float]], counts: list[int]) -> None:
    """In the limit: a tau of 1e-13 moves a logit by no more than that. Absent classes get
    exactly no gradient.
    """
    logits, own = (
        torch.tensor(values, dtype=torch.float64),
        next(c for c, n in enumerate(counts) if n),
    )
    y = torch.full((len(values),), own)
    wanted, found = (
        losses(truncated, logits, y, counts),
        losses(calibrated, logits, y, counts, tau=1e-13),
    )
    assert torch.allclose(found[0], wanted[0], rtol=0, atol=1e-12)
    assert torch.allclose(found[1], wanted[1], rtol=0, atol=1e-12)
    absent = torch.tensor(counts) == 0
    for function, hyper in ((masked, {}), (calibrated, {"tau": 1.0})):
        gradient = losses(function, logits, y, counts, **hyper)[1]
        assert torch.equal(gradient[:, absent], torch.zeros_like(gradient[:, absent]))


def test_refuses() -> None:
    for tau in (0.0, -1.0, float("inf")):
        with pytest.raises(InputError, match="fedlc: tau must be a number above 0"):
            fedlc(tau=tau)
    for alpha in (-0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match="fedrs: alpha must be a number from 0 to 1"):
            fedrs(alpha=alpha)
