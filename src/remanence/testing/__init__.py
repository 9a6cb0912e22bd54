"""Checkers for authors: is my method, my engine, my model what the rest of the program takes it
for?

Each runs the thing in float64 on a small built-in task and raises AssertionError with a sentence
that says what is wrong and where to look. They are made for your own tests:

    from remanence.testing import check_method

    def test_my_method() -> None:
        check_method(my_method(strength=0.5) + wsm())
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from remanence.core import pytree
from remanence.core.engine import ClientWork, Engine, ExampleResults
from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.core.slots import Method, Part
from remanence.core.types import ModelState, Reply
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.results.checkpoint import CheckpointStore, fingerprint
from remanence.results.run import CHECKPOINTS
from remanence.rounds.loop import first_state, make_work, resume_run, start_run
from remanence.testing.toy_task import (
    EQUAL,
    all_slots_part,
    as_method,
    batch_norm_net,
    dataset_for,
    drifting_experiment,
    drop_class,
    max_rel_diff,
    pick_clients,
    run_rounds,
    small_experiment,
    state_tree,
    with_client_models,
    work_tree,
)
from remanence.training.state import RunState
from remanence.training.task import TrainingTask

__all__ = ["check_engine", "check_method", "check_model"]

# where in a state infinity stands for a loss that nobody has measured yet, as for a client without
# validation rows
NOT_YET_MEASURED = ("client_models/best_loss", "assignment_state/")
# relative to the larger of 1 and the value: float64 leaves four digits for a different order of
# sums
TOLERANCE = 1e-12


def check_method(method: str | Method | Part, *, rounds: int = 2) -> None:
    """Is this a method that every engine, checkpoint and partition can carry?

    It must give the same result on `sequential` and on stacks of any size, leave its inputs alone, resume
    exactly from a checkpoint, and stay finite for clients with one example, for a class nobody has,
    and while the data drift. Where there is no server, the clients' own models are what is
    compared.

    >>> check_method("fedprox(mu=0.1)+wsm")

    method: an expression, a part, or parts joined by `+`.
    rounds: how many to play; 2 or more, so that what is kept between rounds is seen.
    """
    if rounds < 2:
        raise InputError(
            f"check_method cannot see what is kept between rounds with rounds={rounds}: give 2"
            " or more"
        )
    made = as_method(method)
    name = "+".join(p.name for p in made.parts)
    cases = [
        (small_experiment(made), (1, 3, 64), "with unequal clients, some with a single example"),
        (small_experiment(made, EQUAL, module=batch_norm_net()), (3,), "with batch norm"),
        (
            small_experiment(made, source=drop_class(3)),
            (64,),
            "where nobody has one of the classes",
        ),
    ]
    if not any(p.centralized for p in made.parts):  # all data in one place cannot drift apart
        cases.append((drifting_experiment(made, rounds + 1), (3,), "while the data drift"))
    for experiment, stacks, where in cases:
        oracle, lines = _play(
            experiment, SequentialEngine(experiment.task), rounds, f"{name} {where}"
        )
        _check_healthy(oracle, lines, f"{name} {where}")
        _check_inputs_stay(
            SequentialEngine(experiment.task),
            make_work(experiment, oracle, rounds + 1),
            f"{name} {where}",
        )
        for stack in stacks:
            state, _ = _play(
                experiment, VectorizedEngine(experiment.task, stack), rounds, f"{name} {where}"
            )
            place, distance = max_rel_diff(state_tree(state), state_tree(oracle))
            assert distance <= TOLERANCE, (
                f"{name} {where}: after {rounds} rounds the engine vectorized (stack={stack})"
                f" differs from sequential by {distance:.1e} at {place}: weigh rows by"
                " batch.weight (padding has 0), make no Python numbers from tensors, and"
                " keep no state but in own and server"
            )
    _check_resume(made, name, rounds)


def check_engine(make_engine: Callable[[TrainingTask], Engine]) -> None:
    """Does this engine carry everything there and back, whatever the method?

    Training and scoring, at any time step, must equal `sequential`, leave their inputs alone, and give a
    client the same result whoever else is in the round.

    >>> check_engine(lambda task: VectorizedEngine(task, stack=2))

    make_engine: called with a task; the engine is closed when it has been checked.
    """
    for experiment in (
        small_experiment(all_slots_part(), {"data.public": 8}),
        small_experiment(all_slots_part(), EQUAL, module=batch_norm_net()),
        drifting_experiment(all_slots_part(), 2),
    ):
        state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 1)
        job = make_work(
            experiment, state, 2
        )  # by now clients and server have something to remember
        engine = make_engine(experiment.task)
        try:
            name = f"engine {engine.name}"
            for asked in (job, with_client_models(job)):
                _check_inputs_stay(engine, asked, name)
                whole = _train(engine, asked, name)
                _check_equal_replies(
                    whole,
                    _train(SequentialEngine(experiment.task), asked, "sequential"),
                    f"{name} and sequential train differently",
                )
                for places in ([1], [0, 2], [1, 2, 3]):
                    some = _train(engine, pick_clients(asked, places), name)
                    _check_equal_replies(
                        some,
                        whole.select(torch.tensor(places)),
                        f"{name}: a client's reply depends on who else is in the round",
                    )
            _check_scores(engine, experiment, with_client_models(job).start, job.time_step)
        finally:
            engine.close()


def check_model(module: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """Can this network be trained here: as a pure function of its weights, and in a stack?

    >>> check_model(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (3, 2, 2), 3)

    shape: of one example: (channels, height, width), (columns,) or, for a network that begins with
        an embedding, (length,).
    classes: how many labels there are.
    """
    if len(shape) not in (1, 3):
        raise InputError(
            f"check_model cannot make examples of shape {shape}: give (channels, height,"
            " width), (columns,) or (length,)"
        )
    before, name = copy.deepcopy(module.state_dict()), type(module).__name__
    changes = EQUAL | {"local.optimizer": "sgd(lr=0.01)"}
    experiment = small_experiment(
        "fedavg", changes, module=module, source=dataset_for(module, shape, classes)
    )
    task, job = experiment.task, make_work(experiment, first_state(experiment), 1)
    _check_predictions(task, name)
    replies = _train(SequentialEngine(task), job, name)
    finite = pytree.finite(
        {"params": replies.params, "buffers": replies.buffers}, replies.num_clients
    )
    assert bool(finite.all()), (
        f"{name} has NaN or infinite weights after a few steps at a small learning rate: check"
        " its initial values"
    )
    _check_all_used(task, name)
    try:
        stacked = _train(VectorizedEngine(task, 3), job, name)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise AssertionError(
            f"{name} cannot be stacked by torch.vmap ({reason}): rewrite that operation,"
            " or use engine=sequential only"
        ) from error
    _check_equal_replies(stacked, replies, f"{name} trains differently in a stack")
    changed = [
        key for key, value in module.state_dict().items() if not torch.equal(value, before[key])
    ]
    assert not changed, (
        f"{name} is changed by being used, at {changed[0]}: its forward must not write to its"
        " own tensors"
    )


# ------------------------------------------------------------------------------------ single checks


def _play(
    experiment: BuiltExperiment, engine: Engine, rounds: int, name: str
) -> tuple[RunState, list[dict[str, Any]]]:
    """`run_rounds`, with the first line of what goes wrong as a sentence."""
    try:
        return run_rounds(experiment, engine, rounds)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        cure = (
            "; under torch.vmap no `if`, no .item() and no boolean masks on tensors"
            if engine.name == "vectorized"
            else ""
        )
        raise AssertionError(
            f"{name} cannot run on the engine {engine.name} ({reason}){cure}"
        ) from error


def _check_predictions(task: TrainingTask, name: str) -> None:
    """A prediction is a function of one row."""
    x = task.train.inputs(torch.arange(4))
    with torch.no_grad():
        once, again = (task.model.predict(task.model.initial, x).logits for _ in range(2))
        alone = torch.cat(
            [task.model.predict(task.model.initial, row).logits for row in torch.split(x, 1)]
        )
    assert bool(torch.isfinite(once).all()), (
        f"{name} gives NaN or infinity for ordinary rows: check its initial values and its"
        " logarithms"
    )
    assert torch.equal(once, again), (
        f"{name} gives two answers to the same rows: it draws random numbers or keeps"
        " state of its own; take that out"
    )
    gap = max_rel_diff({"logits": alone}, {"logits": once})[1]
    assert gap <= TOLERANCE, (
        f"{name} in evaluation mode lets the rows of a batch influence each other (by"
        f" {gap:.1e}): judge each row alone"
    )


def _check_all_used(task: TrainingTask, name: str) -> None:
    """A weight that the loss does not reach would be averaged for nothing."""
    start, x = task.model.initial, task.train.inputs(torch.arange(4))
    leaves = {place: value.clone().requires_grad_() for place, value in start.params.items()}
    out, _ = task.model.apply(leaves, start.buffers, x, Key(0).tensor())
    gradients = torch.autograd.grad(out.logits.sum(), list(leaves.values()), allow_unused=True)
    unused = [place for place, gradient in zip(leaves, gradients, strict=True) if gradient is None]
    assert not unused, f"{name} never uses its parameter {unused[0]}: use it or take it out"


def _train(engine: Engine, job: ClientWork, name: str) -> Reply:
    """All replies in cohort order, each client once."""
    reply = Reply.concat(list(engine.train(job)))
    order = torch.argsort(reply.client)
    asked, answered = job.clients.tolist(), reply.client[order].tolist()
    assert answered == asked, (
        f"{name} was asked for clients {asked} and answered for {answered}: every client"
        " answers once"
    )
    return reply.select(order)


def _check_equal_replies(a: Reply, b: Reply, sentence: str) -> None:
    place, distance = max_rel_diff(a._asdict(), b._asdict())
    assert distance <= TOLERANCE, f"{sentence}: by {distance:.1e} at {place}"


def _check_inputs_stay(engine: Engine, job: ClientWork, name: str) -> None:
    before = pytree.flatten(pytree.clone(work_tree(job)))
    for _ in engine.train(job):
        pass
    after = pytree.flatten(work_tree(job))
    changed = [place for place, value in before.items() if not torch.equal(value, after[place])]
    assert not changed, (
        f"{name} changes its input {changed[0]} in local training: return new tensors,"
        " never write into given ones (+=, add_)"
    )


def _check_healthy(state: RunState, lines: Sequence[Mapping[str, Any]], name: str) -> None:
    for line in lines:
        for refusal in line["rejected"]:
            raise AssertionError(
                f"{name}: in round {line['round']} the reply of client {refusal['client']}"
                f" is refused, because {refusal['reason']}"
            )
        assert not line["abandoned"], (
            f"{name}: round {line['round']} is abandoned, because"
            f" {line.get('problem', 'nobody replied')}"
        )
    for place, value in pytree.flatten(state_tree(state)).items():
        may_be_infinite = place.startswith(NOT_YET_MEASURED)
        healthy = (
            ~torch.isnan(value)
            if may_be_infinite or not value.is_floating_point()
            else torch.isfinite(value)
        )
        assert bool(healthy.all()), (
            f"{name}: after {len(lines)} rounds {place} holds NaN or infinity"
        )


def _check_resume(method: Method, name: str, rounds: int) -> None:
    """Stopped after the first round and resumed, against straight through: the same bits."""
    spec = small_experiment(method, {"rounds": rounds}).config
    with tempfile.TemporaryDirectory() as folder:
        straight, broken = Path(folder) / "straight", Path(folder) / "broken"
        start_run(spec.model_copy(update={"rounds": 1}), broken, method=method)
        runs = (
            start_run(spec, straight, method=method),
            resume_run(broken, rounds=rounds, method=method),
        )
        states = [
            CheckpointStore(run.folder / CHECKPOINTS, fingerprint(run.config)).load(
                torch.device("cpu"), lambda _: None
            )
            for run in runs
        ]
    once, twice = (state_tree(state) for state in states if state is not None)
    place, distance = max_rel_diff(twice, once)
    assert distance == 0, (
        f"{name} does not resume exactly: after {rounds} rounds {place} differs by"
        f" {distance:.1e}; keep all state in own and server"
    )


def _check_scores(
    engine: Engine, experiment: BuiltExperiment, models: ModelState, step: int
) -> None:
    one, loop = models.select(slice(0, 1)), SequentialEngine(experiment.task)
    before = pytree.clone({"params": models.params, "buffers": models.buffers})
    splits: list[tuple[str, np.ndarray | None]] = [
        ("test", None),
        ("train", None),
        ("valid", None),
        ("valid", np.array([4, 1])),
    ]
    if experiment.task.info.public_size:
        splits.append(("public", None))
    for split, owners in splits:
        for some in (one, models):
            mine, wanted = (e.score(some, split, owners, step) for e in (engine, loop))
            place, distance = max_rel_diff(mine._asdict(), wanted._asdict())
            assert distance <= TOLERANCE, (
                f"engine {engine.name} and sequential score the split {split} differently: by"
                f" {distance:.1e} at {place}"
            )
    for split in ("train", "valid", "test"):
        _check_pairs(engine, loop, models, split, step)
    if experiment.task.info.public_size:
        for some in (one, models):
            said, wanted_said = (
                e.predict_logits(some, experiment.task.public) for e in (engine, loop)
            )
            distance = max_rel_diff({"": said}, {"": wanted_said})[1]
            assert distance <= TOLERANCE, (
                f"engine {engine.name} and sequential predict the public set differently: by {distance:.1e}"
            )
    changed = max_rel_diff(before, {"params": models.params, "buffers": models.buffers})[1] > 0
    assert not changed, (
        f"engine {engine.name} changes the models it scores: score must leave them alone"
    )


def _check_pairs(
    engine: Engine, loop: SequentialEngine, models: ModelState, split: str, step: int
) -> None:
    """Models each on rows of its own: some twice, one not at all, one owner without rows on the
    small task, and verdicts on every example.
    """
    which, owners = np.array([2, 0, 0, 3, 2]), np.array([5, 4, 0, 1, 0])
    if split == "test":
        owners = owners % loop.task.population.num_concepts
    for verdicts in (False, True):
        mine, wanted = (
            e.score_pairs(models, which, owners, split, step, verdicts) for e in (engine, loop)
        )
        assert (mine.examples is not None) == verdicts, (
            f"engine {engine.name} gives example results exactly where they are asked for"
        )
        trees_of = [
            {"confusion": s.confusion, "loss": s.loss, **_verdict_tree(s.examples)}
            for s in (mine, wanted)
        ]
        place, distance = max_rel_diff(*trees_of)
        # margins are kept in float32: two that round apart are no defect
        allowed = 1e-6 if place == "margin" else TOLERANCE
        assert distance <= allowed, (
            f"engine {engine.name} and sequential score pairs on the split {split} differently:"
            f" by {distance:.1e} at {place}"
        )


def _verdict_tree(verdicts: ExampleResults | None) -> pytree.Tree:
    return (
        {}
        if verdicts is None
        else {name: torch.from_numpy(column) for name, column in verdicts._asdict().items()}
    )
