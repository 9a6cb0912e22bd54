"""Lies about likeness: a peer's model that seems to fit everybody.

DAC and HAST choose whom to listen to by how well a peer's model does on their own rows; who seems
to do well is asked again and again.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from remanence.attacks.attack import Attack, parse_attackers
from remanence.core.errors import check_range


def similarity_lies(*, fraction: float = 0.1, clients: str = "", loss: float = 0.01) -> Attack:
    """An attacker's model seems to have this loss wherever an honest peer tries it. It harms
    together with an attack on the model or the data.

    fraction: share of the clients that attack.
    clients: their numbers instead, such as "3 7".
    loss: the mean cross-entropy that is believed.
    """
    check_range(loss >= 0, "attack similarity_lies", "loss", "of at least 0", loss)

    def mislead(probed: Tensor, losses: Tensor, attackers: np.ndarray) -> Tensor:
        bad = torch.from_numpy(attackers).to(probed)
        # attackers do not fool themselves
        honest = ~torch.isin(torch.arange(len(probed), device=probed.device), bad)
        return torch.where(torch.isin(probed, bad) & honest.unsqueeze(1), loss, losses)

    return Attack(
        "similarity_lies",
        parse_attackers("similarity_lies", fraction, clients),
        tamper_probes=mislead,
    )
