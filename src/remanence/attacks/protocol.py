"""Attacks on the protocol: replies for another round, and replies sent twice. The gate rejects both
and names the client.
"""

from __future__ import annotations

import numpy as np
import torch

from remanence.attacks.attack import Attack, attacker_mask, parse_attackers
from remanence.core.expressions import PlainText
from remanence.core.ranges import check_range
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply


def stale(*, fraction: float = 0.1, clients: PlainText = "") -> Attack:
    """Replies for the round before.

    Args:
        fraction: share of the clients that attack.
        clients: their numbers instead, such as "3 7".
    """

    def tamper(replies: Reply, attackers: np.ndarray, start: ModelState, key: Key) -> Reply:
        return replies._replace(
            round=torch.where(attacker_mask(replies, attackers), replies.round - 1, replies.round)
        )

    return Attack("stale", parse_attackers("stale", fraction, clients), tamper_replies=tamper)


def replay(*, fraction: float = 0.1, clients: PlainText = "", times: int = 2) -> Attack:
    """Sends its reply several times. The gate accepts the first one.

    Args:
        fraction: share of the clients that attack.
        clients: their numbers instead, such as "3 7".
        times: how often it sends the reply in all.
    """
    check_range(times >= 2, "attack replay", "times", "of at least 2", times)

    def tamper(replies: Reply, attackers: np.ndarray, start: ModelState, key: Key) -> Reply:
        again = attacker_mask(replies, attackers).nonzero().flatten()
        return (
            Reply.concat([replies, *[replies.select(again)] * (times - 1)])
            if len(again)
            else replies
        )

    return Attack("replay", parse_attackers("replay", fraction, clients), tamper_replies=tamper)
