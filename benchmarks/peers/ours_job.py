"""Remanence itself, with the engine that `auto` takes for a long run; it makes data, split and
order of batches for itself, from the same settings.
"""

from __future__ import annotations

import torch
from driver import begin

from remanence.bench.jobs import JOBS, prepare
from remanence.bench.runner import start_engine, train_ours


def main() -> None:
    job, turns = begin()
    experiment, state, work = prepare(JOBS[job.name], "cpu", "fp32", job.changes)
    choice, engine = start_engine(experiment, work)
    turns.ready(
        "remanence-fl", "torch", note=f"engine {choice.reason}; {torch.get_num_threads()} threads"
    )
    try:
        while True:
            turns.wait()
            model = train_ours(experiment, state, work, engine)
            turns.done(lambda: {name: value.numpy() for name, value in model.params.items()})  # noqa: B023 called at once
    finally:
        engine.close()


if __name__ == "__main__":
    main()
