"""A round without a server: every client has a model of its own, averages it with those of some
peers and trains the result.

The clients that are sampled, online and not stopped early take part, all at once: they use the
models of their peers as these were at the end of the previous round. No client uses a model that is
not finite, or one that has no valid loss on its examples.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.engine import ClientWork, Engine, Rejection
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply
from remanence.experiment.build import BuiltExperiment
from remanence.rounds.client_sampling import online_clients, sample_clients
from remanence.rounds.early_stopping import (
    mean_valid_accuracy,
    reset_early_stopping,
    update_early_stopping,
)
from remanence.rounds.peer_averaging import (
    average_with_peers,
    count_peer_bytes,
    count_peers,
    peer_selection,
    select_peers,
)
from remanence.rounds.peer_evaluator import PeerEvaluator
from remanence.rounds.replies import (
    find_nonresponders,
    find_unmoved,
    reply_metrics,
    train_clients,
)
from remanence.rounds.stragglers import late_mask
from remanence.rounds.writer import RunWriter
from remanence.training.server_step import local_models
from remanence.training.state import ClientModels, RunState, load_client_states, store_client_states
from remanence.training.task import TrainingTask


class DecentralizedRound:
    """Sample clients, select peers and average with them, train, check replies, evaluate, write."""

    def __init__(self, experiment: BuiltExperiment, engine: Engine, writer: RunWriter):
        self.experiment, self.engine, self.writer = experiment, engine, writer
        self.evaluator = PeerEvaluator(experiment, engine)
        self.engines: tuple[Engine, ...] = (engine,)

    def run(self, state: RunState) -> tuple[RunState, dict[str, Any]]:
        """Run one round -> the next state, and the round's line of metrics.jsonl."""
        began, experiment, task = time.perf_counter(), self.experiment, self.experiment.task
        round, config = state.round + 1, experiment.config
        time_step, key = config.time_step(round), Key(config.seed).fold_in("round", round)
        state, warmup_rejections, warmed_up = self._begin(state, time_step)
        before = _client_models(state)
        online, active = self._sample(before, round, key)
        clients = np.flatnonzero(active)
        peers = select_peers(experiment, self.engine, before, round, online, active, key)
        sizes = torch.from_numpy(task.population.at(time_step).train.sizes)
        merged = average_with_peers(task, before.models, peers.averages, sizes)
        late, straggler_metrics = late_mask(experiment, clients, time_step, key)
        models = before.models
        if late.any():  # late clients keep the average, untrained
            index = torch.from_numpy(clients[late]).to(task.info.device)
            models = models.scatter(index, merged.select(index))
        work = make_peer_work(experiment, state, merged, clients[~late], round, key)
        checked = train_clients(experiment, self.engine, work)
        replies = checked.valid
        unmoved = find_unmoved(replies, work)
        counts = count_peers(peers.averages, task.info.num_clients)
        client_models = replace(
            before,
            models=_scatter_models(models, merged, replies),
            peers=before.peers | peers.state,
            peer_counts=before.peer_counts + counts,
        )
        client_models = update_early_stopping(
            self.engine, client_models, clients, time_step, config.peers.patience
        )
        state = _store(state, round, time_step, client_models, replies)
        metrics = {
            **reply_metrics(
                replies,
                sorted({*warmup_rejections, *peers.rejections, *checked.rejections}),
                find_nonresponders(work.clients, checked),
            ),
            **straggler_metrics,
            "abandoned": False,
            "unmoved": len(unmoved),
            "learned": warmed_up or (replies is not None and len(unmoved) < replies.num_clients),
            **count_peer_bytes(task, peers.averages, peers.candidates),
            "early_stopped": int(client_models.early_stopped.sum()),
            "valid_accuracy": mean_valid_accuracy(client_models),
            "offline": int((~online).sum()),
            "seconds": time.perf_counter() - began,
            "same_cluster_share": self.evaluator.same_cluster_share(time_step, counts),
        }
        moments = {"before": before.models, "merged": merged, "local": client_models.models}
        return self._evaluate(state, moments, replies, metrics)

    def close(self) -> None:
        self.writer.close()

    def _sample(
        self, client_models: ClientModels, round: int, key: Key
    ) -> tuple[np.ndarray, np.ndarray]:
        """The clients that are online, and those that take part. -> [K] bool, [K] bool"""
        clients = np.arange(self.experiment.task.info.num_clients)
        online = online_clients(self.experiment, clients, round, key)
        sampled = online & np.isin(clients, sample_clients(self.experiment, round, key))
        return online, sampled & ~client_models.early_stopped.numpy()

    def _begin(self, state: RunState, time_step: int) -> tuple[RunState, list[Rejection], bool]:
        """Local training before the first exchange, and new data at a new time step.

        Returns:
            The state, the rejections, and whether the training changed a model.
        """
        rejections: list[Rejection] = []
        learned = False
        if state.round == 0 and self.experiment.config.peers.warmup:
            state, rejections, learned = self._initial_local_training(state)
        if time_step != state.time_step:
            client_models = reset_early_stopping(
                self.experiment.task, self.engine, _client_models(state), time_step
            )
            state = replace(state, time_step=time_step, client_models=client_models)
        return state, rejections, learned

    def _initial_local_training(self, state: RunState) -> tuple[RunState, list[Rejection], bool]:
        """Every client trains once before the first exchange; a client whose reply is rejected
        keeps the initial model.
        """
        experiment, client_models = self.experiment, _client_models(state)
        clients = np.arange(experiment.task.info.num_clients)
        key = Key(experiment.config.seed).fold_in("round", 0)
        work = make_peer_work(experiment, state, client_models.models, clients, 0, key, phases=1)
        checked = train_clients(experiment, self.engine, work)
        replies = checked.valid
        learned = replies is not None and len(find_unmoved(replies, work)) < replies.num_clients
        models = _scatter_models(client_models.models, client_models.models, replies)
        client_models = update_early_stopping(
            self.engine,
            replace(client_models, models=models),
            clients,
            time_step=0,
            patience=0,
        )
        state = _store(state, state.round, state.time_step, client_models, replies)
        return state, checked.rejections, learned

    def _evaluate(
        self,
        state: RunState,
        moments: dict[str, ModelState],
        replies: Reply | None,
        metrics: dict[str, Any],
    ) -> tuple[RunState, dict[str, Any]]:
        client_models = _client_models(state)
        trained = np.empty(0, dtype=np.int64) if replies is None else replies.client.cpu().numpy()
        evaluation = self.evaluator.after_round(state, client_models, moments, trained)
        line = self.writer.write_evaluation(evaluation, metrics)
        if self.evaluator.should_evaluate(state.round):  # then the counts start again from 0
            counts = torch.zeros_like(client_models.peer_counts)
            state = replace(state, client_models=replace(client_models, peer_counts=counts))
        return replace(state, committed=self.writer.commit()), line


def init_client_models(task: TrainingTask) -> ClientModels:
    """All clients before the first round, with the same model."""
    part, peers = peer_selection(task)
    count, device = task.info.num_clients, task.info.device
    models = ModelState(
        *(pytree.clone(pytree.broadcast(tree, count)) for tree in task.model.initial)
    )
    return ClientModels(
        models=models,
        best=models,
        best_loss=torch.full((count,), torch.inf, dtype=torch.float64),
        rounds_since_best=torch.zeros(count, dtype=torch.int64),
        early_stopped=torch.zeros(count, dtype=torch.bool),
        valid_accuracy=torch.full((count,), -1.0, dtype=torch.float64),
        peers=pytree.to({part.name: peers.init(task.info)}, device),
        peer_counts=torch.zeros(count, count, dtype=torch.int64),
    )


def make_peer_work(
    experiment: BuiltExperiment,
    state: RunState,
    models: ModelState,
    clients: np.ndarray,
    round: int,
    key: Key,
    phases: int = 0,
) -> ClientWork:
    """Local training of some clients from their own models.

    Args:
        experiment: Of the run.
        state: Holds what clients keep.
        models: [K, ...], of all clients.
        clients: [k], those that train.
        round: From 1; 0: before the first exchange.
        key: The round's.
        phases: Train only the first phases of the task; 0: all of them.
    """
    task, time_step = experiment.task, experiment.config.time_step(max(round, 1))
    stats = experiment.client_stats(clients, time_step)
    start = models
    # where all train, pass the same stack: an engine recognizes it and does not send it again
    if len(clients) < task.info.num_clients:
        start = models.select(torch.from_numpy(clients).to(task.info.device))
    return ClientWork(
        round=round,
        time_step=time_step,
        clients=clients,
        start=start,
        per_client_start=True,
        broadcast={},
        client_state=load_client_states(state, task, clients, stats),
        stats=stats,
        optimizer_hparams=experiment.optimizer_hparams(max(round, 1)),
        key=key,
        num_phases=phases,
    )


def _client_models(state: RunState) -> ClientModels:
    assert state.client_models is not None
    return state.client_models


def _scatter_models(models: ModelState, start: ModelState, replies: Reply | None) -> ModelState:
    """All models, with those of the replies in place. A client without a valid reply keeps its
    model in `models`: the average if it was late, and its model from before the averaging if its
    reply was rejected.
    """
    if replies is None:
        return models
    index = replies.client
    return models.scatter(index, local_models(start.select(index), replies, stacked=True))


def _store(
    state: RunState,
    round: int,
    time_step: int,
    client_models: ClientModels,
    replies: Reply | None,
) -> RunState:
    client_states = state.client_states
    if replies is not None:
        client_states = store_client_states(client_states, replies)
    return replace(
        state,
        round=round,
        time_step=time_step,
        client_models=client_models,
        client_states=client_states,
    )
