"""FedNTD: distillation of the global model's predictions over all classes but the true one.

A client learns the true class from its labels and forgets the predictions for all other classes,
so only those are distilled. Lee et al., "Preservation of the global knowledge by not-true
distillation in federated learning", NeurIPS 2022.

    equation 4   softmax over the not-true classes        not_true
    equation 5   CE + beta tau^2 KL(q_global || q_local)  slot loss_terms   distill_not_true
"""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.core.compose import part
from remanence.core.contexts import ClientOps, Context
from remanence.core.declarations import ABSENT_CLASSES, Remedy
from remanence.core.ranges import check_range
from remanence.core.slots import Part
from remanence.core.types import Batch, Output


@part
def fedntd(*, beta: float = 1.0, tau: float = 1.0) -> Part:
    """beta * tau^2 * KL(q_global || q_local) added to the loss, where q is softmax(z / tau) over
    the C - 1 classes that are not true.

    The teacher is the model the client received, in evaluation mode, as it is in the authors' code
    for all clients but the first of a training. Of soft targets the largest
    counts as true.

    Args:
        beta: Weight of the distillation loss; 0 is FedAvg.
        tau: Temperature of both softmaxes.
    """
    check_range(beta >= 0, "fedntd", "beta", "of at least 0", beta)
    check_range(tau > 0, "fedntd", "tau", "above 0", tau)
    return Part(
        "fedntd",
        hyper={"beta": beta, "tau": tau},
        loss_terms=(distill_not_true,),
        addresses=(
            Remedy(
                ABSENT_CLASSES,
                "distills the global model's predictions over all classes but the true one, the"
                " absent ones among them",
                rank=1,
                needs_server=True,
            ),
        ),
    )


def distill_not_true(out: Output, batch: Batch, ops: ClientOps, ctx: Context) -> Tensor:
    tau = ctx.hyper["tau"]
    student = torch.log_softmax(not_true(out.logits, batch.y) / tau, dim=1)
    teacher = torch.log_softmax(not_true(ops.forward(ctx.start).logits, batch.y) / tau, dim=1)
    return ctx.hyper["beta"] * tau**2 * (teacher.exp() * (teacher - student)).sum(dim=1)


def not_true(logits: Tensor, y: Tensor) -> Tensor:
    """The logits of all classes but the true one; gathered, because a mask of -inf leaves NaN
    in the product. [B, C] -> [B, C - 1]
    """
    true = (y.argmax(dim=1) if y.dim() == 2 else y).unsqueeze(1)  # [B, 1]
    places = torch.arange(logits.shape[1] - 1, device=logits.device).unsqueeze(0)
    # indices from the true class on are shifted by one
    return logits.gather(1, places + (places >= true))
