"""Server optimizers: the server uses the mean of the clients' updates as a gradient, with momentum
or adaptive rates.

FedAvgM: Hsu et al., "Measuring the effects of non-identical data distribution for federated visual
classification", 2019. FedAdagrad, FedAdam, FedYogi: Reddi et al., "Adaptive federated
optimization", ICLR 2021, algorithm 2. As there, moments have no bias correction, v starts at tau^2
(the smallest value it allows), and the update itself is squared (an early version of the paper
squares its running mean, which the authors call a mistake).

    step                                slot           function
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
from remanence.core.contexts import ServerContext
from remanence.core.pytree import Params, Tree
from remanence.core.ranges import check_range
from remanence.core.slots import Part, ServerUpdate
from remanence.core.types import ModelState, TaskInfo

# (v, update squared, hyper) -> v
SecondMoment = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]


@part
def fedavgm(*, lr: float = 1.0, momentum: float = 0.9) -> Part:
    """m <- momentum * m + update;  x <- x + lr * m

    Args:
        lr: The server's learning rate, eta.
        momentum: beta; 0 with lr = 1 is FedAvg.
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
    """m <- beta1 m + (1 - beta1) update;  v <- beta2 v + (1 - beta2) update^2;  x <- x + lr * m /
    (sqrt(v) + tau)

    Args:
        lr: The server's learning rate, eta. The paper tunes it for each task; the default is ours.
        beta1: Decay rate of m.
        beta2: Decay rate of v.
        tau: Degree of adaptivity; the smaller, the more adaptive.
    """
    return adaptive("fedadam", lr, beta1, beta2, tau, adam_second_moment)


@part
def fedyogi(
    *, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
) -> Part:
    """As fedadam, but v changes by a fixed share of update^2:
    v <- v - (1 - beta2) update^2 sign(v - update^2)

    Args:
        lr: The server's learning rate, eta. The paper tunes it for each task; the default is ours.
        beta1: Decay rate of m.
        beta2: v changes by the share 1 - beta2.
        tau: Degree of adaptivity; the smaller, the more adaptive.
    """
    return adaptive("fedyogi", lr, beta1, beta2, tau, yogi_second_moment)


@part
def fedadagrad(*, lr: float = 0.01, beta1: float = 0.0, tau: float = 1e-3) -> Part:
    """As fedadam, but v only grows: v <- v + update^2

    Args:
        lr: The server's learning rate, eta. The paper tunes it for each task; the default is ours.
        beta1: Decay rate of m.
        tau: Degree of adaptivity; the smaller, the more adaptive.
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
    """FedAdam, FedYogi or FedAdagrad, which differ in the second moment only."""
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
