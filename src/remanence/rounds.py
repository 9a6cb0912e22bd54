"""The round loop.

    share -> engine.train -> gate -> server.update -> record -> checkpoint

A run can be stopped at any moment and goes on exactly where it was: a state is replaced only when its round is complete, and whatever was written after the
last checkpoint is cut off and done again.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remanence import gate, server, trees
from remanence.checkpoint import Vault, fingerprint
from remanence.config import Spec, write_toml
from remanence.data.source import Source
from remanence.engines.choose import Choice, choose_engine, make_engine
from remanence.engines.processes import count_cores
from remanence.errors import INTERRUPTED, OUT_OF_TIME, TERMINATED, InputError, Stopped
from remanence.experiment import Experiment, build
from remanence.files import claim_folder, explain_full_disk, lock, write_atomically
from remanence.keys import Key
from remanence.progress import Progress, Silent
from remanence.record import Recorder, finite_or_none
from remanence.results import ABOUT, CHECKPOINTS, COMPARISON, SPEC, Run
from remanence.signals import Terminated, catch_termination
from remanence.state import RunState, commit_own, gather_own
from remanence.types import Engine, Job, Method, Part, Reply


class Deadline:
    """A time limit that is kept between rounds: the next round starts only if it can be expected to end in time."""

    def __init__(self, seconds: float | None):
        self.begin, self.seconds, self.rounds = time.monotonic(), seconds, 0

    def passed(self) -> bool:
        """Would another round end too late? The first round of a session always runs, so that every session gets somewhere."""
        if self.seconds is None or self.rounds == 0:
            return False
        elapsed = time.monotonic() - self.begin
        return elapsed + elapsed / self.rounds > self.seconds


def start_run(
    spec: Spec,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    deadline: Deadline | None = None,
    title: str = "",
    choice: Choice | None = None,
    method: Method | Part | None = None,
    module: nn.Module | None = None,
    source: Source | None = None,
) -> Run:
    """Check everything, then make the folder, then run."""
    experiment = build(spec, method=method, module=module, source=source)
    given = [name for name, thing in (("method", method), ("model", module), ("data", source)) if thing is not None]
    experiment, _ = settle_engine(replace(experiment, about=experiment.about | {"objects": given}), progress or Silent(), choice)
    claim_folder(out, overwrite, (SPEC, COMPARISON))
    with explain_full_disk(out), lock(out):
        write_atomically(out / SPEC, write_toml(experiment.spec, {ABOUT: experiment.about}).encode())
        return go_on(experiment, out, progress or Silent(), deadline or Deadline(None), title)


def resume_run(
    folder: Path,
    *,
    rounds: int | None = None,
    progress: Progress | None = None,
    deadline: Deadline | None = None,
    title: str = "",
    method: Method | Part | None = None,
    module: nn.Module | None = None,
    source: Source | None = None,
) -> Run:
    """Go on with a run, to more rounds than it was meant to have where asked."""
    run = Run(folder)
    spec = run.spec
    given = {"method": method, "model": module, "data": source}
    missing = [name for name in run.about.get("objects", []) if given[name] is None]
    if missing:
        raise InputError(
            f"{folder} was started from Python with its own {missing[0]}: resume it there, with rem.resume({str(folder)!r}, {missing[0]}=...)"
        )
    if rounds is not None:
        if rounds < spec.rounds:
            raise InputError(f"{folder} was meant to have {spec.rounds} rounds: --rounds {rounds} cannot take any back")
        spec = spec.model_copy(update={"rounds": rounds})
    with explain_full_disk(folder), lock(folder):
        experiment = build(spec, method=method, module=module, source=source)
        if spec != run.spec:
            kept = experiment.about | {name: run.about[name] for name in ("engine", "objects")}
            write_atomically(folder / SPEC, write_toml(experiment.spec, {ABOUT: kept}).encode())
        return go_on(experiment, folder, progress or Silent(), deadline or Deadline(None), title)


def settle_engine(experiment: Experiment, progress: Progress, choice: Choice | None = None) -> tuple[Experiment, Choice]:
    """Choose the engine where it was left open and no choice was made before, and write it down with the reason."""
    spec, task = experiment.spec, experiment.task
    if spec.engine != "auto":
        make_engine(spec.engine, task, spec.stack, spec.workers).close()  # refuses what it cannot run, before any work
        choice = Choice(spec.engine, spec.threads, f"{spec.engine}: as asked")
    elif choice is None:
        choice = choose_engine(task, make_job(experiment, first_state(experiment), 1), spec.stack, spec.workers)
        progress.say(f"engine {choice.reason}")
    torch.set_num_threads(choice.threads)
    workers = spec.workers or count_cores()
    settled = spec.model_copy(update={"engine": choice.name, "threads": choice.threads, "workers": workers})
    return replace(experiment, spec=settled, about=experiment.about | {"engine": choice.reason}), choice


def go_on(experiment: Experiment, folder: Path, progress: Progress, deadline: Deadline, title: str = "") -> Run:
    """Run from the last checkpoint, or from the start, to the end."""
    spec = experiment.spec
    vault = Vault(folder / CHECKPOINTS, fingerprint(spec))
    state = vault.load(experiment.task.world.device, progress.say) or first_state(experiment)
    recorder = Recorder(folder, experiment, dict(state.committed))
    engine = make_engine(spec.engine, experiment.task, spec.stack, spec.workers)
    progress.start(title or spec.method, state.round, spec.rounds)
    state = replace(state, committed=recorder.commit())

    def save() -> None:
        recorder.sync()
        vault.save(state)

    try:
        save()  # the first state too: a model given as an object need not be the same when the run is resumed
        last_save = time.monotonic()
        with catch_termination():
            while state.round < spec.rounds:
                if deadline.passed():
                    save()
                    raise Stopped(
                        f"time is up after round {state.round} of {spec.rounds}: go on with remanence resume {folder}", OUT_OF_TIME
                    )
                state, line = play_round(experiment, engine, state, recorder)
                deadline.rounds += 1
                progress.round(line)
                if time.monotonic() - last_save >= spec.checkpoint.seconds or state.round == spec.rounds:
                    save()
                    last_save = time.monotonic()
    except KeyboardInterrupt as stop:
        save()
        code = TERMINATED if isinstance(stop, Terminated) else INTERRUPTED
        raise Stopped(
            f"stopped after round {state.round} of {spec.rounds}, all saved: go on with remanence resume {folder}", code
        ) from None
    finally:
        engine.close()
        recorder.close()
        progress.finish()
    return Run(folder)


def first_state(experiment: Experiment) -> RunState:
    return RunState(round=0, time_step=0, server=server.found(experiment.task), own={})


def make_job(experiment: Experiment, state: RunState, round: int) -> Job:
    """The work of a round."""
    key = Key(experiment.spec.seed).fold("round", round)
    clients = experiment.cohort(key)
    facts = experiment.facts(clients, state.time_step)
    return Job(
        round=round,
        time_step=state.time_step,
        clients=clients,
        start=state.server.model,
        personal_start=False,
        shared=server.share(experiment.task, state.server, round, key),
        own=gather_own(state, experiment.task, clients, facts),
        facts=facts,
        rule=experiment.rule(round),
        key=key,
    )


def play_round(experiment: Experiment, engine: Engine, state: RunState, recorder: Recorder) -> tuple[RunState, dict[str, Any]]:
    """One round -> the next state, and the line that was written about it."""
    task, spec, round, begin = experiment.task, experiment.spec, state.round + 1, time.perf_counter()
    job = make_job(experiment, state, round)
    recorder.before(engine, state)
    replies, refusals = gate.admit(engine.train(job), expect(experiment, job))
    line: dict[str, Any] = {
        "train_loss": None if replies is None else finite_or_none(float(replies.loss.double().mean())),
        "replies": 0 if replies is None else replies.k,
        "refused": [{"client": r.client, "code": r.code, "reason": r.reason} for r in refusals],
        "abandoned": replies is None or replies.k < spec.round.min_replies,
        **count_bytes(experiment, job, replies, len(refusals)),
        "extras": {} if replies is None else average_numbers(replies),
    }
    update = None
    if replies is not None and not line["abandoned"]:
        try:
            update = server.update(task, state.server, replies, round, job.key, job.rule)
        except server.Unusable as problem:
            line |= {"abandoned": True, "problem": str(problem)}
    if replies is not None and update is not None:
        recorder.local(engine, state, replies, update)
        state = replace(state, server=update.server, own=commit_own(state.own, replies))
    state = replace(state, round=round)
    written = recorder.after(engine, update, state, line | {"seconds": time.perf_counter() - begin})
    return replace(state, committed=recorder.commit()), written


def average_numbers(replies: Reply) -> dict[str, float]:
    """What the clients sent as single numbers, averaged: so a method's own measure can be followed over rounds."""
    single = {name: x.double().mean() for name, x in trees.flatten(replies.extras).items() if x.dim() == 1}
    return {name.replace(trees.SEPARATOR, "."): float(x) for name, x in single.items()}


def expect(experiment: Experiment, job: Job) -> gate.Expected:
    """What a good reply looks like."""
    task = experiment.task
    return gate.Expected(
        round=job.round,
        clients=tuple(int(client) for client in job.clients),
        params=trees.restrict(task.model.initial.params, task.sent_names()),
        buffers=trees.restrict(task.model.initial.buffers, task.sent_buffers()),
        extras=task.extras_form(),
        weight_cap=float(experiment.spec.round.weight_cap),
    )


def count_bytes(experiment: Experiment, job: Job, replies: Reply | None, refused: int) -> dict[str, int]:
    """What would travel between real machines: down the model and what is shared, up what was trained and the extras."""
    task = experiment.task
    initial = task.model.initial
    model = trees.nbytes(trees.restrict(initial.params, task.sent_names())) + trees.nbytes(
        trees.restrict(initial.buffers, task.sent_buffers())
    )
    down = len(job.clients) * (model + trees.nbytes(job.shared))
    number_of_examples = 8
    up = ((0 if replies is None else replies.k) + refused) * (model + trees.nbytes(task.extras_form()) + number_of_examples)
    return {"bytes_up": up, "bytes_down": down}
