"""Masked cross-entropy: the logits of classes the client lacks are set to 0 before the softmax.

Part of HeteroFL: Diao, Ding, Tarokh, "HeteroFL: computation and communication efficient federated
learning for heterogeneous clients", ICLR 2021.

Reading: masked logits are set to 0, not removed. They get no gradient, as in TCE, but m absent
classes leave the constant m * exp(0) in the denominator. Unlike TCE, the loss therefore depends on
the level of the logits, and a client with a single class still raises its logit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from remanence.core.compose import part
from remanence.core.contexts import Context
from remanence.core.declarations import ABSENT_CLASSES, Remedy
from remanence.core.slots import Part
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
