"""The weighted mean of the replies, which a server computes unless a part replaces it.

`training/server_step.py` normalizes the weights, averages the buffers and applies the update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.contexts import ServerContext
from remanence.core.pytree import Params, Tree
from remanence.core.slots import Aggregate
from remanence.core.types import Reply


def size_weights(replies: Reply, srv: ServerContext) -> Tensor:
    """By number of training examples. -> [k]"""
    return replies.weight


def uniform_weights(replies: Reply, srv: ServerContext) -> Tensor:
    """The same for every client. -> [k]"""
    return torch.ones_like(replies.weight)


def partial_sum(weights: Tensor, replies: Reply, srv: ServerContext) -> Tree:
    return pytree.weighted_sum(weights, replies.delta(srv.start))


def finalize_sum(total: Tree, srv: ServerContext) -> Params:
    return total


def apply_delta(params: Params, delta: Params) -> Params:
    """The parameters after the step; those that no client sent stay where they are."""
    return params | pytree.add(delta, params)  # the result has the names of delta


mean = Aggregate(partial_sum, finalize_sum, is_decomposable=True)
