"""Graphs are compiled once for each layout, and functions once for each set of shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from remanence.kernels.compile import call_compiled, compile_graph


def scale(x: Tensor, y: Tensor, times: int) -> Tensor:
    return x * y * times


@contextmanager
def counting_compilations() -> Iterator[list[Any]]:
    """Yields the list of calls of the compiler."""
    with mock.patch.object(torch._inductor, "compile", wraps=torch._inductor.compile) as compile:
        yield compile.call_args_list


@pytest.mark.filterwarnings("ignore")
def test_a_function_is_compiled_once_for_each_shape_and_dtype() -> None:
    x, y = torch.arange(6.0).reshape(2, 3), torch.full((2, 3), 2.0)
    with counting_compilations() as calls:
        assert torch.equal(call_compiled(scale, x, y, times=3), 6 * x)
        assert torch.equal(call_compiled(scale, x + 1, y, times=3), 6 * (x + 1))
        assert len(calls) == 1
        assert torch.equal(
            call_compiled(scale, x, y, times=2), 4 * x
        )  # a number is a constant of the graph
        assert torch.equal(call_compiled(scale, x.double(), y.double(), times=3), 6 * x.double())
        turned = x.reshape(3, 2).t()
        assert torch.equal(call_compiled(scale, turned, y, times=3), 6 * turned)
        assert len(calls) == 4


@pytest.mark.filterwarnings("ignore")
def test_a_graph_is_compiled_once_for_each_layout() -> None:
    """A square matrix and its transpose have one shape but other strides. One input is written
    to.
    """

    def add(total: Tensor, x: Tensor) -> list[Tensor]:
        total.add_(2 * x)
        return [x + 1]

    x = torch.arange(9.0).reshape(3, 3)
    run = compile_graph(make_fx(add)(torch.zeros(3, 3), x))
    total = torch.zeros(3, 3)
    with counting_compilations() as calls:
        for times, now in enumerate(
            (x, x.clone(), x.t(), x.t().clone(memory_format=torch.preserve_format), x), start=1
        ):
            (more,) = run(total, now)
            assert torch.equal(more, now + 1)
            assert len(calls) == (1 if times < 3 else 2)
    assert torch.equal(total, 6 * x + 4 * x.t())


COMPILES = """
import torch
from torch._dynamo.utils import counters
from remanence.kernels.compile import call_compiled, compile_graph
from remanence.kernels.torch_internals import make_fx
from remanence.kernels.winograd import convolve_tiles

def step(x, w):
    return [convolve_tiles(x, w, 1).relu() + 1]  # an operation of our own, compiled by itself

x, w = torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3)
(y,) = compile_graph(make_fx(step)(x, w))(x, w)
found = counters["inductor"]
print(y.sum().item(), found["fxgraph_cache_hit"], found["fxgraph_cache_miss"])
"""


def test_another_process_finds_what_was_compiled(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def compile() -> list[str]:
        process = subprocess.run(
            [sys.executable, "-c", COMPILES],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return process.stdout.split()

    first, second = compile(), compile()
    assert first[1:] == ["0", "2"]
    assert second == [first[0], "2", "0"]
