"""FedReg: local training that does not unlearn what the received model knows, represented by
examples made with that model.

Pseudo examples are inputs moved along the ascent direction of the received model's loss, with its
predictions as labels; perturbed examples are inputs moved a little, with their true labels. A
client's displacement from the received model loses the component that raises the loss of either.

Xu et al., "Acceleration of federated learning with alleviated forgetting in local training", ICLR
2022, with what the authors' program does where the paper is open.

    step                                               slot             function
    make pseudo and perturbed examples, once a round   on_client_start  make_memory
    gradient at gamma * w + (1 - gamma) * w_old        gradient         gradient_between
    w <- w - lr * gradient                             (default)
    project w - w_old                                  project          keep_memory
    plain mean of the models                           client_weights   uniform_weights
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from remanence.aggregators.mean import uniform_weights
from remanence.core import pytree, rng
from remanence.core.compose import part
from remanence.core.contexts import ClientOps, Context
from remanence.core.errors import InputError
from remanence.core.pytree import Params, Tree
from remanence.core.ranges import check_range
from remanence.core.slots import Optimizer, Part
from remanence.core.types import Batch, TaskInfo

# added to squared norms: a gradient of rounding errors in float64 has no direction
TINY = 1e-30


@part
def fedreg(
    *,
    gamma: float = 0.5,
    beta: float = 0.5,
    eta_s: float = 0.1,
    eta_p: float = 0.001,
    ascent: int = 10,
) -> Part:
    """After every local step, d - max(0, <d, s> / |s|^2) * s instead of d = w - w_old, and the same
    with p instead of s for what is left; the server takes the plain mean of the clients' models.

    The gradient of the step is taken at gamma * w + (1 - gamma) * w_old; s and p are gradients at
    beta * w + (1 - beta) * w_old, on pseudo and on perturbed examples; w_old is the model the
    client received. Both kinds are made from all of the client's examples at the start of a round,
    by `ascent` steps x + eta * sign(dL/dx) on the loss of w_old, with eta_s and eta_p. The labels
    of pseudo examples are softmax(w_old's logits), those of perturbed ones the true labels. They
    are divided into batches in a random order of their own, and each step uses the next batch. They
    never leave the client and are forgotten at the end of the round.

    The authors train by plain SGD, mostly at a rate of 0.1: as they do, choose an optimizer without
    momentum and weight decay; the steps of others are projected just as well. Their eta_p is always
    eta_s / 100, their gamma 0.25 to 0.5 by dataset. They clip pseudo examples to the range of the
    batch, which has no effect in their program and is left out here. Step sizes are in standard
    deviations, because inputs are normalized. The examples are made without augmentation. All
    gradients are those of the whole objective. Batch norm, which the authors' networks do not have,
    normalizes a short last batch together with examples of the first. A step costs three gradients,
    and a round 2 * `ascent` gradients of every example.

    Args:
        gamma: Share of w in the parameters at which the gradient is taken.
        beta: The same for the gradients on pseudo and perturbed examples.
        eta_s: Step size of pseudo examples.
        eta_p: Step size of perturbed examples.
        ascent: Steps that make an example.
    """
    check_range(0 < gamma <= 1, "fedreg", "gamma", "above 0 and up to 1", gamma)
    check_range(0 <= beta <= 1, "fedreg", "beta", "from 0 to 1", beta)
    check_range(eta_s >= 0, "fedreg", "eta_s", "of at least 0", eta_s)
    check_range(eta_p >= 0, "fedreg", "eta_p", "of at least 0", eta_p)
    check_range(ascent >= 1, "fedreg", "ascent", "of at least 1", ascent)
    return Part(
        "fedreg",
        hyper={"gamma": gamma, "beta": beta, "eta_s": eta_s, "eta_p": eta_p},
        static=("ascent",),
        on_client_start=lambda ctx, ops: make_memory(ctx, ops, ascent),
        gradient=gradient_between,
        project=keep_memory,
        client_weights=uniform_weights,
        validate=reject_tokens,
    )


def make_memory(ctx: Context, ops: ClientOps, ascent: int) -> tuple[Tree, Tree]:
    """Pseudo and perturbed examples in the order in which the steps use them."""
    _, batch = ops.predict(ctx.start)
    count = (batch.weight > 0).sum()
    order = rng.permutation(rng.fold_in(ctx.key, "memory"), len(batch.weight), count)

    def climb(eta: Tensor) -> Tensor:
        x = batch.x
        for _ in range(ascent):
            gradient = ops.grad(ctx.start.params, batch._replace(x=x), wrt="inputs")
            x = x + eta * torch.sign(gradient)
        return x

    pseudo = climb(ctx.hyper["eta_s"])
    memory = {
        "pseudo": pseudo,
        "predictions": torch.softmax(ops.forward(ctx.start, pseudo).logits, dim=1),
        "perturbed": climb(ctx.hyper["eta_p"]),
        "labels": batch.y,
        "ids": batch.ids,
    }
    return {"count": count} | {
        name: as_long_as_any(values[order], ctx.info) for name, values in memory.items()
    }, {}


def as_long_as_any(values: Tensor, info: TaskInfo) -> Tensor:
    """Values of a client's examples, with room for those of the largest client: the memory of all
    clients has one shape. [n, ...] -> [max(n, max_client_size), ...]
    """
    missing = max(0, info.max_client_size - len(values))
    return pad(values, (0, 0) * (values.dim() - 1) + (0, missing))


def gradient_between(params: Params, batch: Batch, ops: ClientOps, ctx: Context) -> Params:
    """The gradient between the received and the current model."""
    grads: Params = ops.grad(between(params, ctx, "gamma"), batch)
    return grads


def keep_memory(params: Params, batch: Batch, ops: ClientOps, ctx: Context) -> Params:
    """The parameters without the components of w - w_old that raise the loss of remembered
    examples.
    """
    old, at = pytree.select_keys(ctx.start.params, params), between(params, ctx, "beta")
    for remembered in batches_of_step(ctx):
        grads = ops.grad(at, remembered)
        overlap = pytree.dot(pytree.sub(params, old), grads)
        share = overlap.clamp(min=0) / (pytree.squared_norm(grads) + TINY)
        params = pytree.axpy(-share, grads, params)
    return params


def between(params: Params, ctx: Context, share: str) -> Params:
    """share * w + (1 - share) * w_old, with a hyper-parameter as share."""
    return pytree.lerp(pytree.select_keys(ctx.start.params, params), params, ctx.hyper[share])


def batches_of_step(ctx: Context) -> tuple[Batch, Batch]:
    """The pseudo and the perturbed examples of a step."""
    memory, size = ctx.client_state, ctx.info.batch_size
    num_batches = (memory["count"] + size - 1) // size
    place = ctx.step % num_batches * size + torch.arange(size, device=ctx.step.device)
    weight = (place < memory["count"]).to(ctx.info.dtype)
    index = place % memory["count"]  # a short batch is filled with examples of the first
    chosen = {name: values[index] for name, values in memory.items() if name != "count"}
    pseudo = Batch(chosen["pseudo"], chosen["predictions"], weight, chosen["ids"])
    return pseudo, pseudo._replace(x=chosen["perturbed"], y=chosen["labels"])


def reject_tokens(optimizer: Optimizer, info: TaskInfo) -> None:
    """Whole numbers cannot be moved along a gradient."""
    if not info.example_dtype.is_floating_point:
        raise InputError(
            "fedreg moves inputs along their gradient, and tokens have no gradient: use it with"
            " images or tables, or choose another method"
        )
