"""FedDF: against its reference, and what it needs of the public set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from methods.small_task import (
    CLASSES,
    in_plain_tensors,
    largest_gap,
    make_experiment,
    make_net,
    play_all,
)
from reference import feddf as reference

from remanence.core.errors import InputError
from remanence.core.slots import Method, Part
from remanence.core.types import Reply
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import BuiltExperiment
from remanence.losses import wsm
from remanence.methods.feddf import feddf
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing import check_method
from remanence.testing.toy_task import small_experiment
from remanence.training.server_step import local_models, update

BRIEF: dict[str, Any] = {"steps": 30, "patience": 4, "lr": 0.03, "batch": 6, "validation": 0.5}


def compare(kind: str, **options: Any) -> tuple[float, list[reference.Outcome]]:
    experiment = make_experiment(feddf(**options), kind, **{"data.public": 20})
    state = play_all(experiment)
    x, y, rows, public, setting = in_plain_tensors(experiment)
    wanted, outcomes = reference.train(
        make_net(kind), x, y, CLASSES, rows, public, setting, reference.Distillation(**options)
    )
    return largest_gap(state, wanted, kind), outcomes


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_it_equals_plain_pytorch(kind: str) -> None:
    """Three rounds. Some distillation ends early, and one keeps another model than its last:
    both are tried.
    """
    gap, outcomes = compare(kind, **BRIEF)
    assert any(outcome.taken < 30 for outcome in outcomes)
    assert any(0 < outcome.kept < outcome.taken - 1 for outcome in outcomes)
    assert gap < 1e-10


def test_without_validation_all_steps_are_taken() -> None:
    gap, outcomes = compare("mlp", **BRIEF | {"validation": 0.0, "steps": 9})
    assert [outcome.taken for outcome in outcomes] == [9, 9, 9]
    assert gap < 1e-10


@pytest.mark.parametrize("clip", [0.0, 0.03])
def test_long_gradients_are_shortened(clip: float) -> None:
    """A limit that some gradients exceed and others do not, and none."""
    gap, outcomes = compare("mlp", **BRIEF | {"validation": 0.0, "clip": clip})
    clipped, taken = (
        sum(getattr(outcome, name) for outcome in outcomes) for name in ("clipped", "taken")
    )
    assert (0 < clipped < taken) == bool(clip)
    assert gap < 1e-10


def test_the_authors_limit_is_the_default() -> None:
    """Their code clips the student's gradient to a norm of 5."""
    assert feddf().arguments == feddf(clip=5.0).arguments


def test_the_loss_by_hand() -> None:
    """Teachers' logits (log 4, 0) and (0, 0): their mean is (log 2, 0), so p = (2/3, 1/3). The
    student says q = (1/2, 1/2).

    KL = 2/3 log(4/3) + 1/3 log(2/3) = log 2 + 2/3 log(2/3) + 1/3 log(1/3). The mean of
    probabilities would be (0.65, 0.35).
    """
    said = [
        torch.log(torch.tensor([[4.0, 1.0]], dtype=torch.float64)),
        torch.zeros(1, 2, dtype=torch.float64),
    ]
    p = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    wanted = float((p * torch.log(p)).sum() + torch.log(torch.tensor(2.0, dtype=torch.float64)))
    assert float(
        reference.ensemble_loss(torch.zeros(1, 2, dtype=torch.float64), said)
    ) == pytest.approx(wanted, abs=1e-15)


def distance_from_ensemble(
    experiment: BuiltExperiment, replies: Reply, logits: torch.Tensor
) -> float:
    clients = local_models(experiment.task.model.initial, replies)
    ids = experiment.task.public
    predict = torch.func.vmap(
        lambda model: experiment.task.model.predict(model, experiment.task.train.inputs(ids)).logits
    )
    p, q = torch.softmax(predict(clients).mean(dim=0), dim=1), torch.softmax(logits, dim=1)
    return float((p * torch.log(p / q)).sum(dim=1).mean())


def play_first_round(experiment: BuiltExperiment) -> tuple[Reply, Any]:
    work = make_work(experiment, first_state(experiment), 1)
    replies = Reply.concat(list(SequentialEngine(experiment.task).train(work)))
    return replies, update(
        experiment.task,
        first_state(experiment).server,
        replies,
        1,
        work.key,
        work.optimizer_hparams,
        SequentialEngine(experiment.task),
    )


def test_the_student_comes_to_agree_with_the_ensemble() -> None:
    experiment = make_experiment(
        feddf(steps=200, lr=0.01, validation=0.0), "mlp", **{"data.public": 30}
    )
    replies, done = play_first_round(experiment)
    task = experiment.task
    before, after = (
        distance_from_ensemble(
            experiment, replies, task.model.predict(model, task.train.inputs(task.public)).logits
        )
        for model in (done.merged, done.server.model)
    )
    assert after < before / 3


def test_labels_are_used_for_validation_only() -> None:
    """The same run where the public set's labels are all wrong: without validation the same
    bits, with it another model is the best.
    """
    for validation, same in ((0.0, True), (0.5, False)):
        models = []
        for wrong in (False, True):
            experiment = make_experiment(
                feddf(**BRIEF | {"validation": validation}), "mlp", **{"data.public": 20}
            )
            if wrong:
                y, public = experiment.task.train.y, experiment.task.public
                y[public] = (y[public] + 1) % CLASSES
            models.append(play_first_round(experiment)[1].server.model.params)
        equal = all(torch.equal(models[0][name], models[1][name]) for name in models[0])
        assert equal == same


@pytest.mark.parametrize(
    "options", [{"patience": 2, "batch": 4}, {"validation": 0.0}], ids=["validation", "no labels"]
)
@pytest.mark.parametrize("more", [(), (wsm(),)], ids=["alone", "wsm"])
def test_it_keeps_the_contract(options: dict[str, Any], more: tuple[Part, ...]) -> None:
    """At a small rate: the checker's network has a bias before batch norm, whose gradient is
    pure rounding, and Adam makes lr * rounding / 1e-8 of that.
    """
    check_method(Method((feddf(steps=8, lr=1e-5, **options), *more)))


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"patience": 0},
        {"batch": 0},
        {"lr": 0.0},
        {"lr": float("inf")},
        {"validation": 1.0},
        {"validation": -0.1},
        {"clip": -1.0},
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"feddf: {next(iter(options))} must be a number"):
        feddf(**options)


def test_it_needs_a_public_set() -> None:
    with pytest.raises(InputError, match="feddf trains at the server and needs a public set"):
        small_experiment(feddf(), {"data.public": 0})


@pytest.mark.parametrize(("validation", "held"), [(0.05, 0), (0.99, 8)])
def test_a_share_that_leaves_nothing_is_refused(validation: float, held: int) -> None:
    """Of 8 examples 0.05 is none, and 0.99 is all of them."""
    with pytest.raises(InputError, match=f"holds out {held} of the 8 public examples"):
        small_experiment(feddf(validation=validation), {"data.public": 8})
