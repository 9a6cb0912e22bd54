"""Wide convolutions of a stack as one grouped convolution with the channels innermost; those of 1x1 as products of matrices.

Mapped over a stack, torch's own convolution puts the images [k, B, C, H, W] together as [B, k C, H, W], one whole channel after the other, and cuDNN turns
them around and back in every call. Here they are laid out as [B, H, W, k, C] before it and stay so behind it; the compiler makes that layout part of the
operations around the convolution. On an H200 the 64 to 64 layers of ten ResNet-18 take 330 instead of 740 microseconds in bf16, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Sizes = Sequence[int]


def convolve(x: Tensor, w: Tensor, stride: Sizes, padding: Sizes) -> Tensor:
    """One model's images x [B, C, H, W] under its weights w [O, C, kh, kw]."""
    if tuple(w.shape[2:]) == (1, 1) and tuple(padding) == (0, 0):  # a product of matrices, to which a grouped convolution is a detour
        rows = x[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1)
        return (rows @ w.flatten(1).t()).permute(0, 3, 1, 2)
    y: Tensor = _Forward.apply(x, w, stride, padding)  # type: ignore[no-untyped-call]
    return y


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: Sizes, padding: Sizes) -> Tensor:
        return _convolve(x, w, stride, padding, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Sizes, Sizes], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.settings = inputs[2:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x, w), (dy,) = ctx.saved_tensors, gradients
        dx = _Backward.apply(dy, x, w, *ctx.settings, True) if ctx.needs_input_grad[0] else None  # type: ignore[no-untyped-call]
        dw = _Backward.apply(dy, x, w, *ctx.settings, False) if ctx.needs_input_grad[1] else None  # type: ignore[no-untyped-call]
        return dx, dw, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, stride: Sizes, padding: Sizes) -> tuple[Tensor, int]:
        many = info.batch_size
        images, weights = _side_by_side(lead(x, in_dims[0], many)), _below_each_other(lead(w, in_dims[1], many))
        return _apart(_convolve(images, weights, stride, padding, many), many), 0


class _Backward(torch.autograd.Function):
    """The gradient dy [B, O, h, w] of what came out -> that of the images, or else of the weights. There is no gradient of it in turn."""

    @staticmethod
    def forward(dy: Tensor, x: Tensor, w: Tensor, stride: Sizes, padding: Sizes, of_images: bool) -> Tensor:
        return _gradient(dy, x, w, stride, padding, 1, of_images)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, dy: Tensor, x: Tensor, w: Tensor, stride: Sizes, padding: Sizes, of_images: bool
    ) -> tuple[Tensor, int]:
        many = info.batch_size
        dy, x, w = (lead(value, dim, many) for value, dim in zip((dy, x, w), in_dims[:3], strict=True))
        gradient = _gradient(_side_by_side(dy), _side_by_side(x), _below_each_other(w), stride, padding, many, of_images)
        return (_apart(gradient, many) if of_images else gradient.reshape(many, -1, *gradient.shape[1:])), 0


def _convolve(x: Tensor, w: Tensor, stride: Sizes, padding: Sizes, groups: int) -> Tensor:
    y: Tensor = torch.ops.aten.convolution(x, w, None, stride, padding, (1, 1), False, (0, 0), groups)
    return y


def _gradient(dy: Tensor, x: Tensor, w: Tensor, stride: Sizes, padding: Sizes, groups: int, of_images: bool) -> Tensor:
    wanted = [of_images, not of_images, False]
    answer = torch.ops.aten.convolution_backward(dy, x, w, None, stride, padding, (1, 1), False, (0, 0), groups, wanted)
    gradient: Tensor = answer[0] if of_images else answer[1]
    return gradient


def lead(value: Tensor, dim: int | None, many: int) -> Tensor:
    """The stack's axis in front, also where all of it share one."""
    return value.unsqueeze(0).expand(many, *value.shape) if dim is None else value.movedim(dim, 0)


def _side_by_side(images: Tensor) -> Tensor:
    """[k, B, C, H, W] -> [B, k C, H, W], in memory [B, H, W, k, C]"""
    return images.permute(1, 3, 4, 0, 2).contiguous().flatten(3).permute(0, 3, 1, 2)


def _apart(images: Tensor, many: int) -> Tensor:
    """[B, k C, H, W] -> [k, B, C, H, W], where it lies"""
    batch, _, height, width = images.shape
    return images.view(batch, many, -1, height, width).movedim(1, 0)


def _below_each_other(weights: Tensor) -> Tensor:
    """[k, O, C, kh, kw] -> [k O, C, kh, kw], in memory [k, O, kh, kw, C]"""
    return weights.permute(0, 1, 3, 4, 2).contiguous().flatten(0, 1).permute(0, 3, 1, 2)
