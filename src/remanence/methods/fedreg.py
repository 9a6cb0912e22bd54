"""FedReg: local steps that keep what the received model has learned, represented by pseudo data.

Pseudo data are inputs moved along the ascent direction of the received model's loss, with its
predictions as labels. The component of a local gradient that opposes their gradient is removed.

Xu et al., "Acceleration of federated learning with alleviated forgetting in local training", ICLR
2022.

    step                                        slot             function
    pseudo data, perturbed data                 gradient         sign_ascent
    gradients at interpolated parameters        gradient         interpolate
    projection of the gradient                  gradient         remove_opposed
    plain mean of the models                    client_weights   uniform_weights
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from remanence.aggregators.mean import uniform_weights
from remanence.core import pytree
from remanence.core.compose import part
from remanence.core.contexts import ClientOps, Context
from remanence.core.errors import InputError
from remanence.core.pytree import Params
from remanence.core.ranges import check_range
from remanence.core.slots import Part
from remanence.core.types import Batch

# A gradient with a smaller squared norm is rounding error: in a client's first step the gradient on
# pseudo data is 0. Far above the rounding error of float32.
FLOOR = 1e-8
TOKENS = (
    "fedreg moves inputs along their gradient, and tokens have no gradient: use it with images or"
    " tables, or choose another method"
)


@part
def fedreg(
    *,
    gamma: float = 0.4,
    beta: float = 0.5,
    eta_s: float = 0.02,
    eta_p: float = 0.002,
    ascent: int = 10,
) -> Part:
    """g - min(0, <g, s> / |s|^2) * s - min(0, <g, p> / |p|^2) * p instead of the gradient, and the
    plain mean of the clients' models.

    g is the gradient on the batch at gamma * w + (1 - gamma) * w_old; s and p are gradients at beta
    * w + (1 - beta) * w_old, on pseudo data and on perturbed data; w_old is the model the client
    received. Pseudo data: the batch after `ascent` steps x + eta_s * sign(dL/dx) of gradient ascent
    on the loss of w_old, with softmax(w_old's logits) as labels. The batch itself is not changed.

    Our reading, where the paper is open: perturbed data are the batch after one such step of size
    eta_p with their true labels; both projections are those of g itself, over all parameters as
    one vector; |s|^2 and |p|^2 are at least 1e-8, because s is 0 in the first step. Step sizes are
    in standard deviations, because inputs are normalized. All gradients are those of the whole
    objective, in training mode. A step costs `ascent` + 4 gradients.

    Args:
        gamma: Share of w in the parameters at which the gradient is taken; 0.25 to 0.5 by dataset.
        beta: The same for the gradients on pseudo and perturbed data.
        eta_s: Step size of pseudo data (our choice).
        eta_p: Step size of perturbed data (our choice).
        ascent: Steps that make the pseudo data.
    """
    check_range(0 < gamma <= 1, "fedreg", "gamma", "above 0 and up to 1", gamma)
    check_range(0 <= beta <= 1, "fedreg", "beta", "from 0 to 1", beta)
    check_range(eta_s >= 0, "fedreg", "eta_s", "of at least 0", eta_s)
    check_range(eta_p >= 0, "fedreg", "eta_p", "of at least 0", eta_p)
    check_range(ascent >= 1, "fedreg", "ascent", "of at least 1", ascent)

    def gradient(params: Params, batch: Batch, ops: ClientOps, ctx: Context) -> Params:
        if not batch.x.is_floating_point():
            raise InputError(TOKENS)
        old, hyper = pytree.select_keys(ctx.start.params, params), ctx.hyper
        pseudo = batch
        for _ in range(ascent):
            pseudo = sign_ascent(old, pseudo, hyper["eta_s"], ops)
        predictions = torch.softmax(ops.forward(ctx.start, pseudo.x).logits, dim=1)  # [B, C]
        perturbed = sign_ascent(old, batch, hyper["eta_p"], ops)
        between = interpolate(params, old, hyper["beta"])
        g = ops.grad(interpolate(params, old, hyper["gamma"]), batch)
        pseudo_gradients = (
            ops.grad(between, pseudo._replace(y=predictions)),
            ops.grad(between, perturbed),
        )
        return remove_opposed(g, pseudo_gradients)

    return Part(
        "fedreg",
        hyper={"gamma": gamma, "beta": beta, "eta_s": eta_s, "eta_p": eta_p},
        static=("ascent",),
        gradient=gradient,
        client_weights=uniform_weights,
        modify_model=reject_tokens,
    )


def remove_opposed(g: Params, pseudo_gradients: Sequence[Params]) -> Params:
    """The gradient without its components that oppose the pseudo gradients."""
    result: Params = g
    for opposed in pseudo_gradients:
        against = pytree.dot(g, opposed).clamp(max=0) / pytree.squared_norm(opposed).clamp(
            min=FLOOR
        )
        result = pytree.axpy(-against, opposed, result)
    return result


def sign_ascent(params: Params, batch: Batch, size: Tensor, ops: ClientOps) -> Batch:
    """One step of gradient ascent on the loss, by the sign of the inputs' gradient."""
    return batch._replace(x=batch.x + size * torch.sign(ops.grad(params, batch, wrt="inputs")))


def interpolate(new: Params, old: Params, share: Tensor) -> Params:
    """share * new + (1 - share) * old"""
    return pytree.map(lambda w, w_old: share * w + (1 - share) * w_old, new, old)


def reject_tokens(network: nn.Module, classes: int) -> nn.Module:
    if any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in network.modules()):
        raise InputError(TOKENS)
    return network
