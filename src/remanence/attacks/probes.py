"""Attacks on similarity: the attacker's model seems to fit the data of all clients.

Where clients select peers by the loss of a peer's model on their own training examples, a low loss
makes the attacker's model selected often.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from remanence.attacks.attack import Attack, parse_attackers
from remanence.core.expressions import PlainText
from remanence.core.ranges import check_range


def similarity_lies(
    *, fraction: float = 0.1, clients: PlainText = "", loss: float = 0.01
) -> Attack:
    """An attacker's model seems to have this loss at every benign client that measures it. Combine
    it with an attack on the model or the data.

    Args:
        fraction: share of the clients that attack.
        clients: their numbers instead, such as "3 7".
        loss: the reported mean cross-entropy.
    """
    check_range(loss >= 0, "attack similarity_lies", "loss", "of at least 0", loss)

    def tamper(probed: Tensor, losses: Tensor, attackers: np.ndarray) -> Tensor:
        bad = torch.from_numpy(attackers).to(probed)
        # attackers measure true losses
        benign = ~torch.isin(torch.arange(len(probed), device=probed.device), bad)
        return torch.where(torch.isin(probed, bad) & benign.unsqueeze(1), loss, losses)

    return Attack(
        "similarity_lies",
        parse_attackers("similarity_lies", fraction, clients),
        tamper_probes=tamper,
    )
