"""FedDyn against plain PyTorch, against numbers worked by hand, and what holds for h and the h_k:
whoever takes part, where clients solve their problems, and where the rounds come to rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from methods.small_task import (
    COHORT,
    in_plain_tensors,
    largest_gap,
    make_experiment,
    make_net,
    play_all,
)
from reference import feddyn as witness
from reference.federated import cross_entropy
from torch import Tensor

from remanence.core import pytree
from remanence.core.compose_checks import check
from remanence.core.errors import InputError
from remanence.core.slots import Part
from remanence.core.types import ModelState, Reply
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import BuiltExperiment
from remanence.losses import wsm
from remanence.methods import PARTS, fedprox
from remanence.methods.feddyn import (
    apply_dynamic,
    feddyn,
    proximal,
    subtract_gradient,
    update_gradient,
)
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing import check_method
from remanence.testing.toy_task import run_rounds, small_experiment
from remanence.training.state import RunState

PLAIN_SGD = {"local.optimizer": "sgd(lr=0.1)", "local.schedule": "constant"}
CLIENTS = 6


def play(experiment: BuiltExperiment, rounds: int) -> RunState:
    return run_rounds(experiment, SequentialEngine(experiment.task), rounds)[0]


def replies_of(experiment: BuiltExperiment, state: RunState) -> Reply:
    """Of all clients that the next round samples."""
    work = make_work(experiment, state, state.round + 1)
    return Reply.concat(list(SequentialEngine(experiment.task).train(work)))


def gap(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("alpha", [0.1, 0.8])
def test_three_rounds_equal_plain_pytorch(alpha: float, kind: str) -> None:
    """Half of the clients in a round, of different sizes, with momentum, weight decay and a rate
    that changes: the model with its statistics, h, and every h_k.
    """
    experiment = make_experiment(feddyn(alpha=alpha), kind)
    plain = in_plain_tensors(experiment)
    model, h, h_k = witness.train(
        make_net(kind), plain.x, plain.y, plain.rows, plain.setting, alpha
    )
    state = play_all(experiment)
    assert largest_gap(state, model, kind) < 1e-10
    assert gap(state.server.state["feddyn"]["h"], h) < 1e-10
    for client, kept in state.client_states.items():
        assert gap(kept["feddyn"]["h"], h_k[client]) < 1e-10
    assert COHORT < len(state.client_states) < 3 * COHORT, (
        "clients must come back and newcomers join, or the h_k have not been used"
    )
    other = play_all(make_experiment(fedprox(mu=alpha), kind))
    assert largest_gap(other, model, kind) > 1e-3, "FedProx would pass this test"


def test_the_reference_tells_one_alpha_from_another() -> None:
    experiment = make_experiment(feddyn(alpha=0.1), "mlp")
    plain = in_plain_tensors(experiment)
    model, _, _ = witness.train(make_net("mlp"), plain.x, plain.y, plain.rows, plain.setting, 0.11)
    assert largest_gap(play_all(experiment), model, "mlp") > 1e-5


# ------------------------------------------------------------------------------------------ by hand


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


class Quadratics:
    """Clients with f_k(w) = a_k/2 (w - b_k)^2 on one number. A step of 1 / (a_k + alpha) from w_t
    along the gradient of the regularized loss ends at its minimum.
    """

    def __init__(self, a: Sequence[float], b: Sequence[float], alpha: float):
        self.a, self.b, self.alpha = a, b, alpha
        self.w, self.h = number(0.0), number(0.0)
        self.h_k = [number(0.0) for _ in a]

    def play(self, *participants: int) -> None:
        hyper = {"alpha": number(self.alpha)}
        w_k = []
        for client in participants:
            ctx: Any = SimpleNamespace(
                client_state={"h": {"w": self.h_k[client]}},
                start=ModelState({"w": self.w}, {}),
                hyper=hyper,
            )
            a, b = self.a[client], self.b[client]
            # away from w_t, where the proximal term has no gradient, and back
            w = self.solve(ctx, self.solve(ctx, self.w, a, b), a, b)
            kept, sent = update_gradient(ctx, ModelState({"w": w}, {}), None)  # type: ignore[arg-type]
            assert not sent
            self.h_k[client] = kept["h"]["w"]
            w_k.append(w)
        srv: Any = SimpleNamespace(
            state={"h": {"w": self.h}},
            hyper=hyper,
            num_replies=len(participants),
            info=SimpleNamespace(num_clients=len(self.a)),
        )
        mean = torch.stack(w_k).mean()
        params, state = apply_dynamic({"w": self.w}, {"w": mean - self.w}, srv)
        self.w, self.h = params["w"], state["h"]["w"]

    def solve(self, ctx: Any, w: Tensor, a: float, b: float) -> Tensor:
        params = {"w": w.clone().requires_grad_()}
        pull = torch.autograd.grad(proximal(params, ctx), params["w"])[0]
        return w - subtract_gradient({"w": a * (w - b) + pull}, {"w": w}, ctx)["w"] / (
            a + self.alpha
        )

    def numbers(self) -> list[float]:
        return [float(value) for value in (*self.h_k, self.h, self.w)]


def test_two_clients_by_hand() -> None:
    """f_1 = w^2 / 2 and f_2 = (w - 4)^2 / 2, alpha = 3. The minima of the regularized losses are
    w_1 = (h_1 + 3 w_t) / 4 and w_2 = (4 + h_2 + 3 w_t) / 4.

    Round 1, w_t = 0: w_1 = 0, w_2 = 1; h_1 = 0, h_2 = -3 (1 - 0) = -3, h = -3/2 (0 + 1) = -3/2,
             w = 1/2 + (3/2) / 3 = 1.
    Round 2, w_t = 1: w_1 = 3/4, w_2 = (4 - 3 + 3) / 4 = 1; h_1 = -3 (3/4 - 1) = 3/4, h_2 = -3,
             h = -3/2 - 3/2 (-1/4) = -9/8, w = 7/8 + (9/8) / 3 = 5/4.
    Round 3, client 1 alone, w_t = 5/4: w_1 = (3/4 + 15/4) / 4 = 9/8; h_1 = 3/4 + 3/8 = 9/8,
             h = -9/8 - 3/2 (-1/8) = -15/16, w = 9/8 + (15/16) / 3 = 23/16.
    Each h_k is the gradient at w_k: w_1, and w_2 - 4; h is the mean of both.
    """
    clients = Quadratics(a=[1.0, 1.0], b=[0.0, 4.0], alpha=3.0)
    seen = []
    for participants in ((0, 1), (0, 1), (0,)):
        clients.play(*participants)
        seen.append(clients.numbers())
    assert seen == [
        [0.0, -3.0, -1.5, 1.0],
        [0.75, -3.0, -1.125, 1.25],
        [1.125, -3.0, -0.9375, 1.4375],
    ]


@pytest.mark.parametrize("alpha", [0.5, 3.0])
def test_the_rounds_come_to_rest_at_the_optimum_of_the_mean_loss(alpha: float) -> None:
    """f_1 = w^2 / 2 and f_2 = 3 (w - 4)^2 / 2: w + 3 (w - 4) = 0 at w = 3, where the gradients are
    3 and -3. The clients' own optima are 0 and 4; FedAvg with exact local training would stop at
    their mean 2, and FedProx between 2 and 3. One client of two in most rounds.
    """
    clients = Quadratics(a=[1.0, 3.0], b=[0.0, 4.0], alpha=alpha)
    for round in range(400):
        clients.play(*((0,), (1,), (0, 1))[round % 3])
    assert clients.numbers() == pytest.approx([3.0, -3.0, 0.0, 3.0], abs=1e-9)


# ------------------------------------------------------------------------------------ what must hold


LATE = {
    "clients.speed": "lognormal(sigma=0.8)",
    "round.deadline": "quantile(share=0.5)",
    "round.late": "use",
    "round.staleness": 0.0,
}


@pytest.mark.parametrize(
    "changes",
    [{"clients.sample": 2}, {"clients.sample": CLIENTS}, LATE],
    ids=["two clients", "all clients", "late replies"],
)
def test_h_is_the_mean_of_all_h_k(changes: dict[str, Any]) -> None:
    """After every round, with all clients or some, also if a reply is used in a later round: who
    has not taken part yet still has zeros.
    """
    for rounds in (1, 2, 3, 4):
        experiment = make_experiment(feddyn(alpha=0.1), "mlp", **changes | {"rounds": 4})
        state, lines = run_rounds(experiment, SequentialEngine(experiment.task), rounds)
        for name, h in state.server.state["feddyn"]["h"].items():
            total = sum(
                (kept["feddyn"]["h"][name] for kept in state.client_states.values()),
                torch.zeros_like(h),
            )
            assert float(h.abs().max()) > 1e-4
            assert torch.allclose(h, total / CLIENTS, rtol=0, atol=1e-14)
    assert changes is not LATE or any(line["stale_used"] for line in lines)


def test_in_the_first_round_clients_do_what_fedprox_does() -> None:
    """All h_k are zero. The server then moves 1 + 3/6 times as far as to the mean: h / alpha is
    -3/6 of the mean update.
    """
    dynamic, static = (
        make_experiment(method, "mlp") for method in (feddyn(alpha=0.2), fedprox(mu=0.2))
    )
    replies, same = (replies_of(e, first_state(e)) for e in (dynamic, static))
    start = first_state(dynamic).server.model
    state = play(dynamic, 1)
    for name, value in replies.params.items():
        assert torch.equal(value, same.params[name])
        move = (value - start.params[name]).mean(dim=0)
        wanted = start.params[name] + 1.5 * move
        assert torch.allclose(state.server.model.params[name], wanted, rtol=0, atol=1e-14)


def test_a_client_that_solves_its_problem_keeps_the_gradient_of_its_loss() -> None:
    """The gradient of f_k at w_k less h_k plus alpha (w_k - w_t) is 0 at the minimum, so the next
    h_k is that gradient. Full batches; with alpha = 5 the error shrinks to a fraction in every step.
    """
    solved = PLAIN_SGD | {
        "local.optimizer": "sgd(lr=0.15)",
        "local.batch_size": 100,
        "local.epochs": 60,
        "clients.sample": CLIENTS,
    }
    experiment = make_experiment(feddyn(alpha=5.0), "mlp", **solved)
    plain = in_plain_tensors(experiment)
    replies = replies_of(experiment, play(experiment, 2))
    for position, client in enumerate(replies.client.tolist()):
        net, rows = make_net("mlp"), plain.rows[client]
        net.load_state_dict({name: value[position] for name, value in replies.params.items()})
        cross_entropy(net(plain.x[rows]), plain.y[rows]).backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            h_k = replies.client_state["feddyn"]["h"][name][position]
            assert float(h_k.abs().max()) > 1e-3
            assert torch.allclose(h_k, parameter.grad, rtol=0, atol=1e-10)


def test_a_frozen_head_stays_and_has_no_gradient() -> None:
    frozen = Part("frozen_head", frozen=lambda info: info.head)
    experiment = make_experiment(feddyn(alpha=0.1) + frozen, "mlp")
    state = play(experiment, 2)
    start, head = experiment.task.model.initial.params, experiment.task.info.head
    assert head
    for name, value in state.server.model.params.items():
        assert torch.equal(value, start[name]) == (name in head)
    assert set(state.server.state["feddyn"]["h"]) == set(start) - set(head)


@pytest.mark.parametrize(
    "method",
    [feddyn(), feddyn(alpha=0.5) + wsm() + fedprox(mu=0.1)],
    ids=["feddyn", "with wsm and fedprox"],
)
def test_the_contract(method: Any) -> None:
    left_out = check_method(method)
    assert [case.partition(":")[0] for case in left_out] == ["with effective steps (+fednova)"]


def test_clients_send_only_their_models() -> None:
    assert not pytree.flatten(small_experiment(feddyn()).task.payload_spec())
    assert not feddyn().payload_description


@pytest.mark.parametrize("alpha", [0.0, -0.1, float("nan"), float("inf")])
def test_refusals(alpha: float) -> None:
    with pytest.raises(InputError, match="feddyn: alpha must be a number above 0, not"):
        feddyn(alpha=alpha)


def test_late_replies_of_less_weight_are_refused() -> None:
    with pytest.raises(InputError, match="feddyn needs replies of equal weight"):
        make_experiment(feddyn(), "mlp", **LATE | {"round.staleness": 0.5})


@pytest.mark.parametrize("other", ["fedadam", "fedwavg", "dp", "fednova", "median"])
def test_what_takes_the_same_place_at_the_server_is_refused(other: str) -> None:
    with pytest.raises(InputError, match="cannot be combined: both replace the"):
        check(feddyn() + PARTS[other]())
