"""Convolutions of a stack of models as one cuDNN call for each model, several at a time.

For some layers cuDNN has no grouped kernel: it copies every model's channels out of the images,
convolves the models one after the other and copies the results back. Here each model's images are
contiguous already, [k, B, H, W, C], and a few CUDA streams run side by side, since one model does
not fill a GPU.

Measured on an H200 with ten ResNet-18: a layer of 64 to 128 channels with stride 2 takes 450
instead of 1,080 microseconds in bf16, forward and backward; a round of job C (`remanence bench`)
takes 557 instead of 613 ms in tf32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.library import custom_op

STREAMS = 4  # ten are not faster


@custom_op("remanence::conv_per_client", mutates_args=())
def convolve(x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Images x [k, B, C, H, W] and weights w [k, O, C, kh, kw] -> [k, B, O, h, w]"""
    y = _empty_result(x, w, stride, padding)
    _for_each_client(
        len(x),
        x.device,
        lambda client: _convolve_into(y[client], x[client], w[client], stride, padding),
    )
    return y


@custom_op("remanence::conv_per_client_backward", mutates_args=())
def differentiate(
    dy: Tensor, x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], of_images: bool
) -> Tensor:
    """From the gradient dy [k, B, O, h, w] of the result to that of the images if `of_images`,
    else of the weights.
    """
    gradient = empty_nhwc(x, x.shape if of_images else w.shape)
    wanted = [of_images, not of_images, False]

    def compute(client: int) -> None:
        settings = (None, stride, padding, (1, 1), False, (0, 0), 1, wanted)
        result = torch.ops.aten.convolution_backward(dy[client], x[client], w[client], *settings)
        gradient[client].copy_(result[0] if of_images else result[1])

    _for_each_client(len(x), x.device, compute)
    return gradient


@convolve.register_fake
def _(x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    return _empty_result(x, w, stride, padding)


@differentiate.register_fake
def _(
    dy: Tensor, x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], of_images: bool
) -> Tensor:
    return empty_nhwc(x, x.shape if of_images else w.shape)


def _convolve_into(
    y: Tensor, x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> None:
    if _supports_out(x):
        cudnn = torch.backends.cudnn
        deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        torch.ops.aten.cudnn_convolution.out(
            x,
            w,
            padding,
            stride,
            (1, 1),
            1,
            cudnn.benchmark,
            deterministic,
            cudnn.allow_tf32,
            out=y,
        )
    else:
        y.copy_(torch.ops.aten.convolution(x, w, None, stride, padding, (1, 1), False, (0, 0), 1))


def _supports_out(x: Tensor) -> bool:
    """Whether cuDNN can write into a given tensor in this layout without a copy. Not in float64,
    where torch itself converts the images.
    """
    return (
        x.is_cuda
        and x.dtype != torch.float64
        and torch.version.hip is None
        and torch.backends.cudnn.enabled
    )


def _for_each_client(count: int, device: torch.device, compute: Callable[[int], None]) -> None:
    if device.type != "cuda":
        for client in range(count):
            compute(client)
        return
    current, streams = torch.cuda.current_stream(device), _streams(device)[:count]
    for stream in streams:
        # wait for everything that uses memory which the stream may reuse
        stream.wait_stream(current)
    for client in range(count):
        with torch.cuda.stream(streams[client % len(streams)]):
            compute(client)
    for stream in streams:
        current.wait_stream(stream)


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


def _empty_result(x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    sides = [
        (length + 2 * zeros - size) // step + 1
        for length, zeros, size, step in zip(x.shape[3:], padding, w.shape[3:], stride, strict=True)
    ]
    return empty_nhwc(x, (*x.shape[:2], w.shape[1], *sides))


def empty_nhwc(like: Tensor, shape: Sequence[int]) -> Tensor:
    """An uninitialized tensor [k, B, C, H, W], stored as [k, B, H, W, C]."""
    clients, images, channels, height, width = shape
    return like.new_empty((clients, images, height, width, channels)).permute(0, 1, 4, 2, 3)
