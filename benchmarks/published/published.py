"""Jobs that others published, on this machine: Remanence beside a plain PyTorch loop and beside the
package whose job it is.

    python benchmarks/published/published.py [blazefl-cnn blazefl-resnet18 pfl-cnn]
        [--rounds N] [--minutes 10] [--device cuda] [--contenders remanence plain]

The contenders take turns, a round each. One whose rounds took `--minutes` is stopped, and its
rounds until then count. Every round is printed as it comes. With `--out FILE` the results are appended to
a file, and a second call goes on with what is missing there. The packages run in environments of
their own, which the first call makes; where that fails, the table says so. Run it on an idle
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))

import torch
from environments import CannotInstall
from published_contenders import (
    CONTENDERS,
    Course,
    Player,
    choose_contenders,
    describe_progress,
    find_interpreter,
    play_rounds,
)
from published_jobs import JOBS, settings_of, write_task
from published_table import render

from remanence.bench.machine import processor_name
from remanence.core.errors import InputError, RemanenceError, unknown
from remanence.core.signals import exit_code_of, sigterm_as_interrupt

TREE = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    try:
        check(options)
        return run(options)
    except RemanenceError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "remanence-peers"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(JOBS)}; all by default")
    add("--contenders", nargs="+", default=[], help=f"of {', '.join(CONTENDERS)}")
    add("--rounds", type=int, help="instead of the published number")
    add("--minutes", type=float, default=10, help="for each contender (%(default)s)")
    add("--target", type=float, help="test accuracy to which the time is given")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--precision", choices=("fp32", "tf32"), help="default: tf32 on a GPU")
    add("--data", default="cifar10", help="or a synthetic dataset of its shape")
    add("--data-dir", default="", help="folder of the dataset; default: $REMANENCE_DATA")
    add("--out", type=Path, help="file to which results are appended as lines of JSON")
    add("--envs", type=Path, default=cache, help="where the environments are (%(default)s)")
    add("--python", default=sys.executable, help="which Python makes new environments")
    options = parser.parse_args(arguments)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.precision = options.precision or ("tf32" if options.device == "cuda" else "fp32")
    options.jobs = list(dict.fromkeys(options.jobs)) or list(JOBS)
    return options


def check(options: argparse.Namespace) -> None:
    """What the command line can get wrong, before anything is installed or read."""
    for job in options.jobs:
        if job not in JOBS:
            raise unknown("job", job, JOBS)
    choose_contenders(options.contenders, "")
    if options.rounds is not None and options.rounds < 1:
        raise InputError(f"--rounds {options.rounds} trains nothing: give at least 1")
    if options.minutes <= 0:
        raise InputError(f"--minutes {options.minutes:g} is no time: give more than 0")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda needs a GPU that torch can use: give --device cpu")
    if options.envs.resolve().is_relative_to(TREE):
        raise InputError(f"--envs {options.envs} lies in the source tree: give a folder outside it")


def run(options: argparse.Namespace) -> int:
    done = read_results(options.out)
    stop: KeyboardInterrupt | None = None
    results: list[dict[str, Any]] = []
    for name in options.jobs:
        try:
            with sigterm_as_interrupt():
                run_job(name, options, done, results)
        except KeyboardInterrupt as asked:
            say("stopped: what was measured until then follows")
            stop = asked
        ours = [result for result in results if result["job"] == name]
        print(render(JOBS[name], ours, options.target or JOBS[name].target), flush=True)
        if stop is not None:
            break
    return 0 if stop is None else exit_code_of(stop)


def run_job(
    name: str,
    options: argparse.Namespace,
    done: list[dict[str, Any]],
    results: list[dict[str, Any]],
) -> None:
    """Append a result for each contender, also when it is interrupted."""
    job = JOBS[name]
    settings = settings_of(
        job, options.rounds, options.data, options.data_dir, options.device, options.precision
    )
    say(f"{name}: {job.about}")
    courses: dict[str, Course] = {}
    ended = False
    try:
        with (
            tempfile.TemporaryDirectory(prefix="remanence-published-") as folder,
            ExitStack() as stack,
        ):
            task, players = Path(folder) / "task", []
            for contender in choose_contenders(options.contenders, job.peer):
                kind = describe_run(name, contender.name, settings, options.minutes)
                if kept := [result for result in done if result.items() >= kind.items()]:
                    say(f"  {contender.name}: is in {options.out}")
                    results.append(kept[-1])
                    continue
                course = courses[contender.name] = Course(contender.name)
                try:
                    python = find_interpreter(contender, options.envs.resolve(), options.python)
                except CannotInstall as failure:
                    course.problem = str(failure)
                    continue
                if not players:
                    write_task(job, settings, task)
                players.append(Player(contender, python, task, course))
                stack.callback(players[-1].stop)
                players[-1].prepare()  # alone: an engine is chosen by trials
                say(f"  {contender.name}: {describe_progress(course)}")
            play_rounds(players, settings["rounds"], options.minutes, say)
            ended = True
    finally:
        for contender, course in courses.items():
            result = describe_run(name, contender, settings, options.minutes) | {
                "published_rounds": job.settings["rounds"],
                **course.to_json(),
            }
            if course.seconds or course.problem:
                results.append(result)
            if options.out and ended and not course.problem:
                with options.out.open("a") as file:
                    print(json.dumps(result), file=file)


def describe_run(
    job: str, contender: str, settings: dict[str, Any], minutes: float
) -> dict[str, Any]:
    """What a result must have in common with another one that takes its place."""
    cuda = settings["device"] == "cuda"
    return {
        "job": job,
        "contender": contender,
        "data": settings["data.name"],
        "rounds": settings["rounds"],
        "minutes": minutes,
        "device_name": torch.cuda.get_device_name() if cuda else processor_name(),
        "cores": os.cpu_count(),
        "precision": settings["precision"],
    }


def read_results(file: Path | None) -> list[dict[str, Any]]:
    if file is None or not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
