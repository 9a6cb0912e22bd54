"""The benchmark behind `remanence bench`: the engine, a plain PyTorch loop and a lower bound, timed
in turns in one process.

    jobs          the jobs: experiments of the sizes in the papers, on synthetic data
    baselines     the plain loop over clients and the lower bound, with torch.nn and torch.optim
    plain_engine  an engine that trains and evaluates one client at a time, for whole rounds
    runner        runs the jobs, checks their results in float64 and times them
    machine       peak memory, and the machine that a result was measured with
    table         prints the times

Begin with `runner.run_jobs`. `benchmarks/README.md` has the results. Only the command line imports
this package.
"""

from __future__ import annotations

from remanence.bench.jobs import JOBS
from remanence.bench.runner import run_jobs
from remanence.bench.table import render

__all__ = ["JOBS", "render", "run_jobs"]
