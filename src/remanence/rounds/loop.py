"""The round loop.

    share -> engine.train -> gate -> server.update -> record -> checkpoint

A run can be stopped at any moment and goes on exactly where it was: a state is replaced only when
its round is complete, and whatever was written after the last checkpoint is cut off and done again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from remanence.config import Experiment, write_toml
from remanence.core import errors
from remanence.core.engine import ClientWork, Engine
from remanence.core.errors import OUT_OF_TIME, InputError, RunFailed, Stopped
from remanence.core.files import create_output_dir, lock, translate_disk_errors, write_atomically
from remanence.core.process_state import preserve_process_state
from remanence.core.progress import NullProgress, Progress
from remanence.core.rng import Key
from remanence.core.signals import exit_code_of, sigterm_as_interrupt
from remanence.core.slots import Method, Part
from remanence.core.types import ModelState, Reply
from remanence.data.dataset import ArrayDataset
from remanence.engines.autotune import EngineChoice, choose_engine
from remanence.engines.memory import gpu_memory_text, is_out_of_memory
from remanence.engines.processes import count_cores
from remanence.engines.table import ENGINES, EngineOptions
from remanence.experiment.build import BuiltExperiment, build
from remanence.experiment.metadata import check_same_data
from remanence.experiment.torch_setup import set_precision
from remanence.results.checkpoint import CheckpointStore, fingerprint
from remanence.results.readers import read_toml
from remanence.results.run import CHECKPOINTS, COMPARISON, METADATA, SPEC, Run
from remanence.rounds import clustered, decentralized
from remanence.rounds.client_sampling import sample_clients
from remanence.rounds.peer_recorder import PeerRecorder
from remanence.rounds.privacy_budget import (
    describe_guarantees,
    epsilon_spent,
    guarantees_of,
    last_round,
    to_metadata,
)
from remanence.rounds.recorder import Recorder
from remanence.rounds.replies import count_bytes, find_nonresponders, reply_metrics, reply_schema
from remanence.rounds.stragglers import split_stragglers
from remanence.training import gate, server_step
from remanence.training.state import RunState, load_client_states, store_client_states

EngineFor = Callable[[BuiltExperiment], Engine]  # gives a run an engine; by default one of its own


class TimeLimit:
    """A time limit that is kept between rounds: the next round starts only if it can be
    expected to end in time.
    """

    def __init__(self, seconds: float | None):
        self.begin, self.seconds, self.rounds = time.monotonic(), seconds, 0

    def passed(self) -> bool:
        """Would another round end too late? The first round of a session always runs, so that
        every session gets somewhere.
        """
        if self.seconds is None or self.rounds == 0:
            return False
        elapsed = time.monotonic() - self.begin
        return elapsed + elapsed / self.rounds > self.seconds

    def copy_for(self) -> TimeLimit:
        """The same end for a run beside this one, which counts rounds of its own."""
        return TimeLimit(
            None if self.seconds is None else self.begin + self.seconds - time.monotonic()
        )


@preserve_process_state()
def start_run(
    spec: Experiment,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    deadline: TimeLimit | None = None,
    title: str = "",
    choice: EngineChoice | None = None,
    engine_for: EngineFor | None = None,
    method: Method | Part | None = None,
    module: nn.Module | None = None,
    source: ArrayDataset | None = None,
) -> Run:
    """Check everything, then make the folder, then run."""
    experiment = build(spec, method=method, module=module, source=source)
    given = [
        name
        for name, thing in (("method", method), ("model", module), ("data", source))
        if thing is not None
    ]
    experiment, _ = resolve_engine(
        replace(experiment, metadata=experiment.metadata | {"objects": given}),
        progress or NullProgress(),
        choice,
    )
    create_output_dir(out, overwrite, (SPEC, COMPARISON))
    with translate_disk_errors(out), lock(out):
        write_atomically(
            out / SPEC,
            write_toml(
                experiment.config, {METADATA: experiment.metadata | privacy_metadata(experiment)}
            ).encode(),
        )
        return train(
            experiment,
            out,
            progress or NullProgress(),
            deadline or TimeLimit(None),
            title,
            engine_for,
        )


@preserve_process_state()
def resume_run(
    folder: Path,
    *,
    rounds: int | None = None,
    progress: Progress | None = None,
    deadline: TimeLimit | None = None,
    title: str = "",
    engine_for: EngineFor | None = None,
    method: Method | Part | None = None,
    module: nn.Module | None = None,
    source: ArrayDataset | None = None,
) -> Run:
    """Go on with a run, to more rounds than it was meant to have where asked."""
    run = Run(folder)
    spec = run.config
    given = {"method": method, "model": module, "data": source}
    missing = [name for name in run.metadata.get("objects", []) if given[name] is None]
    if missing:
        raise InputError(
            f"{folder} was started from Python with its own {missing[0]}: resume it there,"
            f" with rem.resume({str(folder)!r}, {missing[0]}=...)"
        )
    if rounds is not None:
        if spec.drift.time_steps > 1 and rounds != spec.rounds:
            raise InputError(
                f"{folder} has {spec.drift.time_steps} time steps of {spec.rounds} rounds:"
                " other rounds a time step would be another experiment, so start it anew"
            )
        if rounds < spec.rounds:
            raise InputError(
                f"{folder} was meant to have {spec.rounds} rounds: --rounds {rounds} cannot"
                " take any back"
            )
        spec = spec.model_copy(update={"rounds": rounds})
    with translate_disk_errors(folder), lock(folder):
        experiment = build(spec, method=method, module=module, source=source)
        check_same_data(experiment, run.metadata)
        if spec != run.config:
            kept = (
                experiment.metadata
                | privacy_metadata(experiment)
                | {name: run.metadata[name] for name in ("engine", "objects")}
            )
            write_atomically(
                folder / SPEC, write_toml(experiment.config, {METADATA: kept}).encode()
            )
        return train(
            experiment,
            folder,
            progress or NullProgress(),
            deadline or TimeLimit(None),
            title,
            engine_for,
        )


def resolve_engine(
    experiment: BuiltExperiment, progress: Progress, choice: EngineChoice | None = None
) -> tuple[BuiltExperiment, EngineChoice]:
    """Choose the engine where it was left open and no choice was made before, and write it down
    with the reason.
    """
    spec, task = experiment.config, experiment.task
    if spec.engine != "auto":
        ENGINES[spec.engine].check(task, engine_options(spec))
        choice = EngineChoice(spec.engine, spec.threads, f"{spec.engine}: as asked", spec.execution)
    elif choice is None:
        job = make_work(experiment, first_state(experiment), 1)
        choice = choose_engine(task, job, spec.stack_size, spec.workers, rounds=spec.total_rounds)
        progress.log(f"engine {choice.reason}")
    torch.set_num_threads(choice.threads)
    # a cluster has cores of its own
    workers = spec.workers or (0 if choice.name == "ray" else count_cores())
    steps = choice.execution if spec.execution == "auto" else spec.execution
    settled = spec.model_copy(
        update={
            "engine": choice.name,
            "threads": choice.threads,
            "workers": workers,
            "execution": steps,
            "stack_size": choice.stack or spec.stack_size,
        }
    )
    return replace(
        experiment, config=settled, metadata=experiment.metadata | {"engine": choice.reason}
    ), choice


def train(
    experiment: BuiltExperiment,
    folder: Path,
    progress: Progress,
    deadline: TimeLimit,
    title: str = "",
    engine_for: EngineFor | None = None,
) -> Run:
    """Run from the last checkpoint, or from the start, to the end."""
    spec = experiment.config
    set_precision(spec)
    vault = CheckpointStore(folder / CHECKPOINTS, fingerprint(spec))
    first = first_state(experiment)
    state = vault.load(experiment.task.info.device, progress.log, first) or first
    recorder = make_recorder(folder, experiment, dict(state.file_lengths))
    engine = (engine_for or make_run_engine)(experiment)
    promises = guarantees_of(experiment)
    last = last_round(promises, spec.total_rounds)
    progress.start(title or spec.method, state.round, last)
    if last < spec.total_rounds:
        progress.log(f"the privacy budget ends the run after round {last} of {spec.total_rounds}")
    for sentence in describe_guarantees(promises, state.round) if state.round else []:
        progress.log(f"so far {sentence}")
    state = replace(state, file_lengths=recorder.commit())

    def save() -> None:
        recorder.sync()
        vault.save(state)

    told = ""  # of what the engine could not do
    try:
        # the first state too: a model given as an object need not be the same when the run is
        # resumed
        save()
        last_save = time.monotonic()
        with sigterm_as_interrupt():
            while state.round < last:
                if deadline.passed():
                    save()
                    raise Stopped(
                        f"time is up after round {state.round} of {spec.total_rounds}: go"
                        f" on with remanence resume {folder}",
                        OUT_OF_TIME,
                    )
                state, line = run_round(experiment, engine, state, recorder)
                fallback = engine.degraded_reason
                if fallback != told:
                    record_fallback(fallback.removeprefix(f"{told}; "), folder, progress)
                    told = fallback
                deadline.rounds += 1
                progress.round(line)
                if time.monotonic() - last_save >= spec.checkpoint.seconds or state.round == last:
                    save()
                    last_save = time.monotonic()
            for sentence in describe_guarantees(promises, state.round):
                progress.log(sentence)
    except KeyboardInterrupt as stop:
        save()
        raise Stopped(
            f"stopped after round {state.round} of {spec.total_rounds}, all saved: go on"
            f" with remanence resume {folder}",
            exit_code_of(stop),
        ) from None
    # an engine tries again in smaller pieces; what is around it has none
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        save()
        raise RunFailed(
            "out of memory in round"
            f" {state.round + 1}{gpu_memory_text(experiment.task.info.device)}, all before it"
            " is saved: go on with"
            f" remanence resume {folder} when there is more, or run it with fewer clients a round"
        ) from error
    finally:
        engine.close()
        recorder.close()
        progress.finish()
    return Run(folder)


def record_fallback(reason: str, folder: Path, progress: Progress) -> None:
    """An engine that cannot do what it was asked for goes on more slowly: this is said once,
    and kept with the run.
    """
    about = read_toml(folder / SPEC)[METADATA]
    if reason not in about["engine"]:
        progress.log(f"slower than asked for: {reason}")
        told = about | {"engine": f"{about['engine']}; {reason}"}
        write_atomically(folder / SPEC, write_toml(Run(folder).config, {METADATA: told}).encode())


def make_run_engine(experiment: BuiltExperiment) -> Engine:
    """The engine that the spec names, for this run alone."""
    spec = experiment.config
    return ENGINES[spec.engine].make(experiment.task, engine_options(spec))


def engine_options(spec: Experiment) -> EngineOptions:
    """The settings of an experiment's engine."""
    return EngineOptions(
        spec.stack_size, spec.workers, spec.execution, float(spec.timeout), spec.ray
    )


def privacy_metadata(experiment: BuiltExperiment) -> dict[str, Any]:
    """What a run's folder says of its clients' privacy."""
    return to_metadata(guarantees_of(experiment), experiment.config.total_rounds)


def make_recorder(
    folder: Path, experiment: BuiltExperiment, committed: dict[str, int]
) -> Recorder | PeerRecorder:
    """What writes a run down; with a server there is one model to look at, without there are as
    many as clients.
    """
    kind = Recorder if experiment.task.method.part_filling("peers") is None else PeerRecorder
    return kind(folder, experiment, committed)


def first_state(experiment: BuiltExperiment) -> RunState:
    """Before the first round."""
    task = experiment.task
    state = RunState(round=0, time_step=0, server=server_step.init_server(task), client_states={})
    assigns = task.method.part_filling("model_assignment")
    if assigns is not None and assigns.model_assignment is not None:
        everybody_uses_the_first = torch.zeros(task.info.num_clients, dtype=torch.int64)
        state = replace(
            state,
            model_of_client=everybody_uses_the_first,
            assignment_state={assigns.name: assigns.model_assignment.init(task.info)},
        )
    return replace(state, client_models=decentralized.init_client_models(task))


def make_work(experiment: BuiltExperiment, state: RunState, round: int) -> ClientWork:
    """The work of a round where there is a server."""
    key, time_step = (
        Key(experiment.config.seed).fold_in("round", round),
        experiment.config.time_step(round),
    )
    clients = sample_clients(
        experiment, round, key, [int(late.reply.client) for late in state.stale]
    )
    facts = experiment.client_stats(clients, time_step)
    each_its_own = len(state.global_models) > 1
    return ClientWork(
        round=round,
        time_step=time_step,
        clients=clients,
        start=models_for(state, clients) if each_its_own else state.server.model,
        per_client_start=each_its_own,
        broadcast=server_step.make_broadcast(experiment.task, state.server, round, key),
        client_state=load_client_states(state, experiment.task, clients, facts),
        stats=facts,
        optimizer_hparams=experiment.optimizer_hparams(round),
        key=key,
    )


def models_for(state: RunState, clients: np.ndarray) -> ModelState:
    """The global model that each of these clients uses, as a stack."""
    return ModelState.stack(
        [state.global_models[number].model for number in state.models_used_by(clients)]
    )


def run_round(
    experiment: BuiltExperiment, engine: Engine, state: RunState, recorder: Recorder | PeerRecorder
) -> tuple[RunState, dict[str, Any]]:
    """One round -> the next state, and the line that was written about it."""
    if state.client_models is not None:
        assert isinstance(recorder, PeerRecorder)
        return decentralized.run_round(experiment, engine, state, recorder)
    assert isinstance(recorder, Recorder)
    task, spec, round, begin = (
        experiment.task,
        experiment.config,
        state.round + 1,
        time.perf_counter(),
    )
    time_step = spec.time_step(round)
    recorder.before(engine, state, time_step)
    if time_step != state.time_step and state.model_of_client is not None:
        state = clustered.reassign_clients(task, engine, state, time_step)
    job = make_work(experiment, state, round)
    replies, refusals = gate.validate_replies(
        experiment.adversary.tamper_replies(engine.train(job), job) if len(job.clients) else [],
        reply_schema(experiment, job),
    )
    refusals = gate.add_declined(refusals, engine)
    silent = find_nonresponders(job.clients, replies, refusals)
    replies, late, told = split_stragglers(experiment, state, job, replies)
    line: dict[str, Any] = {
        **reply_metrics(replies, refusals, silent),
        **told,
        "abandoned": replies is None or replies.num_clients < spec.round.min_replies,
        **count_bytes(experiment, job, replies, len(refusals)),
        **(
            {"global_models": len(state.global_models)} if state.model_of_client is not None else {}
        ),
        **(
            epsilon_spent(guarantees_of(experiment), round)
            if recorder.should_evaluate(round)
            else {}
        ),
    }
    updates: dict[int, server_step.ServerResult] = {}
    if replies is not None and not line["abandoned"]:
        try:
            updates = update_servers(experiment, engine, state, job, replies)
        except errors.AggregationFailed as problem:
            line |= {"abandoned": True, "problem": str(problem)}
    asked = np.empty(0, dtype=np.int64)
    if replies is not None and updates:
        asked = replies.client.cpu().numpy()
        start = models_for(state, asked) if job.per_client_start else job.start
        models = functools.partial(
            server_step.local_models, start, replies, stacked=job.per_client_start
        )
        recorder.local(
            engine, state, time_step, asked, models, aggregation_shares(state, asked, updates)
        )
        servers = [
            updates[number].server if number in updates else old
            for number, old in enumerate(state.global_models)
        ]
        state = replace(
            state,
            server=servers[0],
            extra_servers=tuple(servers[1:]),
            client_states=store_client_states(state.client_states, replies),
        )
    state = replace(state, round=round, time_step=time_step, stale=late)
    written = recorder.after(
        engine, updates, state, line | {"seconds": time.perf_counter() - begin}, asked
    )
    return replace(state, file_lengths=recorder.commit()), written


def update_servers(
    experiment: BuiltExperiment, engine: Engine, state: RunState, job: ClientWork, replies: Reply
) -> dict[int, server_step.ServerResult]:
    """The server's half of a round, for every global model that somebody trained. -> by the
    number of the model
    """
    used = state.models_used_by(replies.client.cpu().numpy())
    updates = {}
    for number in np.unique(used).tolist():
        some = (
            replies
            if len(state.global_models) == 1
            else replies.select(
                torch.from_numpy(np.flatnonzero(used == number)).to(replies.client.device)
            )
        )
        key = job.key if number == 0 else job.key.fold_in("model", number)
        updates[number] = server_step.update(
            experiment.task,
            state.global_models[number],
            some,
            job.round,
            key,
            job.optimizer_hparams,
            engine,
        )
    return updates


def aggregation_shares(
    state: RunState, clients: np.ndarray, updates: dict[int, server_step.ServerResult]
) -> np.ndarray:
    """Each client's share in the round, summing to 1: in its model's aggregation, and of that
    model among the round's clients. -> [k]
    """
    used, shares = state.models_used_by(clients), np.zeros(len(clients))
    for number, update in updates.items():
        members = used == number
        shares[members] = update.weights.cpu().numpy() * members.mean()
    return shares
