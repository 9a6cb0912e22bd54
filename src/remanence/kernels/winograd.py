"""Convolutions of compiled steps on a CPU with fewer products, by the algorithm of Winograd, Toom
and Cook.

Four by four outputs of a 5x5 filter take 400 products a channel if each output is summed by itself.
They are also the product of two polynomials, which is determined by its values at eight points a
side: 64 products, and sums that are linear in the image, in the filter and in the result. The
products at one point are a matrix product over all tiles and channels; the sums are compiled.
Gradients use the same sums and products.

Measured on two cores (`benchmarks/winograd.py` measures single layers): the wide layer of job B's
CNN takes 22 to 25 instead of 48 ms, a step 52 instead of 75 ms, a round 3.0 to 3.6 instead of
4.9 s.

Rounding errors grow with the number of points: in float32 the relative error is 3e-6 (5x5) or 1e-6
(3x3) where a plain convolution's is 5e-7 or 3e-7, in float64 less than 1e-14 (all rms).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from remanence.core.memory_format import to_channels_last
from remanence.kernels.compile import call_compiled

aten = torch.ops.aten

TILE = 4  # outputs a side that are computed together
# points by the filter's side; infinity is one more point
POINTS = {3: (0.0, 1.0, -1.0, 0.5, -2.0), 5: (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5)}
SUM_COST = 40  # products that take as long as the sums of one channel at one point of a tile
# the smallest predicted speedup for which it is used: predictions are off by a tenth
MIN_SPEEDUP = 1.15


class WinogradMatrices(NamedTuple):
    """The linear maps of one side: from an image's pixels to values at the points [points, points],
    from a filter [points, filter], and from the points to outputs [TILE, points].
    """

    image: np.ndarray
    filter: np.ndarray
    back: np.ndarray


@cache
def winograd_matrices(side: int) -> WinogradMatrices:
    """The matrices for filters of this side. The inverse of the points' powers maps the values of
    a product of polynomials to its coefficients; a convolution is the transpose of such a product.
    """
    points = POINTS[side]

    def powers(count: int) -> np.ndarray:
        at_infinity = [[0.0] * (count - 1) + [1.0]]
        return np.array(
            [[point**power for power in range(count)] for point in points] + at_infinity
        )

    inverse = np.linalg.inv(powers(len(points) + 1)).T
    inverse[np.abs(inverse) < 1e-12] = 0.0
    # scaled in the filter instead, so that an image's values keep their magnitude
    scale = np.abs(inverse).max(axis=1, keepdims=True)
    return WinogradMatrices(inverse / scale, powers(side) * scale, powers(TILE).T)


def convolutions() -> dict[Any, Callable[..., Any]]:
    """Replacements of ATen operations, for `make_fx`."""
    return {aten.convolution.default: convolve, aten.convolution_backward.default: differentiate}


def convolve(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    """Images x [B, C, H, W] and filters w [O, C, r, r]. -> [B, O, h, w]"""
    if not use_winograd(x, w, stride, padding, dilation, transposed, groups):
        return NotImplemented
    y = convolve_tiles(to_channels_last(x), to_channels_last(w), padding[0])
    return y if bias is None else y + bias.reshape(-1, 1, 1)


def differentiate(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: Sequence[bool],
) -> Any:
    """From the gradient dy [B, O, h, w] of the result to those of images, filters and bias; None
    for those that are not `wanted`.
    """
    if not use_winograd(x, w, stride, padding, dilation, transposed, groups):
        return NotImplemented
    dy, x, side = to_channels_last(dy), to_channels_last(x), w.shape[2]
    dx = (
        convolve_tiles(dy, to_channels_last(w.flip(2, 3).transpose(0, 1)), side - 1 - padding[0])
        if wanted[0]
        else None
    )
    dw = differentiate_tiles(dy, x, side, padding[0]) if wanted[1] else None
    return dx, dw, dy.sum(dim=(0, 2, 3)) if wanted[2] else None


def use_winograd(
    x: Tensor, w: Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool, groups: int
) -> bool:
    """Whether this is a plain convolution on a CPU that becomes faster."""
    side = w.shape[-1]
    plain = (
        groups == 1
        and not transposed
        and set(stride) == set(dilation) == {1}
        and len(set(padding)) == 1
        and padding[0] < side
    )
    if (
        not plain
        or x.device.type != "cpu"
        or x.dim() != 4
        or w.shape[2] != side
        or side not in POINTS
    ):
        return False
    if (
        w.dtype not in (torch.float32, torch.float64)
        or x.dtype != w.dtype
        or min(x.shape[2:]) + 2 * padding[0] < side
    ):
        return False
    direct, by_tiles = 1, 1
    for size in x.shape[2:]:
        outputs = range(-padding[0], size + padding[0] - side + 1)  # first pixel under the filter
        direct *= sum(
            min(begin + side, size) - max(begin, 0) for begin in outputs
        )  # the library skips the zeros around the image
        by_tiles *= _tiles(len(outputs)) * (TILE + side - 1)
    products, sums = w.shape[0] * w.shape[1], SUM_COST * (w.shape[0] + w.shape[1])
    return direct * products > MIN_SPEEDUP * by_tiles * (products + sums)


@torch.library.custom_op("remanence::convolve_tiles", mutates_args=())
def convolve_tiles(x: Tensor, w: Tensor, zeros: int) -> Tensor:
    """The convolution with `zeros` rows and columns around the images, as one operation. Its sums
    are compiled once for all layers of a size: as part of a deep network's step they would take
    minutes to compile.
    """
    return call_compiled(_convolve, x, w, zeros=zeros)


@convolve_tiles.register_fake
def _(x: Tensor, w: Tensor, zeros: int) -> Tensor:
    height, width = (size + 2 * zeros - w.shape[2] + 1 for size in x.shape[2:])
    return to_channels_last(x.new_empty(len(x), w.shape[0], height, width))


@torch.library.custom_op("remanence::differentiate_tiles", mutates_args=())
def differentiate_tiles(dy: Tensor, x: Tensor, side: int, zeros: int) -> Tensor:
    """The gradient of the filters, as one operation."""
    return call_compiled(_differentiate_filters, dy, x, side=side, zeros=zeros)


@differentiate_tiles.register_fake
def _(dy: Tensor, x: Tensor, side: int, zeros: int) -> Tensor:
    return to_channels_last(x.new_empty(dy.shape[1], x.shape[1], side, side))


def _convolve(x: Tensor, w: Tensor, zeros: int) -> Tensor:
    side, height, width = w.shape[2], *(size + 2 * zeros - w.shape[2] + 1 for size in x.shape[2:])
    images, rows, columns = len(x), _tiles(height), _tiles(width)
    # [points points, B rows columns, O]
    products = torch.bmm(_transform_input(x, side, zeros), _transform_filter(w))
    back, points = winograd_matrices(side).back, TILE + side - 1
    by_column = torch.stack(
        _sum(back, products.view(points, points, images, rows, columns, -1).unbind())
    )  # [TILE, points, B, rows, columns, O]
    # [TILE (rows), TILE (columns), B, rows, columns, O]
    tiles = torch.stack(_sum(back, by_column.unbind(dim=1)))
    image = tiles.permute(2, 3, 0, 4, 1, 5).reshape(images, rows * TILE, columns * TILE, -1)
    return to_channels_last(image[:, :height, :width].permute(0, 3, 1, 2))


def _differentiate_filters(dy: Tensor, x: Tensor, side: int, zeros: int) -> Tensor:
    """-> [O, C, r, r]"""
    sums, (_, outputs, height, width) = winograd_matrices(side), dy.shape
    rows, columns = _tiles(height), _tiles(width)
    padded = pad(dy.permute(0, 2, 3, 1), (0, 0, 0, columns * TILE - width, 0, rows * TILE - height))
    tiles = padded.view(len(dy), rows, TILE, columns, TILE, outputs)
    # [points, B, rows, columns, TILE, O]
    by_row = torch.stack(_sum(sums.back.T, tiles.unbind(dim=2)))
    # columns first, as everywhere
    both = torch.stack(_sum(sums.back.T, by_row.unbind(dim=4))).reshape(
        (TILE + side - 1) ** 2, -1, outputs
    )
    products = torch.bmm(
        _transform_input(x, side, zeros).transpose(1, 2), both
    )  # [points points, C, O]
    filters = _on_both_sides(sums.filter.T, products)
    return to_channels_last(filters.view(side, side, -1, outputs).permute(3, 2, 1, 0))


def _transform_input(x: Tensor, side: int, zeros: int) -> Tensor:
    """[B, C, H, W] -> the values of all tiles at the points, [points (columns) points (rows),
    B rows columns, C]
    """
    sums, (images, channels, height, width) = winograd_matrices(side).image, x.shape
    rows, columns = (_tiles(size + 2 * zeros - side + 1) for size in (height, width))
    bottom, right = (
        tiles * TILE + side - 1 - size - zeros for tiles, size in ((rows, height), (columns, width))
    )
    padded = pad(x.permute(0, 2, 3, 1), (0, 0, zeros, right, zeros, bottom))
    last = (rows - 1) * TILE + 1, (columns - 1) * TILE + 1
    # [points, B, rows, width, C]
    by_row = torch.stack(
        _sum(sums, [padded[:, place : place + last[0] : TILE] for place in range(len(sums))])
    )
    both = torch.stack(
        _sum(sums, [by_row[:, :, :, place : place + last[1] : TILE] for place in range(len(sums))])
    )
    return both.view(len(sums) ** 2, images * rows * columns, channels)


def _transform_filter(w: Tensor) -> Tensor:
    """[O, C, r, r] -> their values at the points, [points (columns) points (rows), C, O]"""
    outputs, channels, side, _ = w.shape
    filters = w.permute(3, 2, 1, 0).reshape(side * side, channels * outputs)
    return _on_both_sides(winograd_matrices(side).filter, filters).view(-1, channels, outputs)


def _on_both_sides(matrix: np.ndarray, values: Tensor) -> Tensor:
    """One side's map applied to columns and rows: values [n n, ...] -> [m m, ...]"""
    return torch.tensor(np.kron(matrix, matrix), dtype=values.dtype) @ values.reshape(
        matrix.shape[1] ** 2, -1
    )


def _sum(matrix: np.ndarray, parts: Sequence[Tensor]) -> list[Tensor]:
    """matrix @ parts, term by term: most of its numbers are 0 or 1."""
    return [_weighted_sum(row.tolist(), parts) for row in matrix]


def _weighted_sum(weights: list[float], parts: Sequence[Tensor]) -> Tensor:
    terms = [
        part if weight == 1.0 else part * weight
        for weight, part in zip(weights, parts, strict=True)
        if weight
    ]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _tiles(size: int) -> int:
    return -(-size // TILE)
