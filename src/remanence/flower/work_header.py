"""Writes the header of a message with work for a site's clients; `site_work` reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.engine import ClientWork
from remanence.training.state import NO_STATE, REMOTE


def work_header(work: ClientWork, positions: np.ndarray) -> dict[str, Any]:
    """A round's work for some of its clients, without the models.

    Args:
        work: The work of a round.
        positions: Which of `work.clients` the header is for.
    """
    rounds = pytree.flatten(work.client_state).get(f"{REMOTE}{pytree.SEPARATOR}round")
    return {
        "round": work.round,
        "time_step": work.time_step,
        "clients": work.clients[positions].tolist(),
        # each client starts from the state it had after this round
        "state_rounds": [NO_STATE] * len(positions)
        if rounds is None
        else rounds[torch.from_numpy(positions).to(rounds.device)].tolist(),
        "per_client_start": work.per_client_start,
        "optimizer_hparams": {name: float(value) for name, value in work.optimizer_hparams.items()},
        "key": work.key.value,
        "num_phases": work.num_phases,
    }
