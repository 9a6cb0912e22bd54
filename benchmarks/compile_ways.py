"""Compiles a network's local step as one graph and in regions: seconds to start, with an empty and
with a filled cache and for each further method, and milliseconds a step.

    python benchmarks/compile_ways.py resnet18 regions [--device cuda] [--precision bf16]
    [--methods "fedavg;fedavg+wsm"]

The second argument is `whole` or `regions`. Set TORCHINDUCTOR_CACHE_DIR to an empty folder for a
start without a cache. `notes.md` has what was measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from choices import NETWORKS
from regions import compile_regions
from torch import Tensor
from torch.fx import GraphModule

from remanence.config import parse_experiment
from remanence.engines.client_plan import expected_steps
from remanence.engines.table import make_engine
from remanence.experiment.build import build
from remanence.kernels import trace
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state


def in_regions(graph: GraphModule) -> Callable[..., Any]:
    """What `kernels.compile.compile_graph` does, in regions."""
    by_layout = dict[Any, Callable[..., Any]]()

    def call(*tensors: Tensor) -> Any:
        layout = tuple(tensor.stride() for tensor in tensors)
        if layout not in by_layout:
            by_layout[layout] = compile_regions(graph, tensors, None)
        return by_layout[layout](*tensors)

    return call


def measure(network: str, method: str, options: argparse.Namespace) -> str:
    settings = {"device": options.device, "precision": options.precision, "method": method}
    experiment = build(parse_experiment({}, {**NETWORKS[network], **settings}))
    work = make_work(experiment, first_state(experiment), 1)
    engine = make_engine("vectorized", experiment.task, 0, 0, "compiled")
    seconds, loss = [], 0.0
    for _ in range(3):
        begin = time.perf_counter()
        loss = sum(float(reply.loss.sum()) for reply in engine.train(work))
        seconds.append(time.perf_counter() - begin)
    step = min(seconds[1:]) / int(expected_steps(experiment.task, work).sum())
    return (
        f"{network}, {options.way}, {method}: first round {seconds[0]:.1f} s, then"
        f" {1e3 * step:.3f} ms a step; loss {loss:.6f} {engine.degraded_reason}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("network", choices=sorted(NETWORKS))
    parser.add_argument("way", choices=("whole", "regions"))
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--precision", default="bf16" if cuda else "fp32")
    parser.add_argument("--methods", default="fedavg;fedavg+wsm")
    options = parser.parse_args(arguments)
    with mock.patch.object(
        trace, "compile_graph", in_regions if options.way == "regions" else trace.compile_graph
    ):
        for method in options.methods.split(";"):
            print(measure(options.network, method, options), flush=True)


if __name__ == "__main__":
    main()
