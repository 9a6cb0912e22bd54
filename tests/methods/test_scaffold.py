"""SCAFFOLD against plain PyTorch, against numbers worked by hand, and what holds for its
control variates whoever takes part.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from methods.three_of_six import make_experiment, make_net
from reference import scaffold as witness
from reference.federated import Setting, normalize
from torch import Tensor

from remanence.core import pytree
from remanence.core.errors import InputError
from remanence.core.slots import Part
from remanence.core.types import ModelState
from remanence.engines.sequential import SequentialEngine
from remanence.losses import wsm
from remanence.methods import fedprox
from remanence.methods.scaffold import (
    control_from_steps,
    correct,
    scaffold,
    update_server_control,
)
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing import check_method
from remanence.testing.toy_task import EQUAL, batch_norm_net, run_rounds, small_experiment

EVERYONE = {"clients.sample": 6}


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def frozen_head() -> Part:
    return Part("frozen_head", frozen=lambda info: info.head)


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(
    "optimizer", ["sgd(lr=0.1)", "sgd(lr=0.05, momentum=0.5, weight_decay=0.01)"]
)
def test_three_rounds_equal_plain_pytorch(option: int, equal: bool, optimizer: str) -> None:
    """Half of the clients in a round, of different sizes, with a learning rate that changes:
    the model, c, and every c_i.
    """
    settings = {
        "local.optimizer": optimizer,
        "local.epochs": 2,
        "local.schedule": "exponential(decay=0.8)",
    }
    experiment = make_experiment(scaffold(option=option, equal=equal), **settings)
    rows = experiment.task.population.at(0).train
    assert len(set(rows.sizes.tolist())) > 1
    numbers = (
        {"lr": 0.1}
        if optimizer == "sgd(lr=0.1)"
        else {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01}
    )
    chosen = Setting(
        rounds=3, cohort=3, epochs=2, batch=4, schedule="exponential", decay=0.8, seed=4, **numbers
    )
    x, y = normalize(experiment.dataset.train.x), torch.from_numpy(experiment.dataset.train.y)
    model, c, c_i = witness.train(
        make_net(), x, y, [rows.for_client(client) for client in range(6)], chosen, option, equal
    )
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 3)
    for name, start in make_net().state_dict().items():
        assert float((model[name] - start).abs().max()) > 0.01
        assert torch.allclose(state.server.model.params[name], model[name], rtol=0, atol=1e-10)
        assert torch.allclose(
            state.server.state["scaffold"]["c"][name], c[name], rtol=0, atol=1e-10
        )
        for client, kept in state.client_states.items():
            assert torch.allclose(
                kept["scaffold"]["c"][name], c_i[client][name], rtol=0, atol=1e-10
            )
    assert 3 < len(state.client_states) <= 6, (
        "clients must come back and newcomers join, or the c_i have not been used"
    )


def test_two_clients_by_hand() -> None:
    """f_1 = w^2 / 2 and f_2 = (w - 4)^2 / 2, so g_1 = w and g_2 = w - 4; x = 0, lr = 1/2, K = 2
    steps; option II.

    Round 1, no correction: y_1 = 0 -> 0 -> 0;  y_2 = 0 -> 2 -> 3.  c_1 = (0 - 0) / (2 * 1/2) = 0,
    c_2 = (0 - 3) / 1 = -3, c = -3/2, x = 3/2. Round 2: client 1 steps along w - 0 - 3/2: 3/2 -> 3/2
    -> 3/2, so c_1+ = 0 + 3/2 + 0 = 3/2.
             client 2 steps along w - 4 + 3 - 3/2 = w - 5/2: 3/2 -> 2 -> 9/4, so c_2+ = -3 + 3/2 +
             (3/2 - 9/4) = -9/4. c = -3/2 + (3/2 + 3/4) / 2 = -3/8 = (3/2 - 9/4) / 2, and x = (3/2 +
             9/4) / 2 = 15/8: nearer to the minimum at 2.
    """
    x, c, c_i = number(0.0), number(0.0), [number(0.0), number(0.0)]
    seen = []
    for _ in range(2):
        ends, changes = [], []
        for client, center in enumerate((0.0, 4.0)):
            ctx: Any = SimpleNamespace(
                client_state={"c": {"w": c_i[client]}},
                broadcast={"c": {"w": c}},
                start=ModelState({"w": x}, {}),
                steps=torch.tensor(2),
                optimizer_hparams={"lr": number(0.5)},
            )
            w = x
            for _ in range(2):
                w = w - 0.5 * correct({"w": w - center}, {"w": w}, ctx)["w"]
            own, extras = control_from_steps(ctx, ModelState({"w": w}, {}), None)  # type: ignore[arg-type]
            c_i[client] = own["c"]["w"]
            changes.append(extras["change"]["w"])
            ends.append(w)
        replies: Any = SimpleNamespace(
            payload={"scaffold": {"change": {"w": torch.stack(changes)}}}
        )
        srv: Any = SimpleNamespace(state={"c": {"w": c}}, info=SimpleNamespace(num_clients=2))
        c, x = update_server_control(replies, srv)["c"]["w"], (ends[0] + ends[1]) / 2
        seen.append([float(value) for value in (*c_i, c, x)])
    assert seen == [[0.0, -3.0, -1.5, 1.5], [1.5, -2.25, -0.375, 1.875]]


def test_the_first_round_is_fedavg() -> None:
    """All control variates are zero: there is nothing to correct."""
    models = []
    for method in (scaffold(), "fedavg"):
        experiment = make_experiment(method)
        models.append(
            run_rounds(experiment, SequentialEngine(experiment.task), 1)[0].server.model.params
        )
    for name in models[0]:
        assert torch.equal(models[0][name], models[1][name])


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("sample", [2, 6])
def test_c_is_the_mean_of_all_c_i(option: int, sample: int) -> None:
    """In every round, with all clients or some: who has not taken part yet still has zeros."""
    for rounds in (1, 2, 3):
        experiment = make_experiment(scaffold(option=option), **{"clients.sample": sample})
        state, _ = run_rounds(experiment, SequentialEngine(experiment.task), rounds)
        assert len(state.client_states) == 6 or sample == 2
        for name, c in state.server.state["scaffold"]["c"].items():
            total = sum(
                (kept["scaffold"]["c"][name] for kept in state.client_states.values()),
                torch.zeros_like(c),
            )
            assert float(c.abs().max()) > 1e-3
            assert torch.allclose(c, total / 6, rtol=0, atol=1e-14)


def test_a_full_batch_client_is_moved_along_everyones_gradient() -> None:
    """One step over all rows, option I: after a round c_i is the gradient at x, so at the same
    x the corrected gradient g_i - c_i + c is c for all.
    """
    experiment = make_experiment(scaffold(option=1), **EVERYONE, **{"local.batch_size": 100})
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    before = first_state(experiment).server.model
    # the model of round 1 again, with the variates it left
    work = make_work(experiment, state, 2)._replace(start=before)
    c = state.server.state["scaffold"]["c"]
    for reply in SequentialEngine(experiment.task).train(work):
        for name, value in reply.params.items():
            assert torch.allclose(value[0], before.params[name] - 0.1 * c[name], rtol=0, atol=1e-14)


@pytest.mark.parametrize("option", [1, 2])
def test_a_frozen_head_stays_and_the_rest_is_corrected(option: int) -> None:
    experiment, plain = (
        make_experiment(method, **EVERYONE)
        for method in (scaffold(option=option) + frozen_head(), frozen_head())
    )
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    start, head = experiment.task.model.initial.params, experiment.task.info.head
    assert head
    for name, value in state.server.model.params.items():
        assert torch.equal(value, start[name]) == (name in head)
    assert not torch.equal(
        state.server.model.params["0.weight"],
        run_rounds(plain, SequentialEngine(plain.task), 2)[0].server.model.params["0.weight"],
    )


def test_a_learning_rate_that_ends_at_zero_leaves_the_variates_alone() -> None:
    """(x - y_i) / (K lr) would be 0 / 0 in the last round of a cosine."""
    experiment = make_experiment(scaffold(), **EVERYONE, **{"local.schedule": "cosine"})
    before, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    after, lines = run_rounds(experiment, SequentialEngine(experiment.task), 3)
    assert not lines[2]["abandoned"]
    for name, c in before.server.state["scaffold"]["c"].items():
        assert torch.equal(after.server.state["scaffold"]["c"][name], c)
        assert torch.equal(after.server.model.params[name], before.server.model.params[name])


@pytest.mark.parametrize(
    "method",
    [
        scaffold(),
        scaffold(option=1),
        scaffold(equal=True) + wsm() + fedprox(mu=0.1),
        scaffold(option=1) + frozen_head(),
    ],
    ids=["option 2", "option 1", "wsm and fedprox", "frozen head"],
)
def test_the_contract(method: Any) -> None:
    check_method(method)


def test_what_travels_is_announced() -> None:
    experiment = small_experiment(scaffold(), EQUAL, module=batch_norm_net())
    form = experiment.task.payload_spec()
    assert pytree.nbytes(form) == pytree.nbytes(experiment.task.model.initial.params)
    assert "control variates" in scaffold().payload_description


def test_refusals() -> None:
    with pytest.raises(InputError, match=r"option must be 1 .* or 2 .*, not 3"):
        scaffold(option=3)
    with pytest.raises(InputError, match=r"with adam: write scaffold\(option=1\)"):
        make_experiment(scaffold(), **{"local.optimizer": "adam(lr=0.01)"})
    with pytest.raises(InputError, match=r"a momentum of 0\.9: write scaffold\(option=1\)"):
        make_experiment(scaffold(), **{"local.optimizer": "sgd(lr=0.1, momentum=0.9)"})
    make_experiment(scaffold(option=1), **{"local.optimizer": "adam(lr=0.01)"})
