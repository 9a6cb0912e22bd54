"""Single convolutions on a CPU by `kernels/winograd.py` and by torch's library: milliseconds a layer
and rounding errors, on one thread.

    python benchmarks/winograd.py [--filters 3 5] [--channels 16-16 32-64 ...] [--sizes 8 16 ...]
    [--batch-size 50] [--at-once 1] [--turns 9]

The two take turns, and the median counts. `--at-once` starts several processes that do the same, as
workers do. The last column is whether compiled steps use it in this layer; it must never be slower.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from remanence.core.memory_format import to_channels_last
from remanence.engines.memory import disable_malloc_trim
from remanence.kernels import winograd
from remanence.kernels.torch_internals import make_fx

aten = torch.ops.aten


class Layer(NamedTuple):
    side: int  # of a filter
    inputs: int
    outputs: int
    size: int  # of an image, which stays the same
    batch: int

    @property
    def settings(self) -> tuple[Any, ...]:
        """As torch wants them: stride, padding, dilation, transposed, output padding, groups."""
        return [1, 1], [self.side // 2] * 2, [1, 1], False, [0, 0], 1

    def see(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        return (aten.convolution(x, w, None, *self.settings),)

    def train(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        dx, dw, _ = aten.convolution_backward(dy, x, w, None, *self.settings, [True, True, False])
        return *self.see(x, w, dy), dx, dw

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """Images, filters, and a gradient of what comes out, as they lie in compiled steps."""
        x, dy = (
            torch.randn(self.batch, channels, self.size, self.size)
            for channels in (self.inputs, self.outputs)
        )
        w = (
            torch.randn(self.outputs, self.inputs, self.side, self.side)
            / (self.inputs * self.side**2) ** 0.5
        )
        return to_channels_last(x), to_channels_last(w), to_channels_last(dy)

    @property
    def is_taken(self) -> bool:
        x, w, _ = self.draw()
        stride, padding, dilation, transposed, _, groups = self.settings
        return winograd.use_winograd(x, w, stride, padding, dilation, transposed, groups)


def compile_with_tiles(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    """As in a compiled step, whether the layer suits or not."""
    with mock.patch.object(winograd, "use_winograd", return_value=True):
        # it does not take methods
        graph = make_fx(lambda x, w, dy: function(x, w, dy), winograd.convolutions())(*tensors)
    return torch.compile(graph, dynamic=False)


def compare(layer: Layer, turns: int, at_once: int) -> str:
    tensors = layer.draw()
    contenders: dict[str, Callable[..., Any]] = {}
    begin = time.perf_counter()
    for name, function in (("train", layer.train), ("see", layer.see)):
        contenders |= {
            f"{name} directly": function,
            f"{name} by tiles": compile_with_tiles(function, tensors),
        }
        contenders[f"{name} by tiles"](*tensors)
    compiling = time.perf_counter() - begin
    exact = layer.train(*(tensor.double() for tensor in tensors))
    errors = [
        _error(found, right)
        for found, right in zip(contenders["train by tiles"](*tensors), exact, strict=True)
    ]
    usual = [
        _error(found, right) for found, right in zip(layer.train(*tensors), exact, strict=True)
    ]
    times = measure(contenders, tensors, turns, at_once)
    parts = [
        (
            f"{layer.side}x{layer.side} {layer.inputs:3d} to {layer.outputs:3d}"
            f" {layer.size}x{layer.size}"
        ).ljust(24)
    ]
    for name in ("train", "see"):
        direct, tiles = times[f"{name} directly"], times[f"{name} by tiles"]
        parts.append(f"{direct:7.2f} {tiles:7.2f} {direct / tiles:5.2f}x")
    parts.append(
        f"{max(errors):.0e} {max(usual):.0e}  {compiling:3.0f} s "
        f" {'taken' if layer.is_taken else '-'}"
    )
    return "  ".join(parts)


def measure(
    contenders: dict[str, Callable[..., Any]], tensors: Sequence[Tensor], turns: int, at_once: int
) -> dict[str, float]:
    """Milliseconds, the median of all turns of all processes."""
    if at_once == 1:
        return {
            name: statistics.median(times)
            for name, times in take_turns(contenders, tensors, turns).items()
        }
    context = multiprocessing.get_context("fork")
    answers, together = context.SimpleQueue(), context.Barrier(at_once)

    def work() -> None:
        disable_malloc_trim()
        answers.put(take_turns(contenders, tensors, turns, together.wait))

    workers = [context.Process(target=work) for _ in range(at_once)]
    for worker in workers:
        worker.start()
    told = [answers.get() for _ in workers]
    for worker in workers:
        worker.join()
    return {
        name: statistics.median(itertools.chain.from_iterable(each[name] for each in told))
        for name in contenders
    }


def take_turns(
    contenders: dict[str, Callable[..., Any]],
    tensors: Sequence[Tensor],
    turns: int,
    wait: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.no_grad():
        for _, (name, function) in itertools.product(range(turns + 1), contenders.items()):
            wait()
            begin = time.perf_counter()
            function(*tensors)
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: every[1:] for name, every in times.items()}  # the first one warmed up


def _error(found: Tensor, right: Tensor) -> float:
    return float((found - right).std() / right.std())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--filters", nargs="+", type=int, default=[3, 5])
    parser.add_argument(
        "--channels", nargs="+", default=["16-16", "16-32", "32-32", "32-64", "64-64", "128-128"]
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=[4, 8, 16, 32])
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_malloc_trim()
    print(
        "layer                     forward and backward   forward alone          error  usual "
        " compiling"
    )
    for side, channels, size in itertools.product(options.filters, options.channels, options.sizes):
        inputs, outputs = map(int, channels.split("-"))
        torch.compiler.reset()
        print(
            compare(
                Layer(side, inputs, outputs, size, options.batch), options.turns, options.at_once
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
