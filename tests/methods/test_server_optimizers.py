"""FedAvgM, FedAdam, FedYogi and FedAdagrad against plain PyTorch and against numbers worked by
hand.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import server_optimizers as witness
from reference.federated import Setting, normalize
from torch import Tensor, nn

from remanence.core.compose_checks import check
from remanence.core.errors import InputError
from remanence.core.slots import Part
from remanence.core.types import ModelState
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import BuiltExperiment
from remanence.losses import wsm
from remanence.methods import fedprox
from remanence.methods.server_optimizers import fedadagrad, fedadam, fedavgm, fedyogi
from remanence.testing import check_method
from remanence.testing.toy_task import run_rounds, small_experiment

PARTS: dict[str, tuple[Callable[..., Part], dict[str, float]]] = {
    "fedavgm": (fedavgm, {"lr": 0.7, "momentum": 0.8}),
    "fedadam": (fedadam, {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "tau": 0.01}),
    "fedyogi": (fedyogi, {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "tau": 0.01}),
    "fedadagrad": (fedadagrad, {"lr": 0.05, "beta1": 0.3, "tau": 0.01}),
}


def make_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)).double()


def make_experiment(method: Any) -> BuiltExperiment:
    settings = {
        "data.name": "synthetic(samples=100, classes=5, features=6)",
        "data.partition": "dirichlet_by_class(alpha=0.3, minimum=2)",
        "local.optimizer": "sgd(lr=0.1, momentum=0.9)",
        "clients.sample": 3,
        "rounds": 3,
        "seed": 4,
    }
    return small_experiment(method, settings, module=make_net())


def walk(part: Part, moves: list[float]) -> tuple[list[float], dict[str, Tensor]]:
    """One parameter from x = 0 along given moves, beside one that nobody sends. -> x after
    each, the state
    """
    start = {"x": torch.zeros(1, dtype=torch.float64), "frozen": torch.ones(1, dtype=torch.float64)}
    assert part.server_state is not None
    assert part.server_update is not None
    params, state = start, part.server_state(ModelState(start, {}), None)  # type: ignore[arg-type]
    hyper = {name: torch.tensor(value, dtype=torch.float64) for name, value in part.hyper.items()}
    seen = []
    for move in moves:
        srv: Any = SimpleNamespace(state=state, hyper=hyper)
        names = {kind: set(tree) for kind, tree in state.items()}
        params, state = part.server_update(
            params, {"x": torch.tensor([move], dtype=torch.float64)}, srv
        )
        assert {kind: set(tree) for kind, tree in state.items()} == names, (
            "the state keeps its form"
        )
        assert torch.equal(params["frozen"], start["frozen"])
        seen.append(float(params["x"]))
    return seen, {kind: tree["x"] for kind, tree in state.items()}


@pytest.mark.parametrize("kind", PARTS)
def test_three_rounds_equal_plain_pytorch(kind: str) -> None:
    """Half of the clients in a round, of different sizes, with momentum at the clients too."""
    make, numbers = PARTS[kind]
    experiment = make_experiment(make(**numbers))
    rows = experiment.task.population.at(0).train
    x, y = normalize(experiment.dataset.train.x), torch.from_numpy(experiment.dataset.train.y)
    chosen = Setting(rounds=3, cohort=3, epochs=1, batch=4, lr=0.1, momentum=0.9, seed=4)
    wanted = witness.train(
        make_net(),
        x,
        y,
        5,
        [rows.for_client(client) for client in range(6)],
        chosen,
        kind,
        **numbers,
    )
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 3)
    plain, _ = run_rounds(
        make_experiment("fedavg"), SequentialEngine(make_experiment("fedavg").task), 3
    )
    for name, value in wanted.items():
        assert torch.allclose(state.server.model.params[name], value, rtol=0, atol=1e-10)
        assert float((plain.server.model.params[name] - value).abs().max()) > 1e-3, (
            "FedAvg would pass this test"
        )


def test_fedavgm_by_hand() -> None:
    """lr = 1/2, momentum 1/2, moves 4, 2, 0: m = 4, then 2 + 2 = 4, then 2; x = 2, 4, 5."""
    seen, state = walk(fedavgm(lr=0.5, momentum=0.5), [4.0, 2.0, 0.0])
    assert seen == [2.0, 4.0, 5.0]
    assert float(state["m"]) == 2.0


def test_fedadam_by_hand() -> None:
    """lr = 3, beta1 = 1/2, beta2 = 1/4, tau = 2, so v starts at 4.

    Move 4: m = 2, v = 4/4 + 3/4 * 16 = 13, x = 6 / (sqrt(13) + 2).
    Move 2: m = 1 + 1 = 2, v = 13/4 + 3/4 * 4 = 25/4, x moves by 6 / (5/2 + 2) = 4/3.
    """
    seen, state = walk(fedadam(lr=3.0, beta1=0.5, beta2=0.25, tau=2.0), [4.0, 2.0])
    assert seen == pytest.approx([6 / (13**0.5 + 2), 6 / (13**0.5 + 2) + 4 / 3], abs=1e-14)
    assert (float(state["m"]), float(state["v"])) == (2.0, 6.25)


def test_fedyogi_by_hand() -> None:
    """lr = 3, beta1 = 1/2, beta2 = 3/4, tau = 1, so v starts at 1.

    Move 4: m = 2, v = 1 + 16/4 = 5 (16 is above v), x = 6 / (sqrt(5) + 1).
    Move 2: m = 1 + 1 = 2, v = 5 - 4/4 = 4 (4 is below v), x moves by 6 / (2 + 1) = 2.
    Move 2: m = 2, and 4 equals v: v stays, x moves by 2.
    """
    seen, state = walk(fedyogi(lr=3.0, beta1=0.5, beta2=0.75, tau=1.0), [4.0, 2.0, 2.0])
    first = 6 / (5**0.5 + 1)
    assert seen == pytest.approx([first, first + 2, first + 4], abs=1e-14)
    assert (float(state["m"]), float(state["v"])) == (2.0, 4.0)


def test_fedadagrad_by_hand() -> None:
    """lr = 10, tau = 4, no momentum: v starts at 16. Move 3: v = 25, x = 30 / 9. Move -12: v =
    169, x moves by -120 / 17.
    """
    seen, state = walk(fedadagrad(lr=10.0, tau=4.0), [3.0, -12.0])
    assert seen == pytest.approx([30 / 9, 30 / 9 - 120 / 17], abs=1e-14)
    assert float(state["v"]) == 169.0


def test_fedavgm_without_momentum_is_fedavg() -> None:
    models = []
    for method in (fedavgm(momentum=0.0), "fedavg"):
        experiment = make_experiment(method)
        models.append(
            run_rounds(experiment, SequentialEngine(experiment.task), 3)[0].server.model.params
        )
    for name, value in models[0].items():
        assert torch.allclose(value, models[1][name], rtol=0, atol=1e-15)


def test_a_large_tau_makes_fedadam_a_plain_step() -> None:
    """With tau far above the moves v stays near tau^2: the step is lr * m / (2 tau)."""
    seen, _ = walk(fedadam(lr=2e6, beta1=0.0, tau=1e6), [0.3, -0.1])
    assert seen == pytest.approx([0.3, 0.2], rel=2e-2)


def test_a_frozen_head_stays() -> None:
    experiment = make_experiment(fedadam() + Part("frozen_head", frozen=lambda info: info.head))
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    for name, value in state.server.model.params.items():
        assert torch.equal(value, experiment.task.model.initial.params[name]) == (
            name in experiment.task.info.head
        )


@pytest.mark.parametrize("kind", PARTS)
def test_the_contract(kind: str) -> None:
    check_method(PARTS[kind][0]() + fedprox(mu=0.1) + wsm())


def test_two_of_them_are_refused_with_both_names() -> None:
    with pytest.raises(InputError, match="fedadam and fedyogi cannot be combined"):
        check(fedadam() + fedyogi())


@pytest.mark.parametrize(
    ("make", "numbers", "sentence"),
    [
        (fedavgm, {"lr": 0.0}, "fedavgm: lr must be a number above 0, not 0"),
        (fedavgm, {"momentum": 1.0}, "fedavgm: momentum must be a number from 0 to below 1, not 1"),
        (fedadam, {"lr": float("nan")}, "fedadam: lr must be a number above 0, not nan"),
        (fedadam, {"beta1": -0.1}, "fedadam: beta1 must be a number from 0 to below 1, not -0.1"),
        (fedyogi, {"beta2": 1.5}, "fedyogi: beta2 must be a number from 0 to below 1, not 1.5"),
        (fedadagrad, {"tau": 0.0}, "fedadagrad: tau must be a number above 0, not 0"),
    ],
)
def test_refusals(make: Callable[..., Part], numbers: dict[str, float], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make(**numbers)
