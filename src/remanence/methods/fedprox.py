"""FedProx: a proximal term ties every local model to the global one.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020.

    equation 2   h(w) = F(w) + mu/2 ||w - w_t||^2   slot regularizers   proximal
"""

from __future__ import annotations

from torch import Tensor

from remanence.core import pytree
from remanence.core.compose import part
from remanence.core.contexts import Context
from remanence.core.declarations import HELD_CLASSES, Remedy
from remanence.core.pytree import Params
from remanence.core.ranges import check_range
from remanence.core.slots import Part


@part
def fedprox(*, mu: float = 0.01) -> Part:
    """mu/2 * ||w - w_t||^2 added to the loss.

    Args:
        mu: Weight of the proximal term; 0 is FedAvg.
    """
    check_range(mu >= 0, "fedprox", "mu", "of at least 0", mu)
    return Part(
        "fedprox",
        hyper={"mu": mu},
        regularizers=(proximal,),
        addresses=(
            Remedy(HELD_CLASSES, "ties every local model to the global one", needs_server=True),
        ),
    )


def proximal(params: Params, ctx: Context) -> Tensor:
    return ctx.hyper["mu"] / 2 * pytree.squared_norm(pytree.sub(params, ctx.start.params))
