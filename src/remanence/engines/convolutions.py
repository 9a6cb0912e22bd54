"""Small convolutions of a stack as matrix products.

A stack of convolutions is one grouped convolution, and cuDNN's float32 kernels for many groups of a few channels are slow: on an H200 LeNet's second layer
takes 3.6 times as long as the same arithmetic as a batched product of unfolded images. Wider layers are left to cuDNN, and so are tf32 and bf16, where its
grouped kernels are as fast (tf32) or 2.4 times as fast (bf16). Clients convolved one after the other lost everywhere, by 7% for ResNet-18.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad
from torch.overrides import TorchFunctionMode

from remanence.engines.steps import StepAll
from remanence.local import Progress

NARROW = 16  # output channels up to which a product is faster than a group


class _Product(torch.autograd.Function):
    """x [B, C, H, W], already padded, with w [O, C, kh, kw] -> [B, O, h, w]. Both gradients are gathers and products too: none scatters."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return _correlate(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, w), (dy,) = ctx.saved_tensors, gradients
        kh, kw = w.shape[2:]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _correlate(pad(dy, (kw - 1, kw - 1, kh - 1, kh - 1)), w.flip(2, 3).transpose(0, 1))
        if ctx.needs_input_grad[1]:
            by_row = dy.permute(0, 2, 3, 1).reshape(-1, w.shape[0])  # [B h w, O]
            dw = (by_row.t() @ _unfold(x, kh, kw)).reshape(w.shape)
        return dx, dw


def _unfold(x: Tensor, kh: int, kw: int) -> Tensor:
    """-> [B h w, C kh kw]"""
    windows = x.unfold(2, kh, 1).unfold(3, kw, 1)  # [B, C, h, w, kh, kw]
    return windows.permute(0, 2, 3, 1, 4, 5).reshape(-1, x.shape[1] * kh * kw)


def _correlate(x: Tensor, w: Tensor) -> Tensor:
    (outputs, _, kh, kw), (rows, _, height, width) = w.shape, x.shape
    y = _unfold(x, kh, kw) @ w.reshape(outputs, -1).t()
    return y.reshape(rows, height - kh + 1, width - kw + 1, outputs).permute(0, 3, 1, 2)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`torch.conv2d`, as a product where that is faster."""
    plain = x.dim() == 4 and groups == 1 and _pair(stride) == (1, 1) and _pair(dilation) == (1, 1) and not isinstance(padding, str)
    exact = not torch.is_autocast_enabled(x.device.type) and not (x.is_cuda and torch.backends.cudnn.allow_tf32)
    if not plain or not exact or weight.shape[0] > NARROW:
        return _conv2d(x, weight, bias, stride, padding, dilation, groups)
    assert not isinstance(padding, str)
    (above, beside) = _pair(padding)
    y: Tensor = _Product.apply(pad(x, (beside, beside, above, above)) if above or beside else x, weight)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.reshape(-1, 1, 1)


_conv2d: Callable[..., Tensor] = torch.conv2d


class _Products(TorchFunctionMode):
    """While it is on, a network's own convolutions are ours."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (convolve if function in (torch.conv2d, conv2d) else function)(*args, **(kwargs or {}))


def with_products(step_all: StepAll) -> StepAll:
    """The same step, with small convolutions as products."""

    def step(*arguments: Any) -> tuple[Progress, Tensor]:
        with _Products():
            return step_all(*arguments)

    return step


def _pair(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)
