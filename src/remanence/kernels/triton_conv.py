"""Convolutions of a stack of models in one Triton kernel launch, for layers with few channels.

cuDNN runs many narrow groups with kernels made for other shapes. Here one launch covers all
models, as matrix products of tiles of unfolded images that are never stored; sizes are constants of
the kernel. Images of 8 channels or more are written channels last, which the next layer reads
fastest. Sums over pixels are split into parts that are added in a fixed order, so that results
repeat bit by bit.

Measured on an H200: the two convolutions of 50 LeNets (job A of `remanence bench`) take 160 instead
of 427 microseconds of a step in tf32, forward and backward. Together with keys that are made for
all steps at once, a round of A takes 49 instead of 80 ms.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# (a kernel's arguments have no Python types, and Triton reads annotations as objects, so this file
# has no `from __future__ import annotations`)

import torch
import triton
import triton.language as tl
from torch import Tensor

from remanence.kernels.conv_channels_last import empty_channels_last

PROGRAMS = 2112  # in a launch: sixteen for each of the 132 multiprocessors of an H200


@triton.jit
def _offsets(
    m, k,
    x_image, x_channel, x_height, x_width,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, KW: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr,
):  # fmt: skip
    """The offsets of the input pixels that output pixels m multiply with terms k, and whether they
    lie inside the image. The shapes of m and k broadcast.
    """
    image, place = m // (HO * WO), m % (HO * WO)
    tap, channel = k // C, k % C
    top, left = place // WO - PAD_H, place % WO - PAD_W
    down, right = tap // KW, tap % KW
    offsets = (image * x_image + top * x_height + left * x_width) + (
        channel * x_channel + down * x_height + right * x_width
    )
    inside = (top + down >= 0) & (top + down < H) & (left + right >= 0) & (left + right < W)
    return offsets, inside


@triton.jit
def _conv_forward_kernel(
    x,
    w,
    y,
    rows,  # output pixels of all images
    x_client, x_image, x_channel, x_height, x_width,
    y_client, y_image, y_channel, y_height, y_width,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """w: [client, KH, KW, C, O]"""
    terms: tl.constexpr = KH * KW * C
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    x += client * x_client
    w += client * (terms * O)
    total = tl.zeros((BM, BN), dtype=tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
    for start in range(0, terms, BK):
        k = start + tl.arange(0, BK)
        if C % BK == 0:  # all terms of the tile are channels of one filter pixel
            at, here = _offsets(
                m, start, x_image, x_channel, x_height, x_width,
                C, H, W, HO, WO, KW, PAD_H, PAD_W,
            )  # fmt: skip
            at = at[:, None] + (tl.arange(0, BK) * x_channel)[None, :]
            here = (here & (m < rows))[:, None]
            b = tl.load(w + k[:, None] * O + n[None, :], mask=(n < O)[None, :], other=0.0)
        else:
            at, here = _offsets(
                m[:, None], k[None, :], x_image, x_channel, x_height, x_width,
                C, H, W, HO, WO, KW, PAD_H, PAD_W,
            )  # fmt: skip
            within = (m < rows)[:, None] & (k < terms)[None, :]
            here = within & here if PAD_H + PAD_W > 0 else within
            b = tl.load(
                w + k[:, None] * O + n[None, :],
                mask=(k < terms)[:, None] & (n < O)[None, :],
                other=0.0,
            )
        a = tl.load(x + at, mask=here, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)
    image, place = m // (HO * WO), m % (HO * WO)
    to = image * y_image + (place // WO) * y_height + (place % WO) * y_width
    tl.store(
        y + client * y_client + to[:, None] + (n * y_channel)[None, :],
        total,
        mask=(m < rows)[:, None] & (n < O)[None, :],
    )


@triton.jit
def _conv_weight_grad_kernel(
    x,
    dy,
    parts,  # [part, client, KH, KW, C, O]
    rows,
    rows_per_part,
    clients,
    x_client, x_image, x_channel, x_height, x_width,
    y_client, y_image, y_channel, y_height, y_width,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the weights: a sum over output pixels, here over one part of them."""
    terms: tl.constexpr = KH * KW * C
    tiles: tl.constexpr = (O + BN - 1) // BN
    part, client = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first_k = (tl.program_id(0) // tiles) * BK
    k = first_k + tl.arange(0, BK)
    n = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    x += client * x_client
    dy += client * y_client
    first = part * rows_per_part
    last = tl.minimum(first + rows_per_part, rows)
    total = tl.zeros((BK, BN), dtype=tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
    for start in range(first, last, BM):
        m = start + tl.arange(0, BM)
        if C % BK == 0:
            at, here = _offsets(
                m, first_k, x_image, x_channel, x_height, x_width,
                C, H, W, HO, WO, KW, PAD_H, PAD_W,
            )  # fmt: skip
            at = at[None, :] + (tl.arange(0, BK) * x_channel)[:, None]
            here = (here & (m < last))[None, :]
        else:
            at, here = _offsets(
                m[None, :], k[:, None], x_image, x_channel, x_height, x_width,
                C, H, W, HO, WO, KW, PAD_H, PAD_W,
            )  # fmt: skip
            within = (m < last)[None, :] & (k < terms)[:, None]
            here = within & here if PAD_H + PAD_W > 0 else within
        a = tl.load(x + at, mask=here, other=0.0)
        image, place = m // (HO * WO), m % (HO * WO)
        of = image * y_image + (place // WO) * y_height + (place % WO) * y_width
        b = tl.load(
            dy + of[:, None] + (n * y_channel)[None, :],
            mask=(m < last)[:, None] & (n < O)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)
    to = parts + (part * clients + client) * (terms * O)
    tl.store(to + k[:, None] * O + n[None, :], total, mask=(k < terms)[:, None] & (n < O)[None, :])


def conv_forward(x: Tensor, w: Tensor, padding: tuple[int, int], precision: str) -> Tensor:
    """Images x [k, B, C, H, W] and weights w [k, kh, kw, C, O] -> [k, B, O, h, w]"""
    (clients, images, channels, height, width), (_, kh, kw, _, outputs) = x.shape, w.shape
    size = height + 2 * padding[0] - kh + 1, width + 2 * padding[1] - kw + 1
    y, rows = empty_channels_last(x, (clients, images, outputs, *size)), images * size[0] * size[1]
    # tiles of rows, outputs and terms: the fastest of those tried on an H200
    tile = (
        128,
        _width(outputs),
        64 if outputs > 32 else 32 if channels >= 16 or outputs <= 8 else 16,
    )
    grid = triton.cdiv(rows, tile[0]), triton.cdiv(outputs, tile[1]), clients
    with torch.cuda.device_of(x):
        _conv_forward_kernel[grid](
            x, w.contiguous(), y, rows, *x.stride(), *y.stride(),
            channels, height, width, outputs, *size, kh, kw, *padding, *tile, precision,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return y


def conv_weight_grad(
    x: Tensor, dy: Tensor, kernel: tuple[int, int], padding: tuple[int, int], precision: str
) -> Tensor:
    """Images x [k, B, C, H, W] and the gradient dy [k, B, O, h, w] -> [k, kh, kw, C, O]"""
    (clients, images, channels, height, width), (_, _, outputs, *size) = x.shape, dy.shape
    rows, terms = images * size[0] * size[1], kernel[0] * kernel[1] * channels
    tile = 64 if outputs > 32 else 32, _width(outputs), 64 if outputs > 32 else 32
    tiles = triton.cdiv(terms, tile[2]) * triton.cdiv(outputs, tile[1])
    count = max(1, min(triton.cdiv(PROGRAMS, tiles * clients), rows // (4 * tile[0])))
    rows_per_part = triton.cdiv(triton.cdiv(rows, count), tile[0]) * tile[0]
    count = triton.cdiv(rows, rows_per_part)
    parts = torch.empty(
        (count, clients, *kernel, channels, outputs), dtype=_accumulator(x.dtype), device=x.device
    )
    with torch.cuda.device_of(x):
        _conv_weight_grad_kernel[(tiles, count, clients)](
            x, dy, parts, rows, rows_per_part, clients, *x.stride(), *dy.stride(),
            channels, height, width, outputs, *size, *kernel, *padding, *tile, precision,
            num_warps=4, num_stages=2,
        )  # fmt: skip
    return parts.sum(dim=0).to(x.dtype)


def _width(outputs: int) -> int:
    """The width of a tile; tl.dot needs at least 16 columns."""
    return 16 if outputs <= 16 else 32 if outputs <= 32 else 64


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
