"""Runs the cases of the GPU suite in a few processes, and prints a line for each.

    python -m gpu                     all cases, on the GPU
    python -m gpu --only captured     those whose name contains a text
    python -m gpu --device cpu        the logic of the cases, without a GPU

Every process runs one case after the other. A process in which a case failed is replaced, since an
error of the GPU stays in its process; one that ends or hangs fails its case and no other.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from gpu.cases import Case, synchronize

from remanence.core.process_state import preserve_process_state

LIMIT = 300.0  # seconds of a case, after which its process is ended
NO_GPU = (
    "the GPU suite needs a CUDA device, and torch finds none: run it on a machine with a GPU, or"
    " test the cases themselves with python -m gpu --device cpu"
)
TESTS = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """-> 0: every case passed; 1: one failed; 2: nothing was run"""
    options = parse(arguments)
    if options.worker:
        return work(load(options.cases), options.device)
    if options.device != "cpu" and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    cases = [case for case in load(options.cases).values() if options.only in case.name]
    if not cases:
        print(f"no case has {options.only!r} in its name: see --list", file=sys.stderr)
        return 2
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    return run(cases, options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gpu", description="The GPU suite.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to test the cases alone")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it")
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    parser.add_argument("--jobs", type=int, default=0, help="processes; default: by the cores")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds a case may take")
    parser.add_argument("--cases", default="gpu.cases", help="the module that has all_cases()")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def load(module: str) -> dict[str, Case]:
    """All cases of a module by name, in its order."""
    return {case.name: case for case in importlib.import_module(module).all_cases()}


def run(cases: Sequence[Case], options: argparse.Namespace) -> int:
    """Run the cases, the first ones first, and print the summary. -> the exit status"""
    begin, waiting, lock = time.monotonic(), list(cases), threading.Lock()
    jobs = min(options.jobs or default_jobs(), len(cases))
    answers: dict[str, dict[str, Any]] = {}

    def serve() -> None:
        with contextlib.ExitStack() as stack:
            worker: Worker | None = None
            while True:
                with lock:
                    if not waiting:
                        return
                    case = waiting.pop(0)
                if worker is None or case.fresh:
                    stack.close()
                    worker = stack.enter_context(start_worker(options, jobs))
                answer = worker.run(case)
                with lock:
                    answers[case.name] = answer
                    print(line_of(case, answer), flush=True)
                if "error" in answer or case.fresh:
                    worker = None

    with ThreadPoolExecutor(jobs) as pool:
        for served in [pool.submit(serve) for _ in range(jobs)]:
            served.result()
    return summarize(cases, answers, time.monotonic() - begin)


def default_jobs() -> int:
    """Two cores each: compiling takes cores, and small cases leave a GPU idle."""
    return max(1, min(8, (os.cpu_count() or 1) // 2))


def line_of(case: Case, answer: dict[str, Any]) -> str:
    seconds = f"{answer['seconds']:6.1f} s"
    if "error" in answer:
        return f"FAIL {seconds}           {case.name}: {answer['error']}"
    if "skipped" in answer:
        return f"skip {seconds}           {case.name}: {answer['skipped']}"
    return f"ok   {seconds}  {answer['difference']:7.1e}  {case.name}"


def summarize(cases: Sequence[Case], answers: dict[str, dict[str, Any]], seconds: float) -> int:
    """Print what failed, in full, and the last line. -> the exit status"""
    failed = [case.name for case in cases if "error" in answers[case.name]]
    skipped = sum("skipped" in answer for answer in answers.values())
    for name in failed:
        print(f"\n{name}\n{answers[name].get('trace', answers[name]['error'])}", flush=True)
    differences = [
        answers[case.name].get("difference", 0.0) for case in cases if case.dtype == "float64"
    ]
    print(
        f"\n{len(cases) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped in"
        f" {seconds:.0f} s; largest difference in float64"
        f" {max(differences, default=0.0):.1e}",
        flush=True,
    )
    return 1 if failed else 0


@contextlib.contextmanager
def start_worker(options: argparse.Namespace, jobs: int) -> Iterator[Worker]:
    """Launch a process for cases. It is no child of `multiprocessing`: in one of those one thread
    alone would compile the steps.
    """
    folders = [str(TESTS.parent / "src"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    usual = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": threads}
    if options.device == "cpu":
        usual["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    command = [sys.executable, "-m", "gpu", "--worker", "--device", options.device]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [*command, "--cases", options.cases],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**usual, **os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        ) as process,
    ):
        try:
            yield Worker(process, errors, options.limit)
        finally:
            process.kill()


class Worker:
    """A process that runs cases by name: names go in, one line of JSON comes out for each."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[str], limit: float):
        self.process, self.errors, self.limit = process, errors, limit
        self.ready = ""  # the line that `work` writes when it can begin

    def run(self, case: Case) -> dict[str, Any]:
        """What `work` answers for the case, or why it answers nothing."""
        self.ready = self.ready or stream(self.process.stdout).readline()
        begin, guard = time.monotonic(), threading.Timer(self.limit, self.process.kill)
        guard.start()
        try:
            line = self._ask(case.name)
        finally:
            guard.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        seconds, code = time.monotonic() - begin, self.process.wait()
        ended = f"its process ended with code {code}{self._last_error()}"
        hung = f"its process was ended after {self.limit:.0f} s"
        return {"seconds": seconds, "error": hung if seconds >= self.limit else ended}

    def _ask(self, name: str) -> str:
        try:
            stream(self.process.stdin).write(f"{name}\n")
            stream(self.process.stdin).flush()
        except BrokenPipeError:
            return ""
        return stream(self.process.stdout).readline()

    def _last_error(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return f": {lines[-1]}" if lines else ""


def stream(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def work(cases: dict[str, Case], device: str) -> int:
    """Run the cases that are named on standard input, and answer each with a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a case prints is no answer
    torch.set_num_threads(1)
    with preserve_process_state():
        pass  # what torch imports for it belongs to no case
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(run_case(cases[line.strip()], device)) + "\n")
        answers.flush()
    return 0


def run_case(case: Case, device: str) -> dict[str, Any]:
    """Run a case. -> its seconds; its difference, or why it failed or was left out"""
    if device == "cpu" and case.needs_gpu:
        return {"seconds": 0.0, "skipped": case.needs_gpu}
    begin = time.monotonic()
    answer: dict[str, Any]
    try:
        torch.manual_seed(0)
        with preserve_process_state():
            answer = {"difference": float(case.check(device))}
            synchronize(device)
    except Exception as error:
        text = str(error).strip() or "no message"
        answer = {
            "error": f"{type(error).__name__}: {text.splitlines()[0]}",
            "trace": traceback.format_exc(),
        }
    return {"seconds": time.monotonic() - begin, **answer}
