"""WSM, the re-weighted softmax: cross-entropy that weights every class by its share of the client's
own labels.

Plain cross-entropy lowers the logits of classes that a client lacks, and the global model forgets
them. Legate, "Re-weighted softmax cross-entropy to control forgetting in federated learning",
Universite de Montreal 2022.

    equation 15   -z_y + log sum_c share_c exp(z_c)   slot loss   re_weighted
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
def wsm(*, with_validation: bool = False) -> Part:
    """-z_y + log sum_c share_c exp(z_c), with share_c the share of class c among the client's
    training labels.

    The thesis does not say which labels are counted. A loss describes the examples it is computed
    on, so the default counts those in training.

    Args:
        with_validation: Count the labels of the client's validation examples, too, as the author's
            code does. The other parts of the method then read these counts as well.
    """
    return Part(
        "wsm",
        loss=re_weighted,
        reads_label_counts=True,
        counts_validation_labels=with_validation,
        static=("with_validation",),
        needs_two_classes=True,
        reads_inputs=False,
        addresses=(
            Remedy(ABSENT_CLASSES, "local training then leaves the classes it lacks alone"),
        ),
    )


def re_weighted(out: Output, batch: Batch, ctx: Context) -> Tensor:
    shares = ctx.stats.label_counts / ctx.stats.label_counts.sum()
    return weighted_softmax_loss(out.logits, batch.y, shares)
