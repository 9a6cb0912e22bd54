"""Attacks on the models that clients send.

`a_little_is_enough` is by Baruch, Baruch and Goldberg, "A little is enough: circumventing defenses
for distributed learning", NeurIPS 2019: all attackers send one model so close to the mean of the
benign models that an aggregator which removes outliers keeps it, and removes benign models.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import torch

from remanence.attacks.attack import (
    Attack,
    TamperReplies,
    attacker_mask,
    parse_attackers,
    replace_params,
)
from remanence.core import pytree, rng
from remanence.core.expressions import PlainText
from remanence.core.ranges import check_range
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply


def sign_flip(*, fraction: float = 0.1, clients: PlainText = "", scale: float = 1.0) -> Attack:
    """Reverses the update: start - scale * update.

    Args:
        fraction: share of the clients that attack.
        clients: their numbers instead, such as "3 7".
        scale: the length of the reversed update relative to the true one.
    """
    check_range(scale > 0, "attack sign_flip", "scale", "above 0", scale)
    return Attack(
        "sign_flip",
        parse_attackers("sign_flip", fraction, clients),
        tamper_replies=_stretch(-scale),
    )


def scaling(*, fraction: float = 0.1, clients: PlainText = "", factor: float = 10.0) -> Attack:
    """Enlarges the update: start + factor * update. With one attacker among k clients of equal
    weight and factor k this is model replacement (Bagdasaryan et al. 2020).

    Args:
        fraction: share of the clients that attack.
        clients: their numbers instead, such as "3 7".
        factor: by how much; not 1.
    """
    check_range(factor > 0 and factor != 1, "attack scaling", "factor", "above 0 and not 1", factor)
    return Attack(
        "scaling", parse_attackers("scaling", fraction, clients), tamper_replies=_stretch(factor)
    )


def _stretch(factor: float) -> TamperReplies:
    def tamper(replies: Reply, attackers: np.ndarray, start: ModelState, key: Key) -> Reply:
        return replace_params(
            replies,
            attacker_mask(replies, attackers),
            pytree.axpy(factor, replies.delta(start), start.params),
        )

    return tamper


def gaussian(*, fraction: float = 0.1, clients: PlainText = "", std: float = 1.0) -> Attack:
    """Sends noise: start + N(0, std^2) in every coordinate, instead of the update.

    Args:
        fraction: share of the clients that attack.
        clients: their numbers instead, such as "3 7".
        std: standard deviation of a coordinate.
    """
    check_range(std > 0, "attack gaussian", "std", "above 0", std)

    def tamper(replies: Reply, attackers: np.ndarray, start: ModelState, key: Key) -> Reply:
        bad, forged = attacker_mask(replies, attackers), dict(replies.params)
        for index in bad.nonzero().flatten().tolist():
            # a key for each client, so that the order of replies does not matter
            client_key = key.fold_in("gaussian", int(replies.client[index]))
            for name, x in forged.items():
                noise = std * rng.normal(
                    client_key.fold_in(name).tensor().to(x.device), x.shape[1:], x.dtype
                )
                base = start.params[name]
                center = base if base.dim() < x.dim() else base[index]
                forged[name] = x.index_copy(
                    0,
                    torch.tensor([index], device=x.device),
                    (center + noise).unsqueeze(0).to(x.dtype),
                )
        return replace_params(replies, bad, forged)

    return Attack("gaussian", parse_attackers("gaussian", fraction, clients), tamper_replies=tamper)


def nan(*, fraction: float = 0.1, clients: PlainText = "") -> Attack:
    """Sends NaN in every parameter, like a client whose training diverged. The gate rejects it.

    Args:
        fraction: share of the clients that attack.
        clients: their numbers instead, such as "3 7".
    """

    def tamper(replies: Reply, attackers: np.ndarray, start: ModelState, key: Key) -> Reply:
        return replace_params(
            replies,
            attacker_mask(replies, attackers),
            pytree.map(lambda x: torch.full_like(x, torch.nan), replies.params),
        )

    return Attack("nan", parse_attackers("nan", fraction, clients), tamper_replies=tamper)


def a_little_is_enough(*, fraction: float = 0.1, clients: PlainText = "", z: float = 0.0) -> Attack:
    """All attackers send mean - z * std of the benign replies, coordinate by coordinate.

    The attackers know the benign replies of the round. Without benign replies they send their own
    models.

    Args:
        fraction: share of the clients that attack.
        clients: their numbers instead, such as "3 7".
        z: the number of standard deviations; 0: the largest that stays hidden by the paper's
            equation 3, from the numbers of replies and of attackers among them.
    """
    check_range(z >= 0, "attack a_little_is_enough", "z", "of at least 0", z)

    def tamper(replies: Reply, attackers: np.ndarray, start: ModelState, key: Key) -> Reply:
        bad = attacker_mask(replies, attackers)
        n, f = replies.num_clients, int(bad.sum())
        if f in (0, n):
            return replies
        deviations = z or a_little_std(n, f)
        benign = pytree.take(replies.params, (~bad).nonzero().flatten())
        forged = pytree.map(
            lambda x: x.mean(dim=0) - deviations * x.std(dim=0, correction=0), benign
        )
        return replace_params(replies, bad, forged)

    return Attack(
        "a_little_is_enough",
        parse_attackers("a_little_is_enough", fraction, clients),
        tamper_replies=tamper,
    )


def a_little_std(n: int, f: int) -> float:
    """Return z_max = max z with Phi(z) < (n - f - s) / (n - f), at least 0.

    s = floor(n / 2 + 1) - f benign clients must be further from the mean than the attackers.

    >>> round(a_little_std(n=50, f=24), 2)  # s = 2: Phi(z) = 24 / 26
    1.43
    >>> a_little_std(n=10, f=1)  # s = 5 of 9: too few attackers to hide any distance
    0.0

    Args:
        n: the number of replies in the round.
        f: how many of them are from attackers.
    """
    supporters = max(1, n // 2 + 1 - f)
    share = (n - f - supporters) / (n - f)
    return NormalDist().inv_cdf(share) if share > 0.5 else 0.0
