"""Every method of ours against the plain PyTorch in `reference.federated`, and the two losses
against numbers worked by hand.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import federated
from torch import Tensor, nn

from remanence.core.types import Batch, ClientStats, Output
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import BuiltExperiment
from remanence.losses.tce import truncated
from remanence.losses.wsm import re_weighted
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing.toy_task import run_rounds, small_experiment

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox(mu=0.1)": {"mu": 0.1},
    "fedavg+wsm": {"loss": "wsm"},
    "fedavg+tce": {"loss": "tce"},
    "fedprox(mu=0.1)+wsm": {"mu": 0.1, "loss": "wsm"},
    "fedprox(mu=0.1)+tce": {"mu": 0.1, "loss": "tce"},
}


class ConvNet(nn.Module):
    """A convolution without bias before batch norm: a bias there has a gradient of pure
    rounding, which Adam would blow up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=2, bias=False), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten()
        )
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def make_net(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = (
            nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
            if kind == "mlp"
            else ConvNet()
        )
    return net.double()


def make_experiment(
    method: str, kind: str, partition: str, optimizer: str, **more: Any
) -> BuiltExperiment:
    data = (
        "synthetic(samples=100, classes=5, features=6)"
        if kind == "mlp"
        else "synthetic(samples=100, classes=5, shape='2x6x6')"
    )
    settings = {
        "data.name": data,
        "data.partition": partition,
        "local.optimizer": optimizer,
        "clients.sample": 3,
        "rounds": 3,
        "seed": 4,
    }
    return small_experiment(method, settings | more, module=make_net(kind))


def compare(
    experiment: BuiltExperiment, kind: str, *, with_validation: bool = False, **setting: Any
) -> float:
    """The largest difference after all rounds between the program and the reference."""
    rows, valid = experiment.task.population.at(0).train, experiment.task.population.at(0).valid
    assert len(set(rows.sizes.tolist())) > 1, "clients of equal size would hide a wrong weight"
    x, y = (
        federated.normalize(experiment.dataset.train.x),
        torch.from_numpy(experiment.dataset.train.y),
    )
    chosen = federated.Setting(rounds=3, cohort=3, batch=4, seed=4, **{"epochs": 1} | setting)
    trained_on = [rows.for_client(client) for client in range(len(rows.sizes))]
    counted = [
        np.concatenate([mine, valid.for_client(client)]) if with_validation else mine
        for client, mine in enumerate(trained_on)
    ]
    wanted = federated.train(make_net(kind), x, y, 5, trained_on, chosen, counted)
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 3)
    found = {**state.server.model.params, **state.server.model.buffers}
    assert found.keys() == wanted.keys()
    moved = max(
        float((wanted[name] - start).abs().max())
        for name, start in make_net(kind).state_dict().items()
    )
    assert moved > 0.01, "a model that hardly moved proves nothing"
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("method", METHODS)
def test_sgd_equals_plain_pytorch(method: str, kind: str) -> None:
    """Three rounds with momentum, weight decay, a learning rate that changes, clients of
    different sizes, half of them in a round.
    """
    experiment = make_experiment(
        method,
        kind,
        "dirichlet_by_class(alpha=0.3, minimum=2)",
        "sgd(lr=0.1, momentum=0.9, weight_decay=0.01)",
        **{"local.schedule": "exponential(decay=0.8)"},
    )
    given = {
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.01,
        "schedule": "exponential",
        "decay": 0.8,
    }
    assert compare(experiment, kind, **given, **METHODS[method]) < 1e-10


def test_wsm_counts_validation_labels_where_it_is_told_to() -> None:
    """The reference counts the labels of both splits; counting those in training is another run."""
    experiment = make_experiment(
        "fedavg+wsm(with_validation=true)",
        "mlp",
        "dirichlet_by_class(alpha=0.3, minimum=2)",
        "sgd(lr=0.1)",
    )
    assert compare(experiment, "mlp", lr=0.1, loss="wsm", with_validation=True) < 1e-10
    assert compare(experiment, "mlp", lr=0.1, loss="wsm") > 1e-4


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("method", METHODS)
def test_adam_equals_plain_pytorch(method: str, kind: str) -> None:
    """Adam starts anew in every round. Clients of very different sizes with the same label mix,
    two epochs, half a cosine of a schedule.
    """
    more = {"local.schedule": "cosine", "local.epochs": 2}
    experiment = make_experiment(
        method, kind, "quantity(power=1.2, minimum=8)", "adam(lr=0.02, weight_decay=0.01)", **more
    )
    given = {
        "optimizer": "adam",
        "lr": 0.02,
        "weight_decay": 0.01,
        "schedule": "cosine",
        "epochs": 2,
    }
    assert compare(experiment, kind, **given, **METHODS[method]) < 1e-10


def test_the_reference_tells_the_methods_apart() -> None:
    """Six different results: an agreement above is then no accident."""
    experiment = make_experiment(
        "fedavg", "mlp", "dirichlet_by_class(alpha=0.3, minimum=2)", "sgd(lr=0.1)"
    )
    gaps = [compare(experiment, "mlp", lr=0.1, **setting) for setting in METHODS.values()]
    assert gaps[0] < 1e-10
    assert min(gaps[1:]) > 1e-4
    assert len({round(gap, 10) for gap in gaps}) == 6


# ------------------------------------------------------------------------------- the losses by hand


def losses(function: Any, logits: Tensor, y: Tensor, counts: list[float]) -> tuple[Tensor, Tensor]:
    """-> the loss of each row [B], the gradient of their sum with respect to the logits [B, C]"""
    logits = logits.clone().requires_grad_()
    stats = ClientStats(
        size=torch.tensor(sum(counts), dtype=torch.float64),
        label_counts=torch.tensor(counts, dtype=torch.float64),
    )
    batch = Batch(
        x=logits.detach(),
        y=y,
        weight=torch.ones(len(y), dtype=torch.float64),
        ids=torch.arange(len(y)),
    )
    rows = function(Output(logits, logits), batch, SimpleNamespace(stats=stats))
    return rows.detach(), torch.autograd.grad(rows.sum(), logits)[0]


Z = torch.tensor([[0.0, math.log(2), math.log(3)]], dtype=torch.float64)  # exp(z) = 1, 2, 3


def test_wsm_by_hand() -> None:
    """Labels 0, 1, 2, 2: shares 1/4, 1/4, 1/2. sum_c share_c exp(z_c) = 1/4 + 2/4 + 3/2 = 9/4, so
    for y = 1 the loss is log(9/4) - log 2 = log(9/8).

    Its gradient is share_c exp(z_c) / (9/4) = 1/9, 2/9, 6/9, less 1 at y.
    """
    rows, gradient = losses(re_weighted, Z, torch.tensor([1]), [1, 1, 2])
    assert rows.tolist() == pytest.approx([math.log(9 / 8)], abs=1e-15)
    assert gradient[0].tolist() == pytest.approx([1 / 9, 2 / 9 - 1, 6 / 9], abs=1e-15)


def test_tce_by_hand() -> None:
    """Labels 0, 1, 1: class 2 is absent. log(1 + 2) - log 2 = log(3/2); the gradient is 1/3,
    2/3 - 1 and nothing for the absent class.
    """
    rows, gradient = losses(truncated, Z, torch.tensor([1]), [1, 2, 0])
    assert rows.tolist() == pytest.approx([math.log(3 / 2)], abs=1e-15)
    assert gradient[0].tolist() == pytest.approx([1 / 3, -1 / 3, 0.0], abs=1e-15)


def test_soft_targets_by_hand() -> None:
    """y = (1/2, 1/2, 0): the target's logit is (0 + log 2) / 2. WSM with labels 0, 1: log(1/2 +
    2/2) - log(2) / 2; TCE: log(1 + 2) - log(2) / 2.

    Both gradients are (1/3, 2/3, 0) - y.
    """
    y = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    for function, total in ((re_weighted, 1.5), (truncated, 3.0)):
        rows, gradient = losses(function, Z, y, [1, 1, 0])
        assert rows.tolist() == pytest.approx([math.log(total) - math.log(2) / 2], abs=1e-15)
        assert gradient[0].tolist() == pytest.approx([1 / 3 - 1 / 2, 2 / 3 - 1 / 2, 0.0], abs=1e-15)


logit_rows = st.lists(st.lists(st.floats(-20, 20), min_size=4, max_size=4), min_size=1, max_size=3)


@given(logit_rows, st.integers(1, 50))
def test_wsm_with_uniform_shares_is_cross_entropy_less_a_constant(
    values: list[list[float]], count: int
) -> None:
    """share_c = 1/C: log sum_c exp(z_c) / C - z_y = cross-entropy - log C, and a constant has
    no gradient.
    """
    logits, y = torch.tensor(values, dtype=torch.float64), torch.arange(len(values)) % 4
    rows, gradient = losses(re_weighted, logits, y, [count] * 4)
    plain, plain_gradient = losses(
        lambda out, batch, _: nn.functional.cross_entropy(out.logits, batch.y, reduction="none"),
        logits,
        y,
        [1] * 4,
    )
    assert torch.allclose(rows, plain - math.log(4), rtol=0, atol=1e-12)
    assert torch.allclose(gradient, plain_gradient, rtol=0, atol=1e-12)


@given(logit_rows, st.lists(st.integers(0, 1), min_size=4, max_size=4).filter(any))
def test_tce_is_wsm_with_shares_of_zero_and_one(
    values: list[list[float]], present: list[int]
) -> None:
    """With m classes held equally often WSM has shares 1/m: sum_c exp(z_c) / m over them, so it
    is TCE less log m, with the same gradient.
    """
    logits, y = (
        torch.tensor(values, dtype=torch.float64),
        torch.full((len(values),), present.index(1)),
    )
    wsm_rows, wsm_gradient = losses(re_weighted, logits, y, [3 * p for p in present])
    tce_rows, tce_gradient = losses(truncated, logits, y, [3 * p for p in present])
    assert torch.allclose(wsm_rows, tce_rows - math.log(sum(present)), rtol=0, atol=1e-12)
    assert torch.allclose(wsm_gradient, tce_gradient, rtol=0, atol=1e-12)
    absent = torch.tensor(present) == 0
    assert torch.equal(tce_gradient[:, absent], torch.zeros_like(tce_gradient[:, absent]))
    assert torch.equal(wsm_gradient[:, absent], torch.zeros_like(wsm_gradient[:, absent]))


@pytest.mark.parametrize("function", [re_weighted, truncated])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_a_client_of_one_class_has_nothing_to_learn(function: Any, size: float) -> None:
    """One class of share 1: log exp(z_y) - z_y = 0, whatever the logits; its gradient is 1 - 1
    = 0. Nothing overflows on the way.
    """
    logits = size * torch.tensor([[3.0, -1.0, 2.0], [-1.0, 5.0, 0.0]], dtype=torch.float64)
    rows, gradient = losses(function, logits, torch.tensor([1, 1]), [0, 7, 0])
    assert torch.equal(rows, torch.zeros(2, dtype=torch.float64))
    assert torch.equal(gradient, torch.zeros(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("method", ["fedavg+wsm", "fedavg+tce"])
def test_local_training_leaves_absent_classes_untouched(method: str) -> None:
    """Without weight decay the classifier's rows of classes a client lacks keep their bits;
    cross-entropy moves them.
    """
    experiment = make_experiment(
        method, "conv", "shards(per_client=1)", "sgd(lr=0.1, momentum=0.9)", **{"clients.sample": 6}
    )
    plain = make_experiment(
        "fedavg",
        "conv",
        "shards(per_client=1)",
        "sgd(lr=0.1, momentum=0.9)",
        **{"clients.sample": 6},
    )
    work = make_work(experiment, first_state(experiment), 1)
    lacking = 0
    for reply, other, counts in zip(
        SequentialEngine(experiment.task).train(work),
        SequentialEngine(plain.task).train(work),
        work.stats.label_counts,
        strict=True,
    ):
        absent, lacking = counts == 0, lacking + int((counts == 0).sum())
        for name in ("head.weight", "head.bias"):
            assert torch.equal(reply.params[name][0, absent], work.start.params[name][absent])
            assert not torch.isclose(
                other.params[name][0, absent], work.start.params[name][absent], rtol=0, atol=1e-6
            ).all()
    assert lacking > 0
    assert np.isfinite(float(reply.loss))
