"""Speed, measured side by side: `remanence bench`."""

from __future__ import annotations

from remanence.bench.jobs import JOBS
from remanence.bench.runner import run_jobs
from remanence.bench.table import render

__all__ = ["JOBS", "render", "run_jobs"]
