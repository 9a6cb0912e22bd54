"""`check_method`: runs of a method on the built-in task, compared between engines."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from remanence.core import pytree
from remanence.core.errors import InputError
from remanence.core.process_state import preserve_process_state
from remanence.core.slots import Method, Part
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.methods.fedbn import fedbn
from remanence.methods.fednova import fednova
from remanence.methods.frozen_head import frozen_head
from remanence.results.checkpoint import CheckpointStore, fingerprint
from remanence.results.manifest import CHECKPOINTS
from remanence.rounds.federated import make_work
from remanence.rounds.loop import resume_run, start_run
from remanence.testing.disclosure_checks import check_disclosures
from remanence.testing.part_checks import carried_values, check_declarations, check_unchanged
from remanence.testing.running import TOLERANCE, check_inputs_unchanged, run
from remanence.testing.toy_task import (
    EQUAL,
    as_method,
    batch_norm_net,
    drifting_experiment,
    drop_class,
    max_rel_diff,
    small_experiment,
    state_tree,
)
from remanence.training.state import RunState

# where in a state infinity stands for a loss that is not measured yet, as for a client without
# validation examples
NOT_YET_MEASURED = ("client_models/best_loss", "assignment_state/")


class Case(NamedTuple):
    """An experiment to run, with the sizes of the stacks to compare with one client at a time."""

    experiment: BuiltExperiment
    stacks: tuple[int, ...]
    title: str


@preserve_process_state()
def check_method(method: str | Method | Part, *, rounds: int = 2) -> list[str]:
    """Check that a method works on the built-in task as the engines and checkpoints need it.

    It must give the same result on the engine `sequential` and on stacks of any size, leave its
    inputs unchanged, resume exactly from a checkpoint, and stay finite: for clients with one
    example, for a class that no client has, and while the data drift. It must also run with frozen
    and with personal parameters, and with `fednova` where it has regularizers; cases that the
    method refuses with an `InputError` are left out. Its parts must read numbers through
    `ctx.hyper`, keep no state of their own, and declare what each leaf of their payload reveals,
    which must not change with examples, labels or sizes that it does not reveal.

    >>> check_method("fedprox(mu=0.1)+wsm")
    []

    Args:
        method: an expression, a part, or parts joined by `+`.
        rounds: how many to run; 2 or more, so that what is kept between rounds has an effect.

    Returns:
        The cases that were left out, with the method's reasons.

    Raises:
        AssertionError: with a sentence that names the first problem and its cause.
    """
    if rounds < 2:
        raise InputError(
            f"check_method cannot see what is kept between rounds with rounds={rounds}: give 2"
            " or more"
        )
    method = as_method(method)
    name = "+".join(p.name for p in method.parts)
    cases, left_out = _cases(method, rounds)
    for case in cases:
        _check_case(case, method, f"{name} {case.title}", rounds)
    experiment = small_experiment(method)
    check_declarations(method, experiment.task)
    state, _ = run(experiment, SequentialEngine(experiment.task), 1, name)
    check_disclosures(experiment, state, name)
    _check_resume(method, name, rounds)
    return left_out


def _cases(method: Method, rounds: int) -> tuple[list[Case], list[str]]:
    """The cases to run; and those that the method refuses, such as batch norm, with its reason."""
    cases = [
        Case(
            small_experiment(method),
            (1, 3, 64),
            "with unequal clients, some with a single example",
        ),
        Case(
            small_experiment(method, source=drop_class(3)),
            (64,),
            "where no client has one of the classes",
        ),
    ]
    optional: list[tuple[Callable[[], BuiltExperiment], str]] = [
        (
            lambda: small_experiment(method, EQUAL, module=batch_norm_net()),
            "with batch norm",
        )
    ]
    if not any(p.centralized for p in method.parts):  # all data in one place cannot drift apart
        optional.append((lambda: drifting_experiment(method, rounds + 1), "while the data drift"))
    for other, title in ((frozen_head(), "frozen"), (fedbn(), "personal")):
        if other.name not in [p.name for p in method.parts]:
            with_other = functools.partial(small_experiment, method + other)
            optional.append((with_other, f"with {title} parameters (+{other.name})"))
    if any(p.regularizers for p in method.parts):
        with_steps = functools.partial(small_experiment, method + fednova())
        optional.append((with_steps, "with effective steps (+fednova)"))
    left_out = []
    for make, title in optional:
        try:
            cases.append(Case(make(), (3,), title))
        except InputError as refused:
            left_out.append(f"{title}: {refused}")
    return cases, left_out


def _check_case(case: Case, method: Method, name: str, rounds: int) -> None:
    task = case.experiment.task
    carried = [carried_values(p) for p in method.parts]
    expected, lines = run(case.experiment, SequentialEngine(task), rounds, name)
    for p, values in zip(method.parts, carried, strict=True):
        check_unchanged(p, values)
    _check_healthy(expected, lines, name)
    check_inputs_unchanged(
        SequentialEngine(task), make_work(case.experiment, expected, rounds + 1), name
    )
    for stack in case.stacks:
        state, _ = run(case.experiment, VectorizedEngine(task, stack), rounds, name)
        place, distance = max_rel_diff(state_tree(state), state_tree(expected))
        assert distance <= TOLERANCE, (
            f"{name}: after {rounds} rounds the engine vectorized (stack={stack}) differs from"
            f" sequential by {distance:.1e} at {place}: weigh examples by batch.weight (padding"
            " has 0), make no Python numbers from tensors, and keep no state but in client_state"
            " and server_state"
        )


def _check_healthy(state: RunState, lines: Sequence[Mapping[str, Any]], name: str) -> None:
    """No reply is rejected, no round abandoned, and no value NaN or infinite."""
    for line in lines:
        for rejection in line["rejected"]:
            raise AssertionError(
                f"{name}: in round {line['round']} the reply of client {rejection['client']}"
                f" is rejected, because {rejection['reason']}"
            )
        assert not line["abandoned"], (
            f"{name}: round {line['round']} is abandoned, because"
            f" {line.get('problem', 'no client replied')}"
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
    """A run that stops after the first round and resumes ends with the same bits."""
    config = small_experiment(method, {"rounds": rounds}).config
    with tempfile.TemporaryDirectory() as folder:
        straight, broken = Path(folder) / "straight", Path(folder) / "broken"
        start_run(config.model_copy(update={"rounds": 1}), broken, method=method)
        runs = (
            start_run(config, straight, method=method),
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
        f" {distance:.1e}; keep all state in client_state and server_state"
    )
