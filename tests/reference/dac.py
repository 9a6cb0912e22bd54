"""The peer selection of DAC (Zec et al. 2022; algorithm 3 of the HAST thesis), reimplemented:
similarities, probabilities and two-hop estimates, number by number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SMALLEST_LOSS = 1e-10  # so that a perfect peer has a finite similarity
LARGEST_SIMILARITY = (
    20.0  # similarities are clipped to this value before probabilities are computed
)


def first_similarities(clients: int) -> list[list[float]]:
    """s[k][j] = 1 / (K - 1), and 0 on the diagonal."""
    return [[0.0 if j == k else 1 / (clients - 1) for j in range(clients)] for k in range(clients)]


def similarity_of(loss: float) -> float:
    """1 / L(w_j, D_k): the lower the loss of a peer's model on my data, the higher the similarity."""
    return 1 / max(loss, SMALLEST_LOSS)


def temperature(tau: float, within: int, published: bool) -> float:
    """tau, or the published 2 tau / (1 + exp(-.2 t)) - tau + 1, which is 1 at t = 0 and grows
    to tau + 1; t: rounds since the time step began
    """
    return 2 * tau / (1 + math.exp(-0.2 * within)) - tau + 1 if published else tau


def chances(similarities: Sequence[float], candidates: Sequence[int], tau: float) -> list[float]:
    """softmax(tau * clip(s, 0, 20)) over the candidates; the largest exponent is taken from
    all, so that none overflows.
    """
    exponents = [tau * min(max(similarities[j], 0.0), LARGEST_SIMILARITY) for j in candidates]
    powers = [math.exp(exponent - max(exponents)) for exponent in exponents]
    return [power / sum(powers) for power in powers]


def two_hop(
    me: int,
    fresh: Sequence[float],
    old: Sequence[Sequence[float]],
    met: Sequence[bool],
    probed: Sequence[int],
) -> dict[int, float]:
    """Return estimates for the peers I never met: the similarity that the probed peer most similar
    to me, among those that know the other one, had for it in the last round.

    fresh: my similarities after this round's probes; old: those of all clients at the end of the
        previous round; met: by me, including this round
    """
    estimates = {}
    for j in range(len(fresh)):
        if j == me or met[j]:
            continue
        likest = -1.0
        for p in probed:
            if old[p][j] > 0 and fresh[p] > likest:
                likest = fresh[p]
                estimates[j] = old[p][j]
    return estimates


def update_similarities(
    me: int,
    losses: Mapping[int, float],
    old: Sequence[Sequence[float]],
    met: Sequence[bool],
    hearsay_wins: bool = False,
) -> tuple[list[float], list[bool]]:
    """Return my similarities and the peers I have met, after probing. losses: of each probed peer's
    model on my training examples; hearsay_wins: a peer probed for the first time is estimated too,
    if another of the probed peers knows it
    """
    mine, acquainted = list(old[me]), list(met)
    for j, loss in losses.items():
        mine[j] = similarity_of(loss)
        acquainted[j] = True
    strangers = met if hearsay_wins else acquainted
    for j, estimate in two_hop(me, mine, old, strangers, list(losses)).items():
        mine[j] = estimate
    return mine, acquainted
