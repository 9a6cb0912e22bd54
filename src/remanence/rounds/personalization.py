"""Personal models: what a client would use itself, made for evaluation alone. Nothing of them is
aggregated, and no client keeps them.

A personal model is the server's with the client's personal part in place (FedBN), then fine-tuned
on the client's training rows where a part has a `personalise` phase (FedBABU).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.compose import Composed
from remanence.core.rng import Key
from remanence.core.types import Engine, Job, Method, PairScores, Part, Reply, Start
from remanence.engines.autotune import make_engine
from remanence.engines.vectorized import needs_padding
from remanence.experiment.build import Experiment
from remanence.training import server_step
from remanence.training.client_step import PERSONAL, Task
from remanence.training.state import RunState, gather_own


def has_personal_models(task: Task) -> bool:
    """Do clients have models that differ from the server's?"""
    return bool(task.method.personal(task.world)) or task.method.owner("personalise") is not None


def tuning_task(task: Task) -> Task | None:
    """Fine-tuning as a task for an engine; None where nothing is fine-tuned.

    It is plain training: of the method only the loss, the optimiser and the phase itself are left.
    What serves the aggregation (corrections, springs, distillation, frozen parameters) has no place
    where nothing is aggregated, so that the phase's `trainable` alone decides what is trained.
    """
    owner = task.method.owner("personalise")
    if owner is None or owner.personalise is None:
        return None
    phases = (owner.personalise,)

    def bare(p: Part) -> Part:
        return Part(
            p.name,
            hyper=p.hyper,
            base=p.base,
            optimiser=p.optimiser,
            phases=(lambda _: phases) if p is owner else None,
        )

    method = Composed(Method(tuple(bare(p) for p in task.method.parts)))
    # all buffers come back
    return replace(task, method=method, phases=phases, average_buffers=True)


def make_tuner(experiment: Experiment) -> Engine | None:
    """An engine for the fine-tuning, of the kind that trains; where its epochs cannot be
    stacked, a loop, which gives the same result.
    """
    spec, tuning = experiment.spec, tuning_task(experiment.task)
    # a site fine-tunes where its data are, when it is asked for counts
    if tuning is None or experiment.task.at_sites:
        return None
    unstackable = tuning.model.mixes_rows and needs_padding(tuning)
    name = "loop" if spec.engine == "stacked" and unstackable else spec.engine
    return make_engine(
        name, tuning, spec.stack, spec.workers, timeout=float(spec.timeout), ray=spec.ray
    )


def score_models(
    experiment: Experiment,
    tuner: Engine | None,
    engine: Engine,
    state: RunState,
    clients: np.ndarray,
) -> PairScores:
    """The personal models of some clients, each on its owner's validation rows. clients: [k]
    ascending
    """
    if experiment.task.at_sites:
        remote: Any = engine  # the personal parts are at the sites, and never leave them
        scores: PairScores = remote.score_personal(experiment, state, clients)
        return scores
    models = make_models(experiment, tuner, state, clients)
    return engine.score_pairs(models, np.arange(len(clients)), clients, "valid", state.time_step)


def make_models(
    experiment: Experiment, tuner: Engine | None, state: RunState, clients: np.ndarray
) -> Start:
    """The personal models of some clients after a round. clients: [k] ascending -> stacked [k,
    ...]
    """
    task, model = experiment.task, state.server.model
    facts = experiment.facts(clients, state.time_step)
    own = gather_own(state, task, clients, facts)
    mine = own.pop(PERSONAL, {})
    start = Start(
        *(
            pytree.expand(tree, len(clients)) | mine.get(kind, {})
            for kind, tree in model._asdict().items()
        )
    )
    if tuner is None:
        return start
    key = Key(experiment.spec.seed).fold("round", state.round, "personal")
    job = Job(
        round=state.round,
        time_step=state.time_step,
        clients=clients,
        start=start,
        personal_start=True,
        shared=server_step.share(task, state.server, state.round, key),
        own=own,
        facts=facts,
        rule=experiment.rule(state.round),
        key=key,
    )
    replies = Reply.join(list(tuner.train(job)))
    tuned = replies.pick(torch.argsort(replies.client))
    return Start(start.params | tuned.params, start.buffers | tuned.buffers)
