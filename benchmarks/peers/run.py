"""The same jobs on other simulators: data, split, batches and first weights are equal, and so is
the model after a round, or there is no number.

    python benchmarks/peers/run.py [--jobs B B2 A] [--peers pfl pfl-processes flwr fedlab fedjax
    fluke] [--repeat 5] [--quick] [--json]

Each simulator runs in a virtual environment of its own, which the first call makes (some minutes
and 6 GB; `--envs` says where). Run it with the project's own Python, on an idle machine. Ctrl-C
ends it with a table of what was measured until then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contenders import OURS, PEERS, PLAIN, Contender, choose_peers
from environments import CannotInstall, make_environment
from job_folder import GENTLY, QUICK, write_job
from peer_table import describe_machine, render, summarize
from turns import Score, play_job

from remanence.core.errors import InputError, RemanenceError, unknown
from remanence.core.signals import exit_code_of, sigterm_as_interrupt

TREE = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    try:
        results, machine, stop = run(
            options.jobs,
            options.peers,
            options.repeat,
            options.envs,
            quick=options.quick,
            python=options.python,
            say=say_aside,
        )
    except RemanenceError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as asked:
        say_aside("stopped before anything was measured")
        return exit_code_of(asked)
    print(
        json.dumps([result | {"machine": machine} for result in results], indent=1)
        if options.json
        else render(results, machine)
    )
    return 0 if stop is None else exit_code_of(stop)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "remanence-peers"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--jobs",
        nargs="+",
        default=list(GENTLY),
        metavar="JOB",
        help=f"of {', '.join(GENTLY)}; all by default",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        default=[],
        metavar="PEER",
        help=f"of {', '.join(PEERS)}; all by default",
    )
    parser.add_argument(
        "--repeat", type=int, default=5, help="rounds that count, after one to warm up"
    )
    parser.add_argument("--quick", action="store_true", help="one local epoch in every job")
    parser.add_argument("--json", action="store_true", help="objects instead of a table")
    parser.add_argument(
        "--envs",
        type=Path,
        default=cache,
        help="where the environments lie, outside the tree (%(default)s)",
    )
    parser.add_argument(
        "--python", default=sys.executable, help="which Python new environments are made with"
    )
    return parser.parse_args(arguments)


def say_aside(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(
    jobs: Sequence[str],
    peers: Sequence[str],
    repeat: int,
    envs: Path,
    *,
    quick: bool,
    python: str,
    say: Callable[[str], None],
) -> tuple[list[dict[str, Any]], str, KeyboardInterrupt | None]:
    """-> one object a job and contender, the machine in words, and what stopped it before its
    end, if anything did
    """
    chosen = choose_peers(peers)
    check(jobs, repeat, envs)
    machine = describe_machine(repeat)
    ready, missing = make_environments(chosen, envs.resolve(), python, say)
    contenders = [(OURS, sys.executable), (PLAIN, sys.executable), *ready]
    results, stop = [], None
    with tempfile.TemporaryDirectory(prefix="remanence-peers-") as folder:
        for job in dict.fromkeys(jobs):
            settings = write_job(job, Path(folder) / job, GENTLY[job] | (QUICK if quick else {}))
            sizes = settings["sizes"]
            say(
                f"{job}: {len(sizes)} of {settings['clients']} clients of {min(sizes)} to"
                f" {max(sizes)} samples, local epochs: {settings['epochs']}"
            )
            scores, stop = play_job(contenders, Path(folder) / job, repeat, say)
            results += summarize(job, [*scores, *missing])
            if stop is not None:
                say(f"stopped in {job}: what was measured until then follows")
                break
    return results, machine, stop


def check(jobs: Sequence[str], repeat: int, envs: Path) -> None:
    """What the command line can get wrong, before anything is installed."""
    for job in jobs:
        if job not in GENTLY:
            raise unknown("job", job, GENTLY)
    if repeat < 1:
        raise InputError(f"--repeat {repeat} measures nothing: give at least 1")
    if envs.resolve().is_relative_to(TREE):
        raise InputError(
            f"--envs {envs} lies in the source tree, where gigabytes of packages do not"
            " belong: give a folder outside it"
        )


def make_environments(
    chosen: Sequence[Contender], envs: Path, python: str, say: Callable[[str], None]
) -> tuple[list[tuple[Contender, str]], list[Score]]:
    """-> who can run, with its interpreter, and who cannot, with the reason"""
    ready: list[tuple[Contender, str]] = []
    missing: list[Score] = []
    reasons: dict[str, str] = {}
    for peer in chosen:
        try:
            if peer.environment in reasons:
                raise CannotInstall(reasons[peer.environment])
            say(f"environment of {peer.name}: {envs / peer.environment}")
            ready.append((peer, str(make_environment(peer.environment, envs, python))))
        except CannotInstall as failure:
            reasons[peer.environment] = str(failure)
            missing.append(Score(peer, problem=str(failure)))
    return ready, missing


if __name__ == "__main__":
    with sigterm_as_interrupt():  # so that the contenders are stopped and their files removed
        sys.exit(main())
