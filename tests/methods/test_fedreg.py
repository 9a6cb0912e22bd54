"""FedReg against its reference, the batches it remembers, what it keeps, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from methods import unequal
from methods.unequal import distance, global_values, make_experiment, make_net, the_data
from reference import fedreg as witness
from torch import Tensor

import remanence as rem
from remanence.aggregators.mean import uniform_weights
from remanence.core.errors import InputError
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.losses import wsm
from remanence.methods.fedreg import batches_of_step, fedreg
from remanence.models import text
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing import check_method
from remanence.testing.toy_task import dataset_for, run_rounds, small_experiment
from remanence.training.task import TrainingTask

SETTING = replace(unequal.SETTING, momentum=0.0, weight_decay=0.0)
PLAIN = {"local.optimizer": "sgd(lr=0.1)"}

ENGINES: dict[str, Callable[[TrainingTask], Any]] = {
    "sequential": SequentialEngine,
    "stacks": lambda task: VectorizedEngine(task, 3, "eager"),
    "captured": lambda task: VectorizedEngine(task, 3, "captured"),
}


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize(
    ("gamma", "beta", "eta_s", "eta_p"), [(0.5, 0.5, 0.1, 0.001), (0.25, 0.8, 0.3, 0.2)]
)
def test_equals_plain_pytorch(
    kind: str, gamma: float, beta: float, eta_s: float, eta_p: float, monkeypatch: Any
) -> None:
    """Three rounds with both projections at work. Batch norm, which `conv` has, is not stacked for
    clients of different sizes.
    """
    projected: list[bool] = []

    def counted(way: Tensor, g: Tensor) -> Tensor:
        projected.append(float((way * g).sum()) > 0)
        return without(way, g)

    without = witness.without
    monkeypatch.setattr(witness, "without", counted)
    experiment = make_experiment(
        fedreg(gamma=gamma, beta=beta, eta_s=eta_s, eta_p=eta_p), kind, **PLAIN
    )
    wanted = witness.train(
        make_net(kind), *the_data(experiment), SETTING, gamma, beta, eta_s, eta_p
    )
    assert sum(projected[::2]) > 20, "pseudo examples that are never in the way prove nothing"
    assert eta_p < 0.1 or sum(projected[1::2]) > 5
    for name in ["sequential"] if kind == "conv" else ENGINES:
        engine = ENGINES[name](experiment.task)
        state, _ = run_rounds(experiment, engine, 3)
        assert distance(global_values(state), wanted) < 1e-10, name
        assert not engine.degraded_reason, name


def test_the_projections_matter() -> None:
    """Without memory at the same models in between it ends elsewhere, far beyond rounding."""
    start = fedreg()
    alike = replace(start, name="alike", project=None)
    states = [
        global_values(unequal.play_loop(make_experiment(method, "mlp", **PLAIN)))
        for method in (start, replace(alike, on_client_start=None, hyper=start.hyper))
    ]
    assert distance(*states) > 1e-3


@pytest.mark.parametrize("method", [fedreg(), fedreg(gamma=0.25, eta_s=0.2) + wsm()])
def test_every_engine_can_carry_it(method: Any) -> None:
    check_method(method)


def test_nothing_is_kept_and_nothing_is_sent() -> None:
    """Remembered examples are made anew in every round; neither they nor their labels leave."""
    for make in ENGINES.values():
        experiment = make_experiment(fedreg(), "mlp", **PLAIN)
        work = make_work(experiment, first_state(experiment), 1)
        for reply in make(experiment.task).train(work):
            assert reply.payload == {}
            assert not any(reply.client_state.values())


def test_the_batches_of_a_step_by_hand() -> None:
    """Five examples in batches of two, in the order in which they are kept: 0 1, 2 3, 4, and again.
    The third batch is filled with the first example, which does not count.
    """
    five = torch.arange(5.0, dtype=torch.float64)
    room = torch.cat([five, torch.full((3,), torch.nan, dtype=torch.float64)])
    memory = {
        "count": torch.tensor(5),
        "pseudo": room,
        "perturbed": room + 10,
        "predictions": torch.stack([room, 1 - room], dim=1),
        "labels": torch.arange(8),
        "ids": torch.arange(8) + 70,
    }
    info = SimpleNamespace(batch_size=2, dtype=torch.float64)
    seen = []
    for step in range(4):
        ctx: Any = SimpleNamespace(client_state=memory, info=info, step=torch.tensor(step))
        pseudo, perturbed = batches_of_step(ctx)
        assert torch.equal(perturbed.x, pseudo.x + 10)
        assert torch.equal(pseudo.y[:, 0], pseudo.x)
        assert perturbed.y.tolist() == pseudo.x.tolist()
        assert pseudo.ids.tolist() == perturbed.ids.tolist() == [70 + x for x in pseudo.x.tolist()]
        assert torch.equal(pseudo.weight, perturbed.weight)
        seen.append((pseudo.x.tolist(), pseudo.weight.tolist()))
    assert seen == [([0, 1], [1, 1]), ([2, 3], [1, 1]), ([4, 0], [1, 0]), ([0, 1], [1, 1])]


def test_two_clients_count_alike() -> None:
    """30 rows and 1 row: the same weight, whatever the size."""
    replies: Any = SimpleNamespace(weight=torch.tensor([30.0, 1.0]))
    srv: Any = None
    assert fedreg().client_weights is uniform_weights
    assert uniform_weights(replies, srv).tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_it_forgets_less_than_fedavg_on_digits() -> None:
    """Two shards a client, four of 20 clients in a round, the authors' gamma and step sizes: the
    mean accuracy of the last five of 20 rounds is above FedAvg's for seven of eight seeds or more.
    """
    setting: dict[str, Any] = {
        "data": "digits",
        "partition": "shards(per_client=2)",
        "clients": 20,
        "sample": 4,
        "epochs": 5,
        "batch_size": 20,
        "lr": 0.1,
        "rounds": 20,
        "engine": "sequential",
        "set": {"threads": 1},
        "quiet": True,
    }

    def accuracy(method: str, seed: int) -> float:
        ends: list[float] = rem.run(method=method, seed=seed, **setting).curve()[1][-5:]
        return sum(ends) / len(ends)

    method = "fedreg(gamma=0.5, eta_s=0.1, eta_p=0.001)"
    above = [accuracy(method, seed) > accuracy("fedavg", seed) for seed in range(8)]
    assert sum(above) >= 7, above


def test_refuses_tokens_before_any_work() -> None:
    network = text((7,), 3, vocabulary=20)
    with pytest.raises(
        InputError,
        match="fedreg moves inputs along their gradient, and tokens have no gradient",
    ):
        small_experiment(fedreg(), module=network, source=dataset_for(network, (7,), 3))


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
