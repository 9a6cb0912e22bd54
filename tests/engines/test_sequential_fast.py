"""The engine of a worker process: traced steps, client by client or in stacks, equal to
`sequential` at 1e-12 in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from remanence.core.engine import Engine
from remanence.core.rng import Key
from remanence.data.batches import plan_batches
from remanence.engines import client_plan, sequential_fast
from remanence.engines.processes import ProcessEngine, balance
from remanence.engines.sequential import SequentialEngine
from remanence.engines.sequential_fast import FastSequentialEngine
from remanence.engines.traced_step import TracedStep
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing import TOLERANCE, check_engine
from remanence.testing.toy_task import (
    EQUAL,
    batch_norm_net,
    max_rel_diff,
    run_rounds,
    small_experiment,
    state_tree,
)
from remanence.training.client_step import init_train_state, train_step
from remanence.training.gradients import grad_func
from remanence.training.task import TrainingTask

IMAGES = {
    "data.name": "synthetic(samples=64, classes=4, shape='1x16x16', test=0.25)",
    "model": "lenet",
}


def assert_equals_loop(
    method: Any,
    changes: dict[str, Any],
    make: Callable[[TrainingTask], Engine],
    rounds: int = 2,
    module: Any = None,
) -> Any:
    experiment = small_experiment(method, changes, module=module)
    oracle, _ = run_rounds(experiment, SequentialEngine(experiment.task), rounds)
    with closing(make(experiment.task)) as engine:
        state, _ = run_rounds(experiment, engine, rounds)
    place, distance = max_rel_diff(state_tree(state), state_tree(oracle))
    assert distance <= TOLERANCE, f"{place} differs by {distance:.1e}"
    return engine


@pytest.mark.parametrize(
    "method", ["fedavg", "scaffold+wsm", "flashback", "hast(peers=2, depth=1, finetune_epochs=1)"]
)
def test_traced_steps(method: str) -> None:
    """Clients of 30 to 1 rows with batches of 8: what is too narrow is padded to an even width;
    a schedule, so that no number may become a constant.
    """
    engine = assert_equals_loop(
        method,
        {"local.schedule": "cosine", "rounds": 3, "local.batch_size": 8},
        partial(FastSequentialEngine, execution="captured"),
    )
    assert engine.degraded_reason == ""
    assert engine.traced
    for known in engine.traced.values():
        widths = {
            kind[0][0]
            for step in known
            for kind in step.kinds
            if kind[0] and kind[1] == torch.int64 and len(kind[0]) == 1
        }
        assert 8 in widths
        assert widths <= {2, 4, 6, 8}
        assert 1 < len(known) == len(widths)


def test_batches_of_batch_norm_are_not_padded() -> None:
    """6 rows in batches of 4: with batch norm a batch of 4 and one of 2 are two forms."""
    engine = assert_equals_loop(
        "fedavg",
        EQUAL | {"local.epochs": 2},
        partial(FastSequentialEngine, execution="captured"),
        module=batch_norm_net(),
    )
    (known,) = engine.traced.values()
    assert len(known) == 2
    assert engine.degraded_reason == ""


def test_too_many_forms_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential_fast, "MAX_FORMS", 1)
    engine = assert_equals_loop(
        "fedavg",
        EQUAL,
        partial(FastSequentialEngine, execution="captured"),
        module=batch_norm_net(),
    )
    assert (
        engine.degraded_reason
        == "steps could not be traced (more than 1 different forms of arguments)"
    )
    assert engine.execution == "eager"
    assert not engine.traced


@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1, momentum=0.9)", "adam(lr=0.01)"])
def test_all_steps_see_parameters_in_one_layout(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's first weights have their channels innermost, and Adam, which flattens them,
    answers in another layout: compiled for each, steps would take twice the time to compile.
    """
    seen: set[Any] = set()

    class Watched(TracedStep):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            run = self.run

            def look(*tensors: Any) -> Any:
                seen.add(
                    tuple(
                        tensor.stride()
                        for tensor in tensors
                        if tensor.is_floating_point()
                        and tensor.dim() == 4
                        and tensor.shape[-1] == 5
                    )
                )
                return run(*tensors)

            self.run = look

    monkeypatch.setattr(sequential_fast, "TracedStep", Watched)
    engine = assert_equals_loop(
        "fedavg",
        IMAGES | {"local.optimizer": optimizer},
        partial(FastSequentialEngine, execution="captured"),
    )
    assert engine.degraded_reason == ""
    (strides,) = seen
    assert len(strides) >= 2  # the filters of both layers, and with momentum theirs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled() -> None:
    """In the workers themselves, each of which compiles."""
    engine = assert_equals_loop(
        "fedavg", {}, lambda task: ProcessEngine(task, 2, execution="compiled")
    )
    assert engine.degraded_reason == ""


# ---------------------------------------------------------------------------------- a traced step


def one_step(steps: int = 2) -> tuple[TrainingTask, Any, list[Any]]:
    """The first client's task, the arguments of its first step, and the inputs of all its steps."""
    experiment = small_experiment("fedavg", {"local.optimizer": "adam(lr=0.01, eps=1e-4)"})
    task, job = experiment.task, make_work(experiment, first_state(experiment), 1)
    loop, client = SequentialEngine(task), int(job.clients[0])
    rows = loop._rows(job, client)
    ctx = client_plan.at_phase(client_plan.make_context(task, job, 0), 0, steps)
    progress = init_train_state(task, grad_func, ctx.start.params, {}, {}, rows, ctx)
    plan = plan_batches(Key(3), len(rows.train), batch=2, steps=steps)
    moments = list(
        loop.iter_batches(task, ctx, rows.train[torch.from_numpy(plan.indices)], np.full(steps, 2))
    )
    return (
        task,
        (progress, {}, moments[0][0], rows, ctx._replace(step=moments[0][1], key=moments[0][2])),
        moments,
    )


def test_a_tensor_that_occurs_twice_is_two_inputs() -> None:
    """Before the first step the parameters are those of the received model, the same tensors: a
    second step must read the changed ones.
    """
    task, arguments, moments = one_step()
    assert arguments[0].params["head.bias"] is arguments[4].start.params["head.bias"]
    step = partial(train_step, task, grad_func)
    written, wanted, losses = TracedStep(step, arguments), arguments[0], []
    for batch, number, key in moments:
        wanted, loss = step(
            wanted, {}, batch, arguments[3], arguments[4]._replace(step=number, key=key)
        )
        losses.append(loss)
    found, seen = written.run_steps(arguments, moments)
    assert max_rel_diff(found._asdict(), wanted._asdict())[1] <= TOLERANCE
    assert [float(loss) for loss in seen] == pytest.approx(
        [float(loss) for loss in losses], abs=TOLERANCE
    )


def test_arguments_that_are_not_read_may_have_any_form() -> None:
    """Of all arguments FedAvg with Adam reads 6 parameters, 4 slots, inputs, labels, weights,
    and lr, beta1, beta2, eps: rows of other clients fit, too.
    """
    task, arguments, _ = one_step()
    written = TracedStep(partial(train_step, task, grad_func), arguments)
    assert len(written.places) == 6 + 4 + 3 + 4
    progress, fixed, batch, rows, ctx = arguments
    assert written.fits((progress, fixed, batch, rows._replace(train=rows.train[:1]), ctx))
    assert not written.fits((progress, fixed, batch._replace(x=batch.x[:1]), rows, ctx))
    assert not written.fits((progress, fixed, batch._replace(x=batch.x.float()), rows, ctx))
    assert not written.fits((progress, {"more": batch.x}, batch, rows, ctx))


# -------------------------------------------------------------------------------- stacks in workers


@pytest.mark.parametrize("workers", [1, 2])
def test_stacks_in_workers_keep_the_contract(workers: int) -> None:
    check_engine(lambda task: ProcessEngine(task, workers, stack=2))


def test_convolutions_are_never_stacked_in_workers() -> None:
    with closing(ProcessEngine(small_experiment("fedavg", IMAGES).task, 2, stack=3)) as engine:
        assert engine.stack == 1
    assert_equals_loop("flashback", IMAGES, lambda task: ProcessEngine(task, 2, stack=3), rounds=1)


def test_a_worker_gives_the_reason_for_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise NotImplementedError("no such operation")

    monkeypatch.setattr(sequential_fast, "TracedStep", refuse)  # before the fork
    engine = assert_equals_loop(
        "fedavg", {}, lambda task: ProcessEngine(task, 2, execution="captured"), rounds=1
    )
    assert engine.degraded_reason == "steps could not be traced (no such operation)"


def test_reasons_of_workers_are_only_added() -> None:
    """The round loop logs what follows the reasons that it knows."""
    engine = SequentialEngine(small_experiment("fedavg").task)
    engine.add_degraded_reasons(["no compiler"])
    engine.add_degraded_reasons(["no memory", "no compiler"])
    assert engine.degraded_reason == "no compiler; no memory"


def test_work_is_balanced() -> None:
    """Five clients, the largest first: singly, as two stacks for two workers, or, where a stack
    holds one or two, as four.
    """
    order = np.array([4, 0, 3, 1, 2])
    assert [share.tolist() for share in balance(order, 2, 0)] == [[4], [0], [3], [1], [2]]
    assert [share.tolist() for share in balance(order, 2, 3)] == [[4, 1, 2], [0, 3]]
    assert [share.tolist() for share in balance(order, 2, 2)] == [[4], [0], [3], [1, 2]]
    assert [share.tolist() for share in balance(order[:1], 4, 8)] == [[4]]
