"""What `check_method` finds by reading a part: numbers and state in closures, missing declarations.

A function of a part reads numbers through `ctx.hyper` or `srv.hyper`, and Python values that the
part declares in `Part.static`. Another number in its closure would be shared by all runs of a
stack; a value that changes there is state that no checkpoint holds.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
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
        for name, value in values_carried(function):
            argument = _find_argument(p, name, value)
            if argument is None:
                assert slot in WITHOUT_CONTEXT or not _is_closed_over(function, name, value), (
                    f"{p.name}: a function of the slot {slot} reads the number {name} from its"
                    " closure: make it an argument of a constructor that is decorated with @part,"
                    ' put the argument into hyper, and compute the number from ctx.hyper["..."]'
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


def values_carried(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What a function carries: closure cells, defaults and bound arguments, also those of the
    functions among them.

    Yields:
        The name and the value; the name "" for an argument bound by position.
    """
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        for name, value in _carried_by(current):
            yield name, value
            items = value if isinstance(value, tuple) else (value,)
            waiting += [item for item in items if callable(item)]


def _carried_by(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        yield "", function.func
        yield from (("", value) for value in function.args)
        yield from function.keywords.items()
    elif isinstance(function, types.FunctionType):
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if cell != types.CellType():  # not assigned yet
                yield name, cell.cell_contents
        yield from (("", value) for value in function.__defaults__ or ())
        yield from (function.__kwdefaults__ or {}).items()
    elif isinstance(function, types.MethodType):
        yield "", function.__func__
        yield from getattr(function.__self__, "__dict__", {}).items()
    elif not isinstance(function, type):
        yield from getattr(function, "__dict__", {}).items()


def _is_closed_over(function: Any, name: str, value: Any) -> bool:
    """Is this a number in the function's own closure: a float, or a tensor that holds one?"""
    code = getattr(function, "__code__", None)
    is_number = isinstance(value, float) or (
        isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 0
    )
    return is_number and code is not None and name in code.co_freevars


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
        for number, (name, value) in enumerate(values_carried(function))
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
    return isinstance(value, list | dict | set | bytearray | Tensor | np.ndarray)


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
