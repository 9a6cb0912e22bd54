"""What a run needs of the machine: one estimate, made before anything of it is used.

Every need is at least what the run will take, so that a run that could work is not refused: copies
and temporary values whose size depends on the engine are left out. `run_sizes.py` has the numbers
that the estimate starts from. This module never imports torch.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from remanence.config import Experiment
from remanence.core.errors import InputError
from remanence.core.memory import machine_memory, size_of

# Of a model that is built: the network as it was given, its templates for training and evaluation,
# and the initial values. One client's training adds the gradients and the new parameters.
MODEL_COPIES = 6
CLIENT_BYTES = 192  # of a client: the arrays that hold its examples while they are partitioned
STEP_BYTES = 48  # of a client at a time step, besides the ids of its examples
METRICS_LINE = 300  # bytes of a line of metrics.jsonl, and of a class in it
METRICS_CLASS = 5
RECORD, RECORD_CLASS = 34, 12  # bytes of a record of the ledger, and of a class in it
EXAMPLE_RECORD = 30
SMALL_FILES = 1 << 30
MOST_STEPS = 10**15  # local steps of a run: months at a hundred million a second
WORKER_BYTES = 20 << 20  # of a worker process besides what it shares with its parent
SPARE_FILES = 100  # file descriptors that a process needs besides its pipes to workers
THREADS_PER_CORE, FEW_THREADS = 4, 256


class RunSizes(NamedTuple):
    """The sizes of a run from which everything else follows; 0: not known yet, or none.

    Args:
        clients: K.
        cohort: Clients that a round samples.
        rounds: Of all time steps together.
        time_steps: At which clients may get other examples.
        classes: C.
        samples: Examples of a client at a time step, at least.
        model: Bytes of the model.
        reply: Bytes of the parameters, buffers and payload that a client sends.
        client_state: Bytes that a client keeps between rounds.
        steps: Local steps of the largest client in a round.
        batch: Examples in its batch.
        concepts: Test sets that models are evaluated on.
        decentralized: Every client has a model of its own.
        own: Clients whose models and states are on this machine; None: all of them.
        remote: Replies stay on other machines.
        gpu: Models are on a GPU.
        data: Bytes of the inputs of all examples.
        every: Rounds between two evaluations.
        local_every: Rounds between two evaluations of the clients' models; 0: they are not
            evaluated.
        cross: Clients whose models are evaluated on each other's examples.
        validation: Validation examples are evaluated.
        confusion: Whole confusion matrices are recorded.
        examples: Results on single training examples are recorded.
    """

    clients: int
    cohort: int
    rounds: int
    time_steps: int
    classes: int
    samples: int = 1
    model: int = 0
    reply: int = 0
    client_state: int = 0
    steps: int = 0
    batch: int = 0
    concepts: int = 1
    decentralized: bool = False
    own: int | None = None
    remote: bool = False
    gpu: bool = False
    data: int = 0
    every: int = 1
    local_every: int = 0
    cross: int = 0
    validation: bool = False
    confusion: bool = False
    examples: bool = False


class Need(NamedTuple):
    """A part of what a run needs."""

    what: str
    size: int  # bytes
    cure: str  # what to change so that it gets smaller


class Resources(NamedTuple):
    """What a run needs, in named parts."""

    memory: tuple[Need, ...]
    gpu: tuple[Need, ...]
    disk: tuple[Need, ...]
    steps: int  # local steps of all clients in all rounds


def estimate_resources(run: RunSizes) -> Resources:
    """Estimate what a run needs of the machine, at least."""
    own = run.clients if run.own is None else run.own
    models = (
        Need("the copies of the model", MODEL_COPIES * run.model, "use a smaller model"),
        Need(
            "the models of all clients",
            2 * own * run.model if run.decentralized else 0,
            "lower clients.count or use a smaller model",
        ),
        Need(
            "the replies of a round",
            0 if run.remote else min(run.cohort, own) * run.reply,
            "lower clients.sample or use a smaller model",
        ),
    )
    keepers = min(own, run.cohort * run.rounds)
    data = Need("the data", run.data, "use fewer or smaller examples")
    memory = (
        data,
        Need(
            "the examples of each client at each time step",
            run.clients * (CLIENT_BYTES + run.time_steps * (STEP_BYTES + 8 * run.samples)),
            "lower clients.count or drift.time_steps",
        ),
        Need(
            "tables over pairs of clients",
            9 * run.clients**2 if run.decentralized else 0,
            "lower clients.count or use a method with a server",
        ),
        Need(
            "what clients keep between rounds",
            keepers * run.client_state,
            "lower clients.count or use a method whose clients keep nothing",
        ),
        Need(
            "the batches of one client",
            8 * run.steps * run.batch,
            "lower local.epochs or local.steps",
        ),
        Need(
            "confusion matrices",
            16 * _evaluated_models(run) * run.classes**2,
            "use fewer classes, or leave out record.local",
        ),
    )
    return Resources(
        memory=memory if run.gpu else (*memory, *models),
        gpu=(data, *models) if run.gpu else (),
        disk=_estimate_disk(run, own, keepers),
        steps=run.rounds * run.cohort * run.steps,
    )


def _evaluated_models(run: RunSizes) -> int:
    """Models times groups of examples whose confusion matrices are in memory at a time."""
    if run.decentralized:
        return (run.clients if run.own is None else run.own) * run.concepts
    if not run.local_every:
        return run.concepts
    return max(run.cohort * run.concepts, min(run.cross, run.cohort) ** 2)


def _estimate_disk(run: RunSizes, own: int, keepers: int) -> tuple[Need, ...]:
    """The files of a run when it has ended: records, and the last two checkpoints."""
    evaluated = run.rounds // run.every
    models = own if run.decentralized else 1
    tests, others = models * run.concepts * evaluated, int(run.validation) * evaluated
    rows = 1 + run.validation  # test and validation examples
    lines = METRICS_LINE * (run.rounds + (rows - 1) * evaluated)
    lines += METRICS_CLASS * run.classes * rows * evaluated
    if run.local_every and not run.decentralized:
        times = run.rounds // run.local_every
        tests += times * run.concepts * (1 + run.cohort)
        others += times * min(run.cross, run.cohort) ** 2 if run.validation else 0
    return (
        Need("metrics.jsonl", lines, "lower rounds or raise record.every"),
        Need(
            "the ledger",
            (tests + others) * (RECORD + RECORD_CLASS * run.classes),
            "raise record.every or record.local_every",
        ),
        Need(
            "confusion matrices",
            tests * 4 * run.classes**2 if run.confusion else 0,
            "leave out record.confusion or raise record.every",
        ),
        Need(
            "results on single examples",
            3 * evaluated * run.cohort * run.samples * EXAMPLE_RECORD if run.examples else 0,
            "leave out record.examples or raise record.every",
        ),
        Need(
            "the last two checkpoints",
            2 * models * run.model + keepers * run.client_state,
            "lower clients.count or use a smaller model",
        ),
    )


def check_resources(needed: Resources, gpu_memory: int = 0) -> None:
    """Raise `InputError` if a run needs more memory than the machine has, or cannot end.

    Args:
        needed: By the run.
        gpu_memory: Bytes of the GPU's memory, where it is used.
    """
    _check_sum("memory", needed.memory, machine_memory(), "this machine allows")
    _check_sum("GPU memory", needed.gpu, gpu_memory, "the GPU has")
    if needed.steps > MOST_STEPS:
        raise InputError(
            f"this run makes {needed.steps:.2g} local steps, and no machine can end more than"
            f" {MOST_STEPS:.0e}: lower rounds, local.epochs or local.steps"
        )


def check_disk(needed: Resources, folder: Path, runs: int = 1) -> None:
    """Raise `InputError` if the files of so many runs do not fit on the disk of their folder.

    Small ones are not checked: a run that fills a disk stops, and resumes when there is room.
    """
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    disk = [need._replace(size=runs * need.size) for need in needed.disk]
    if sum(need.size for need in disk) > SMALL_FILES:
        _check_sum("disk space", disk, shutil.disk_usage(there).free, f"{there} has")


def _check_sum(what: str, needs: Sequence[Need], available: int, who: str) -> None:
    total = sum(need.size for need in needs)
    if total <= available:
        return
    largest = max(needs, key=lambda need: need.size)
    raise InputError(
        f"the experiment needs at least {size_of(total)} of {what}, {size_of(largest.size)} of it"
        f" for {largest.what}, and {who} {size_of(available)}: {largest.cure}"
    )


def check_threads(config: Experiment) -> None:
    """Raise `InputError` if `threads` is far beyond what the machine has cores for."""
    cores = os.cpu_count() or 1
    most = max(FEW_THREADS, THREADS_PER_CORE * cores)
    if config.threads > most:
        raise InputError(
            f"threads={config.threads} is more than {most}, the most that this machine with"
            f" {cores} cores can use: set threads={cores}, or leave it out"
        )


def check_workers(workers: int) -> None:
    """Raise `InputError` if so many worker processes cannot be started."""
    memory, files = workers * WORKER_BYTES, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if memory > machine_memory():
        raise InputError(
            f"workers={workers} need at least {size_of(memory)} of memory, and this machine allows"
            f" {size_of(machine_memory())}: set workers={os.cpu_count() or 1}, or leave it out"
        )
    if files != resource.RLIM_INFINITY and workers + SPARE_FILES > files:
        raise InputError(
            f"workers={workers} need a pipe each, and this process may open {files} files: set"
            f" workers={os.cpu_count() or 1}, or raise the limit (ulimit -n)"
        )
