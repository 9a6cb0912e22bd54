"""Convolutions of a stack as one convolution a client, several at a time.

For some layers cuDNN has no grouped kernel: it cuts every client's channels out of the images,
convolves them one after the other, and puts the answers back. Here each client's images lie
together already, [k, B, H, W, C], and a few streams work side by side, since one client alone does
not fill a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.library import custom_op

STREAMS = 4  # ten were not faster


@custom_op("remanence::convolve_separately", mutates_args=())
def convolve(x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Images x [k, B, C, H, W] under w [k, O, C, kh, kw] -> [k, B, O, h, w]"""
    y = _room_for_answers(x, w, stride, padding)
    _for_each_client(
        len(x),
        x.device,
        lambda client: _convolve_into(y[client], x[client], w[client], stride, padding),
    )
    return y


@custom_op("remanence::differentiate_separately", mutates_args=())
def differentiate(
    dy: Tensor, x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], of_images: bool
) -> Tensor:
    """The gradient dy [k, B, O, h, w] of what came out -> that of the images, or else of the
    weights
    """
    gradient = channels_innermost(x, x.shape if of_images else w.shape)
    wanted = [of_images, not of_images, False]

    def compute(client: int) -> None:
        settings = (None, stride, padding, (1, 1), False, (0, 0), 1, wanted)
        answer = torch.ops.aten.convolution_backward(dy[client], x[client], w[client], *settings)
        gradient[client].copy_(answer[0] if of_images else answer[1])

    _for_each_client(len(x), x.device, compute)
    return gradient


@convolve.register_fake
def _(x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    return _room_for_answers(x, w, stride, padding)


@differentiate.register_fake
def _(
    dy: Tensor, x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], of_images: bool
) -> Tensor:
    return channels_innermost(x, x.shape if of_images else w.shape)


def _convolve_into(
    y: Tensor, x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> None:
    if _takes_memory(x):
        cudnn = torch.backends.cudnn
        repeats = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        torch.ops.aten.cudnn_convolution.out(
            x, w, padding, stride, (1, 1), 1, cudnn.benchmark, repeats, cudnn.allow_tf32, out=y
        )
    else:
        y.copy_(torch.ops.aten.convolution(x, w, None, stride, padding, (1, 1), False, (0, 0), 1))


def _takes_memory(x: Tensor) -> bool:
    """Can cuDNN write where we say, in our layout, without a copy? Not in float64, for which
    torch itself turns images around.
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
    here, streams = torch.cuda.current_stream(device), _streams(device)[:count]
    for stream in streams:
        # and with it for all that used memory which a stream is about to take again
        stream.wait_stream(here)
    for client in range(count):
        with torch.cuda.stream(streams[client % len(streams)]):
            compute(client)
    for stream in streams:
        here.wait_stream(stream)


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


def _room_for_answers(
    x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    sides = [
        (length + 2 * zeros - size) // step + 1
        for length, zeros, size, step in zip(x.shape[3:], padding, w.shape[3:], stride, strict=True)
    ]
    return channels_innermost(x, (*x.shape[:2], w.shape[1], *sides))


def channels_innermost(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory for [k, B, C, H, W], laid out as [k, B, H, W, C]"""
    clients, images, channels, height, width = shape
    return like.new_empty((clients, images, height, width, channels)).permute(0, 1, 4, 2, 3)
