"""Draws peers for all clients at once, from counter-based keys: without a loop over clients, and
with the same draw on every machine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from remanence.core import rng
from remanence.core.rng import Key


def sample_uniform(adjacency: Tensor, count: int, key: Key) -> Tensor:
    """Draw `count` different peers for each client, each subset equally likely.

    Args:
        adjacency: [K, K] bool: whether client k can reach client j.
        count: Peers for each client.
        key: Draws the peers.

    Returns:
        [K, min(count, K)], -1: no peer.
    """
    return sample_weighted(
        torch.zeros(adjacency.shape, dtype=torch.float64, device=adjacency.device),
        adjacency,
        count,
        key,
    )


def sample_weighted(scores: Tensor, adjacency: Tensor, count: int, key: Key) -> Tensor:
    """Draw `count` different peers for each client, one after the other with probability
    proportional to exp(score) among those left.

    Adding Gumbel noise and taking the largest does exactly this (Vieira 2014, Kool et al. 2019)
    without computing exp(score), which may overflow. Each row draws a sample of its own; there is
    one row a client, or one row for a single sample of clients.

    Args:
        scores: [n, K]; -inf, the logarithm of a probability of 0: never drawn.
        adjacency: [n, K] bool: whether the client of a row can reach client j.
        count: Peers for each row.
        key: Draws the peers.

    Returns:
        [n, min(count, K)], -1: no peer.
    """
    noisy = torch.where(adjacency, scores + gumbel(key, scores), -math.inf)
    value, peers = torch.topk(noisy, min(count, scores.shape[1]), dim=1)
    return torch.where(value > -math.inf, peers, -1)


def gumbel(key: Key, like: Tensor) -> Tensor:
    """Gumbel noise in the shape of a tensor, from 53 random bits, so that ties hardly occur."""
    words = rng.bits(key.tensor().to(like.device), tuple(like.shape))
    # in (0, 1), never an end
    uniform = (((words >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))
