"""Compiles many graphs in several processes at once. Workers fill torch's cache on disk, from which
this process then loads the compiled graphs.

A worker is a command of its own: a process that uses CUDA cannot be forked, and `multiprocessing`
would run a user's script again to start one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule
from torch_parts import cache_misses, fake_tensors

from remanence.kernels.torch_internals import compile_inductor

MOST = 8  # workers
FEW = 24  # starting workers takes as long as compiling this many graphs
SIZE_BYTES = 8  # of the length that precedes every message to a worker


class GraphToCompile(NamedTuple):
    """A graph, and the layouts of its inputs: shape, stride, dtype and device of each."""

    graph: GraphModule
    layouts: Sequence[Any]

    @property
    def size(self) -> int:
        return len(self.graph.graph.nodes)


def compile_all(
    graphs: Sequence[GraphToCompile], options: dict[str, Any] | None
) -> list[Callable[..., Any]]:
    """Compile graphs: here, or in workers where torch's cache does not have them.

    Args:
        graphs: What to compile.
        options: Of the compiler. Workers are used without any.
    """
    smallest_first = sorted(range(len(graphs)), key=lambda number: graphs[number].size)
    count = min(MOST, len(os.sched_getaffinity(0)) // 2) if options is None else 0
    compiled, before = dict[int, Callable[..., Any]](), cache_misses()
    helped = dict[int, Future[None]]()
    with contextlib.ExitStack() as stack:
        for place, number in enumerate(smallest_first, 1):
            if number in helped and not helped[number].cancel():
                helped[number].exception()  # what a worker cannot do is done here
            graph, layouts = graphs[number]
            compiled[number] = compile_inductor(graph, fake_tensors(layouts), options)
            rest = smallest_first[place:]
            if not helped and len(rest) >= FEW and count > 1 and cache_misses() > before:
                submit = stack.enter_context(_start_workers(count))
                helped = {each: submit(_to_bytes(graphs[each])) for each in reversed(rest)}
    return [compiled[number] for number in range(len(graphs))]


def _to_bytes(item: GraphToCompile) -> bytes:
    return pickle.dumps((*item, _read_settings()))


def _read_settings() -> dict[str, Any]:
    """What torch's cache has in its keys of this process' settings."""
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.backends.cuda.matmul.fp32_precision,
    }


def _apply_settings(settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    torch.use_deterministic_algorithms(settings["deterministic"])
    torch.backends.cuda.matmul.fp32_precision = settings["precision"]


@contextlib.contextmanager
def _start_workers(count: int) -> Iterator[Callable[[bytes], Future[None]]]:
    """Worker processes, each with a thread that talks to it. -> a function that compiles a graph"""
    local, processes = threading.local(), list[subprocess.Popen[bytes]]()

    def start() -> None:
        local.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        processes.append(local.process)

    def compile(message: bytes) -> None:
        to, answers = local.process.stdin, local.process.stdout
        to.write(len(message).to_bytes(SIZE_BYTES, "big") + message)
        to.flush()
        if answers.read(1) != b"1":
            raise RuntimeError("a worker could not compile a graph")

    threads = ThreadPoolExecutor(count, initializer=start)
    try:
        yield lambda message: threads.submit(compile, message)
    finally:
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.kill()
            process.communicate()


def serve() -> None:
    """Compile what comes from standard input, until it ends."""
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the compiler prints is no answer
    while header := source.read(SIZE_BYTES):
        graph, layouts, settings = pickle.loads(source.read(int.from_bytes(header, "big")))
        _apply_settings(settings)
        try:
            compile_inductor(graph, fake_tensors(layouts), {"compile_threads": 1})
            answers.write(b"1")
        except Exception:  # the compiler may fail in any way
            answers.write(b"0")
        answers.flush()


if __name__ == "__main__":
    serve()
