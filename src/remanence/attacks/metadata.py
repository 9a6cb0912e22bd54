"""False counts: how many examples a client has, how many of each class, and any other count that
its method declares.

A server cannot check them without the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from remanence.attacks.attack import Attack, attacker_mask, parse_attackers
from remanence.core import pytree
from remanence.core.errors import InputError, nearest
from remanence.core.expressions import PlainText
from remanence.core.pytree import Tree
from remanence.core.ranges import check_range
from remanence.core.slots import Part
from remanence.core.types import Reply

CLAIMS = ("true", "uniform", "inverse")


def count_lies(
    *,
    fraction: float = 0.1,
    clients: PlainText = "",
    factor: float = 10.0,
    claim: PlainText = "true",
) -> Attack:
    """Claims `factor` times its number of examples, and `factor` times every count that the method
    declares in its payload. A single count of 0 is multiplied as 1.

    Args:
        fraction: share of the clients that attack.
        clients: their numbers instead, such as "3 7".
        factor: multiplies the counts; 1 to change only their spread over classes (`claim`). The
            gate rejects a reply whose number of examples is above round.weight_cap.
        claim: how the claimed labels are spread over classes: true, as they are; uniform, all
            classes alike; inverse, most of what it has least of.
    """
    if claim not in CLAIMS:
        raise InputError(f"attack count_lies: unknown claim {claim!r}: {nearest(claim, CLAIMS)}")
    check_range(factor > 0, "attack count_lies", "factor", "above 0", factor)
    if factor == 1 and claim == "true":
        raise InputError(
            "attack count_lies: factor=1 with claim=true changes nothing: give another factor,"
            " or claim=inverse"
        )

    def overstate(counts: Tensor, bad: Tensor) -> Tensor:
        """One count of each client [k], or one for each class [k, C]."""
        if counts.dim() == 1:
            return torch.where(bad, (factor * counts.clamp(min=1)).to(counts), counts)
        claimed = factor * spread_labels(counts, claim)
        return torch.where(bad.unsqueeze(1), claimed.to(counts), counts)

    def tamper(replies: Reply, attackers: np.ndarray, leaves: Sequence[tuple[str, str]]) -> Reply:
        bad = attacker_mask(replies, attackers)
        weight = torch.where(bad, factor * replies.weight, replies.weight)
        payload = pytree.flatten(replies.payload)
        counts = {f"{part}{pytree.SEPARATOR}{path}" for part, path in leaves} & payload.keys()
        payload |= {path: overstate(payload[path], bad) for path in counts}
        return replies._replace(weight=weight, payload=pytree.unflatten(payload))

    return Attack(
        "count_lies", parse_attackers("count_lies", fraction, clients), tamper_counts=tamper
    )


def count_leaves(parts: Sequence[Part], payload: Tree) -> tuple[tuple[str, str], ...]:
    """The payload leaves that their parts declare to be counts of examples.

    Args:
        parts: of the method.
        payload: what one client sends, by part.

    Returns:
        Part and path of each.
    """
    return tuple(
        (p.name, path)
        for p in parts
        for path in pytree.flatten(payload.get(p.name, {}))
        if p.disclosure(path).is_count
    )


def spread_labels(counts: Tensor, claim: str) -> Tensor:
    """Label counts [k, C] with the same sum, as they are claimed.

    >>> spread_labels(torch.tensor([[6.0, 0.0, 3.0]]), "uniform")
    tensor([[3., 3., 3.]])
    >>> spread_labels(torch.tensor([[6.0, 0.0, 3.0]]), "inverse")
    tensor([[0., 6., 3.]])

    Args:
        counts: [k, C].
        claim: one of `CLAIMS`.

    Returns:
        [k, C].
    """
    if claim == "true":
        return counts
    total = counts.sum(dim=1, keepdim=True)
    uniform = (total / counts.shape[1]).expand_as(counts)
    if claim == "uniform":
        return uniform
    lacking = counts.amax(dim=1, keepdim=True) - counts
    missing = lacking.sum(dim=1, keepdim=True)
    return torch.where(missing > 0, total * lacking / missing.clamp(min=1e-30), uniform)
