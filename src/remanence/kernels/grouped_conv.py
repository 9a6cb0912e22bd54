"""Convolutions of a stack, by the fastest way there is for their widths, and the batch norms behind
them.

A stack of convolutions is one grouped convolution, for which cuDNN has no good kernels where groups
have few channels: on an H200 the two layers of 50 LeNets take 427 microseconds forward and backward
in tf32, and 160 by the kernels of `triton_conv.py`. Wide layers of compiled steps go to cuDNN with the
channels innermost (`conv_channels_last.py`). All else is left to torch: layers between the two, narrow ones in
float64, dilation, groups, and machines without Triton.

Images come out of both with the channels innermost. Before a batch norm torch asks for just that
layout, for cuDNN, in a call that cannot be mapped over a stack; its own kernels take images as they
lie, and the compiler knows what they compute and fuses it with what is around.
"""

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

from remanence.kernels import conv_channels_last
from remanence.kernels.conv_channels_last import empty_channels_last

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

# input and output channels up to which our kernels are faster
NARROW = {torch.float32: (16, 32), torch.bfloat16: (32, 64)}
WIDE = 64  # channels from which on cuDNN is faster with the channels innermost
OFFSETS = 2**31  # the kernels count within a client's images in 32 bits


@custom_op("remanence::correlate", mutates_args=())
def conv_forward(x: Tensor, w: Tensor, above: int, beside: int, tf32: bool) -> Tensor:
    """Images x [k, B, C, H, W], with so many rows of zeros above and below and columns beside
    them, under w [k, kh, kw, C, O] -> [k, B, O, h, w]
    """
    from remanence.kernels import triton_conv

    return triton_conv.conv_forward(x, w, (above, beside), "tf32" if tf32 else "ieee")


@custom_op("remanence::correlate_rows", mutates_args=())
def conv_weight_grad(
    x: Tensor, dy: Tensor, kh: int, kw: int, above: int, beside: int, tf32: bool
) -> Tensor:
    """What `conv_forward` says about the gradient of its weights: x [k, B, C, H, W], dy [k, B, O,
    h, w] -> [k, kh, kw, C, O]
    """
    from remanence.kernels import triton_conv

    return triton_conv.conv_weight_grad(
        x, dy, (kh, kw), (above, beside), "tf32" if tf32 else "ieee"
    )


@conv_forward.register_fake
def _(x: Tensor, w: Tensor, above: int, beside: int, tf32: bool) -> Tensor:
    (clients, images, _, height, width), (_, kh, kw, _, outputs) = x.shape, w.shape
    return empty_channels_last(
        x, (clients, images, outputs, height + 2 * above - kh + 1, width + 2 * beside - kw + 1)
    )


@conv_weight_grad.register_fake
def _(x: Tensor, dy: Tensor, kh: int, kw: int, above: int, beside: int, tf32: bool) -> Tensor:
    return x.new_empty((x.shape[0], kh, kw, x.shape[2], dy.shape[2]))


def _fold(operation: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """Mapped over a stack an operation on stacks is the same operation on a longer one."""

    def mapped(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        tensors = [
            conv_channels_last.batch_first(value, dim, info.batch_size)
            for value, dim in zip(arguments[:2], in_dims[:2], strict=True)
        ]
        answer = operation(*(value.flatten(0, 1) for value in tensors), *arguments[2:])
        return answer.reshape(info.batch_size, -1, *answer.shape[1:]), 0

    return mapped


conv_forward.register_vmap(_fold(conv_forward))
conv_weight_grad.register_vmap(_fold(conv_weight_grad))


class _Convolution(torch.autograd.Function):
    """One model's images x [B, C, H, W] under its weights w [O, C, kh, kw]. Both gradients
    gather, too: none scatters.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, above: int, beside: int, tf32: bool) -> Tensor:
        y: Tensor = conv_forward(
            x.unsqueeze(0), w.permute(2, 3, 1, 0).unsqueeze(0), above, beside, tf32
        ).squeeze(0)
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
        (x, w), (dy,), (above, beside, tf32) = ctx.saved_tensors, gradients, ctx.settings
        kh, kw = w.shape[2:]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _Convolution.apply(
                dy, w.flip(2, 3).transpose(0, 1), kh - 1 - above, kw - 1 - beside, tf32
            )  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[1]:
            dw = _WeightGradient.apply(x, dy, kh, kw, above, beside, tf32)  # type: ignore[no-untyped-call]
        return dx, dw, None, None, None


class _WeightGradient(torch.autograd.Function):
    """Images x [B, C, H, W] and the gradient of what became of them, dy [B, O, h, w] -> dw [O,
    C, kh, kw]. There is no gradient of it in turn.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, dy: Tensor, kh: int, kw: int, above: int, beside: int, tf32: bool
    ) -> Tensor:
        dw: Tensor = conv_weight_grad(
            x.unsqueeze(0), dy.unsqueeze(0), kh, kw, above, beside, tf32
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
    """`torch.conv2d`, by our kernels or in our layout where they are faster; `fused` if the
    compiler can make the layout part of what comes before.
    """
    if torch.is_autocast_enabled(x.device.type):
        lower = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(lower), weight.to(lower), None if bias is None else bias.to(lower)
    plain = (
        x.dim() == 4 and groups == 1 and _pair(dilation) == (1, 1) and not isinstance(padding, str)
    )
    if plain and _pair(stride) == (1, 1) and use_triton(x, weight, padding):
        y: Tensor = _Convolution.apply(x, weight, *_pair(padding), torch.backends.cudnn.allow_tf32)  # type: ignore[no-untyped-call, arg-type]
    elif plain and fused and use_channels_last(x, weight):
        y = conv_channels_last.convolve(x, weight, _pair(stride), _pair(padding))  # type: ignore[arg-type]
    else:
        return _conv2d(x, weight, bias, stride, padding, dilation, groups)
    return y if bias is None else y + bias.reshape(-1, 1, 1)


def use_triton(x: Tensor, weight: Tensor, padding: Any) -> bool:
    """Are our kernels faster for these images [B, C, H, W] and weights [O, C, kh, kw]? More
    padding than a kernel's size would be cropped by its gradient.
    """
    (outputs, inputs, *kernel), (most_inputs, most_outputs) = (
        weight.shape,
        NARROW.get(weight.dtype, (0, 0)),
    )
    within = all(zeros < size for zeros, size in zip(_pair(padding), kernel, strict=True))
    return (
        inputs <= most_inputs
        and outputs <= most_outputs
        and within
        and outputs * x.numel() < OFFSETS
    )


def use_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Is a stack of these faster with the channels innermost? cuDNN's kernels for this layout are
    those of the tensor cores; float64, in which engines are compared, goes the same way.
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


class _Layers(TorchFunctionMode):
    """While it is on, a network's own convolutions and batch norms are ours."""

    def __init__(self, fused: bool):
        super().__init__()
        self.ours: dict[Any, Callable[..., Tensor]] = {
            torch.conv2d: partial(convolve, fused=fused),
            batch_norm: stacked_batch_norm,
        }

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.ours.get(function, function)(*args, **(kwargs or {}))


def with_convolutions(
    compute: Callable[Arguments, Answer], fused: bool = False
) -> Callable[Arguments, Answer]:
    """The same for a stack on a GPU, with convolutions by our kernels and in our layout and
    batch norms that take it; `fused` if it will be compiled.
    """
    if importlib.util.find_spec("triton") is None:
        return compute

    def ours(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        with _Layers(fused):
            return compute(*args, **kwargs)

    return ours


def _pair(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)
