"""A round with a server, and one global model or several."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remanence.core.engine import ClientWork, Engine
from remanence.core.errors import AggregationFailed
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply
from remanence.experiment.build import BuiltExperiment
from remanence.rounds.client_sampling import sample_clients
from remanence.rounds.clustered import reassign_clients
from remanence.rounds.evaluator import ServerEvaluator
from remanence.rounds.privacy_budget import epsilon_spent
from remanence.rounds.replies import (
    count_bytes,
    find_nonresponders,
    find_unmoved,
    reply_metrics,
    train_clients,
)
from remanence.rounds.stragglers import split_stragglers
from remanence.rounds.writer import RunWriter
from remanence.training import server_step
from remanence.training.state import RunState, load_client_states, store_client_states

Updates = dict[int, server_step.ServerResult]  # by number of the global model


class FederatedRound:
    """Sample clients, broadcast the model, train, check replies, aggregate, evaluate, write."""

    def __init__(self, experiment: BuiltExperiment, engine: Engine, writer: RunWriter):
        self.experiment, self.engine, self.writer = experiment, engine, writer
        self.evaluator = ServerEvaluator(experiment, engine)
        tuner = self.evaluator.finetune_engine
        self.engines: tuple[Engine, ...] = (engine,) if tuner is None else (engine, tuner)

    def run(self, state: RunState) -> tuple[RunState, dict[str, Any]]:
        """Run one round -> the next state, and the round's line of metrics.jsonl."""
        began, experiment = time.perf_counter(), self.experiment
        time_step = experiment.config.time_step(state.round + 1)
        self.writer.write(self.evaluator.before_training(state, time_step))
        if time_step != state.time_step and state.model_of_client is not None:
            state = reassign_clients(experiment.task, self.engine, state, time_step)
        work = make_work(experiment, state, state.round + 1)
        checked = train_clients(experiment, self.engine, work)
        unmoved = find_unmoved(checked.valid, work)
        split = split_stragglers(experiment, state, work, checked.valid)
        replies = split.replies  # those that the server uses in this round
        updates, problems = self._aggregate(state, work, replies, split.discount)
        metrics = {
            **reply_metrics(replies, checked.rejections, find_nonresponders(work.clients, checked)),
            **split.metrics,
            "abandoned": not updates,
            "unmoved": len(unmoved),
            "learned": _has_learned(state, updates, replies, unmoved),
            **({"problem": "; ".join(problems)} if problems else {}),
            **count_bytes(experiment, work, checked.num_sent),
            **self._state_metrics(state, work),
        }
        stale = split.stale
        if split.arrived and not updates:
            metrics["stale_used"] = 0
            # a failed aggregation may fail again with the same replies
            stale = split.stale if problems else split.postponed()
        clients = np.empty(0, dtype=np.int64)
        if replies is not None and updates:
            clients = replies.client.cpu().numpy()
            self._evaluate_local_models(state, work, replies, updates)
            state = _store_updates(state, updates, replies)
        state = replace(state, round=work.round, time_step=time_step, stale=stale)
        metrics["seconds"] = time.perf_counter() - began
        evaluation = self.evaluator.after_round(state, updates, clients)
        line = self.writer.write_evaluation(evaluation, metrics)
        return replace(state, committed=self.writer.commit()), line

    def close(self) -> None:
        try:
            self.evaluator.close()
        finally:
            self.writer.close()

    def _aggregate(
        self, state: RunState, work: ClientWork, replies: Reply | None, discount: Tensor | None
    ) -> tuple[Updates, list[str]]:
        """The server's updates, and why aggregations failed. Without enough replies both are
        empty.
        """
        if replies is None or replies.num_clients < self.experiment.config.round.min_replies:
            return {}, []
        return update_servers(self.experiment, self.engine, state, work, replies, discount)

    def _state_metrics(self, state: RunState, work: ClientWork) -> dict[str, Any]:
        """The number of global models, where there are several, and the privacy spent so far."""
        metrics: dict[str, Any] = {}
        if state.model_of_client is not None:
            metrics["global_models"] = len(state.global_models)
        if self.evaluator.should_evaluate(work.round):
            metrics |= epsilon_spent(self.evaluator.guarantees, work.round)
        return metrics

    def _evaluate_local_models(
        self, state: RunState, work: ClientWork, replies: Reply, updates: Updates
    ) -> None:
        clients = replies.client.cpu().numpy()
        # not every client of the cohort has replied
        start = models_for(state, clients) if work.per_client_start else work.start
        local_models = functools.partial(
            server_step.local_models, start, replies, stacked=work.per_client_start
        )
        shares = aggregation_shares(state, clients, updates)
        self.writer.write(
            self.evaluator.after_training(state, work.time_step, clients, local_models, shares)
        )


def make_work(experiment: BuiltExperiment, state: RunState, round: int) -> ClientWork:
    """Sample the clients of a round; what each of them starts from."""
    key = Key(experiment.config.seed).fold_in("round", round)
    time_step = experiment.config.time_step(round)
    busy = [int(stale.reply.client) for stale in state.stale]
    clients = sample_clients(experiment, round, key, busy)
    stats = experiment.client_stats(clients, time_step)
    several_models = len(state.global_models) > 1
    return ClientWork(
        round=round,
        time_step=time_step,
        clients=clients,
        start=models_for(state, clients) if several_models else state.server.model,
        per_client_start=several_models,
        # with several global models, all clients receive the broadcast of the first one's server
        broadcast=server_step.make_broadcast(experiment.task, state.server, round, key),
        client_state=load_client_states(state, experiment.task, clients, stats),
        stats=stats,
        optimizer_hparams=experiment.optimizer_hparams(round),
        key=key,
    )


def models_for(state: RunState, clients: np.ndarray) -> ModelState:
    """The global model that each of these clients uses, as a stack."""
    return ModelState.stack(
        [state.global_models[number].model for number in state.models_used_by(clients)]
    )


def update_servers(
    experiment: BuiltExperiment,
    engine: Engine,
    state: RunState,
    work: ClientWork,
    replies: Reply,
    discount: Tensor | None = None,
) -> tuple[Updates, list[str]]:
    """Aggregate the replies for every global model that a client has trained.

    Args:
        experiment: Of the run.
        engine: Evaluates models, if the method trains at the server.
        state: Before the round.
        work: Of the round.
        replies: Those that the server uses.
        discount: [k] the factor of each reply's weight, where the server has one model; None: 1.

    Returns:
        The updates, and why there is none for a model whose aggregation failed: it does not change.
    """
    used = state.models_used_by(replies.client.cpu().numpy())
    updates: Updates = {}
    problems = []
    for number in np.unique(used).tolist():
        own_replies = replies
        if len(state.global_models) > 1:
            index = torch.from_numpy(np.flatnonzero(used == number))
            own_replies = replies.select(index.to(replies.client.device))
        try:
            updates[number] = server_step.update(
                experiment.task,
                state.global_models[number],
                own_replies,
                work.round,
                # model 0 draws what a single global model would
                work.key if number == 0 else work.key.fold_in("model", number),
                work.optimizer_hparams,
                engine,
                discount,
            )
        except AggregationFailed as problem:
            model = f"global model {number}: " if len(state.global_models) > 1 else ""
            problems.append(f"{model}{problem}")
    return updates, problems


def aggregation_shares(state: RunState, clients: np.ndarray, updates: Updates) -> np.ndarray:
    """The weight of each client in its model's aggregation, times the fraction of the round's
    clients that use that model. The shares sum to 1. -> [k]
    """
    used, shares = state.models_used_by(clients), np.zeros(len(clients))
    for number, update in updates.items():
        members = used == number
        shares[members] = update.weights.cpu().numpy() * members.mean()
    return shares


def _has_learned(
    state: RunState, updates: Updates, replies: Reply | None, unmoved: set[int]
) -> bool:
    """Whether a global model changed, and a client or training at the server did that: noise
    alone teaches nothing.
    """
    if replies is None or not updates:
        return False
    trained_at_server = any(update.server.model is not update.merged for update in updates.values())
    if not trained_at_server and unmoved.issuperset(replies.client.tolist()):
        return False
    return any(
        not torch.equal(value, state.global_models[number].model.params[name])
        for number, update in updates.items()
        for name, value in update.server.model.params.items()
    )


def _store_updates(state: RunState, updates: Updates, replies: Reply) -> RunState:
    servers = [
        updates[number].server if number in updates else server
        for number, server in enumerate(state.global_models)
    ]
    # a model whose aggregation failed has not used its clients' replies
    used = np.isin(state.models_used_by(replies.client.cpu().numpy()), list(updates))
    if not used.all():
        index = torch.from_numpy(np.flatnonzero(used))
        replies = replies.select(index.to(replies.client.device))
    return replace(
        state,
        server=servers[0],
        extra_servers=tuple(servers[1:]),
        client_states=store_client_states(state.client_states, replies),
    )
