"""FedDyn: a regularizer that changes from round to round lets the clients' optima agree with a
stationary point of the mean loss.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated learning based on dynamic
regularization", ICLR 2021, algorithm 1.

    step                                        slot           function
    h, h_k = 0                                  server_state,  zero_gradient
                                                client_state
    w_k <- argmin f_k(w) - <h_k, w>             transforms     subtract_gradient
                  + alpha/2 ||w - w_t||^2       regularizers   proximal
    h_k <- h_k - alpha (w_k - w_t)              on_client_end  update_gradient
    h <- h - alpha/m sum_k (w_k - w_t)          server_update  apply_dynamic
    w <- mean of the w_k - h / alpha            client_weights uniform_weights
                                                aggregate      mean
                                                server_update  apply_dynamic
"""

from __future__ import annotations

from torch import Tensor

from remanence.aggregators.mean import mean, uniform_weights
from remanence.core import pytree
from remanence.core.compose import part
from remanence.core.contexts import ClientOps, Context, ServerContext
from remanence.core.pytree import Params, Tree
from remanence.core.ranges import check_range
from remanence.core.slots import Part, Transform
from remanence.core.types import ModelState, TaskInfo


@part
def feddyn(*, alpha: float = 0.01) -> Part:
    """alpha/2 * ||w - w_t||^2 - <h_k, w> added to the loss; the server subtracts h / alpha from
    the plain mean of the clients' models.

    h_k estimates the gradient of client k's loss at the model it trained last, and is exactly that
    if the client minimizes its regularized loss; h is the mean of the h_k of all m clients,
    whichever take part. All start at zero. Where the rounds stop changing anything, h is zero and
    all clients' models are the global one, a stationary point of the mean loss; FedAvg and FedProx
    stop elsewhere if the clients' data differ. The mean loss weights all clients equally, so all
    replies of a round have the same weight, as in the paper.

    The paper minimizes the regularized loss exactly; here clients make the experiment's local steps
    with its optimizer, and the recorded training loss leaves -<h_k, w> out. h never decays: -h /
    alpha is the sum over all rounds of sum_k (w_k - w_t) / m, so the global model keeps moving
    where a schedule ends at a learning rate of 0. Every client keeps h_k, as large as the model,
    and sends only its trained model. Any loss can be added: `feddyn(alpha=0.1)+wsm`.

    Numbers of the authors' code are not comparable without more: it divides a client's alpha by its
    size relative to the mean size, limits the norm of every gradient to 10, and reports, besides
    others, the mean of the models that all m clients trained last, where the global model of
    algorithm 1 is evaluated here.

    Args:
        alpha: Weight of the regularizer, tuned for each task in the paper; the default is that of
            the examples in the authors' code.
    """
    check_range(alpha > 0, "feddyn", "alpha", "above 0", alpha)
    return Part(
        "feddyn",
        hyper={"alpha": alpha},
        client_state=lambda start, stats, info: zero_gradient(start, info),
        server_state=zero_gradient,
        regularizers=(proximal,),
        transforms=(Transform("correct", subtract_gradient),),
        on_client_end=update_gradient,
        client_weights=uniform_weights,
        # h is the mean of the h_k only if delta is the plain mean of the updates
        aggregate=mean,
        equal_weights=True,
        server_update=apply_dynamic,
    )


def zero_gradient(start: ModelState, info: TaskInfo) -> Tree:
    return {"h": pytree.zeros_like(pytree.select_keys(start.params, info.communicated))}


def proximal(params: Params, ctx: Context) -> Tensor:
    return ctx.hyper["alpha"] / 2 * pytree.squared_norm(pytree.sub(params, ctx.start.params))


def subtract_gradient(grads: Params, params: Params, ctx: Context) -> Params:
    """g - h_k, the gradient with the term -<h_k, w>."""
    h_k = ctx.client_state["h"]
    return {name: g - h_k[name] if name in h_k else g for name, g in grads.items()}


def update_gradient(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
    """h_k - alpha (w_k - w_t)"""
    return {
        "h": pytree.map(
            lambda h_k, w_k, w_t: h_k - ctx.hyper["alpha"] * (w_k - w_t),
            ctx.client_state["h"],
            trained.params,
            ctx.start.params,
        )
    }, {}


def apply_dynamic(params: Params, delta: Params, srv: ServerContext) -> tuple[Params, Tree]:
    """h <- h - alpha/m sum_k (w_k - w_t);  w <- w_t + delta - h / alpha

    With the same weight for all replies num_replies * delta is the sum of their updates.
    """
    alpha, share = srv.hyper["alpha"], srv.num_replies / srv.info.num_clients
    h = pytree.map(lambda h, move: h - alpha * share * move, srv.state["h"], delta)
    moved = pytree.map(lambda move, h, w_t: w_t + move - h / alpha, delta, h, params)
    return params | moved, {"h": h}
