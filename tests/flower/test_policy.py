"""What a site declines, and how it changes counts."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remanence.core import rng
from remanence.core.contexts import ServerContext
from remanence.core.declarations import (
    AT_CLIENT,
    AT_SERVER,
    EACH_ROUND,
    EXAMPLE,
    MODEL,
    Disclosure,
    Mechanism,
)
from remanence.core.rng import Key
from remanence.core.slots import Part, Transform
from remanence.flower.discrete_noise import draw_geometric
from remanence.flower.policy import (
    add_noise,
    check_evaluation,
    check_method,
    check_update,
    suppress_counts,
)
from remanence.flower.refusals import Declined
from remanence.flower.secure_noise import needs_secret_noise, secret_noise
from remanence.flower.settings import Policy
from remanence.testing.toy_task import small_experiment

CONFUSION = np.array([[[7, 3], [0, 5]]], dtype=np.int64)
LOSS = np.array([30.0])


def test_counts_do_not_change_by_default() -> None:
    shown, loss = suppress_counts(Policy(), CONFUSION, LOSS)
    assert shown.tolist() == CONFUSION.tolist()
    assert loss.tolist() == [30.0]


def test_small_counts_are_suppressed_and_the_mean_loss_stays() -> None:
    """Below 5: the 3 becomes 0, 5 stays. 12 of 15 examples are left, so the summed loss is 30 * 12
    / 15 = 24, and the mean 2 as before.
    """
    shown, loss = suppress_counts(Policy(suppress=5), CONFUSION, LOSS)
    assert shown.tolist() == [[[7, 0], [0, 5]]]
    assert loss.tolist() == [24.0]
    assert loss[0] / shown.sum() == LOSS[0] / CONFUSION.sum()


def test_with_no_counts_left_the_loss_is_zero() -> None:
    shown, loss = suppress_counts(Policy(suppress=100), CONFUSION, LOSS)
    assert not shown.any()
    assert loss.tolist() == [0.0]


@given(st.floats(5e-324, 5.0))
def test_noised_counts_are_counts(epsilon: float) -> None:
    shown = add_noise(Policy(epsilon=epsilon, suppress=2), CONFUSION)
    assert shown.dtype == np.int64
    assert ((shown == 0) | (shown >= 2)).all()


def test_noise_has_the_promised_distribution() -> None:
    """P(z) = (1 - a) / (1 + a) * a^|z| with a = exp(-epsilon): for epsilon = ln 2, a = 1/2, so
    P(0) = 1/3, P(1) = P(-1) = 1/6 and P(2) = 1/12.
    """
    below = random.Random(1).randrange
    drawn = draw_geometric(Fraction(math.log(2)), (40_000,), below)
    shares = [(drawn == z).mean() for z in (-1, 0, 1, 2)]
    # more than four standard deviations
    assert shares == pytest.approx([1 / 6, 1 / 3, 1 / 6, 1 / 12], abs=0.01)
    assert abs(drawn.mean()) < 0.05


def test_noise_takes_every_value() -> None:
    """With epsilon 1/1000 half of the noise is odd, and the mean size is 1000."""
    drawn = draw_geometric(Fraction(1, 1000), (10_000,), random.Random(1).randrange)
    assert (drawn % 2).mean() == pytest.approx(0.5, abs=0.02)
    assert np.abs(drawn).mean() == pytest.approx(1000, rel=0.05)


def test_noise_comes_from_the_operating_system() -> None:
    """Two responses about the same examples differ, with the same experiment and seed."""
    many = np.repeat(CONFUSION, 50, axis=0)
    shown = [add_noise(Policy(epsilon=0.1), many) for _ in range(2)]
    assert (shown[0] != shown[1]).any()


def test_label_counts_need_permission() -> None:
    task = small_experiment("flashback").task
    check_method(Policy(label_counts=True), task)
    with pytest.raises(Declined, match="flashback asks for label counts") as refused:
        check_method(Policy(), task)
    assert refused.value.code == "policy"


def test_label_counts_that_are_not_sent_need_none() -> None:
    """WSM uses them at the site and does not send them."""
    check_method(Policy(), small_experiment("fedavg+wsm").task)


def test_only_listed_methods_are_accepted() -> None:
    task = small_experiment("scaffold+wsm").task
    check_method(Policy(methods=("scaffold", "wsm")), task)
    with pytest.raises(Declined, match="accepts only fedavg, wsm"):
        check_method(Policy(methods=("fedavg", "wsm")), task)


def test_counts_need_a_permission_or_noise() -> None:
    """Exact counts are label counts, and so are noised counts where one example changes the inputs
    of all.
    """
    method = small_experiment("fedavg").task.method
    assert check_evaluation(Policy(epsilon=0.5), method, own_statistics=False)
    assert check_evaluation(Policy(epsilon=0.5, label_counts=True), method, own_statistics=False)
    assert not check_evaluation(Policy(label_counts=True), method, own_statistics=True)
    for policy, own_statistics, reason in (
        (Policy(), False, "exact counts of predictions reveal label counts"),
        (Policy(suppress=5), False, "exact counts of predictions reveal label counts"),
        (Policy(label_counts=True, evaluate=False), False, "sends no counts"),
        (Policy(epsilon=0.5), True, "normalize all of them with their own mean"),
    ):
        with pytest.raises(Declined, match=reason):
            check_evaluation(policy, method, own_statistics)
    private = small_experiment("fedavg+dp_sgd(noise=1)").task.method
    with pytest.raises(Declined, match="dp_sgd hides single examples, and exact counts"):
        check_evaluation(Policy(label_counts=True), private, own_statistics=False)


def test_small_updates_are_declined() -> None:
    policy = Policy(min_examples=10, min_steps=3)
    check_update(policy, 4, 10, 3)
    with pytest.raises(Declined, match=r"client 4 would come from 9 training examples, and .* 10"):
        check_update(policy, 4, 9, 3)
    with pytest.raises(Declined, match=r"2 local steps, and .* fewer than 3 \(policy.min_steps\)"):
        check_update(policy, 4, 10, 2)


def noisy_part() -> Part:
    """It sends a number that it does not declare."""
    return Part(
        "noisy",
        payload=lambda start, info: {"total": torch.zeros((), dtype=info.dtype)},
        on_client_end=lambda ctx, trained, ops: (
            {},
            {"total": ctx.stats.size + rng.normal(ctx.key, (), torch.float64)},
        ),
    )


def test_an_undeclared_payload_is_declined() -> None:
    task = small_experiment(noisy_part()).task
    check_method(Policy(label_counts=True), task)
    with pytest.raises(Declined, match="noisy sends total, which it does not declare") as declined:
        check_method(Policy(), task)
    assert declined.value.code == "policy"
    declared = replace(noisy_part(), discloses={"total": Disclosure("size")})
    check_method(Policy(), small_experiment(declared).task)


def test_a_payload_that_reveals_examples_needs_permission() -> None:
    """Noise of the experiment's own choice is none: it may be tiny, and is new in every answer."""
    check_method(Policy(), small_experiment("scaffold").task)
    for method in ("fedwavg", "fedwavg(noise=3)", "scaffold(option=1)"):
        check_method(Policy(label_counts=True), small_experiment(method).task)
        with pytest.raises(Declined, match="may reveal single examples"):
            check_method(Policy(), small_experiment(method).task)


def test_under_a_privacy_part_every_payload_is_in_an_account() -> None:
    """Also at a site that allows label counts. FedWAvg's counts of a chosen model give label counts
    away, so dp_counts would hide nothing.
    """
    policy = Policy(label_counts=True)
    check_method(policy, small_experiment("fedwavg(noise=5)+wsm+dp_counts").task)
    check_method(policy, small_experiment("fednova+wsm+dp_counts").task)
    for method, leaf in (("fedwavg", "forgettable"), ("scaffold(option=1)", "change.body.weight")):
        with pytest.raises(Declined, match=rf"dp_counts hides single .* sends \({leaf}\)"):
            check_method(policy, small_experiment(f"{method}+wsm+dp_counts").task)


def test_noise_that_is_not_declared_comes_from_a_secret_key() -> None:
    """A part that declares all it sends draws from the key that the coordinator sends too."""
    assert needs_secret_noise(small_experiment(noisy_part()).task)
    declared = replace(noisy_part(), discloses={"total": Disclosure("size")})
    assert not needs_secret_noise(small_experiment(declared).task)
    noise = Mechanism(EXAMPLE, "total", AT_CLIENT, 1.0, EACH_ROUND)
    assert needs_secret_noise(small_experiment(replace(declared, mechanisms=(noise,))).task)
    transform = Transform("noise", lambda grads, params, ctx: grads)
    assert needs_secret_noise(small_experiment(Part("hidden", transforms=(transform,))).task)


def test_every_server_function_of_a_noisy_part_gets_a_secret_key() -> None:
    """Two calls with one context draw from two keys, also of a part that is not ours."""
    keys: list[Key] = []

    def remember(params: Any, delta: Any, srv: ServerContext) -> Any:
        keys.append(srv.key)
        return params, srv.state

    noise = Mechanism("client", MODEL, AT_SERVER, 1.0, EACH_ROUND)
    part = Part("mine", server_update=remember, mechanisms=(noise,))
    srv: Any = ServerContext(1, None, 0, {}, {}, Key(0), None)  # type: ignore[arg-type]
    for p in (secret_noise(part), replace(part, mechanisms=())):
        assert p.server_update is not None
        for _ in range(2):
            secret_noise(p).server_update({}, {}, srv)  # type: ignore[misc]
    assert len({int(key.tensor()) for key in keys[:2]}) == 2
    assert keys[2] == keys[3] == Key(0)
