"""FedWAvg: against its reference, its weights by hand, and when a client counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.small_task import CLASSES, in_plain_tensors, largest_gap, make_experiment, make_net
from reference import fedwavg as reference
from reference.fedbn import names_of_normalization
from torch import Tensor

from remanence.core.errors import InputError
from remanence.core.slots import Method, Part
from remanence.core.types import Batch, ModelState, Output
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.losses import wsm
from remanence.methods import fedbn, fedprox
from remanence.methods.fedwavg import client_weights, count_forgotten, fedwavg, forgetting_weights
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing import check_method
from remanence.testing.toy_task import (
    EQUAL,
    batch_norm_net,
    max_rel_diff,
    run_rounds,
    small_experiment,
    state_tree,
)

ROUNDS = 4  # with half of the clients in a round, most have come back by then
CASES: dict[str, tuple[Part | Method, dict[str, Any], int]] = {
    "alone": (fedwavg(alpha=0.8), {}, 1),
    "every second round": (fedwavg(alpha=0.8, every=2), {}, 2),
    "fedprox and wsm": (
        fedwavg(alpha=0.8) + fedprox(mu=0.1) + wsm(),
        {"mu": 0.1, "loss": "wsm"},
        1,
    ),
}


def run_both(case: str, kind: str) -> tuple[float, list[dict[int, float]], list[dict[str, Any]]]:
    method, setting, every = CASES[case]
    experiment = make_experiment(method, kind, rounds=ROUNDS)
    state, lines = run_rounds(experiment, SequentialEngine(experiment.task), ROUNDS)
    x, y, rows, _, chosen = in_plain_tensors(experiment, rounds=ROUNDS, **setting)
    wanted, uploads = reference.train(make_net(kind), x, y, CLASSES, rows, chosen, 0.8, every)
    return largest_gap(state, wanted, kind), uploads, lines


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("case", CASES)
def test_it_equals_algorithm_1(case: str, kind: str) -> None:
    gap, uploads, lines = run_both(case, kind)
    sent = [count for round in uploads for count in round.values()]
    assert max(sent) > 1, "where nobody forgets, the weights are not tried"
    assert [line["payload"]["fedwavg.forgettable"] for line in lines] == pytest.approx(
        [np.mean(list(round.values())) for round in uploads]
    )
    assert gap < 1e-10


@pytest.mark.parametrize("method", [fedwavg(alpha=0.8) + fedbn(), fedwavg(alpha=0.8)])
def test_a_client_counts_with_the_normalization_it_keeps(method: Any) -> None:
    """A client that keeps its normalization evaluates the received model with it in place: with
    its scales and statistics (fedbn), or with its statistics alone (local.buffers=local).
    """
    local = {} if isinstance(method, Method) else {"local.buffers": "local"}
    experiment = make_experiment(method, "conv", rounds=ROUNDS, **local)
    state, lines = run_rounds(experiment, SequentialEngine(experiment.task), ROUNDS)
    x, y, rows, _, chosen = in_plain_tensors(experiment, rounds=ROUNDS)
    net = make_net("conv")
    kept = names_of_normalization(net)
    if local:
        kept = [name for name, _ in net.named_buffers()]
    wanted, uploads = reference.train(net, x, y, CLASSES, rows, chosen, 0.8, 1, kept)
    assert [line["payload"]["fedwavg.forgettable"] for line in lines] == pytest.approx(
        [np.mean(list(round.values())) for round in uploads]
    )
    assert largest_gap(state, wanted, "conv") < 1e-10


def test_stacked_clients_count_with_the_normalization_they_keep() -> None:
    experiment = small_experiment(
        fedwavg() + fedbn(), EQUAL | {"local.epochs": 4, "rounds": ROUNDS}, module=batch_norm_net()
    )
    (one, lines), (many, others) = (
        run_rounds(experiment, engine, ROUNDS)
        for engine in (
            SequentialEngine(experiment.task),
            VectorizedEngine(experiment.task, 3),
        )
    )
    assert max(line["payload"]["fedwavg.forgettable"] for line in lines) > 1
    assert [line["payload"] for line in lines] == [line["payload"] for line in others]
    assert max_rel_diff(state_tree(many), state_tree(one))[1] <= 1e-12


def test_the_event_period_matters() -> None:
    """In rounds 1 and 3 of a period of 2 nobody counts; what is sent then is the last count."""
    _, always, _ = run_both("alone", "mlp")
    _, seldom, _ = run_both("every second round", "mlp")
    assert always[0] == seldom[0] == dict.fromkeys(always[0], 1.0)
    assert always != seldom


def test_the_weights_by_hand() -> None:
    """F = (3, 1), alpha = 1/2: W = 1/2 + 1/2 * 2 * (3/4, 1/4) = (5/4, 3/4).

    Models 8 and 16 become (5/4 * 8 + 3/4 * 16) / 2 = (10 + 12) / 2 = 11; a plain mean is 12, and
    sizes play no part.
    """
    replies: Any = SimpleNamespace(
        payload={"fedwavg": {"forgettable": torch.tensor([3.0, 1.0])}},
        weight=torch.tensor([900.0, 1.0]),
    )
    srv: Any = SimpleNamespace(hyper={"alpha": torch.tensor(0.5)})
    weights = client_weights(replies, srv)
    assert weights.tolist() == [1.25, 0.75]
    assert float((weights * torch.tensor([8.0, 16.0])).mean()) == 11


def test_nobody_forgot_anything() -> None:
    assert forgetting_weights(torch.zeros(3, dtype=torch.float64), torch.tensor(0.3)).tolist() == [
        1.0,
        1.0,
        1.0,
    ]


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=40), st.floats(0, 0.999))
def test_the_weights_sum_to_the_number_of_clients(counts: list[int], alpha: float) -> None:
    """sum W = (1 - alpha) N + alpha N = N, and no weight is below 1 - alpha: the average stays
    convex. More forgotten is never less weight.
    """
    weights = forgetting_weights(
        torch.tensor(counts, dtype=torch.float64), torch.tensor(alpha, dtype=torch.float64)
    )
    assert float(weights.sum()) == pytest.approx(len(counts), rel=1e-12)
    assert float(weights.min()) >= 1 - alpha - 1e-12
    order = np.argsort(counts, kind="stable")
    assert bool((weights[torch.from_numpy(order)].diff() >= 0).all())
    assert weights.tolist() == pytest.approx(reference.averaging_weights(counts, alpha), rel=1e-12)


def test_forgettable_examples_by_hand() -> None:
    """Labels 0 1 0 1 0. The local model says 0 1 0 0 0, the received one 0 0 1 1 1.

    Rows 1, 2 and 4 were right and are wrong now; row 3 was wrong and is right now; row 0 stays
    right. Row 4 is padding: two are lost.
    """
    y, weight = torch.tensor([0, 1, 0, 1, 0]), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])

    def predict(model: ModelState, split: str = "train") -> tuple[Output, Batch]:
        logits = torch.nn.functional.one_hot(model.params["says"], 2).float()
        return Output(logits, logits), Batch(y, y, weight, y)

    local, received = (
        ModelState({"says": torch.tensor(says)}, {}) for says in ([0, 1, 0, 0, 0], [0, 0, 1, 1, 1])
    )
    ops: Any = SimpleNamespace(predict=predict)
    assert float(count_forgotten(local, received, ops)) == 2
    assert float(count_forgotten(received, local, ops)) == 1


def test_a_newcomer_has_nothing_to_forget() -> None:
    """In round 1 all bring F = 1; later so does whoever comes for the first time, while those
    who come back bring a count.
    """
    experiment = make_experiment(fedwavg(), "mlp", rounds=ROUNDS)
    known: set[int] = set()
    state, counts = first_state(experiment), []
    for round in range(1, ROUNDS + 1):
        work = make_work(experiment, state, round)
        for reply in SequentialEngine(experiment.task).train(work):
            sent = float(reply.payload["fedwavg"]["forgettable"])
            if int(reply.client) in known:
                counts.append(sent)
            else:
                assert sent == 1
        known |= set(work.clients.tolist())
        state, _ = run_rounds(experiment, SequentialEngine(experiment.task), round)
    assert len(known) < ROUNDS * 3
    assert max(counts) > 1


def test_alpha_0_is_the_plain_mean() -> None:
    """And not FedAvg's: the largest client weighs as much as the smallest."""
    experiment = make_experiment(fedwavg(alpha=0.0), "mlp")
    work = make_work(experiment, first_state(experiment), 1)
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    replies = list(SequentialEngine(experiment.task).train(work))
    for name, value in state.server.model.params.items():
        mean: Tensor = sum(reply.params[name][0] for reply in replies) / len(replies)  # type: ignore[assignment]
        assert torch.allclose(value, mean, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "method",
    [fedwavg(), fedwavg(alpha=0.5, every=2) + fedprox(mu=0.01) + wsm()],
    ids=["alone", "fedprox and wsm"],
)
def test_it_keeps_the_contract(method: Any) -> None:
    check_method(method, rounds=3)


@pytest.mark.parametrize(
    "options", [{"alpha": 1.0}, {"alpha": -0.1}, {"alpha": float("nan")}, {"every": 0}]
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"fedwavg: {next(iter(options))} must be a number"):
        fedwavg(**options)
