"""Runs of the built-in task for the checkers, with errors as sentences."""

from __future__ import annotations

import traceback
import types
from collections.abc import Iterable
from typing import Any

import torch

from remanence.core import pytree
from remanence.core.compose import BoundHook
from remanence.core.engine import ClientWork, Engine
from remanence.core.slots import Part
from remanence.core.types import Reply
from remanence.experiment.build import BuiltExperiment
from remanence.testing.part_checks import functions_of
from remanence.testing.toy_task import (
    max_rel_diff,
    run_rounds,
    work_tree,
)
from remanence.training.state import RunState

# relative to the larger of 1 and the value: float64 leaves four digits for a different order of
# sums
TOLERANCE = 1e-12
STATES = ("client_state", "server_state")  # slots that declare what a part keeps


def run(
    experiment: BuiltExperiment, engine: Engine, rounds: int, name: str
) -> tuple[RunState, list[dict[str, Any]]]:
    """`run_rounds`; an error becomes a sentence with its first line and the slot it comes from."""
    try:
        return run_rounds(experiment, engine, rounds)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        parts = experiment.task.method.parts
        if slot := find_slot(error, parts):
            reason += f", in {slot}"
        absent = [name for name in STATES if all(getattr(p, name) is None for p in parts)]
        if isinstance(error, KeyError) and absent:
            reason += f"; no part declares a {' or a '.join(absent)}"
        cure = (
            "; under torch.vmap no `if`, no .item() and no boolean masks on tensors"
            if engine.name == "vectorized"
            else ""
        )
        raise AssertionError(
            f"{name} cannot run on the engine {engine.name} ({reason}){cure}"
        ) from error


def find_slot(error: BaseException, parts: Iterable[Part]) -> str:
    """The innermost function of a part that an error passed through, in words; "" where none."""
    codes = {
        function.__code__: f"the function {function.__name__} of the slot {slot} of {p.name}"
        for p in parts
        for slot, function in functions_of(p)
        if isinstance(function, types.FunctionType)
    }
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code is BoundHook.__call__.__code__:  # a wrong number of arguments raises here
            code = getattr(frame.f_locals["self"].function, "__code__", code)
        found = codes.get(code, found)
    return found


def train(engine: Engine, work: ClientWork, name: str) -> Reply:
    """All replies in cohort order, each client once."""
    reply = Reply.concat(list(engine.train(work)))
    order = torch.argsort(reply.client)
    expected, replied = work.clients.tolist(), reply.client[order].tolist()
    assert replied == expected, (
        f"{name} was given clients {expected} and replied for {replied}: every client replies once"
    )
    return reply.select(order)


def check_equal_replies(a: Reply, b: Reply, sentence: str) -> None:
    place, distance = max_rel_diff(a._asdict(), b._asdict())
    assert distance <= TOLERANCE, f"{sentence}: by {distance:.1e} at {place}"


def check_inputs_unchanged(engine: Engine, work: ClientWork, name: str) -> None:
    before = pytree.flatten(pytree.clone(work_tree(work)))
    for _ in engine.train(work):
        pass
    after = pytree.flatten(work_tree(work))
    changed = [place for place, value in before.items() if not torch.equal(value, after[place])]
    assert not changed, (
        f"{name} changes its input {changed[0]} in local training: return new tensors,"
        " never write into given ones (+=, add_)"
    )
