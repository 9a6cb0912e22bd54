"""Convolutions and batch norms of a stack of models on a GPU, each by the fastest operator.

`with_convolutions` replaces torch's own while a function runs. A stack of convolutions is one
grouped convolution, for which cuDNN has no good kernels if groups have few channels. Narrow layers
therefore use the kernels of `triton_conv.py`, and wide layers of compiled steps use cuDNN with the
channels last (`conv_channels_last.py`); each module's docstring has its measured gain. Everything
else is left to torch: widths between the two, narrow layers in float64, dilation, groups, and
machines without Triton.

Both return images with the channels last. Batch norms then use torch's own kernels, which accept
that layout: before cuDNN's kernel torch changes the layout by a call that vmap cannot map.
Measured on an H200: with them the steps of job C-mixed (`remanence bench`) can be compiled, and a
round takes 0.3 instead of 2.3 s.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import batch_norm
from torch.overrides import TorchFunctionMode

from remanence.kernels import conv_channels_last, kernels_enabled
from remanence.kernels.conv_channels_last import empty_channels_last

FunctionArguments = ParamSpec("FunctionArguments")
FunctionResult = TypeVar("FunctionResult")

# (inputs, outputs): the most channels with which the Triton kernels are faster than cuDNN
NARROW = {torch.float32: (16, 32), torch.bfloat16: (32, 64)}
WIDE = 64  # the fewest channels with which cuDNN is faster with the channels last
OFFSETS = 2**31  # the kernels' offsets within a client's images have 32 bits


@custom_op("remanence::stacked_conv", mutates_args=())
def conv_forward(x: Tensor, w: Tensor, pad_h: int, pad_w: int, tf32: bool) -> Tensor:
    """Stacked images x [k, B, C, H, W] and weights w [k, kh, kw, C, O] -> [k, B, O, h, w]"""
    from remanence.kernels import triton_conv

    return triton_conv.conv_forward(x, w, (pad_h, pad_w), "tf32" if tf32 else "ieee")


@custom_op("remanence::stacked_conv_weight_grad", mutates_args=())
def conv_weight_grad(
    x: Tensor, dy: Tensor, kh: int, kw: int, pad_h: int, pad_w: int, tf32: bool
) -> Tensor:
    """The gradient of the weights of `conv_forward`: x [k, B, C, H, W], dy [k, B, O, h, w]
    -> [k, kh, kw, C, O]
    """
    from remanence.kernels import triton_conv

    return triton_conv.conv_weight_grad(x, dy, (kh, kw), (pad_h, pad_w), "tf32" if tf32 else "ieee")


@conv_forward.register_fake
def _(x: Tensor, w: Tensor, pad_h: int, pad_w: int, tf32: bool) -> Tensor:
    (clients, images, _, height, width), (_, kh, kw, _, outputs) = x.shape, w.shape
    return empty_channels_last(
        x, (clients, images, outputs, height + 2 * pad_h - kh + 1, width + 2 * pad_w - kw + 1)
    )


@conv_weight_grad.register_fake
def _(x: Tensor, dy: Tensor, kh: int, kw: int, pad_h: int, pad_w: int, tf32: bool) -> Tensor:
    return x.new_empty((x.shape[0], kh, kw, x.shape[2], dy.shape[2]))


def _fold(operator: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """The vmap rule of an operator on stacks: the same operator on a longer stack."""

    def mapped(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        tensors = [
            conv_channels_last.batch_first(value, dim, info.batch_size)
            for value, dim in zip(arguments[:2], in_dims[:2], strict=True)
        ]
        result = operator(*(value.flatten(0, 1) for value in tensors), *arguments[2:])
        return result.reshape(info.batch_size, -1, *result.shape[1:]), 0

    return mapped


conv_forward.register_vmap(_fold(conv_forward))
conv_weight_grad.register_vmap(_fold(conv_weight_grad))


class _Convolution(torch.autograd.Function):
    """One model's images x [B, C, H, W] and weights w [O, C, kh, kw]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, pad_h: int, pad_w: int, tf32: bool) -> Tensor:
        stacked_w = w.permute(2, 3, 1, 0).unsqueeze(0)
        y: Tensor = conv_forward(x.unsqueeze(0), stacked_w, pad_h, pad_w, tf32).squeeze(0)
        return y

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, int, int, bool], output: Tensor
    ) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.settings = inputs[2:]

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (x, w), (dy,), (pad_h, pad_w, tf32) = ctx.saved_tensors, gradients, ctx.settings
        kh, kw = w.shape[2:]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            flipped = w.flip(2, 3).transpose(0, 1)
            dx = _Convolution.apply(dy, flipped, kh - 1 - pad_h, kw - 1 - pad_w, tf32)
        if ctx.needs_input_grad[1]:
            dw = _WeightGradient.apply(x, dy, kh, kw, pad_h, pad_w, tf32)
        return dx, dw, None, None, None


class _WeightGradient(torch.autograd.Function):
    """Images x [B, C, H, W] and the gradient dy [B, O, h, w] of the result -> dw [O, C, kh, kw].
    It has no gradient itself.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, dy: Tensor, kh: int, kw: int, pad_h: int, pad_w: int, tf32: bool
    ) -> Tensor:
        dw: Tensor = conv_weight_grad(
            x.unsqueeze(0), dy.unsqueeze(0), kh, kw, pad_h, pad_w, tf32
        ).squeeze(0)
        return dw.permute(3, 2, 0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    fused: bool = False,
) -> Tensor:
    """`torch.conv2d` by the fastest operator.

    Args:
        fused: Whether the step will be compiled, so that changes of layout become part of other
            operations. The remaining arguments are those of `torch.conv2d`.
    """
    if torch.is_autocast_enabled(x.device.type):
        lower = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(lower), weight.to(lower), None if bias is None else bias.to(lower)
    plain = (
        x.dim() == 4 and groups == 1 and _pair(dilation) == (1, 1) and not isinstance(padding, str)
    )
    if plain and _pair(stride) == (1, 1) and use_triton(x, weight, padding):
        tf32 = torch.backends.cudnn.allow_tf32
        y: Tensor = _Convolution.apply(x, weight, *_pair(padding), tf32)
    elif plain and fused and use_channels_last(x, weight):
        y = conv_channels_last.convolve(x, weight, _pair(stride), _pair(padding))
    else:
        return _conv2d(x, weight, bias, stride, padding, dilation, groups)
    return y if bias is None else y + bias.reshape(-1, 1, 1)


def use_triton(x: Tensor, weight: Tensor, padding: Any) -> bool:
    """Whether the Triton kernels are faster for images [B, C, H, W] and weights [O, C, kh, kw].
    Padding must be smaller than the kernel: the gradient would crop the rest.
    """
    outputs, inputs, *kernel = weight.shape
    most_inputs, most_outputs = NARROW.get(weight.dtype, (0, 0))
    within = all(zeros < size for zeros, size in zip(_pair(padding), kernel, strict=True))
    return (
        inputs <= most_inputs
        and outputs <= most_outputs
        and within
        and outputs * x.numel() < OFFSETS
    )


def use_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Whether a stack of these is faster with the channels last. cuDNN's kernels for that layout
    run on tensor cores; float64, in which engines are compared, takes the same path.
    """
    outputs, inputs = weight.shape[:2]
    tensor_cores = weight.dtype != torch.float32 or torch.backends.cudnn.allow_tf32
    return x.is_cuda and tensor_cores and min(inputs, outputs) >= WIDE


_conv2d: Callable[..., Tensor] = torch.conv2d


def stacked_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.batch_norm`, never by cuDNN."""
    if training and x.numel() == x.shape[1]:
        raise ValueError(
            "batch norm in training needs more than one value a channel, and the batch has"
            f" the shape {list(x.shape)}"
        )
    y: Tensor = torch.native_batch_norm(
        x, weight, bias, running_mean, running_var, training, momentum, eps
    )[0]
    return y


class _ReplaceLayers(TorchFunctionMode):
    """While it is active, `torch.conv2d` and `batch_norm` are those of this module."""

    def __init__(self, fused: bool):
        super().__init__()
        self.replacements: dict[Any, Callable[..., Tensor]] = {
            torch.conv2d: partial(convolve, fused=fused),
            batch_norm: stacked_batch_norm,
        }

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.replacements.get(function, function)(*args, **(kwargs or {}))


def with_convolutions(
    compute: Callable[FunctionArguments, FunctionResult], fused: bool = False
) -> Callable[FunctionArguments, FunctionResult]:
    """The same function with the convolutions and batch norms of this module, for a stack of
    models on a GPU.

    Args:
        compute: The function.
        fused: Whether it will be compiled.

    Returns:
        `compute` itself without Triton, or if `REMANENCE_KERNELS=0`.
    """
    if importlib.util.find_spec("triton") is None or not kernels_enabled():
        return compute

    def replaced(
        *args: FunctionArguments.args, **kwargs: FunctionArguments.kwargs
    ) -> FunctionResult:
        with _ReplaceLayers(fused):
            return compute(*args, **kwargs)

    return replaced


def _pair(value: Any) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)
