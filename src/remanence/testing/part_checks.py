"""What `check_method` finds by reading a part: numbers and state in closures, missing declarations.

A function of a part reads numbers through `ctx.hyper` or `srv.hyper`, and Python values that the
part declares in `Part.static`. Another number in its closure would be shared by all runs of a
stack; a value that changes there is state that no checkpoint holds.
"""

from __future__ import annotations

import copy
import functools
import random
import types
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.declarations import UNDECLARED
from remanence.core.slots import Method, Part
from remanence.training.task import TrainingTask

# slots whose functions get no context, so that they read numbers from their constructor
WITHOUT_CONTEXT = (
    "client_state",
    "server_state",
    "payload",
    "frozen",
    "personal",
    "phases",
    "personalize",
    "modify_model",
    "validate",
    "privatize_stats",
    "init",
)

# values whose position changes when they are used
STATEFUL = (Iterator, random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def check_declarations(method: Method, task: TrainingTask) -> None:
    """Check that parts read numbers through `hyper` and declare what their payload reveals."""
    sent = task.payload_spec()
    for p in method.parts:
        check_numbers(p)
        for path in pytree.flatten(sent.get(p.name, {})):
            assert p.disclosure(path) is not UNDECLARED, (
                f"{p.name} does not declare what the leaf {path} of its payload reveals: add"
                f' discloses={{"{path.partition(pytree.SEPARATOR)[0]}": Disclosure(...)}}'
            )


def check_numbers(p: Part) -> None:
    """Check that every number reaches the functions through `hyper`, or is declared static."""
    assert p.arguments or not p.hyper, (
        f"{p.name} has hyper-parameters ({', '.join(p.hyper)}) and no recorded arguments, so a run"
        " could not store them: decorate its constructor with @part"
    )
    for slot, function in functions_of(p):
        for name, value, is_bound in values_carried(function):
            argument = _find_argument(p, name, value)
            if argument is None:
                assert slot in WITHOUT_CONTEXT or not (is_bound and _is_number(value)), (
                    f"{p.name}: a function of the slot {slot} reads the number"
                    f" {name or float(value)} from its"
                    " closure: make it an argument of a constructor that is decorated with @part,"
                    ' put the argument into hyper, and compute the number from ctx.hyper["..."]'
                )
                assert not isinstance(value, STATEFUL), (
                    f"{p.name}: a function of the slot {slot} carries {name or 'a value'} of the"
                    f" type {type(value).__name__}, whose position no checkpoint holds: draw from"
                    " keys (remanence.extend.rng), and count in client_state or server_state"
                )
                continue
            if argument in p.static:
                continue
            reads = f"{p.name}: a function of the slot {slot} reads {argument} from its closure"
            assert argument in p.hyper, (
                f"{reads}, and it is neither in hyper nor in static: put it into hyper and read"
                f' ctx.hyper["{argument}"], or declare static=("{argument}",) if it changes'
                " which operations run"
            )
            assert slot in WITHOUT_CONTEXT, (
                f'{reads}: read ctx.hyper["{argument}"], or all runs of a stack would share the'
                " number of one of them"
            )
    for argument in p.arguments:
        assert argument in p.hyper or argument in p.static, (
            f"{p.name}: the argument {argument} is neither in hyper nor in static: put it into"
            f' hyper and read ctx.hyper["{argument}"], or declare static=("{argument}",) if it'
            " changes which operations run"
        )


def functions_of(p: Part) -> Iterator[tuple[str, Callable[..., Any]]]:
    """All functions of a part, also those inside tuples such as `Aggregate`.

    Yields:
        The slot and the function; the slot "init" for the first half of a tuple such as
        `PeerSelection`, which gets no context.
    """
    for slot in p.__dataclass_fields__:
        yield from _functions_in(slot, getattr(p, slot))


def _functions_in(slot: str, value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    if isinstance(value, tuple):
        names = getattr(value, "_fields", (slot,) * len(value))
        for name, item in zip(names, value, strict=True):
            is_init = name == "init" and slot in ("peers", "model_assignment", "optimizer")
            yield from _functions_in("init" if is_init else slot, item)
    elif callable(value):
        yield slot, value


def values_carried(function: Callable[..., Any]) -> Iterator[tuple[str, Any, bool]]:
    """What a function carries: closure cells, defaults, bound arguments and attributes, also those
    of the functions, containers and objects among them.

    Yields:
        The name, the value, and whether it is in the closure or among the bound arguments of the
        function or of another one of its module; the name "" for an argument bound by position.
    """
    module = _module_of(function)
    waiting: list[tuple[Any, bool]] = [(function, True)]
    seen: set[int] = set()
    while waiting:
        current, near = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        for name, value, is_bound in _carried_by(current):
            yield name, value, near and is_bound
            if isinstance(value, types.FunctionType | functools.partial):
                waiting.append((value, _module_of(value) == module))
            elif type(value) in (tuple, list, dict, set):
                waiting.append((value, near and is_bound))
            elif not isinstance(value, type | types.ModuleType | Tensor):
                waiting.append((value, False))


def _carried_by(carrier: Any) -> Iterator[tuple[str, Any, bool]]:
    """Names and values, and whether they are in a closure or bound as arguments."""
    if isinstance(carrier, functools.partial):
        yield "", carrier.func, True
        yield from (("", value, True) for value in carrier.args)
        yield from ((name, value, True) for name, value in carrier.keywords.items())
    elif isinstance(carrier, types.FunctionType):
        for name, cell in zip(carrier.__code__.co_freevars, carrier.__closure__ or (), strict=True):
            if cell != types.CellType():  # not assigned yet
                yield name, cell.cell_contents, True
        yield from (("", value, False) for value in carrier.__defaults__ or ())
        yield from ((name, value, False) for name, value in (carrier.__kwdefaults__ or {}).items())
    elif isinstance(carrier, types.MethodType):
        yield "", carrier.__func__, False
        yield from _attributes(carrier.__self__)
    elif isinstance(carrier, Mapping):
        yield from ((str(name), value, True) for name, value in carrier.items())
    elif isinstance(carrier, tuple | list | set | frozenset):
        yield from (("", value, True) for value in carrier)
    else:
        yield from _attributes(carrier)


def _attributes(value: Any) -> Iterator[tuple[str, Any, bool]]:
    return ((name, item, False) for name, item in getattr(value, "__dict__", {}).items())


def _module_of(function: Any) -> str:
    """The module of a function, also of one with bound arguments."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", ""))


def _is_number(value: Any) -> bool:
    """Is this a float, or a tensor that holds one?"""
    return isinstance(value, float) or (
        isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 0
    )


def _find_argument(p: Part, name: str, value: Any) -> str | None:
    """The argument of the constructor that a carried number is; None where it is no argument."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    equal = [
        argument
        for argument, given in p.arguments.items()
        if type(given) is type(value) and given == value
    ]
    if name in equal:
        return name
    if not name:  # bound by position
        return equal[0] if equal else None
    return next((argument for argument in equal if argument in p.hyper), None)


def carried_values(p: Part) -> dict[str, Any]:
    """Copies of all values that the functions of a part carry, by slot and place."""
    return {
        f"{slot} {number}: {name}": copy.deepcopy(value) if _is_mutable(value) else value
        for slot, function in functions_of(p)
        for number, (name, value, _) in enumerate(values_carried(function))
    }


def check_unchanged(p: Part, before: dict[str, Any]) -> None:
    """Check that the functions of a part carry the same values as before a run."""
    after = carried_values(p)
    for place, value in after.items():
        same = place in before and _equal(before[place], value)
        assert same, (
            f"{p.name}: a run changes what a function of the slot {place.partition(' ')[0]}"
            f" carries ({place.rpartition(' ')[2]}), which no checkpoint holds: keep no state but"
            " in client_state and server_state"
        )


def _is_mutable(value: Any) -> bool:
    return isinstance(value, (MutableSequence, MutableMapping, MutableSet, Tensor, np.ndarray))


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(value, b[name]) for name, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)
