"""FedRS, the restricted softmax: the logits of classes that a client lacks are scaled down, so that
local training lowers them less.

Li and Zhan, "FedRS: federated learning with restricted softmax for label distribution non-IID
data", KDD 2021.

Reading: the paper scales the scores w_c * h of a classifier without bias; here the whole logit is
scaled, its bias included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from remanence.core.compose import part
from remanence.core.contexts import Context
from remanence.core.declarations import ABSENT_CLASSES, Remedy
from remanence.core.ranges import check_range
from remanence.core.slots import Part
from remanence.core.types import Batch, Output


@part
def fedrs(*, alpha: float = 0.5) -> Part:
    """Cross-entropy over z_c for the classes the client has and alpha * z_c for those it lacks.

    Args:
        alpha: The scale; 1 is plain cross-entropy, 0 is masked_ce.
    """
    check_range(0 <= alpha <= 1, "fedrs", "alpha", "from 0 to 1", alpha)
    return Part(
        "fedrs",
        hyper={"alpha": alpha},
        loss=restricted,
        reads_label_counts=True,
        reads_inputs=False,
        addresses=(Remedy(ABSENT_CLASSES),),
    )


def restricted(out: Output, batch: Batch, ctx: Context) -> Tensor:
    present = ctx.stats.label_counts > 0
    return cross_entropy(
        torch.where(present, out.logits, ctx.hyper["alpha"] * out.logits), batch.y, reduction="none"
    )
