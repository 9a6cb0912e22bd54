"""Lies about facts: how many examples a client has, of which classes, and how many it saw
forgotten.

FedAvg weighs by the first, Flashback believes the second and FedWAvg the third; nobody can check
them without seeing the data.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from remanence.attacks.attack import Attack, attacker_mask, parse_attackers
from remanence.core.errors import InputError, check_range, nearest
from remanence.core.pytree import Tree
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply

CLAIMS = ("true", "uniform", "inverse")
# extras that are counts of labels [k, C], by part and name
COUNTS = (("flashback", "label_counts"),)
NUMBERS = (("fedwavg", "forgettable"),)  # extras that are one count each [k]


def count_lies(
    *, fraction: float = 0.1, clients: str = "", factor: float = 10.0, claim: str = "true"
) -> Attack:
    """Claims `factor` times its examples, its label counts and its forgettable examples (at least
    one of these, or nothing could be multiplied).

    fraction: share of the clients that attack.
    clients: their numbers instead, such as "3 7".
    factor: by how much; 1 where only `claim` shall lie. A claim above round.weight_cap is refused
        by the gate.
    claim: how the claimed labels are spread over classes: true, as they are; uniform, all classes
        alike; inverse, most of what it has least of.
    """
    if claim not in CLAIMS:
        raise InputError(f"attack count_lies: unknown claim {claim!r}: {nearest(claim, CLAIMS)}")
    check_range(factor > 0, "attack count_lies", "factor", "above 0", factor)
    if factor == 1 and claim == "true":
        raise InputError(
            "attack count_lies: factor=1 with claim=true tells the truth: give another factor,"
            " or claim=inverse"
        )

    def tamper(replies: Reply, attackers: np.ndarray, start: ModelState, key: Key) -> Reply:
        bad = attacker_mask(replies, attackers)
        weight = torch.where(bad, factor * replies.weight, replies.weight)
        extras = replies.payload
        for part, name in COUNTS:
            extras = _change(
                extras,
                part,
                name,
                lambda x: torch.where(bad.unsqueeze(1), factor * spread_labels(x, claim), x),
            )
        for part, name in NUMBERS:
            extras = _change(
                extras, part, name, lambda x: torch.where(bad, factor * x.clamp(min=1), x)
            )
        return replies._replace(weight=weight, payload=extras)

    return Attack(
        "count_lies", parse_attackers("count_lies", fraction, clients), tamper_replies=tamper
    )


def _change(extras: Tree, part: str, name: str, lie: Callable[[Tensor], Tensor]) -> Tree:
    """The extras with one of them replaced, where the method sends it."""
    if name not in extras.get(part, {}):
        return extras
    return extras | {part: extras[part] | {name: lie(extras[part][name])}}


def spread_labels(counts: Tensor, claim: str) -> Tensor:
    """Label counts with the same sum, as they are claimed.

    >>> spread_labels(torch.tensor([[6.0, 0.0, 3.0]]), "uniform")
    tensor([[3., 3., 3.]])
    >>> spread_labels(torch.tensor([[6.0, 0.0, 3.0]]), "inverse")
    tensor([[0., 6., 3.]])

    counts: [k, C] -> [k, C]
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
