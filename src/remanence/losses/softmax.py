"""Cross-entropy with weights per class, which the losses for absent classes share."""

from __future__ import annotations

import torch
from torch import Tensor


def target_logit(logits: Tensor, y: Tensor) -> Tensor:
    """The logit of the true class, or its mean under soft targets.

    Args:
        logits: [B, C].
        y: Labels [B], or soft targets [B, C].

    Returns:
        [B].
    """
    if y.dim() == 2:
        return (y * logits).sum(dim=1)
    return logits.gather(1, y.unsqueeze(1)).squeeze(1)


def weighted_softmax_loss(logits: Tensor, y: Tensor, class_weight: Tensor) -> Tensor:
    """-z_y + log sum_c weight_c exp(z_c). A class of weight 0 gets no gradient.

    Args:
        logits: [B, C].
        y: Labels [B], or soft targets [B, C].
        class_weight: [C].

    Returns:
        The loss of each example, [B].
    """
    return torch.logsumexp(logits + torch.log(class_weight), dim=1) - target_logit(logits, y)
