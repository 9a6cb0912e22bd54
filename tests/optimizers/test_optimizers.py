"""Our optimizers beside torch.optim's, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from remanence.core import pytree
from remanence.core.contexts import Context
from remanence.core.errors import InputError
from remanence.core.expressions import instantiate, parse_call
from remanence.core.pytree import Params
from remanence.core.slots import Optimizer
from remanence.optimizers import OPTIMIZERS

STEPS, CLIENTS = 20, 3
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}

CASES: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd(lr=0.1)": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd(lr=0.1, weight_decay=0.05)": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05),
    "sgd(lr=0.05, momentum=0.9)": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "sgd(lr=0.05, momentum=0.9, weight_decay=0.01)": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, weight_decay=0.01
    ),
    "sgd(lr=0.05, momentum=0.8, nesterov=true)": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.8, nesterov=True
    ),
    "sgd(lr=0.05, momentum=0.8, weight_decay=0.1, nesterov=true)": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.8, weight_decay=0.1, nesterov=True
    ),
    "adam": lambda p: torch.optim.Adam(p, foreach=False),
    "adam(lr=0.02, beta1=0.7, beta2=0.95, eps=0.001)": lambda p: torch.optim.Adam(
        p, lr=0.02, betas=(0.7, 0.95), eps=1e-3, foreach=False
    ),
    "adam(lr=0.02, weight_decay=0.1)": lambda p: torch.optim.Adam(
        p, lr=0.02, weight_decay=0.1, foreach=False
    ),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw(lr=0.02, weight_decay=0.3)": lambda p: torch.optim.AdamW(
        p, lr=0.02, weight_decay=0.3, foreach=False
    ),
}


def make(text: str) -> Optimizer:
    return instantiate(parse_call(text), OPTIMIZERS, "optimizer")


def context(numbers: dict[str, float], dtype: torch.dtype = torch.float64) -> Context:
    """All an optimizer may read are its numbers."""
    rule = {
        name: torch.tensor(value, dtype=torch.float64).to(dtype) for name, value in numbers.items()
    }
    fields: dict[str, Any] = dict.fromkeys(Context._fields)
    return Context(**fields | {"optimizer_hparams": rule})


def first_params(client: int) -> Params:
    generator = torch.Generator().manual_seed(client)
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator)
        for name, shape in (("w", (3, 2)), ("b", (2,)))
    }


def gradient(params: Params, step: int | Tensor) -> Params:
    """Of a bumpy bowl that changes with the step, with signs that change too."""
    return {name: value * 0.7 + torch.sin(3 * value + step) for name, value in params.items()}


def run_theirs(text: str, client: int) -> Params:
    params = {name: value.clone().requires_grad_() for name, value in first_params(client).items()}
    optimizer = CASES[text](list(params.values()))
    for step in range(STEPS):
        for name, value in gradient(pytree.detach(params), step).items():
            params[name].grad = value
        optimizer.step()
    return pytree.detach(params)


def run_ours(text: str, params: Params) -> Params:
    optimizer = make(text)
    slots = optimizer.init(params)
    for step in range(STEPS):
        params, slots = optimizer.step(
            params, gradient(params, step), slots, context(dict(optimizer.hparams))
        )
    return params


@pytest.mark.parametrize("text", CASES)
def test_twenty_steps_equal_torch(text: str) -> None:
    start = first_params(0)
    ours, theirs = run_ours(text, start), run_theirs(text, 0)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], **TOLERANCE)
        assert not torch.equal(ours[name], start[name])
    # nothing was written in place
    assert all(torch.equal(start[name], value) for name, value in first_params(0).items())


@pytest.mark.parametrize("text", CASES)
def test_a_stack_of_clients_equals_torch_client_by_client(text: str) -> None:
    stacked = vmap(lambda params: run_ours(text, params))(
        pytree.stack([first_params(client) for client in range(CLIENTS)])
    )
    for client in range(CLIENTS):
        theirs = run_theirs(text, client)
        for name in theirs:
            torch.testing.assert_close(stacked[name][client], theirs[name], **TOLERANCE)


@pytest.mark.parametrize("text", CASES)
def test_init_works_inside_vmap_and_slots_keep_their_form(text: str) -> None:
    optimizer = make(text)
    params = pytree.stack([first_params(client) for client in range(CLIENTS)])
    slots = vmap(optimizer.init)(params)
    _, after = vmap(
        lambda p, s: optimizer.step(p, gradient(p, 0), s, context(dict(optimizer.hparams)))
    )(params, slots)
    before, after = pytree.flatten(slots), pytree.flatten(after)
    assert {name: (x.shape, x.dtype) for name, x in before.items()} == {
        name: (x.shape, x.dtype) for name, x in after.items()
    }


@pytest.mark.parametrize("text", CASES)
def test_single_precision_stays_single(text: str) -> None:
    optimizer = make(text)
    params = {"w": torch.ones(2)}
    new, slots = optimizer.step(
        params,
        {"w": torch.ones(2)},
        optimizer.init(params),
        context(dict(optimizer.hparams), torch.float32),
    )
    assert {x.dtype for x in (new["w"], *pytree.leaves(slots))} == {torch.float32}


@pytest.mark.parametrize("text", CASES)
def test_every_number_is_read_from_the_context(text: str) -> None:
    """Two runs may share a stack though their numbers differ: none may be caught in a closure."""
    optimizer, params = make(text), first_params(0)
    _, slots = optimizer.step(
        params, gradient(params, 0), optimizer.init(params), context(dict(optimizer.hparams))
    )
    for name, value in optimizer.hparams.items():
        if value == 0:  # left out of the computation altogether
            continue
        numbers = {**optimizer.hparams, name: value * 0.5}
        arguments = ", ".join(f"{key}={number}" for key, number in numbers.items())
        other = make(
            f"{optimizer.name}({arguments}{', nesterov=true' if 'nesterov' in text else ''})"
        )
        ours, _ = optimizer.step(params, gradient(params, 1), slots, context(numbers))
        theirs, _ = other.step(params, gradient(params, 1), slots, context(numbers))
        unchanged, _ = optimizer.step(
            params, gradient(params, 1), slots, context(dict(optimizer.hparams))
        )
        assert all(torch.equal(ours[key], theirs[key]) for key in params)
        assert not torch.equal(ours["w"], unchanged["w"])


def step_twice(text: str) -> list[float]:
    """From w = 1 with the gradient 2, twice."""
    optimizer, w, passed = make(text), {"w": torch.tensor(1.0, dtype=torch.float64)}, []
    slots = optimizer.init(w)
    for _ in range(2):
        w, slots = optimizer.step(
            w,
            {"w": torch.tensor(2.0, dtype=torch.float64)},
            slots,
            context(dict(optimizer.hparams)),
        )
        passed.append(float(w["w"]))
    return passed


def test_sgd_by_hand() -> None:
    """lr .1, decay .1, momentum .5.

    plain      1 - .1*2 = .8, .8 - .2 = .6 decay      g = 2 + .1*1 = 2.1: .79; g = 2.079: .5821
    momentum   v = 2: .8; v = .5*2 + 2 = 3: .5 nesterov   step g + .5*v = 3: .7; v = 3, step 2 + 1.5
    = 3.5: .35 all        g = v = 2.1, step 3.15: .685; g = 2.0685, v = 1.05 + 2.0685 = 3.1185, step
    2.0685 + 1.55925 = 3.62775: .322225
    """
    assert step_twice("sgd(lr=0.1)") == pytest.approx([0.8, 0.6], rel=1e-14)
    assert step_twice("sgd(lr=0.1, weight_decay=0.1)") == pytest.approx([0.79, 0.5821], rel=1e-14)
    assert step_twice("sgd(lr=0.1, momentum=0.5)") == pytest.approx([0.8, 0.5], rel=1e-14)
    assert step_twice("sgd(lr=0.1, momentum=0.5, nesterov=true)") == pytest.approx(
        [0.7, 0.35], rel=1e-14
    )
    everything = "sgd(lr=0.1, momentum=0.5, weight_decay=0.1, nesterov=true)"
    assert step_twice(everything) == pytest.approx([0.685, 0.322225], rel=1e-14)


def test_adam_by_hand() -> None:
    """With a constant gradient g both corrected moments are exact, so every step is lr * g / (|g| +
    eps); here .1 * 2 / (2 + .5) = .08.

    AdamW with decay .5 first shrinks w by 1 - .1*.5 = .95: .95 - .08 = .87, .8265 - .08 = .7465.
    """
    assert step_twice("adam(lr=0.1, eps=0.5)") == pytest.approx([0.92, 0.84], rel=1e-14)
    assert step_twice("adamw(lr=0.1, eps=0.5, weight_decay=0.5)") == pytest.approx(
        [0.87, 0.7465], rel=1e-14
    )


def test_plain_sgd_remembers_nothing() -> None:
    assert make("sgd").init(first_params(0)) == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("sgd(lr=0)", "sgd: lr must be a number above 0, not 0.0"),
        ("sgd(lr=-1)", "sgd: lr must be a number above 0, not -1.0"),
        ("sgd(momentum=1)", "sgd: momentum must be a number from 0 to below 1, not 1.0"),
        ("sgd(momentum=-0.1)", "sgd: momentum must be"),
        ("sgd(weight_decay=-1)", "sgd: weight_decay must be a number of at least 0, not -1.0"),
        (
            "sgd(nesterov=true)",
            r"sgd: nesterov needs momentum: write sgd\(momentum=0.9, nesterov=true\)",
        ),
        ("adam(lr=0)", "adam: lr must be"),
        ("adam(beta1=1)", "adam: beta1 must be a number from 0 to below 1, not 1.0"),
        ("adam(beta2=-0.5)", "adam: beta2 must be"),
        ("adam(eps=0)", "adam: eps must be a number above 0, not 0.0"),
        ("adamw(weight_decay=-1)", "adamw: weight_decay must be"),
        ("sdg", "unknown optimizer 'sdg': did you mean sgd"),
    ],
)
def test_numbers_out_of_range_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        make(text)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(name: str, value: float) -> None:
    for option in make(name).hparams:
        with pytest.raises(InputError, match=f"{name}: {option} must be a number"):
            OPTIMIZERS[name](**{option: value})
