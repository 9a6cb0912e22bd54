"""Drawing peers for all clients at once, from counter-based keys: no loop over clients, the
same draw on every machine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from remanence.core import rng
from remanence.core.rng import Key


def sample_uniform(reachable: Tensor, count: int, key: Key) -> Tensor:
    """For each client, `count` different reachable peers, all subsets alike. reachable: [K, K]
    bool -> [K, min(count, K)], -1: no peer
    """
    return sample_weighted(
        torch.zeros(reachable.shape, dtype=torch.float64, device=reachable.device),
        reachable,
        count,
        key,
    )


def sample_weighted(scores: Tensor, reachable: Tensor, count: int, key: Key) -> Tensor:
    """For each client, `count` different reachable peers, one after the other with probability
    proportional to exp(score) among those left.

    Adding Gumbel noise and taking the largest does exactly this (Vieira 2014, Kool et al. 2019),
    and never needs exp(score), which may be huge.
    scores, reachable: [K, K] -> [K, min(count, K)], -1: no peer
    """
    noisy = torch.where(reachable, scores + gumbel(key, scores), -math.inf)
    value, peers = torch.topk(noisy, min(count, scores.shape[1]), dim=1)
    return torch.where(value > -math.inf, peers, -1)


def gumbel(key: Key, like: Tensor) -> Tensor:
    """Gumbel noise of the shape of a tensor; 53 random bits, so that two peers never tie."""
    words = rng.bits(key.tensor().to(like.device), tuple(like.shape))
    # in (0, 1), never an end
    uniform = (((words >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))
