"""FedNova against plain PyTorch, its effective steps against closed forms, and two clients
worked by hand.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from methods.three_of_six import make_experiment, make_net
from reference import fednova as witness
from reference.federated import Setting, normalize

from remanence.core.errors import InputError
from remanence.core.types import ModelState, Reply
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.losses import tce
from remanence.methods import fedprox
from remanence.methods.fednova import fednova, rescale, sum_normalized
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing import check_method
from remanence.testing.toy_task import run_rounds


def sent_steps(
    method: Any, optimizer: str, engine: type = SequentialEngine
) -> tuple[list[float], list[int]]:
    """What every client says its effective steps are, and how many steps it makes: rows / 4,
    twice.
    """
    experiment = make_experiment(
        method, **{"local.optimizer": optimizer, "local.epochs": 2, "clients.sample": 6}
    )
    replies = Reply.concat(
        list(engine(experiment.task).train(make_work(experiment, first_state(experiment), 1)))
    )
    order = torch.argsort(replies.client)
    sizes = experiment.task.population.at(0).train.sizes
    return replies.payload["fednova"]["steps"][order].tolist(), [2 * -(-int(n) // 4) for n in sizes]


@pytest.mark.parametrize(
    ("optimizer", "mu"),
    [
        ({"lr": 0.1}, 0.0),
        ({"lr": 0.1, "momentum": 0.9}, 0.0),
        ({"lr": 0.1}, 0.5),
        ({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}, 0.2),
    ],
    ids=["plain", "momentum", "proximal", "all"],
)
def test_three_rounds_equal_plain_pytorch(optimizer: dict[str, float], mu: float) -> None:
    """Half of the clients in a round, of different sizes, with a learning rate that changes."""
    written = ", ".join(f"{name}={value}" for name, value in optimizer.items())
    more = {
        "local.optimizer": f"sgd({written})",
        "local.epochs": 2,
        "local.schedule": "exponential(decay=0.8)",
    }
    experiment = make_experiment(fednova() + fedprox(mu=mu) if mu else fednova(), **more)
    rows = experiment.task.population.at(0).train
    chosen = Setting(
        rounds=3,
        cohort=3,
        epochs=2,
        batch=4,
        mu=mu,
        schedule="exponential",
        decay=0.8,
        seed=4,
        **optimizer,
    )
    x, y = normalize(experiment.dataset.train.x), torch.from_numpy(experiment.dataset.train.y)
    wanted = witness.train(
        make_net(), x, y, 5, [rows.for_client(client) for client in range(6)], chosen
    )
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 3)
    plain = make_experiment(fedprox(mu=mu) if mu else "fedavg", **more)
    other, _ = run_rounds(plain, SequentialEngine(plain.task), 3)
    for name, value in wanted.items():
        assert torch.allclose(state.server.model.params[name], value, rtol=0, atol=1e-10)
        assert float((other.server.model.params[name] - value).abs().max()) > 1e-3, (
            "FedAvg would pass this test"
        )


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_effective_steps_equal_closed_forms(engine: type) -> None:
    """Plain SGD: a = K.

    Momentum rho: m_t = (1 - rho^t) / (1 - rho), a = sum_t m_t = (K - rho (1 - rho^K) / (1 - rho)) /
    (1 - rho).
    FedProx: a_t = alpha a_{t-1} + 1 with alpha = 1 - lr mu, so a = (1 - alpha^K) / (1 - alpha).
    """
    found, counts = sent_steps(fednova(), "sgd(lr=0.1)", engine)
    assert len(set(counts)) > 1
    assert found == pytest.approx(counts, abs=1e-12)
    rho, alpha = 0.9, 1 - 0.1 * 0.5
    found, _ = sent_steps(fednova(), f"sgd(lr=0.1, momentum={rho})", engine)
    assert found == pytest.approx(
        [(k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho) for k in counts], abs=1e-11
    )
    found, _ = sent_steps(fednova() + fedprox(mu=0.5), "sgd(lr=0.1)", engine)
    assert found == pytest.approx([(1 - alpha**k) / (1 - alpha) for k in counts], abs=1e-12)


def test_recurrences_equal_closed_forms() -> None:
    """m <- rho m + 1, a <- a + m for three steps with rho = 1/2: m = 1, 3/2, 7/4 and a = 17/4. (1 -
    lr mu) a + 1 with lr mu = 1/2: 1, 3/2, 7/4.

    Both at once, v <- v / 2 + 1 - a / 2, a <- a + v:  v = 1, a = 1;  v = 1/2 + 1/2 = 1, a = 2;  v =
    1/2 + 0 = 1/2, a = 5/2.
    """
    assert witness.effective_steps(3, lr=0.1, momentum=0.5) == pytest.approx(17 / 4, abs=1e-15)
    assert witness.effective_steps(3, lr=0.5, mu=1.0) == pytest.approx(7 / 4, abs=1e-15)
    assert witness.effective_steps(3, lr=0.5, momentum=0.5, mu=1.0) == pytest.approx(
        5 / 2, abs=1e-15
    )


def test_two_clients_by_hand() -> None:
    """x = 1. Client 1: weight 1/4, 2 steps, y = 3. Client 2: weight 3/4, 6 steps, y = -5.

    Directions per step: (3 - 1) / 2 = 1 and (-5 - 1) / 6 = -1; their mean 1/4 - 3/4 = -1/2. tau_eff
    = 2/4 + 18/4 = 5, so the step is -5/2. FedAvg would go 2/4 - 18/4 = -4: the client with more
    steps pulls harder than its weight.
    """
    ys, steps = (
        torch.tensor([[3.0], [-5.0]], dtype=torch.float64),
        torch.tensor([2.0, 6.0], dtype=torch.float64),
    )
    empty = torch.zeros(2, dtype=torch.float64)
    replies = Reply(
        torch.arange(2),
        torch.ones(2).long(),
        {"w": ys},
        {},
        {"fednova": {"steps": steps}},
        empty,
        {},
        empty,
    )
    srv: Any = SimpleNamespace(
        start=ModelState({"w": torch.tensor([1.0], dtype=torch.float64)}, {})
    )
    total = sum_normalized(torch.tensor([0.25, 0.75], dtype=torch.float64), replies, srv)
    assert rescale(total, srv)["w"].tolist() == [-2.5]


@pytest.mark.parametrize(
    "optimizer", ["sgd(lr=0.1)", "sgd(lr=0.1, momentum=0.9, weight_decay=0.01)"]
)
def test_equal_steps_are_fedavg(optimizer: str) -> None:
    """All a_i = a: a * sum_i p_i delta_i / a. Clients of different sizes that make three steps
    each.
    """
    models = []
    for method in (fednova(), "fedavg"):
        experiment = make_experiment(
            method, **{"local.optimizer": optimizer, "local.steps": 3, "local.epochs": 0}
        )
        models.append(
            run_rounds(experiment, SequentialEngine(experiment.task), 3)[0].server.model.params
        )
    for name, value in models[0].items():
        assert torch.allclose(value, models[1][name], rtol=0, atol=1e-13)


def test_a_learning_rate_that_ends_at_zero_moves_nothing() -> None:
    """-u / lr would be 0 / 0 in the last round of a cosine."""
    experiment = make_experiment(fednova(), **{"local.schedule": "cosine"})
    before, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    after, lines = run_rounds(experiment, SequentialEngine(experiment.task), 3)
    assert not lines[2]["abandoned"]
    for name, value in before.server.model.params.items():
        assert torch.equal(after.server.model.params[name], value)


@pytest.mark.parametrize(
    "method",
    [fednova(), fednova() + fedprox(mu=0.1) + tce()],
    ids=["fednova", "with fedprox and tce"],
)
def test_the_contract(method: Any) -> None:
    check_method(method)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_is_refused_with_the_cure(optimizer: str) -> None:
    with pytest.raises(
        InputError,
        match=f"fednova: the update of {optimizer} is not a weighted sum.*: train with sgd",
    ):
        make_experiment(fednova(), **{"local.optimizer": f"{optimizer}(lr=0.01)"})
