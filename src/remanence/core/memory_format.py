"""Networks that fail on channels-last images.

Engines store images channels last, which makes convolutions faster. A network that calls
`x.view(len(x), -1)`, as many tutorials do, then fails. It is called with `reshape` in place of
`view`, which returns the same numbers and copies them where necessary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ViewAsReshape(TorchFunctionMode):
    """While it is active, `view` is `reshape`."""

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
    """While it is active, convolutions return channels-last images, as some engines do."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return to_channels_last(result) if function is torch.conv2d else result


def depends_on_layout(predict: Callable[[Tensor], Any], example: Tensor) -> bool:
    """Whether a network fails on channels-last images. example: inputs that it accepts"""
    if example.dim() != 4:
        return False
    try:
        with torch.no_grad(), ChannelsLast():
            predict(to_channels_last(example))
    except RuntimeError:
        return True
    return False


def to_channels_last(x: Tensor) -> Tensor:
    """Images or filters, channels last; tensors of other dimensions are returned unchanged."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
