"""Worker processes compile although the process they were forked from has compiled before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, torch
from remanence.engines.table import make_engine
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing.toy_task import small_experiment

experiment = small_experiment("fedavg", {"data.partition": "iid"})
job = make_work(experiment, first_state(experiment), 1)
for engine in ("vectorized", "processes"):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(sys.argv[1], engine)  # nothing of the first may serve the second
    torch._dynamo.reset()
    print(sum(len(reply.client) for reply in make_engine(engine, experiment.task, 16, execution="compiled").train(job)), flush=True)
"""


@pytest.mark.slow
def test_compiling_in_a_fork(tmp_path: Path) -> None:
    """The compiler's threads do not survive a fork; a worker that waits for them waits for ever."""
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert answer.returncode == 0, answer.stderr
    counts = answer.stdout.split()
    assert len(counts) == 2
    assert counts[0] == counts[1] != "0"
