"""Masked cross-entropy: the logits of classes the client lacks are set to 0 before the softmax.

Part of HeteroFL: Diao, Ding, Tarokh, "HeteroFL: computation and communication efficient federated
learning for heterogeneous clients", ICLR 2021.

Reading: masked logits are replaced by the number 0, not taken out. They get no gradient, as in TCE,
but m absent classes leave m * exp(0) in the denominator, an opponent that never moves. So unlike
TCE the loss depends on the level of the logits, and a client of one class still pushes its logit
up.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from remanence.core.compose import part
from remanence.core.declarations import ABSENT_CLASSES, Remedy
from remanence.core.slots import Context, Part
from remanence.core.types import Batch, Output


@part
def masked_ce() -> Part:
    """-z_y + log(m + sum_{c in the client's classes} exp(z_c)), with m the number of classes
    the client lacks.
    """
    return Part(
        "masked_ce",
        loss=masked,
        reads_label_counts=True,
        reads_inputs=False,
        addresses=(Remedy(ABSENT_CLASSES),),
    )


def masked(out: Output, batch: Batch, ctx: Context) -> Tensor:
    kept = torch.where(ctx.stats.label_counts > 0, out.logits, torch.zeros_like(out.logits))
    return cross_entropy(kept, batch.y, reduction="none")
