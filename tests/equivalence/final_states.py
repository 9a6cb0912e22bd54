"""Run a fixed list of small jobs and save every tensor of their final states, one file a job.

    python tests/equivalence/final_states.py OUT [--only TEXT]

`compare_trees.py` runs this file from two versions of the source and compares what they saved. Each
version has its own copy of this file, written in its own vocabulary, so that the two may name the
same job, setting or tensor differently. The names of the jobs (`JOBS`) must stay the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import remanence as rem
from remanence.core import pytree
from remanence.engines.processes import ProcessEngine
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.methods import METHODS, PARTS
from remanence.results.checkpoint import CheckpointStore, fingerprint
from remanence.results.run import CHECKPOINTS, Comparison, Run
from remanence.testing.toy_task import (
    EQUAL,
    batch_norm_net,
    drifting_experiment,
    fast_config,
    run_rounds,
    small_experiment,
    state_tree,
)

Tensors = dict[str, torch.Tensor]

IMAGES = {"data.name": "synthetic(samples=80, classes=4, shape='1x8x8', test=0.25)", "model": "cnn"}
COLORS = {
    "data.name": "synthetic(samples=80, classes=4, shape='3x16x16', test=0.25)",
    "local.steps": 2,
}
TIMES = ("seconds",)  # metrics that are measured times and differ between two runs of one version
DIGITS: dict[str, Any] = {
    "data": "digits",
    "clients": 8,
    "sample": 4,
    "rounds": 3,
    "batch_size": 16,
    "quiet": True,
}
DIGITS_SET: dict[str, Any] = {
    "threads": 1,
    "checkpoint.seconds": 0,
    "record.local": True,
    "record.examples": True,
    "record.confusion": True,
}

SIX = {"clients.sample": 6}  # krum needs five replies
SPECIAL = {"trimmed_mean": "trimmed_mean(fraction=0.2)"}

SETTINGS: dict[str, dict[str, Any]] = {
    "adam": {"local.optimizer": "adam(lr=0.01)"},
    "adamw": {"local.optimizer": "adamw(lr=0.01)"},
    "nesterov": {"local.optimizer": "sgd(lr=0.05, momentum=0.5, nesterov=true, weight_decay=0.01)"},
    "cosine": {"local.schedule": "cosine", "rounds": 4},
    "steps": {"local.steps": 3, "local.epochs": 0},
    "drop_last": {"local.drop_last": True},
    "poisson": {"clients.sampling": "poisson"},
    "offline": {"clients.availability": "random(offline=0.4)"},
    "speeds": {"clients.speed": "lognormal(sigma=0.8)", "round.deadline": "quantile(share=0.5)"},
    "stale": {
        "clients.speed": "lognormal(sigma=0.8)",
        "round.deadline": "quantile(share=0.5)",
        "round.late": "use",
    },
    "over_selection": {"round.over_selection": 1.5, "clients.speed": "lognormal(sigma=0.8)"},
    "fp32": {"precision": "fp32"},
    "sign_flip": {"attack": "sign_flip(fraction=0.3)"},
    "label_flip": {"attack": "label_flip(fraction=0.3)"},
    "images": IMAGES,
    "winograd": COLORS | {"model": "cnn", "precision": "fp32"},
    "resnet": COLORS | EQUAL | {"model": "shallow_resnet"},
}


def engines() -> dict[str, Callable[[BuiltExperiment], Any]]:
    return {
        "sequential": lambda e: SequentialEngine(e.task),
        "vectorized": lambda e: VectorizedEngine(e.task, 3, "eager"),
    }


def list_jobs() -> dict[str, Callable[[], Tensors]]:
    """Name -> a function that runs the job and returns its tensors."""
    jobs: dict[str, Callable[[], Tensors]] = {}
    for engine, make in engines().items():
        for name in PARTS:
            jobs[f"part/{name}/{engine}"] = lambda name=name, make=make: play_small(
                small_experiment(SPECIAL.get(name, fast_config(name)), SIX), make
            )
        for name in METHODS:
            jobs[f"drift/{name}/{engine}"] = lambda name=name, make=make: play_small(
                drifting_experiment(fast_config(name), 3), make
            )
        for name, changes in SETTINGS.items():
            jobs[f"setting/{name}/{engine}"] = lambda changes=changes, make=make: play_small(
                small_experiment("fedavg", changes), make
            )
        for text in (
            "scaffold+wsm",
            "fedprox(mu=0.1)+tce+fedadam",
            "hast(peers=2)+wsm",
            "fedbabu",
            "fedbn",
            "dp+fedprox",
        ):
            changes = EQUAL if "+" in text and "fed" in text else {}
            jobs[f"sum/{text}/{engine}"] = lambda text=text, changes=changes, make=make: play_small(
                small_experiment(text, changes), make
            )
        for name in ("fedavg", "fedbn", "scaffold", "fednova", "random"):
            jobs[f"batch_norm/{name}/{engine}"] = lambda name=name, make=make: play_small(
                small_experiment(fast_config(name), EQUAL, module=batch_norm_net()), make
            )
    for name in ("fedavg", "scaffold", "flashback", "hast", "images"):
        changes = IMAGES if name == "images" else {}
        method = "fedavg" if name == "images" else fast_config(name)
        jobs[f"traced/{name}"] = lambda method=method, changes=changes: play_small(
            small_experiment(method, changes), lambda e: VectorizedEngine(e.task, 3, "captured")
        )
        jobs[f"processes/{name}"] = lambda method=method, changes=changes: play_small(
            small_experiment(method, changes), lambda e: ProcessEngine(e.task, 2)
        )
    for engine in ("sequential", "vectorized"):
        public = {"sequential": "sequential", "vectorized": "vectorized"}
        name = next(new for new, old in public.items() if old == engine)
        jobs[f"run/fedavg/{name}"] = lambda engine=engine: run_folder("fedavg", engine)
        jobs[f"run/hast-drift/{name}"] = lambda engine=engine: run_folder(
            "hast(peers=2, tau=3, depth=1, finetune_epochs=1)",
            engine,
            drift="random(clusters=2)",
            time_steps=2,
            samples=20,
        )
        jobs[f"run/feddrift/{name}"] = lambda engine=engine: run_folder(
            "feddrift",
            engine,
            drift="random(clusters=2)",
            time_steps=2,
            samples=20,
            concepts="swap",
        )
        jobs[f"resume/scaffold/{name}"] = lambda engine=engine: run_and_resume("scaffold", engine)
        jobs[f"resume/dac/{name}"] = lambda engine=engine: run_and_resume("dac(peers=2)", engine)
        jobs[f"sweep/{name}"] = lambda engine=engine: run_sweep(engine)
    return jobs


def play_small(experiment: BuiltExperiment, make: Callable[[BuiltExperiment], Any]) -> Tensors:
    engine = make(experiment)
    try:
        state, lines = run_rounds(experiment, engine, 3)
    finally:
        engine.close()
    return pytree.flatten(state_tree(state)) | metric_tensors(lines)


def run_folder(method: str, engine: str, **flags: Any) -> Tensors:
    with tempfile.TemporaryDirectory() as folder:
        return read_run(
            rem.run(
                method=method, engine=engine, out=f"{folder}/run", set=DIGITS_SET, **DIGITS | flags
            )
        )


def run_and_resume(method: str, engine: str) -> Tensors:
    with tempfile.TemporaryDirectory() as folder:
        rem.run(
            method=method,
            engine=engine,
            out=f"{folder}/run",
            set=DIGITS_SET,
            **DIGITS | {"rounds": 2},
        )
        run = rem.resume(f"{folder}/run", rounds=4, quiet=True)
        assert isinstance(run, Run)
        return read_run(run)


def run_sweep(engine: str) -> Tensors:
    with tempfile.TemporaryDirectory() as folder:
        comparison = rem.compare(
            ["fedavg", "fedprox(mu=0.1)", "flashback", "fedavg+wsm"],
            seeds=2,
            grid={"lr": [0.1, 0.05]},
            engine=engine,
            public=40,
            out=f"{folder}/sweep",
            set=DIGITS_SET,
            **DIGITS,
        )
        assert isinstance(comparison, Comparison)
        return {
            f"{run.folder.name}/{name}": value
            for run in comparison.runs
            for name, value in read_run(run).items()
        }


def read_run(run: Run) -> Tensors:
    """Everything a finished run wrote down: the last state, the metrics and the ledger."""
    state = CheckpointStore(run.folder / CHECKPOINTS, fingerprint(run.config)).load(
        torch.device("cpu"), lambda _: None
    )
    assert state is not None
    lines = [
        json.loads(line)
        for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    records = {
        "ledger": run.ledger.records,
        "confusion": run.confusions,
        "examples": run.examples,
        "peers": run.peers,
    }
    files = {
        f"records/{name}": bytes_tensor(array)
        for name, array in records.items()
        if array is not None
    }
    return pytree.flatten(state_tree(state)) | metric_tensors(lines) | files


def bytes_tensor(records: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(records.tobytes(), dtype=np.uint8).copy())


def metric_tensors(lines: list[dict[str, Any]]) -> Tensors:
    return {
        f"metrics/{number}/{name}": value
        for number, line in enumerate(lines, start=1)
        for name, value in walk_numbers(line)
    }


def walk_numbers(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from walk_numbers(value, f"{name}/{key}" if name else str(key))
    elif isinstance(tree, bool | int | float) and name.rpartition("/")[2] not in TIMES:
        yield name, torch.tensor(float(tree), dtype=torch.float64)
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from walk_numbers(value, f"{name}/{place}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--only", default="", help="run only the jobs whose name contains this text"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    began, failed = time.monotonic(), 0
    for name, job in list_jobs().items():
        if options.only not in name:
            continue
        target = options.out / (name.replace("/", "~") + ".safetensors")
        try:
            tensors = job()
        # a combination that this version refuses must be refused by the other one too
        except Exception as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {error!s:.200}")
            tensors = {"error": torch.ones(())}
        save_file(
            {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()},
            target,
        )
    print(f"{time.monotonic() - began:.0f} s, {failed} jobs refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
