from __future__ import annotations

import torch
from torch import nn

from remanence.models import cnn


def test_published_count_on_mnist() -> None:
    """McMahan et al. state 1,663,370: 25*1*32+32 = 832; 25*32*64+64 = 51,264; 7*7*64*512+512 =
    1,606,144; 512*10+10 = 5,130.
    """
    assert sum(p.numel() for p in cnn((1, 28, 28), 10).parameters()) == 1_663_370


def test_count_on_cifar10() -> None:
    """25*3*32+32 = 2,432; 51,264 as above; 8*8*64*512+512 = 2,097,664; 5,130: together
    2,156,490.
    """
    assert sum(p.numel() for p in cnn((3, 32, 32), 10).parameters()) == 2_156_490


def test_same_function_written_out() -> None:
    torch.manual_seed(0)
    model = cnn((2, 9, 6), 3).double()
    w1, b1, w2, b2, w3, b3, w4, b4 = model.parameters()
    x = torch.randn(4, 2, 9, 6, dtype=torch.float64)
    h = nn.functional.max_pool2d(torch.conv2d(x, w1, b1, padding=2).clamp(min=0), 2)
    h = nn.functional.max_pool2d(torch.conv2d(h, w2, b2, padding=2).clamp(min=0), 2)
    h = (h.reshape(4, -1) @ w3.T + b3).clamp(min=0)
    torch.testing.assert_close(model(x), h @ w4.T + b4, rtol=1e-12, atol=1e-12)
