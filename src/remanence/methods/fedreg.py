"""FedReg: local steps that do not undo what the received model knows, which generated inputs stand
for.

Inputs moved up the loss of the received model, with its predictions as labels, hold its knowledge.
Where a local gradient opposes theirs, that component is removed. Xu et al., "Acceleration of
federated learning with alleviated forgetting in local training", ICLR 2022.

    step                                        hook             function
    pseudo data, perturbed data                 gradient         sign_ascent
    gradients at interpolated parameters        gradient         interpolate
    projection of the gradient                  gradient         in `fedreg`
    plain mean of the models                    client_weights   uniform_weights
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from remanence.aggregators.mean import uniform_weights
from remanence.core import pytree
from remanence.core.compose import part
from remanence.core.errors import InputError, check_range
from remanence.core.pytree import Params
from remanence.core.slots import ClientOps, Context, Part
from remanence.core.types import Batch

# Below this squared length a gradient is rounding: in a client's first step the pseudo data's
# own labels give none at all. Far above the rounding of float32.
FLOOR = 1e-8
TOKENS = (
    "fedreg moves inputs along their gradient, which token numbers do not have: use it with"
    " images or tables, or choose another method"
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
    received. Pseudo data: the batch after `ascent` steps x + eta_s * sign(dL/dx) up the loss of
    w_old, with softmax(w_old's logits) as labels. The batch itself is never changed.

    Our reading, where the text is open: perturbed data are the batch after one such step of size
    eta_p with their true labels, so that p seldom points against g; both projections are those of g
    itself, over all parameters as one vector; where |s|^2 is under 1e-8 it counts as that, for in
    the first step s is 0. Inputs are normalized, so step sizes are in standard deviations. All
    gradients are those of the whole objective, with the terms of other methods, in training mode. A
    step costs `ascent` + 4 gradients.

    gamma: how far from w_old towards w the gradient is taken; 0.25 to 0.5 by data set.
    beta: the same for the gradients of pseudo and perturbed data.
    eta_s, eta_p: the step sizes of pseudo and of perturbed data (our choice).
    ascent: steps that make the pseudo data.
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
        remembered = torch.softmax(ops.forward(ctx.start, pseudo.x).logits, dim=1)  # [B, C]
        perturbed = sign_ascent(old, batch, hyper["eta_p"], ops)
        between = interpolate(params, old, hyper["beta"])
        g = ops.grad(interpolate(params, old, hyper["gamma"]), batch)
        pseudo_gradients = (
            ops.grad(between, pseudo._replace(y=remembered)),
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
    """One step up the loss, by the sign of the inputs' gradient."""
    return batch._replace(x=batch.x + size * torch.sign(ops.grad(params, batch, wrt="inputs")))


def interpolate(new: Params, old: Params, share: Tensor) -> Params:
    """share * new + (1 - share) * old"""
    return pytree.map(lambda w, w_old: share * w + (1 - share) * w_old, new, old)


def reject_tokens(network: nn.Module, classes: int) -> nn.Module:
    if any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in network.modules()):
        raise InputError(TOKENS)
    return network
