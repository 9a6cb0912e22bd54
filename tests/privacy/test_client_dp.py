"""Client-level differential privacy: what is clipped, what is added, who is refused."""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.compose import ComposedMethod
from remanence.core.compose_checks import check
from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.core.slots import Method, Part
from remanence.core.types import ModelState, Reply
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.experiment.privacy_checks import check_client_privacy
from remanence.losses import wsm
from remanence.methods import (
    fedadam,
    fedavg,
    feddf,
    feddrift,
    fedprox,
    flashback,
    moon,
    scaffold,
)
from remanence.methods.centralized import centralized
from remanence.privacy.client_dp import dp, norms_of, split_noise
from remanence.rounds.privacy_budget import client_guarantee
from remanence.testing import TOLERANCE
from remanence.testing.toy_task import (
    EQUAL,
    batch_norm_net,
    max_rel_diff,
    run_rounds,
    small_experiment,
    state_tree,
)
from remanence.training.server_step import Server, ServerResult, update

SHAPES = {"a": (2,), "b": (1, 2)}


def replies_of(moves: list[list[float]], rows: list[int] | None = None) -> Reply:
    """Clients that moved a model from 1 everywhere by these four numbers: two in `a`, two in
    `b`.
    """
    moved = torch.tensor(moves, dtype=torch.float64) + 1.0
    k = len(moves)
    return Reply(
        client=torch.arange(k),
        round=torch.ones(k, dtype=torch.int64),
        params={"a": moved[:, :2], "b": moved[:, 2:].unsqueeze(1)},
        buffers={},
        payload={},
        weight=torch.tensor(rows or [1] * k, dtype=torch.float64),
        client_state={},
        loss=torch.zeros(k),
    )


def one_round(
    method: Part | Method, replies: Reply, key: Key | None = None, state: Any = None
) -> ServerResult:
    """The server's half of a round, on a model of ones."""
    task = small_experiment(method).task
    start = ModelState(
        {name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()}, {}
    )
    return update(
        task,
        Server(start, state or {}),
        replies,
        1,
        key or Key(0),
        {"lr": 0.1},
        SequentialEngine(task),
    )


def move_of(done: ServerResult) -> list[float]:
    return (torch.cat([done.server.model.params[name].flatten() for name in SHAPES]) - 1).tolist()


# ------------------------------------------------------------------------------------ clip and mean


def test_two_clients_by_hand() -> None:
    """Moves (3, 0; 0, 4) of length 5 and (0, 1; 0, 0) of length 1, clip 2: the first shrinks by 2/5
    to (1.2, 0; 0, 1.6), the second stays.

    Their mean is (.6, .5; 0, .8), although the second has nine times the rows.
    """
    done = one_round(dp(clip=2, noise=0), replies_of([[3, 0, 0, 4], [0, 1, 0, 0]], rows=[1, 9]))
    assert move_of(done) == pytest.approx([0.6, 0.5, 0, 0.8])
    assert done.weights.tolist() == [0.5, 0.5]


def test_nobody_moves_the_model_further_than_the_clip_over_k() -> None:
    """The promise rests on this: with and without one client, however far it goes, the mean of
    k differs by clip / k.
    """
    others = [[0.1, 0.2, 0, 0], [0, 0, -5, 0]]
    nothing, far = (
        torch.tensor(move_of(one_round(dp(clip=0.5, noise=0), replies_of([*others, last]))))
        for last in ([0] * 4, [0, 1e6, 0, 0])
    )
    assert float((far - nothing).norm()) == pytest.approx(0.5 / 3, rel=1e-6)


def test_where_clients_join_by_coins_the_sum_is_divided_by_those_expected() -> None:
    """Three of six are expected and two came, with moves (3, 0; 0, 0) and (0, 1; 0, 0), clip 2:
    (2, 1; 0, 0) / 3. So the number of replies is not revealed.
    """
    experiment = small_experiment(
        dp(clip=2, noise=0), {"clients.sample": 3, "clients.sampling": "poisson"}
    )
    start = ModelState(
        {name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()}, {}
    )
    task, replies = experiment.task, replies_of([[3, 0, 0, 0], [0, 1, 0, 0]])
    done = update(task, Server(start, {}), replies, 1, Key(0), {"lr": 0.1}, SequentialEngine(task))
    assert move_of(done) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    adaptive = small_experiment(
        dp(noise=0, adaptive=True), {"clients.sample": 3, "clients.sampling": "poisson"}
    ).task
    state = {"dp": {"clip": torch.tensor(2.0, dtype=torch.float64)}}
    again = update(
        adaptive, Server(start, state), replies, 1, Key(0), {"lr": 0.1}, SequentialEngine(adaptive)
    )
    clip = again.server.state["dp"]["clip"]
    # one within and one beyond: 1/2 + (1/2 - 1/2) / 3 is the quantile already
    assert float(clip) == pytest.approx(2.0)


def test_a_client_that_did_not_move_is_no_division_by_zero() -> None:
    assert move_of(one_round(dp(clip=2, noise=0), replies_of([[0, 0, 0, 0]]))) == [0, 0, 0, 0]


def test_a_loose_clip_without_noise_is_the_plain_mean() -> None:
    replies = replies_of([[3, 0, 0, 4], [0, 1, 0, 0]])
    assert move_of(one_round(dp(clip=100, noise=0), replies)) == pytest.approx(
        move_of(one_round(fedavg(), replies))
    )


def test_the_norm_is_over_the_whole_model() -> None:
    assert norms_of(
        replies_of([[3, 0, 0, 4], [1, 1, 1, 1]]).delta(
            ModelState({name: torch.ones(s) for name, s in SHAPES.items()}, {})
        )
    ).tolist() == [5, 2]


# -------------------------------------------------------------------------------------------- noise


def noises(made: Part, k: int, keys: int) -> Tensor:
    """What is added to the mean of k clients that did not move, for many keys. -> [keys, 4]"""
    still = replies_of([[0.0] * 4] * k)
    state = {"dp": {"clip": torch.tensor(2.0, dtype=torch.float64)}}
    task = small_experiment(made).task
    start = ModelState(
        {name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()}, {}
    )
    server, engine = Server(start, state), SequentialEngine(task)
    return torch.tensor(
        [
            move_of(update(task, server, still, 1, Key(number), {"lr": 0.1}, engine))
            for number in range(keys)
        ]
    )


@pytest.mark.parametrize(("k", "adaptive"), [(1, False), (4, False), (4, True)])
def test_the_deviation_of_the_noise(k: int, adaptive: bool) -> None:
    """noise * clip / k = 1.5 * 2 / k; adaptive, at k = 4, sigma_b = max(4/20, 1.5) = noise, so z
    grows by (1 - 1/4)^(-1/2) = 2 / sqrt(3).

    400 keys of 4 numbers: the deviation is known to 1 / sqrt(2 * 1600) = 1.8%, the mean to
    deviation / 40; four times that is allowed.
    """
    drawn = noises(dp(clip=2, noise=1.5, adaptive=adaptive), k, 400)
    wanted = 1.5 * 2 / k * (2 / math.sqrt(3) if adaptive else 1)
    assert float(drawn.std()) == pytest.approx(wanted, rel=0.071)
    assert abs(float(drawn.mean())) < 4 * wanted / 40
    correlation = torch.corrcoef(drawn.T) - torch.eye(4)
    assert float(correlation.abs().max()) < 4 / math.sqrt(400)  # every number has noise of its own


def test_noise_is_the_keys_and_the_rounds() -> None:
    replies = replies_of([[0.0] * 4])
    first, again, other = (
        move_of(one_round(dp(), replies, key)) for key in (Key(1), Key(1), Key(2))
    )
    assert first == again
    assert first != other


# -------------------------------------------------------------------------------- adaptive clipping


def test_the_clip_follows_the_quantile_by_hand() -> None:
    """Clip 2 and moves of 1, 1, 1 and 5: three quarters are within it. Without noise clip <- 2
    exp(-.2 (.75 - .5)).
    """
    replies = replies_of([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [3, 0, 0, 4]])
    state = {"dp": {"clip": torch.tensor(2.0, dtype=torch.float64)}}
    done = one_round(dp(clip=7, noise=0, adaptive=True), replies, state=state)
    assert float(done.server.state["dp"]["clip"]) == pytest.approx(2 * math.exp(-0.05))
    # the round itself used the clip that its clients were promised: 2, not 7 and not the new one
    assert move_of(done) == pytest.approx([(1 + 3 * 0.4) / 4, 0.25, 0.25, 0.4])


def test_the_clip_settles_at_the_quantile() -> None:
    """Moves of length 1 to 20, always: half of them are within 10."""
    replies, state = (
        replies_of([[float(size), 0, 0, 0] for size in range(1, 21)]),
        {"dp": {"clip": torch.tensor(0.1, dtype=torch.float64)}},
    )
    for number in range(120):
        state = one_round(dp(noise=0.1, adaptive=True), replies, Key(number), state).server.state
    assert 8 < float(state["dp"]["clip"]) < 13


@pytest.mark.parametrize(("noise", "k"), [(1.0, 100), (1.0, 4), (0.3, 20), (5.0, 1)])
def test_both_noises_together_cost_what_one_would(noise: float, k: int) -> None:
    """Two Gaussian mechanisms: 1/z^2 = 1/z_moves^2 + (1/2 / sigma_b)^2."""
    moves, share = split_noise(noise, k)
    assert moves**-2 + (2 * share * k) ** -2 == pytest.approx(noise**-2)
    assert share >= 1 / 20 - 1e-12
    # the paper's sigma_b = 100/20 = 5: 1 - 1/100
    assert split_noise(1.0, 100) == pytest.approx(((1 - 0.01) ** -0.5, 0.05))


# -------------------------------------------------------------------------------- in the round loop


@pytest.mark.parametrize(
    "method",
    [
        fedavg() + dp(noise=0.1),
        fedprox(mu=0.1) + wsm() + dp(adaptive=True),
        fedadam() + dp(),
        moon() + dp(),
    ],
)
def test_with_any_averaging_method_on_every_engine(method: Method) -> None:
    experiment = small_experiment(method)
    check_client_privacy(experiment.task)
    oracle, lines = run_rounds(experiment, SequentialEngine(experiment.task), 3)
    assert not any(line["abandoned"] for line in lines)
    state, _ = run_rounds(experiment, VectorizedEngine(experiment.task, 3), 3)
    assert max_rel_diff(state_tree(state), state_tree(oracle))[1] <= TOLERANCE
    plain, _ = run_rounds(
        small_experiment("fedavg"), SequentialEngine(small_experiment("fedavg").task), 3
    )
    assert max_rel_diff(oracle.server.model.params, plain.server.model.params)[1] > 1e-3


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (scaffold(), "dp and scaffold cannot be combined: scaffold sends more than its model"),
        (flashback(), "dp and flashback cannot be combined: flashback sends more than its model"),
        (
            feddf(),
            "dp and feddf cannot be combined: feddf lets the server read the clients' models",
        ),
        (
            centralized(),
            "dp and centralized cannot be combined: centralized has all data in one place",
        ),
    ],
)
def test_what_else_goes_up_is_refused(other: Part, words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_client_privacy(small_experiment(other + dp()).task)


def test_several_global_models_are_refused() -> None:
    with pytest.raises(
        InputError,
        match="dp and feddrift cannot be combined: feddrift asks every client how well each model"
        " does",
    ):
        check_client_privacy(small_experiment(feddrift() + dp()).task)


def test_another_part_that_weighs_is_refused() -> None:
    with pytest.raises(InputError, match="both replace the weights of the clients"):
        check(dp() + Part("mine", client_weights=lambda replies, srv: replies.weight))


def with_norms(buffers: str) -> BuiltExperiment:
    return small_experiment(
        fedavg() + dp(), EQUAL | {"local.buffers": buffers}, module=batch_norm_net()
    )


def test_buffers_may_stay_but_not_go_up() -> None:
    with pytest.raises(
        InputError,
        match=r"dp cannot protect the model's buffers \(norm.running_mean\).* local.buffers to"
        r" local"
        r" or frozen",
    ):
        check_client_privacy(with_norms("average").task)
    for kept in ("local", "frozen"):
        check_client_privacy(with_norms(kept).task)


def test_what_slipped_through_is_refused_where_it_would_count() -> None:
    """Even if nobody asked `check_client_privacy`."""
    with pytest.raises(InputError, match="dp cannot protect the model's buffers"):
        with_norms("average")
    replies = replies_of([[0.0] * 4])._replace(payload={"other": {"counts": torch.ones(1, 3)}})
    with pytest.raises(InputError, match="clients sent more than that"):
        one_round(dp(), replies)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"clip": 0}, "dp: clip must be a number above 0, not 0"),
        ({"clip": math.inf}, "dp: clip"),
        ({"noise": -1}, "dp: noise must be a number of at least 0"),
        ({"delta": 0}, "dp: delta must be a number between 0 and 1"),
        ({"delta": 1}, "dp: delta"),
        ({"quantile": 1}, "dp: quantile"),
        ({"budget": -1}, "dp: budget"),
        ({"adaptive": 2}, "dp: adaptive must be true or false, not 2"),
        ({"noise": 0, "budget": 3}, "dp: a budget of 3 cannot be kept without noise"),
    ],
)
def test_settings_that_cannot_be(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        dp(**arguments)


def test_a_budget_needs_the_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    with pytest.raises(InputError, match=r"pip install \"remanence-fl\[dp\]\""):
        dp(budget=3)
    dp()  # without one there is nothing to account for


# ------------------------------------------------------------------------------------ the guarantee


def test_what_a_run_promises() -> None:
    method = ComposedMethod(fedavg() + dp(noise=2, delta=1e-6))
    found = client_guarantee(method, 4, 6)
    assert found is not None
    assert (found.noise, found.delta, found.budget, found.sampling) == (2.0, 1e-6, 0.0, "fixed")
    assert found.fraction == pytest.approx(4 / 6)
    sometimes = client_guarantee(method, 4, 6, "any")
    assert sometimes is not None
    assert sometimes.sampling == "any"
    assert client_guarantee(ComposedMethod(fedavg() + wsm()), 4, 6) is None
    assert client_guarantee(ComposedMethod(fedavg() + dp(noise=0)), 4, 6) is None


@pytest.mark.skipif(
    find_spec("dp_accounting") is None,
    reason="the package dp-accounting is not installed (the extra remanence-fl[dp])",
)
def test_an_adaptive_clip_costs_no_more() -> None:
    fixed, adaptive = (
        client_guarantee(ComposedMethod(Method((dp(noise=2, adaptive=kind),))), 4, 6)
        for kind in (False, True)
    )
    assert fixed is not None
    assert fixed == adaptive
    assert fixed.epsilon(3) < math.inf


def test_the_replies_are_left_alone() -> None:
    replies = replies_of([[3, 0, 0, 4], [0, 1, 0, 0]])
    before = pytree.clone(replies.params)
    one_round(dp(), replies)
    assert max_rel_diff(replies.params, before) == ("", 0.0)
