"""FedLC, calibrated logits: the rarer a class is at a client, the larger the margin that its logit
needs.

Zhang et al., "Federated learning with label distribution skew via logits calibration", ICML 2022.

Reading: a class the client lacks has n_c = 0 and an infinite margin, so it drops out of the softmax
and gets no gradient; the denominator has the true class in it, as any softmax has. Then tau -> 0 is
TCE, and with many examples of every class it is plain cross-entropy.
"""

from __future__ import annotations

from torch import Tensor

from remanence.core.compose import part
from remanence.core.contexts import Context
from remanence.core.declarations import ABSENT_CLASSES, Remedy
from remanence.core.ranges import check_range
from remanence.core.slots import Part
from remanence.core.types import Batch, Output
from remanence.losses.softmax import weighted_softmax_loss


@part
def fedlc(*, tau: float = 1.0) -> Part:
    """Cross-entropy over z_c - tau * n_c^(-1/4), with n_c the number of the client's training
    examples of class c.

    Args:
        tau: Strength of the calibration.
    """
    check_range(tau > 0, "fedlc", "tau", "above 0 (without calibration it is tce)", tau)
    return Part(
        "fedlc",
        hyper={"tau": tau},
        loss=calibrated,
        reads_label_counts=True,
        needs_two_classes=True,
        reads_inputs=False,
        addresses=(Remedy(ABSENT_CLASSES),),
    )


def calibrated(out: Output, batch: Batch, ctx: Context) -> Tensor:
    counts = ctx.stats.label_counts
    # [C]; the margin of an absent class has no effect, because its weight is 0
    margin = ctx.hyper["tau"] * counts.clamp(min=1) ** -0.25
    return weighted_softmax_loss(out.logits - margin, batch.y, (counts > 0).to(out.logits.dtype))
