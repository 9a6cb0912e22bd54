"""Attacks on what a client answers: its model.

`a_little_is_enough` is by Baruch, Baruch and Goldberg, "A little is enough: circumventing defenses
for distributed learning", NeurIPS 2019: all attackers agree on a model so close to the honest ones'
mean that an aggregator which looks for outliers takes them for honest, and honest ones for
outliers.
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
from remanence.core.errors import check_range
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply


def sign_flip(*, fraction: float = 0.1, clients: str = "", scale: float = 1.0) -> Attack:
    """Walks backwards: start - scale * (what it learned).

    fraction: share of the clients that attack.
    clients: their numbers instead, such as "3 7".
    scale: how far, in units of the way it would have gone.
    """
    check_range(scale > 0, "attack sign_flip", "scale", "above 0", scale)
    return Attack(
        "sign_flip",
        parse_attackers("sign_flip", fraction, clients),
        tamper_replies=_stretch(-scale),
    )


def scaling(*, fraction: float = 0.1, clients: str = "", factor: float = 10.0) -> Attack:
    """Pulls harder: start + factor * (what it learned). With one attacker of k alike and factor k
    this is model replacement (Bagdasaryan et al. 2020).

    fraction: share of the clients that attack.
    clients: their numbers instead, such as "3 7".
    factor: by how much; 1 would be honest.
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


def gaussian(*, fraction: float = 0.1, clients: str = "", std: float = 1.0) -> Attack:
    """Sends noise: start + N(0, std^2) in every coordinate, whatever it learned.

    fraction: share of the clients that attack.
    clients: their numbers instead, such as "3 7".
    std: standard deviation of a coordinate.
    """
    check_range(std > 0, "attack gaussian", "std", "above 0", std)

    def tamper(replies: Reply, attackers: np.ndarray, start: ModelState, key: Key) -> Reply:
        bad, forged = attacker_mask(replies, attackers), dict(replies.params)
        for place in bad.nonzero().flatten().tolist():
            # by client, so that the order of replies does not matter
            mine = key.fold_in("gaussian", int(replies.client[place]))
            for name, x in forged.items():
                noise = std * rng.normal(
                    mine.fold_in(name).tensor().to(x.device), x.shape[1:], x.dtype
                )
                base = start.params[name]
                center = base if base.dim() < x.dim() else base[place]
                forged[name] = x.index_copy(
                    0,
                    torch.tensor([place], device=x.device),
                    (center + noise).unsqueeze(0).to(x.dtype),
                )
        return replace_params(replies, bad, forged)

    return Attack("gaussian", parse_attackers("gaussian", fraction, clients), tamper_replies=tamper)


def nan(*, fraction: float = 0.1, clients: str = "") -> Attack:
    """Sends NaN in every parameter, as a client does whose training diverged. The gate refuses it.

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


def a_little_is_enough(*, fraction: float = 0.1, clients: str = "", z: float = 0.0) -> Attack:
    """All attackers send mean - z * std of the honest replies, coordinate by coordinate: an update
    that a part of the honest ones exceed.

    The attackers see the honest replies of the round. Where there are none, they send what they
    have.

    fraction: share of the clients that attack.
    clients: their numbers instead, such as "3 7".
    z: how many standard deviations; 0: the most that stays hidden by the paper's equation 3, from
        the numbers of replies and of attackers among them.
    """
    check_range(z >= 0, "attack a_little_is_enough", "z", "of at least 0", z)

    def tamper(replies: Reply, attackers: np.ndarray, start: ModelState, key: Key) -> Reply:
        bad = attacker_mask(replies, attackers)
        n, f = replies.num_clients, int(bad.sum())
        if f in (0, n):
            return replies
        far = z or a_little_std(n, f)
        honest = pytree.take(replies.params, (~bad).nonzero().flatten())
        forged = pytree.map(lambda x: x.mean(dim=0) - far * x.std(dim=0, correction=0), honest)
        return replace_params(replies, bad, forged)

    return Attack(
        "a_little_is_enough",
        parse_attackers("a_little_is_enough", fraction, clients),
        tamper_replies=tamper,
    )


def a_little_std(n: int, f: int) -> float:
    """z_max = max z with Phi(z) < (n - f - s) / (n - f), where s = floor(n / 2 + 1) - f honest ones
    must look worse than the attackers; 0 at least.

    >>> round(a_little_std(n=50, f=24), 2)  # s = 2: Phi(z) = 24 / 26
    1.43
    >>> a_little_std(n=10, f=1)  # s = 5 of 9: too few attackers to hide any distance
    0.0

    n: replies in the round; f: those of attackers
    """
    supporters = max(1, n // 2 + 1 - f)
    share = (n - f - supporters) / (n - f)
    return NormalDist().inv_cdf(share) if share > 0.5 else 0.0
