"""FedDF: the server distills the ensemble of the round's client models into the averaged model.

Lin et al., "Ensemble distillation for robust model fusion in federated learning", NeurIPS 2020,
algorithm 1.

    step                                        slot          function
    x <- mean of the x_k, weighted by n_k       (default)
    x <- x - lr grad KL(mean of logits || x)    server_train  learn_from_ensemble
    loss of a public example                    -             ensemble_loss
    gradient of at most this norm               -             clip_gradient
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.compose import part
from remanence.core.contexts import Context, ServerContext, ServerOps
from remanence.core.errors import InputError
from remanence.core.pytree import Params, Tree
from remanence.core.ranges import check_range
from remanence.core.slots import Optimizer, Part
from remanence.core.types import Batch, ModelState, Output, Reply, TaskInfo
from remanence.losses.dynamic_distillation import distill
from remanence.optimizers.adam import adam


@part
def feddf(
    *,
    steps: int = 10_000,
    patience: int = 1_000,
    lr: float = 0.001,
    batch: int = 128,
    validation: float = 0.1,
    clip: float = 5.0,
) -> Part:
    """KL(softmax(mean_k z_k) || softmax(z)) minimized over the server's public set, starting at the
    average by n_k; z are logits.

    Adam with a cosine schedule, clipped gradients and the numbers of the authors' code. The labels
    of the public set are used for early stopping only: with validation=0 none are needed, all steps
    are taken and the last model is kept. The share held out for validation is our reading.

    Args:
        steps: The most steps in a round.
        patience: Steps without a better validation accuracy after which a round's distillation
            ends; the best model is kept.
        lr: Learning rate of the first step.
        batch: Public examples in a step.
        validation: Share of the public set that is held out for validation.
        clip: Largest norm of the gradient of a step, 5 in the authors' code; 0: not limited.
    """
    check_arguments(steps, patience, lr, batch, validation, clip)
    server_optimizer = clip_gradient(adam(lr=lr), clip) if clip else adam(lr=lr)

    def learn_from_ensemble(
        merged: ModelState,
        previous: ModelState,
        replies: Reply,
        ops: ServerOps,
        srv: ServerContext,
    ) -> ModelState:
        # [1, n, C]: one teacher, with weight 1 for every class
        ensemble = ops.predict_logits(ops.local_models(replies)).mean(dim=0, keepdim=True)
        loss_args = {"ensemble": ensemble, "alpha": torch.ones_like(ensemble[:, 0])}
        return ops.fit(
            merged,
            ensemble_loss,
            loss_args,
            steps=steps,
            batch=batch,
            optimizer=server_optimizer,
            cosine=True,
            validation=validation,
            patience=patience,
        )

    return Part(
        "feddf",
        static=("steps", "patience", "lr", "batch", "validation", "clip"),
        server_train=learn_from_ensemble,
        validate=functools.partial(check_split, validation),
        needs_public_data=True,
    )


def check_arguments(
    steps: int, patience: int, lr: float, batch: int, validation: float, clip: float
) -> None:
    check_range(steps >= 1, "feddf", "steps", "of at least 1", steps)
    check_range(patience >= 1, "feddf", "patience", "of at least 1", patience)
    check_range(batch >= 1, "feddf", "batch", "of at least 1", batch)
    check_range(lr > 0, "feddf", "lr", "above 0", lr)
    check_range(0 <= validation < 1, "feddf", "validation", "from 0 to below 1", validation)
    check_range(clip >= 0, "feddf", "clip", "of at least 0", clip)


def clip_gradient(optimizer: Optimizer, clip: float) -> Optimizer:
    """An optimizer that scales gradients with a larger norm down to `clip`."""

    def step(params: Params, grads: Params, opt_state: Tree, ctx: Context) -> tuple[Params, Tree]:
        # the small number is that of torch.nn.utils.clip_grad_norm_
        factor = (clip / (pytree.squared_norm(grads).sqrt() + 1e-6)).clamp(max=1)
        return optimizer.step(params, pytree.map(lambda g: g * factor, grads), opt_state, ctx)

    return optimizer._replace(step=step)


def check_split(validation: float, optimizer: Optimizer, info: TaskInfo) -> None:
    """Refuse a share that leaves no example for training or for validation."""
    held = round(validation * info.public_size)
    if validation and not 0 < held < info.public_size:
        raise InputError(
            f"feddf: validation={validation} holds out {held} of the {info.public_size} public"
            " examples, and training and validation need at least one each: add examples"
            " (data.public), or use validation=0"
        )


def ensemble_loss(out: Output, batch: Batch, index: Tensor, loss_args: Tree) -> Tensor:
    return distill(out.logits, loss_args["ensemble"][:, index], loss_args["alpha"])
