"""Parts of a step that are compiled once for all the places where they stand."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from remanence.engines.compiler import call_compiled


def scale(x: Tensor, y: Tensor, times: int) -> Tensor:
    return x * y * times


@pytest.mark.filterwarnings("ignore")
def test_once_a_form() -> None:
    calls: list[Any] = []
    compile = torch._inductor.compile

    def count(*arguments: Any) -> Any:
        calls.append(arguments)
        return compile(*arguments)

    x, y = torch.arange(6.0).reshape(2, 3), torch.full((2, 3), 2.0)
    with mock.patch.object(torch._inductor, "compile", count):
        assert torch.equal(call_compiled(scale, x, y, times=3), 6 * x)
        assert torch.equal(call_compiled(scale, x + 1, y, times=3), 6 * (x + 1))
        assert len(calls) == 1
        assert torch.equal(call_compiled(scale, x, y, times=2), 4 * x)  # a number is written down
        assert torch.equal(call_compiled(scale, x.double(), y.double(), times=3), 6 * x.double())
        turned = x.reshape(3, 2).t()
        assert torch.equal(call_compiled(scale, turned, y, times=3), 6 * turned)
        assert len(calls) == 4
