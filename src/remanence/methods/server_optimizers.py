"""Server optimizers: the mean of the clients' updates is taken for a gradient, and the server steps
along it with momentum or adaptive rates.

FedAvgM: Hsu et al., "Measuring the effects of non-identical data distribution for federated visual
classification", 2019. FedAdagrad, FedAdam, FedYogi: Reddi et al., "Adaptive federated
optimization", ICLR 2021, algorithm 2. As there, moments are not corrected for their start, v starts
at tau^2 (the least it allows), and the update itself is squared (an early version of the paper
squares its running mean; the authors call that a slip).

    step                                hook           function
    m = 0, v = tau^2                    server_state   init_momentum, in `adaptive`
    m <- beta1 m + (1 - beta1) update   server_update  apply_adaptive
    v <- by the rule of each method     server_update  adam_, yogi_, adagrad_second_moment
    x <- x + lr m / (sqrt(v) + tau)     server_update  apply_adaptive
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.compose import part
from remanence.core.errors import check_range
from remanence.core.pytree import Params, Tree
from remanence.core.slots import Part, ServerContext, ServerUpdate
from remanence.core.types import ModelState, TaskInfo

SecondMoment = Callable[
    [Tensor, Tensor, dict[str, Tensor]], Tensor
]  # (v, move squared, hyper) -> v


@part
def fedavgm(*, lr: float = 1.0, momentum: float = 0.9) -> Part:
    """m <- momentum * m + move;  x <- x + lr * m

    lr: the server's rate, eta. momentum: beta; 0 with lr = 1 is FedAvg.
    """
    check_range(lr > 0, "fedavgm", "lr", "above 0", lr)
    check_range(0 <= momentum < 1, "fedavgm", "momentum", "from 0 to below 1", momentum)
    return Part(
        "fedavgm",
        hyper={"lr": lr, "momentum": momentum},
        server_state=init_momentum,
        server_update=apply_momentum,
    )


@part
def fedadam(
    *, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
) -> Part:
    """m <- beta1 m + (1 - beta1) move;  v <- beta2 v + (1 - beta2) move^2;  x <- x + lr * m /
    (sqrt(v) + tau)

    lr: the server's rate, eta: the paper tunes it task by task, so this default is ours. beta1,
        beta2: how slowly m and v change. tau: how little it adapts.
    """
    return adaptive("fedadam", lr, beta1, beta2, tau, adam_second_moment)


@part
def fedyogi(
    *, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
) -> Part:
    """As fedadam, but v moves by a fixed share of move^2: v <- v - (1 - beta2) move^2 sign(v -
    move^2)

    lr: the server's rate, eta: the paper tunes it task by task, so this default is ours. beta1,
        beta2: how slowly m and v change. tau: how little it adapts.
    """
    return adaptive("fedyogi", lr, beta1, beta2, tau, yogi_second_moment)


@part
def fedadagrad(*, lr: float = 0.01, beta1: float = 0.0, tau: float = 1e-3) -> Part:
    """As fedadam, but v only grows: v <- v + move^2

    lr: the server's rate, eta: the paper tunes it task by task, so this default is ours. beta1: how
        slowly m changes. tau: how little it adapts.
    """
    return adaptive("fedadagrad", lr, beta1, None, tau, adagrad_second_moment)


def adam_second_moment(v: Tensor, squared: Tensor, hyper: dict[str, Tensor]) -> Tensor:
    return hyper["beta2"] * v + (1 - hyper["beta2"]) * squared


def yogi_second_moment(v: Tensor, squared: Tensor, hyper: dict[str, Tensor]) -> Tensor:
    return v - (1 - hyper["beta2"]) * squared * torch.sign(v - squared)


def adagrad_second_moment(v: Tensor, squared: Tensor, hyper: dict[str, Tensor]) -> Tensor:
    return v + squared


def init_momentum(start: ModelState, info: TaskInfo) -> Tree:
    return {"m": pytree.zeros_like(start.params)}


def apply_momentum(params: Params, delta: Params, srv: ServerContext) -> tuple[Params, Tree]:
    m = pytree.map(lambda move, m: srv.hyper["momentum"] * m + move, delta, srv.state["m"])
    return params | pytree.axpy(srv.hyper["lr"], m, params), {"m": srv.state["m"] | m}


def adaptive(
    name: str, lr: float, beta1: float, beta2: float | None, tau: float, second: SecondMoment
) -> Part:
    """The three of algorithm 2, which differ in `second` alone."""
    check_range(lr > 0, name, "lr", "above 0", lr)
    check_range(0 <= beta1 < 1, name, "beta1", "from 0 to below 1", beta1)
    check_range(beta2 is None or 0 <= beta2 < 1, name, "beta2", "from 0 to below 1", beta2 or 0.0)
    check_range(tau > 0, name, "tau", "above 0", tau)

    def server(start: ModelState, info: TaskInfo) -> Tree:
        v = pytree.map(lambda x: torch.full_like(x, tau**2), start.params)
        return {"m": pytree.zeros_like(start.params), "v": v}

    numbers = {"lr": lr, "beta1": beta1, "tau": tau} | ({} if beta2 is None else {"beta2": beta2})
    return Part(name, hyper=numbers, server_state=server, server_update=apply_adaptive(second))


def apply_adaptive(second: SecondMoment) -> ServerUpdate:
    def apply(params: Params, delta: Params, srv: ServerContext) -> tuple[Params, Tree]:
        hyper, state = srv.hyper, srv.state
        m = pytree.map(
            lambda move, m: hyper["beta1"] * m + (1 - hyper["beta1"]) * move, delta, state["m"]
        )
        v = pytree.map(lambda move, v: second(v, move * move, hyper), delta, state["v"])
        moved = pytree.map(
            lambda m, v, x: x + hyper["lr"] * m / (torch.sqrt(v) + hyper["tau"]), m, v, params
        )
        # parameters that no client sent stay where they are
        return params | moved, {"m": state["m"] | m, "v": state["v"] | v}

    return apply
