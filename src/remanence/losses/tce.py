"""TCE, truncated cross-entropy: the denominator runs only over the classes the client has.

WSM with the shares replaced by 0 and 1. Legate, Caccia, Belilovsky, "Re-weighted softmax
cross-entropy to control forgetting in federated learning", 2022.

    equation 3   -z_y + log sum_{c present} exp(z_c)   slot loss   truncated
"""

from __future__ import annotations

from torch import Tensor

from remanence.core.compose import part
from remanence.core.contexts import Context
from remanence.core.declarations import ABSENT_CLASSES, Remedy
from remanence.core.slots import Part
from remanence.core.types import Batch, Output
from remanence.losses.softmax import weighted_softmax_loss


@part
def tce() -> Part:
    """-z_y + log sum_{c in the client's classes} exp(z_c)."""
    return Part(
        "tce",
        loss=truncated,
        reads_label_counts=True,
        needs_two_classes=True,
        reads_inputs=False,
        addresses=(
            Remedy(ABSENT_CLASSES, "local training then leaves the classes it lacks alone", rank=1),
        ),
    )


def truncated(out: Output, batch: Batch, ctx: Context) -> Tensor:
    present = (ctx.stats.label_counts > 0).to(out.logits.dtype)
    return weighted_softmax_loss(out.logits, batch.y, present)
