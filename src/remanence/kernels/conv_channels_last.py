"""Wide convolutions of a stack, with the channels innermost: as one grouped convolution, one a
client, or as products of matrices.

Mapped over a stack, torch's own convolution puts the images [k, B, C, H, W] together as [B, k C, H,
W], one whole channel after the other, and cuDNN turns them around and back in every call. Here they
are laid out as [B, H, W, k, C] before it and stay so behind it; the compiler makes that layout part
of the operations around the convolution. On an H200 the 64 to 64 layers of ten ResNet-18 take 330
instead of 740 microseconds in bf16, forward and backward.

Where cuDNN has no grouped kernel, which is so for strides and for the deepest layers, each client
is convolved alone (`conv_per_client.py`): from 64 to 128 channels with stride 2 that takes 450 instead of
1,080 microseconds. Convolutions of 1x1 are products of matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from remanence.kernels import conv_per_client

# channels from which on a client's own convolution is faster than its share of a grouped one
DEEP = 512

ConvSizes = Sequence[int]


def convolve(x: Tensor, w: Tensor, stride: ConvSizes, padding: ConvSizes) -> Tensor:
    """One model's images x [B, C, H, W] under its weights w [O, C, kh, kw]."""
    # a product of matrices: a grouped convolution is a detour
    if tuple(w.shape[2:]) == (1, 1) and tuple(padding) == (0, 0):
        rows = x[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1)
        return (rows @ w.flatten(1).t()).permute(0, 3, 1, 2)
    y: Tensor = _Convolution.apply(x, w, stride, padding)  # type: ignore[no-untyped-call]
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
            around = [size - 1 - zeros for size, zeros in zip(w.shape[2:], padding, strict=True)]
            if tuple(stride) == (1, 1) and min(around) >= 0:
                # a convolution itself, for which cuDNN has better kernels than for the gradient of
                # one
                dx = _Convolution.apply(dy, w.flip(2, 3).transpose(0, 1), stride, around)  # type: ignore[no-untyped-call]
            else:
                dx = _Gradient.apply(dy, x, w, stride, padding, True)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[1]:
            dw = _Gradient.apply(dy, x, w, stride, padding, False)  # type: ignore[no-untyped-call]
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
    """The gradient dy [B, O, h, w] of what came out -> that of the images, or else of the
    weights. There is no gradient of it in turn.
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
    answer = torch.ops.aten.convolution_backward(*images, _to_nhwc(w).flatten(0, 1), *settings)
    return _from_grouped(answer[0], groups) if of_images else answer[1].unflatten(0, (groups, -1))


_PLAIN = ((1, 1), False, (0, 0))  # not dilated, not transposed


def _is_separate(w: Tensor, stride: ConvSizes) -> bool:
    return tuple(stride) != (1, 1) or min(w.shape[1:3]) >= DEEP


def batch_first(value: Tensor, dim: int | None, many: int) -> Tensor:
    """The stack's axis in front, also where all of it share one."""
    return value.unsqueeze(0).expand(many, *value.shape) if dim is None else value.movedim(dim, 0)


def _to_grouped(images: Tensor) -> Tensor:
    """[k, B, C, H, W] -> [B, k C, H, W], in memory [B, H, W, k, C]"""
    return images.permute(1, 3, 4, 0, 2).contiguous().flatten(3).permute(0, 3, 1, 2)


def _from_grouped(images: Tensor, many: int) -> Tensor:
    """[B, k C, H, W] -> [k, B, C, H, W], where it lies"""
    batch, _, height, width = images.shape
    return images.view(batch, many, -1, height, width).movedim(1, 0)


def _to_nhwc(values: Tensor) -> Tensor:
    """[k, n, C, h, w], in memory [k, n, h, w, C]"""
    return values.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


CHANNELS_LAST = 8  # of images with at least so many


def empty_channels_last(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory for images [k, B, C, H, W]: the channels innermost where there are enough of them
    for whole lines of memory.
    """
    return (
        like.new_empty(shape)
        if shape[2] < CHANNELS_LAST
        else conv_per_client.channels_innermost(like, shape)
    )
