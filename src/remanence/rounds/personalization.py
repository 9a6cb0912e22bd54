"""Personal models of clients, made for evaluation alone: they are neither aggregated nor kept.

A personal model is the server's with the client's personal parameters in place (FedBN), fine-tuned
on the client's training examples where a part has a `personalize` phase (FedBABU).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.compose import ComposedMethod
from remanence.core.engine import ClientWork, Engine, PairCounts
from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.core.slots import Method, Part
from remanence.core.types import ModelState, Reply
from remanence.engines.table import ENGINES, engine_options
from remanence.experiment.build import BuiltExperiment
from remanence.training import server_step
from remanence.training.state import RunState, load_client_states
from remanence.training.task import PERSONAL, TrainingTask


def has_personal_models(task: TrainingTask) -> bool:
    """Whether clients have models that differ from the server's."""
    return (
        bool(task.method.personal(task.info)) or task.method.part_filling("personalize") is not None
    )


def finetune_task(task: TrainingTask) -> TrainingTask | None:
    """Fine-tuning as a task for an engine; None where nothing is fine-tuned.

    Only the loss, the optimizer and the phase of the method are used. Its corrections,
    regularizers, distillation and frozen parameters serve the aggregation, and personal models are
    not aggregated. The `trainable` of the phase alone selects the trained parameters.
    """
    part = task.method.part_filling("personalize")
    if part is None or part.personalize is None:
        return None
    phases = (part.personalize,)

    def reduced(p: Part) -> Part:
        return Part(
            p.name,
            hyper=p.hyper,
            reads_label_counts=p.reads_label_counts,
            loss=p.loss,
            optimizer=p.optimizer,
            phases=(lambda _: phases) if p is part else None,
        )

    method = ComposedMethod(Method(tuple(reduced(p) for p in task.method.parts)))
    # replies contain all buffers
    return replace(task, method=method, phases=phases, average_buffers=True)


def make_finetune_engine(experiment: BuiltExperiment) -> Engine | None:
    """An engine for fine-tuning: the kind that trains the run or, where that cannot fine-tune, the
    sequential one, which gives the same result.

    Returns:
        None where nothing is fine-tuned here.
    """
    config, task = experiment.config, finetune_task(experiment.task)
    # a site fine-tunes by itself when it is asked for counts
    if task is None or experiment.task.clients_remote:
        return None
    options, entry = engine_options(config), ENGINES[config.engine]
    try:
        entry.check(task, options)
    except InputError:  # clients that cannot be stacked, for example
        entry = ENGINES["sequential"]
    return entry.make(task, options)


def score_models(
    experiment: BuiltExperiment,
    finetune_engine: Engine | None,
    engine: Engine,
    state: RunState,
    clients: np.ndarray,
) -> PairCounts:
    """Evaluate personal models, each on its client's validation examples. clients: [k] ascending"""
    if experiment.task.clients_remote:
        # personal parameters never leave the sites
        return engine.score_personal(make_personal_work(experiment, state, clients))
    # runs that share an engine must not capture steps at the same time
    models = engine.run_exclusive(
        lambda _: make_models(experiment, finetune_engine, state, clients)
    )
    return engine.score_pairs(models, np.arange(len(clients)), clients, "valid", state.time_step)


def make_models(
    experiment: BuiltExperiment,
    finetune_engine: Engine | None,
    state: RunState,
    clients: np.ndarray,
) -> ModelState:
    """The personal models of some clients after a round.

    clients: [k] ascending -> stacked [k, ...]
    """
    model, work = state.server.model, make_personal_work(experiment, state, clients)
    client_state = dict(work.client_state)
    personal = client_state.pop(PERSONAL, {})
    start = ModelState(
        *(
            pytree.broadcast(tree, len(clients)) | personal.get(kind, {})
            for kind, tree in model._asdict().items()
        )
    )
    if finetune_engine is None:
        return start
    work = work._replace(start=start, per_client_start=True, client_state=client_state)
    replies = Reply.concat(list(finetune_engine.train(work)))
    tuned = replies.select(torch.argsort(replies.client))
    return ModelState(start.params | tuned.params, start.buffers | tuned.buffers)


def make_personal_work(
    experiment: BuiltExperiment, state: RunState, clients: np.ndarray
) -> ClientWork:
    """What the personal models of some clients are made from. clients: [k] ascending"""
    key = Key(experiment.config.seed).fold_in("round", state.round, "personal")
    stats = experiment.client_stats(clients, state.time_step)
    return ClientWork(
        round=state.round,
        time_step=state.time_step,
        clients=clients,
        start=state.server.model,
        per_client_start=False,
        broadcast=server_step.make_broadcast(experiment.task, state.server, state.round, key),
        client_state=load_client_states(state, experiment.task, clients, stats),
        stats=stats,
        optimizer_hparams=experiment.optimizer_hparams(state.round),
        key=key,
    )
