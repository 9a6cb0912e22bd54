"""SCAFFOLD: control variates correct every client's gradient towards the mean over all clients.

Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning", ICML 2020,
algorithm 1.

    line   step                                   slot                 function
    -      c, c_i = 0                             server_state,        zero_control_variates
                                                  client_state
    5      send x and c to the clients            broadcast            in `scaffold`
    10     y <- y - lr (g(y) - c_i + c)           transforms           correct
    12 i   c_i+ = gradient at x                   on_client_end        control_from_data
    12 ii  c_i+ = c_i - c + (x - y) / (K lr)      on_client_end        control_from_steps
    13     send the change of c_i                 payload              communicated
    16-17  x <- mean of the y_i                   (default)            uniform_weights, if `equal`
    17     c <- c + sum of the changes / N        update_server_state  update_server_control
"""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.aggregators.mean import uniform_weights
from remanence.core import pytree
from remanence.core.compose import part
from remanence.core.contexts import ClientOps, Context, ServerContext
from remanence.core.declarations import HELD_CLASSES, Disclosure, Remedy
from remanence.core.errors import InputError
from remanence.core.pytree import Params, Tree
from remanence.core.slots import Optimizer, Part, Transform
from remanence.core.types import ModelState, Reply, TaskInfo


@part
def scaffold(*, option: int = 2, equal: bool = False) -> Part:
    """Local steps y <- y - lr * (g(y) - c_i + c); then c_i is updated, and c changes by the sum of
    the changes / N.

    c_i estimates client i's gradient and c the mean gradient. All start at zero, so that c is
    always the mean of all N clients' c_i, whichever take part. The server's learning rate is 1:
    add a server optimizer, `scaffold+fedavgm(lr=0.5, momentum=0)`, for another. Option 2 assumes
    that K steps move the model by lr times the sum of K gradients. With momentum they move it up to
    1 / (1 - momentum) times as far, and from a factor of 2 on the error of the control variates
    grows: with a momentum above 0.5, or with Adam, use option 1.

    Args:
        option: How c_i is updated. 2: c_i - c + (x - y_i) / (K lr), from the steps just made (the
            paper's experiments); 1: the gradient at the received model x over all of the client's
            training data, without augmentation.
        equal: Give all clients of a round the same weight, as the paper does. By default clients
            are weighted by their numbers of examples.
    """
    if option not in (1, 2):
        raise InputError(
            "scaffold: option must be 1 (a gradient over all data) or 2 (from the local"
            f" steps), not {option}"
        )
    return Part(
        "scaffold",
        client_state=lambda start, stats, info: zero_control_variates(start, info),
        server_state=zero_control_variates,
        broadcast=lambda srv: {"c": srv.state["c"]},
        transforms=(Transform("correct", correct),),
        on_client_end=control_from_data if option == 1 else control_from_steps,
        payload=lambda start, info: {"change": communicated(start, info)},
        discloses={
            "change": Disclosure("model")
            if option == 2
            else Disclosure(
                "examples", cure="its control variates are raw gradients; write scaffold(option=2)"
            )
        },
        static=("option", "equal"),
        addresses=(
            Remedy(
                HELD_CLASSES,
                "corrects every client's gradient towards the mean over all clients",
                rank=1,
                needs_server=True,
            ),
        ),
        update_server_state=update_server_control,
        client_weights=uniform_weights if equal else None,
        validate=None if option == 1 else check_steps_are_gradients,
        payload_description="the change of its control variates, as large as the model",
    )


def communicated(start: ModelState, info: TaskInfo) -> Params:
    """The parameters that have control variates."""
    return pytree.select_keys(start.params, info.communicated)


def zero_control_variates(start: ModelState, info: TaskInfo) -> Tree:
    return {"c": pytree.zeros_like(communicated(start, info))}


def check_steps_are_gradients(optimizer: Optimizer, info: TaskInfo) -> None:
    """Option 2 computes gradients from a client's update."""
    if optimizer.name in ("adam", "adamw") or optimizer.hparams.get("momentum", 0.0) > 0.5:
        what = (
            optimizer.name
            if "adam" in optimizer.name
            else f"a momentum of {optimizer.hparams['momentum']:g}"
        )
        raise InputError(
            f"scaffold: option 2 cannot compute gradients from steps made with {what}: write"
            " scaffold(option=1), or train with sgd and a momentum of at most 0.5"
        )


def correct(grads: Params, params: Params, ctx: Context) -> Params:
    """g - c_i + c"""
    c_i, c = ctx.client_state["c"], ctx.broadcast["c"]
    return {name: g - c_i[name] + c[name] if name in c else g for name, g in grads.items()}


def control_from_steps(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
    """Option 2: c_i+ = c_i - c + (x - y_i) / (K lr)."""
    lr = ctx.optimizer_hparams["lr"]
    # a schedule may end at 0: the update is 0 then, whatever the gradient
    moving = lr > 0
    length = ctx.steps * torch.where(moving, lr, torch.ones_like(lr))

    def next_control(c_i: Tensor, c: Tensor, x: Tensor, y_i: Tensor) -> Tensor:
        return torch.where(moving, c_i - c + (x - y_i) / length, c_i)

    return state_and_change(
        pytree.map(
            next_control,
            ctx.client_state["c"],
            ctx.broadcast["c"],
            ctx.start.params,
            trained.params,
        ),
        ctx,
    )


def control_from_data(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
    """Option 1: c_i+ = the gradient at x over all of the client's training data."""
    gradient = ops.full_grad(ctx.start.params)
    return state_and_change(pytree.select_keys(gradient, ctx.client_state["c"]), ctx)


def state_and_change(renewed: Params, ctx: Context) -> tuple[Tree, Tree]:
    return {"c": renewed}, {"change": pytree.sub(renewed, ctx.client_state["c"])}


def update_server_control(replies: Reply, srv: ServerContext) -> Tree:
    """c + sum_i (c_i+ - c_i) / N"""
    change = replies.payload["scaffold"]["change"]
    return {
        "c": pytree.map(
            lambda c, changes: c + changes.sum(dim=0) / srv.info.num_clients, srv.state["c"], change
        )
    }
