"""MOON against its witness, against numbers worked by hand, its first round, and its projection
head.
"""

from __future__ import annotations

import copy
import math
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
from reference import moon as witness
from torch import Tensor, nn

from remanence.core.errors import InputError
from remanence.core.types import Batch, Output
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.losses import wsm
from remanence.methods.moon import contrast, moon
from remanence.models import MODELS
from remanence.testing import check_method
from remanence.testing.toy_task import max_rel_diff, run_rounds, small_experiment, state_tree


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize(("mu", "temperature"), [(5.0, 0.5), (0.8, 0.05)])
def test_equals_plain_pytorch(kind: str, mu: float, temperature: float) -> None:
    """The global model, and what each client keeps: its last local model with its statistics."""
    experiment = make_experiment(moon(mu=mu, temperature=temperature), kind)
    wanted, last = witness.train(make_net(kind), *the_data(experiment), SETTING, mu, temperature)
    state = play_loop(experiment)
    assert distance(global_values(state), wanted) < 1e-10
    assert state.client_states.keys() == last.keys()
    for client, kept in state.client_states.items():
        assert (
            distance({**kept["moon"]["params"], **kept["moon"].get("buffers", {})}, last[client])
            < 1e-10
        )
        assert float(kept["moon"]["seen"]) == 1


def test_a_first_round_is_fedavg_and_a_second_is_not() -> None:
    """With all clients in every round nobody has a negative in round 1, and everybody in round
    2.
    """
    both = [
        make_experiment(method, "conv", **{"clients.sample": 6}) for method in ("fedavg", moon())
    ]
    first, second = (
        [global_values(play_loop(experiment, rounds)) for experiment in both] for rounds in (1, 2)
    )
    assert distance(*first) == 0
    assert distance(*second) > 1e-3


def test_mu_zero_is_fedavg_to_the_bit() -> None:
    plain, without = (
        play_loop(make_experiment(method, "conv")) for method in ("fedavg", moon(mu=0.0))
    )
    assert distance(global_values(without), global_values(plain)) == 0


@pytest.mark.parametrize("method", [moon(), moon(mu=1.0) + wsm()])
def test_every_engine_can_carry_it(method: Any) -> None:
    check_method(method)


# ------------------------------------------------------------------------------------------ by hand


def contrasted(
    z: list[float], z_glob: list[float], z_prev: list[float], seen: float = 1.0
) -> tuple[float, list[float]]:
    """-> the term of one row at mu = 5, T = 1/2, and its gradient with respect to the features"""
    models = {
        "start": torch.tensor([z_glob], dtype=torch.float64),
        "previous": torch.tensor([z_prev], dtype=torch.float64),
    }
    features = torch.tensor([z], dtype=torch.float64, requires_grad=True)
    numbers = {
        "mu": torch.tensor(5.0, dtype=torch.float64),
        "temperature": torch.tensor(0.5, dtype=torch.float64),
    }
    ops: Any = SimpleNamespace(
        forward=lambda model: Output(features, models["start" if model == "start" else "previous"])
    )
    ctx: Any = SimpleNamespace(
        hyper=numbers,
        start="start",
        client_state={"params": {}, "seen": torch.tensor(seen, dtype=torch.float64)},
    )
    rows = contrast(
        Output(features, features),
        Batch(features, torch.zeros(1), torch.ones(1), torch.zeros(1)),
        ops,
        ctx,
    )
    return float(rows.detach()), torch.autograd.grad(rows.sum(), features)[0][0].tolist()


def test_by_hand() -> None:
    """z = (2, 0), z_glob = (3, 0), z_prev = (0, 1): cosines 1 and 0, over T they are 2 and 0, so
    the term is 5 * log(1 + exp(-2)).

    Only the direction of z counts: along z the gradient is 0. Across it the cosines change by 0 and
    1/|z| = 1/2, and the term by 5 * exp(0) / (exp(2) + exp(0)) * (1/2) / T = 5 / (exp(2) + 1).
    """
    term, gradient = contrasted([2.0, 0.0], [3.0, 0.0], [0.0, 1.0])
    assert term == pytest.approx(5 * math.log(1 + math.exp(-2)), abs=1e-14)
    assert gradient == pytest.approx([0.0, 5 / (math.exp(2) + 1)], abs=1e-14)


def test_no_negative_no_term() -> None:
    assert contrasted([2.0, 1.0], [3.0, 0.0], [0.0, 1.0], seen=0.0) == (0.0, [0.0, 0.0])


def test_features_of_zero_length_stay_finite() -> None:
    """A row on which every unit is silent has no direction: both cosines count as 0, and the
    term is 5 log 2.
    """
    term, gradient = contrasted([0.0, 0.0], [0.0, 0.0], [0.0, 1.0])
    assert term == pytest.approx(5 * math.log(2), abs=1e-14)
    assert all(math.isfinite(number) for number in gradient)


# ------------------------------------------------------------------------------ the projection head


def test_projection_equals_plain_pytorch() -> None:
    """On the changed network, whose features are what leaves the projection: d-d-3 with d = 6."""
    experiment = make_projected()
    net = copy.deepcopy(experiment.task.model.source_module)
    assert [tuple(p.shape) for name, p in net.named_parameters() if "projection" in name] == [
        (6, 6),
        (6,),
        (3, 6),
        (3,),
    ]
    assert tuple(net.head.weight.shape) == (4, 3)
    assert experiment.task.info.head == ("head.weight", "head.bias")
    assert not [name for name, _ in net.named_parameters() if name.startswith("body.head")], (
        "the old classifier would be averaged for nothing"
    )
    wanted, _ = witness.train(net, *the_data(experiment), SETTING, 5.0, 0.5)
    assert distance(global_values(play_loop(experiment)), wanted) < 1e-10


def test_projection_on_a_stack() -> None:
    experiment = make_projected()
    states = [
        state_tree(run_rounds(experiment, engine, 2)[0])
        for engine in (SequentialEngine(experiment.task), VectorizedEngine(experiment.task, 3))
    ]
    assert max_rel_diff(*states)[1] < 1e-12


def make_projected() -> Any:
    changes = {
        "model": "mlp(hidden=6)",
        "local.optimizer": "sgd(lr=0.1, momentum=0.9, weight_decay=0.01)",
        "local.epochs": 2,
        "seed": 4,
    }
    return small_experiment(moon(projection=3), changes)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (5,)),
        ("cnn", (1, 8, 8)),
        ("lenet", (3, 32, 32)),
        ("resnet18", (3, 32, 32)),
        ("shallow_resnet", (3, 32, 32)),
        ("text", (7,)),
    ],
)
def test_projection_fits_every_network_of_ours(name: str, shape: tuple[int, ...]) -> None:
    adapt = moon(projection=8).modify_model
    assert adapt is not None
    given = MODELS[name](shape, 3)
    net = adapt(given, 3).eval()
    x = torch.zeros(2, *shape, dtype=torch.int64 if name == "text" else torch.float32)
    assert net.features(x).shape == (2, 8)
    assert torch.equal(net(x), net.head(net.features(x)))
    assert getattr(net, "vocabulary", None) == getattr(given, "vocabulary", None)
    assert isinstance(given.head, nn.Linear), "the network that was given must stay as it was"


class NoHead(nn.Module):
    def features(self, x: Tensor) -> Tensor:
        return x


class NoFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize("network", [nn.Linear(2, 2), NoHead(), NoFeatures()])
def test_projection_refuses_other_networks(network: nn.Module) -> None:
    adapt = moon(projection=256).modify_model
    assert adapt is not None
    with pytest.raises(
        InputError,
        match=rf"moon cannot put a projection head into {type(network).__name__}: .*projection=0",
    ):
        adapt(network, 2)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"mu": -1.0}, "mu"),
        ({"temperature": 0.0}, "temperature"),
        ({"projection": -1}, "projection"),
    ],
)
def test_refuses(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=f"moon: {name} must be a number"):
        moon(**arguments)
