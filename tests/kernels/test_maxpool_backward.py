"""The gradient of max pooling in compiled steps equals torch's own."""

from __future__ import annotations

import pytest
import torch

from remanence.kernels import maxpool_backward

library = torch.ops.aten


@pytest.mark.parametrize("kernel", [(2, 2), (2, 3), (1, 2)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_it_equals_torchs_even_where_pixels_are_equal(
    kernel: tuple[int, int], layout: torch.memory_format
) -> None:
    x = (
        torch.randint(0, 3, (4, 5, 6, 12), generator=torch.Generator().manual_seed(0))
        .double()
        .contiguous(memory_format=layout)
    )
    y, indices = library.max_pool2d_with_indices(x, kernel)
    dy = torch.arange(y.numel(), dtype=x.dtype).reshape(y.shape)
    settings = (list(kernel), list(kernel), [0, 0], [1, 1], False, indices)
    assert torch.equal(
        maxpool_backward.max_pool2d_backward(dy, x, *settings),
        library.max_pool2d_with_indices_backward(dy, x, *settings),
    )


@pytest.mark.parametrize(
    ("side", "kernel", "stride", "padding"), [(7, 2, 2, 0), (6, 3, 2, 0), (6, 2, 2, 1)]
)
def test_windows_that_do_not_tile_the_image_are_left_to_torch(
    side: int, kernel: int, stride: int, padding: int
) -> None:
    x = torch.zeros(1, 1, side, side)
    y, indices = library.max_pool2d_with_indices(x, [kernel], [stride], [padding])
    assert (
        maxpool_backward.max_pool2d_backward(
            y, x, [kernel], [stride], [padding], [1], False, indices
        )
        is NotImplemented
    )
