"""Wide convolutions of a stack of models with the channels last: as one grouped convolution, one
convolution for each model, or a matrix product.

vmap turns a stack of convolutions into images [B, k C, H, W] with one whole channel after the
other, and cuDNN converts them in every call. Here they are stored as [B, H, W, k, C] before and
after the convolution, and the compiler makes the conversions part of the operations around it.
Where cuDNN has no grouped kernel, with a stride or 512 channels, each model is convolved by itself
(`conv_per_client.py`). Convolutions of 1x1 are matrix products.

Measured on an H200 with ten ResNet-18 (job C of `remanence bench`): a layer of 64 to 64 channels
takes 330 instead of 740 microseconds in bf16, forward and backward; a round takes 659 instead of
747 ms in tf32, and 424 instead of 482 ms in bf16. Matrix products take it further to 613 and 373.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from remanence.kernels import conv_per_client

# the fewest channels with which a convolution for each client is faster than a grouped one
DEEP = 512

ConvSizes = Sequence[int]


def convolve(x: Tensor, w: Tensor, stride: ConvSizes, padding: ConvSizes) -> Tensor:
    """One model's images x [B, C, H, W] and weights w [O, C, kh, kw]. -> [B, O, h, w]"""
    if tuple(w.shape[2:]) == (1, 1) and tuple(padding) == (0, 0):
        pixels = x[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1)
        return (pixels @ w.flatten(1).t()).permute(0, 3, 1, 2)
    y: Tensor = _Convolution.apply(x, w, stride, padding)
    return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: ConvSizes, padding: ConvSizes) -> Tensor:
        return _convolve_stack(x.unsqueeze(0), w.unsqueeze(0), stride, padding).squeeze(0)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, ConvSizes, ConvSizes], output: Tensor
    ) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.settings = inputs[2:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x, w), (dy,), (stride, padding) = ctx.saved_tensors, gradients, ctx.settings
        dx = dw = None
        if ctx.needs_input_grad[0]:
            full = [size - 1 - zeros for size, zeros in zip(w.shape[2:], padding, strict=True)]
            if tuple(stride) == (1, 1) and min(full) >= 0:
                # a convolution too, and cuDNN has better kernels for it than for a gradient
                flipped = w.flip(2, 3).transpose(0, 1)
                dx = _Convolution.apply(dy, flipped, stride, full)
            else:
                dx = _Gradient.apply(dy, x, w, stride, padding, True)
        if ctx.needs_input_grad[1]:
            dw = _Gradient.apply(dy, x, w, stride, padding, False)
        return dx, dw, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, w: Tensor, stride: ConvSizes, padding: ConvSizes
    ) -> tuple[Tensor, int]:
        x, w = (
            batch_first(value, dim, info.batch_size)
            for value, dim in zip((x, w), in_dims[:2], strict=True)
        )
        return _convolve_stack(x, w, stride, padding), 0


class _Gradient(torch.autograd.Function):
    """From the gradient dy [B, O, h, w] of the result to that of the images if `of_images`, else
    of the weights. It has no gradient itself.
    """

    @staticmethod
    def forward(
        dy: Tensor, x: Tensor, w: Tensor, stride: ConvSizes, padding: ConvSizes, of_images: bool
    ) -> Tensor:
        return _differentiate_stack(
            dy.unsqueeze(0), x.unsqueeze(0), w.unsqueeze(0), stride, padding, of_images
        ).squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        dy: Tensor,
        x: Tensor,
        w: Tensor,
        stride: ConvSizes,
        padding: ConvSizes,
        of_images: bool,
    ) -> tuple[Tensor, int]:
        dy, x, w = (
            batch_first(value, dim, info.batch_size)
            for value, dim in zip((dy, x, w), in_dims[:3], strict=True)
        )
        return _differentiate_stack(dy, x, w, stride, padding, of_images), 0


def _convolve_stack(x: Tensor, w: Tensor, stride: ConvSizes, padding: ConvSizes) -> Tensor:
    """x [k, B, C, H, W], w [k, O, C, kh, kw] -> [k, B, O, h, w]"""
    if _is_separate(w, stride):
        y: Tensor = conv_per_client.convolve(_to_nhwc(x), _to_nhwc(w), stride, padding)
        return y
    groups = len(x)
    return _from_grouped(
        torch.ops.aten.convolution(
            _to_grouped(x), _to_nhwc(w).flatten(0, 1), None, stride, padding, *_PLAIN, groups
        ),
        groups,
    )


def _differentiate_stack(
    dy: Tensor, x: Tensor, w: Tensor, stride: ConvSizes, padding: ConvSizes, of_images: bool
) -> Tensor:
    if _is_separate(w, stride):
        gradient: Tensor = conv_per_client.differentiate(
            _to_nhwc(dy), _to_nhwc(x), _to_nhwc(w), stride, padding, of_images
        )
        return gradient
    groups, images = len(x), (_to_grouped(dy), _to_grouped(x))
    settings = (None, stride, padding, *_PLAIN, groups, [of_images, not of_images, False])
    result = torch.ops.aten.convolution_backward(*images, _to_nhwc(w).flatten(0, 1), *settings)
    return _from_grouped(result[0], groups) if of_images else result[1].unflatten(0, (groups, -1))


_PLAIN = ((1, 1), False, (0, 0))  # dilation, transposed, output padding


def _is_separate(w: Tensor, stride: ConvSizes) -> bool:
    return tuple(stride) != (1, 1) or min(w.shape[1:3]) >= DEEP


def batch_first(value: Tensor, dim: int | None, count: int) -> Tensor:
    """The value with the mapped axis first; expanded if it is not mapped (dim None)."""
    return value.unsqueeze(0).expand(count, *value.shape) if dim is None else value.movedim(dim, 0)


def _to_grouped(images: Tensor) -> Tensor:
    """[k, B, C, H, W] -> [B, k C, H, W], stored as [B, H, W, k, C]"""
    return images.permute(1, 3, 4, 0, 2).contiguous().flatten(3).permute(0, 3, 1, 2)


def _from_grouped(images: Tensor, count: int) -> Tensor:
    """[B, k C, H, W] -> [k, B, C, H, W], a view"""
    batch, _, height, width = images.shape
    return images.view(batch, count, -1, height, width).movedim(1, 0)


def _to_nhwc(values: Tensor) -> Tensor:
    """[k, n, C, h, w], stored as [k, n, h, w, C]"""
    return values.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


MIN_CHANNELS = 8  # fewer channels do not fill a cache line


def empty_channels_last(like: Tensor, shape: Sequence[int]) -> Tensor:
    """An uninitialized tensor for images [k, B, C, H, W], channels last if there are enough of
    them.
    """
    return (
        like.new_empty(shape)
        if shape[2] < MIN_CHANNELS
        else conv_per_client.empty_nhwc(like, shape)
    )
