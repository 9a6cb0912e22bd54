"""Two ways to differentiate a function: autograd's tape, and `torch.func` for use in `vmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remanence.core import pytree

# (function, argument) -> gradient, aux; where function(argument) -> scalar, aux
Differentiate = Callable[[Callable[[Any], tuple[Tensor, Any]], Any], tuple[Any, Any]]


def grad_autograd(function: Callable[[Any], tuple[Tensor, Any]], argument: Any) -> tuple[Any, Any]:
    """Differentiate with autograd's tape: the reference.

    Args:
        function: Maps a tensor, or a dictionary of tensors, to a scalar and auxiliary values.
        argument: Where the gradient is taken.

    Returns:
        The gradient, in the form of `argument`, and the auxiliary values, detached.
    """
    single = isinstance(argument, Tensor)
    tree = {"": argument} if single else argument
    leaves = {name: value.detach().requires_grad_() for name, value in tree.items()}
    value, aux = function(leaves[""] if single else leaves)
    gradients = torch.autograd.grad(
        value, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    aux = pytree.detach(aux)
    return (gradients[0] if single else dict(zip(leaves, gradients, strict=True))), aux


def grad_func(function: Callable[[Any], tuple[Tensor, Any]], argument: Any) -> tuple[Any, Any]:
    """Differentiate with `torch.func`. Works inside `vmap`; see `grad_autograd`."""
    return torch.func.grad(function, has_aux=True)(argument)  # type: ignore[no-any-return]
