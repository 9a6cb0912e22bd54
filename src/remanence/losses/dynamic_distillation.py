"""Dynamic distillation: each teacher is weighted, class by class, by the share of the labels that
it has seen.

"Flashback: understanding and mitigating forgetting in federated learning", 2023, equation 3 and
section 4.1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def label_shares(nu: Tensor, mu: Tensor) -> Tensor:
    """alpha_i = mu_i / (nu + sum_j mu_j), and 0 for a class without examples.

    Args:
        nu: Label counts of the student, [C].
        mu: Label counts of the teachers, [m, C].

    Returns:
        alpha, [m, C].

    >>> label_shares(torch.tensor([1.0, 0.0]), torch.tensor([[2.0, 0.0], [1.0, 0.0]]))
    tensor([[0.5000, 0.0000],
            [0.2500, 0.0000]])
    """
    seen = nu + mu.sum(dim=0)  # [C]
    return torch.where(seen > 0, mu / seen, torch.zeros_like(mu))


def distill(student: Tensor, teachers: Tensor, alpha: Tensor) -> Tensor:
    """sum_i sum_c alpha_i^c p_i^c log(p_i^c / q^c), where p_i are the teachers' probabilities and q
    the student's.

    Args:
        student: Logits [B, C].
        teachers: Logits [m, B, C].
        alpha: [m, C].

    Returns:
        The loss of each example, [B].
    """
    # finite even where p is 0: no 0 * log 0
    log_p, log_q = torch.log_softmax(teachers, dim=-1), torch.log_softmax(student, dim=-1)
    return (alpha.unsqueeze(-2) * log_p.exp() * (log_p - log_q)).sum(dim=(0, -1))
