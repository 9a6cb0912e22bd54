"""Networks that depend on how images lie in memory.

Engines lay images out with the channels innermost, which convolutions like. A network that views
them as rows (`x.view(len(x), -1)`, as in many a tutorial) fails on them then, and is called with
`reshape` in place of `view`: the same numbers, copied where they must be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ViewAsReshape(TorchFunctionMode):
    """While it is on, `view` copies where it must."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.view_as:
            function = Tensor.reshape_as
        elif function is Tensor.view and not any(
            isinstance(value, torch.dtype) for value in (*args[1:], *(kwargs or {}).values())
        ):
            function = Tensor.reshape
        return function(*args, **(kwargs or {}))


class ChannelsLast(TorchFunctionMode):
    """While it is on, convolutions answer in the layout in which engines may compute them."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        answer = function(*args, **(kwargs or {}))
        return (
            answer.contiguous(memory_format=torch.channels_last)
            if function is torch.conv2d and answer.dim() == 4
            else answer
        )


def depends_on_layout(predict: Callable[[Tensor], Any], example: Tensor) -> bool:
    """Does a network fail where the channels are innermost? example: rows that it takes as they
    lie
    """
    if example.dim() != 4:
        return False
    try:
        with torch.no_grad(), ChannelsLast():
            predict(example.contiguous(memory_format=torch.channels_last))
    except RuntimeError:
        return True
    return False


def to_channels_last(x: Tensor) -> Tensor:
    """Images, and the filters they are convolved with, as convolutions on a CPU like them: with
    the channels innermost.
    """
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
