"""A round without a server: every client has a model of its own, mixes it with those of some peers
and trains the result.

    probe -> engine.score_pairs -> gate -> decide -> mix -> engine.train -> gate -> validate ->
    record

All K clients move at once, and read each other's models as they were at the end of the round
before. Nobody hears a model that is not finite, and nobody mixes with a peer whose model has no
loss on its rows.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.compose import BoundHook
from remanence.core.engine import ClientWork, Engine, Rejection
from remanence.core.rng import Key
from remanence.core.slots import PeerAverage, PeerContext, PeerSelection
from remanence.core.types import ModelState, Reply
from remanence.experiment.build import BuiltExperiment
from remanence.rounds.client_sampling import online_clients, sample_clients
from remanence.rounds.peer_recorder import PeerRecorder
from remanence.rounds.replies import find_nonresponders, reply_metrics, reply_schema
from remanence.rounds.stragglers import late_mask
from remanence.training import gate
from remanence.training.server_step import local_models
from remanence.training.state import ClientModels, RunState, load_client_states, store_client_states
from remanence.training.task import TrainingTask


def init_client_models(task: TrainingTask) -> ClientModels | None:
    """All clients before the first round, with the same model; None where there is a server."""
    owner = task.method.part_filling("peers")
    if owner is None or owner.peers is None:
        return None
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
        peers=pytree.to({owner.name: owner.peers.init(task.info)}, device),
        peer_counts=torch.zeros(count, count, dtype=torch.int64),
    )


def run_round(
    experiment: BuiltExperiment, engine: Engine, state: RunState, recorder: PeerRecorder
) -> tuple[RunState, dict[str, Any]]:
    """One round -> the next state, and the line that was written about it."""
    spec, task, round, begin = (
        experiment.config,
        experiment.task,
        state.round + 1,
        time.perf_counter(),
    )
    time_step, key = spec.time_step(round), Key(spec.seed).fold_in("round", round)
    refusals: list[Rejection] = []
    if state.round == 0 and spec.peers.warmup:
        state, refusals = _initial_local_training(experiment, engine, state)
    if time_step != state.time_step:
        state = replace(
            state,
            time_step=time_step,
            client_models=_on_drift(task, engine, _client_models(state), time_step),
        )
    crowd = _client_models(state)
    online = online_clients(experiment, round, key)
    active = (
        np.isin(np.arange(task.info.num_clients), sample_clients(experiment, round, key))
        & ~crowd.early_stopped.numpy()
    )
    mixes, remembered, unheard = _select_peers(
        experiment, engine, crowd, time_step, round, online, active, key
    )
    sizes = torch.from_numpy(task.population.at(time_step).train.sizes)
    mixed = gossip_average(task, crowd.models, mixes, sizes)
    clients = np.flatnonzero(active)
    moments = {"before": crowd.models, "merged": mixed}
    job = _make_work(experiment, state, mixed, clients, round, key)
    late, told = late_mask(experiment, job)
    if late.any():  # they run out of time: what they heard stays with them, untrained
        index = torch.from_numpy(clients[late]).to(task.info.device)
        crowd = replace(crowd, models=crowd.models.scatter(index, mixed.select(index)))
        job = _make_work(experiment, state, mixed, clients[~late], round, key)
    replies, refused, own = _train(experiment, engine, state, job)
    if replies is not None:
        crowd = replace(crowd, models=_scatter_models(crowd.models, mixed, replies))
    now = peer_counts(mixes, task.info.num_clients)
    crowd = replace(crowd, peers=crowd.peers | remembered, peer_counts=crowd.peer_counts + now)
    improved = _update_early_stopping(engine, crowd, clients, time_step, spec.peers.patience)
    answered = np.empty(0, dtype=np.int64) if replies is None else replies.client.cpu().numpy()
    state = replace(
        state, round=round, time_step=time_step, client_models=improved, client_states=own
    )
    line = {
        **reply_metrics(
            replies,
            sorted({*refusals, *unheard, *refused}),
            find_nonresponders(job.clients, replies, refused),
        ),
        **told,
        "abandoned": False,
        **count_bytes(task, mixes),
        "early_stopped": int(improved.early_stopped.sum()),
        "offline": int((~online).sum()),
        "seconds": time.perf_counter() - begin,
    }
    written = recorder.after(
        engine, state, line, now, moments | {"local": improved.models}, answered
    )
    if recorder.should_evaluate(round):
        state = replace(
            state,
            client_models=replace(improved, peer_counts=torch.zeros_like(improved.peer_counts)),
        )
    return replace(state, file_lengths=recorder.commit()), written


def peer_counts(mixes: tuple[PeerAverage, ...], clients: int) -> Tensor:
    """How often each client listens to each other one in these mixes. -> [K, K] int64"""
    heard = torch.zeros(clients, clients + 1, dtype=torch.int64)
    for peers, _ in mixes:
        place = torch.where(peers >= 0, peers, clients).cpu()  # nobody has a column of its own
        heard.scatter_add_(1, place, torch.ones_like(place))
    return heard[:, :clients]


def _client_models(state: RunState) -> ClientModels:
    assert state.client_models is not None
    return state.client_models


def _initial_local_training(
    experiment: BuiltExperiment, engine: Engine, state: RunState
) -> tuple[RunState, list[Rejection]]:
    """Every client trains once before the first exchange; who answers badly keeps the initial
    model.
    """
    crowd, key = _client_models(state), Key(experiment.config.seed).fold_in("round", 0)
    everybody = np.arange(experiment.task.info.num_clients)
    replies, refused, own = _train(
        experiment,
        engine,
        state,
        _make_work(experiment, state, crowd.models, everybody, 0, key, phases=1),
    )
    if replies is not None:
        crowd = replace(crowd, models=_scatter_models(crowd.models, crowd.models, replies))
    return replace(
        state,
        client_models=_update_early_stopping(engine, crowd, everybody, 0, 0),
        client_states=own,
    ), refused


def _on_drift(
    task: TrainingTask, engine: Engine, crowd: ClientModels, time_step: int
) -> ClientModels:
    """A new time step: models and memories stay, the best models are measured again on the new
    validation rows, and everybody trains on.
    """
    everybody = np.arange(task.info.num_clients)
    loss = (
        engine.score_pairs(crowd.best, everybody, everybody, "valid", time_step)
        .mean_loss()
        .nan_to_num(nan=torch.inf)
    )
    return replace(
        crowd,
        best_loss=loss,
        rounds_since_best=torch.zeros_like(crowd.rounds_since_best),
        early_stopped=torch.zeros_like(crowd.early_stopped),
    )


def _select_peers(
    experiment: BuiltExperiment,
    engine: Engine,
    crowd: ClientModels,
    time_step: int,
    round: int,
    online: np.ndarray,
    active: np.ndarray,
    key: Key,
) -> tuple[tuple[PeerAverage, ...], dict[str, Any], list[Rejection]]:
    """Whom each client listens to -> mixes, what is remembered of peers by part, whose models
    nobody may hear
    """
    task = experiment.task
    probe, decide = peer_hooks(task)
    unsound, refusals = gate.find_nonfinite(crowd.models)
    assert experiment.topology is not None  # there is no server
    reachable = experiment.topology & online[None, :] & active[:, None] & ~unsound.numpy()[None, :]
    ctx = PeerContext(
        round=(round - 1) % experiment.config.rounds + 1,
        state=crowd.peers,
        adjacency=torch.from_numpy(reachable).to(task.info.device),
        true_cluster=torch.from_numpy(task.population.at(time_step).cluster).to(task.info.device),
        hyper=task.hparam_tensors(),
        key=key.fold_in("peers"),
        info=task.info,
    )
    probed = probe(ctx)
    losses = experiment.adversary.tamper_probes(
        probed, _score_candidates(engine, crowd.models, probed, time_step)
    )
    rows = torch.from_numpy(task.population.at(time_step).train.sizes)
    losses, bad, misfits = gate.validate_probe_losses(probed, losses, rows)
    owner = task.method.part_filling("peers")
    assert owner is not None
    mixes, remembered = decide(probed, losses, ctx)
    return (
        drop_rejected_peers(mixes, probed, bad),
        {owner.name: remembered} if remembered else {},
        refusals + misfits,
    )


def drop_rejected_peers(
    mixes: tuple[PeerAverage, ...], probed: Tensor, bad: Tensor
) -> tuple[PeerAverage, ...]:
    """The mixes without pairs that a probe has shown to be bad, whatever the method decided.
    probed: [K, m]; bad: [K, m] bool
    """
    if not bool(bad.any()):
        return mixes
    names = torch.where(bad, probed, -2)  # -2: no peer at all, so it equals none
    return tuple(
        gossip_average._replace(
            peers=torch.where(
                (gossip_average.peers.unsqueeze(2) == names.unsqueeze(1)).any(dim=2),
                -1,
                gossip_average.peers,
            )
        )
        for gossip_average in mixes
    )


def peer_hooks(task: TrainingTask) -> tuple[Any, Any]:
    """The method's two functions, each seeing its own part's state."""
    owner = task.method.part_filling("peers")
    assert owner is not None
    peers: PeerSelection | None = owner.peers
    assert peers is not None
    return BoundHook(owner, peers.candidates), BoundHook(owner, peers.select)


def _score_candidates(engine: Engine, models: ModelState, probed: Tensor, time_step: int) -> Tensor:
    """The mean loss of probed peers' models on each client's own training rows. probed: [K, m],
    -1: nobody -> [K, m] float64, NaN: nobody
    """
    table = probed.cpu().numpy()
    losses = torch.full(probed.shape, torch.nan, dtype=torch.float64)
    owners, place = np.nonzero(table >= 0)
    if len(owners):
        losses[owners, place] = engine.score_pairs(
            models, table[owners, place], owners, "train", time_step
        ).mean_loss()
    return losses.to(probed.device)


def gossip_average(
    task: TrainingTask, models: ModelState, mixes: tuple[PeerAverage, ...], sizes: Tensor
) -> ModelState:
    """Every client's model averaged with its peers', by numbers of training rows. models: [K, ...];
    sizes: [K]

    Peers enter as they were, the client itself as mixed so far. What is frozen or personal does not
    travel, and is not mixed.
    """
    sent, buffers = set(task.communicated_params()), set(task.communicated_buffers())
    params, kept = dict(models.params), dict(models.buffers)
    for peers, names in mixes:
        if peers.shape[1] == 0:
            continue
        peers = peers.to(task.info.device)
        there = peers >= 0
        # nobody: itself, weighing nothing
        place = torch.where(
            there, peers, torch.arange(len(peers), device=peers.device).unsqueeze(1)
        )
        rows = sizes.double().to(peers.device)
        heard = rows[place] * there  # [K, m]
        total = rows + heard.sum(dim=1)
        mine, theirs = rows / total, heard / total.unsqueeze(1)
        for name in params:
            if name in sent and (names is None or name in names):
                params[name] = _average(params[name], models.params[name], place, mine, theirs)
        for name in kept if names is None else ():
            if name in buffers:
                # a counter of batches has no mean
                combine = _average if kept[name].is_floating_point() else _elementwise_max
                kept[name] = combine(kept[name], models.buffers[name], place, mine, theirs)
    return ModelState(params, kept)


def _average(own: Tensor, peers: Tensor, place: Tensor, mine: Tensor, theirs: Tensor) -> Tensor:
    """own, peers: [K, ...]; place, theirs: [K, m]; mine: [K]"""
    shape = (-1, *(1,) * (own.dim() - 1))
    result = mine.to(own).reshape(shape) * own
    # peers one after the other: no copy of m models for every client
    for column in range(place.shape[1]):
        result = result + theirs[:, column].to(own).reshape(shape) * peers[place[:, column]]
    return result


def _elementwise_max(
    own: Tensor, peers: Tensor, place: Tensor, mine: Tensor, theirs: Tensor
) -> Tensor:
    """As `_average`; whoever is nobody weighs nothing and is passed over."""
    result = own
    for column in range(place.shape[1]):
        there = (theirs[:, column] > 0).reshape(-1, *(1,) * (own.dim() - 1))
        result = torch.where(there, torch.maximum(result, peers[place[:, column]]), result)
    return result


def _make_work(
    experiment: BuiltExperiment,
    state: RunState,
    start: ModelState,
    clients: np.ndarray,
    round: int,
    key: Key,
    phases: int = 0,
) -> ClientWork:
    """Local training of some clients from their own models. start: [K, ...]"""
    time_step = experiment.config.time_step(max(round, 1))
    facts = experiment.client_stats(clients, time_step)
    # then the stack itself: an engine knows again what it has sent before
    everybody = len(clients) == experiment.task.info.num_clients
    return ClientWork(
        round=round,
        time_step=time_step,
        clients=clients,
        start=start
        if everybody
        else start.select(torch.from_numpy(clients).to(experiment.task.info.device)),
        per_client_start=True,
        broadcast={},
        client_state=load_client_states(state, experiment.task, clients, facts),
        stats=facts,
        optimizer_hparams=experiment.optimizer_hparams(max(round, 1)),
        key=key,
        num_phases=phases,
    )


def _train(
    experiment: BuiltExperiment, engine: Engine, state: RunState, job: ClientWork
) -> tuple[Reply | None, list[Rejection], Any]:
    """-> good replies, refusals, what all clients keep"""
    if not len(job.clients):
        return None, [], state.client_states
    replies, refusals = gate.validate_replies(
        experiment.adversary.tamper_replies(engine.train(job), job), reply_schema(experiment, job)
    )
    refusals = gate.add_declined(refusals, engine)
    return (
        replies,
        refusals,
        state.client_states
        if replies is None
        else store_client_states(state.client_states, replies),
    )


def _scatter_models(models: ModelState, mixed: ModelState, replies: Reply) -> ModelState:
    """All models, with the trained ones in their places; who did not answer keeps what it had."""
    index = replies.client
    return models.scatter(index, local_models(mixed.select(index), replies, stacked=True))


def _update_early_stopping(
    engine: Engine, crowd: ClientModels, clients: np.ndarray, time_step: int, patience: int
) -> ClientModels:
    """Who has a better model than ever on its validation rows keeps it as its best; who has
    waited too long stops. Without such rows the last counts.
    """
    if not len(clients):
        return crowd
    scores, index = (
        engine.score_pairs(crowd.models, clients, clients, "valid", time_step),
        torch.from_numpy(clients),
    )
    loss = scores.mean_loss()
    # a loss that is no number for another reason is no better than any
    without_rows = scores.confusion.sum(dim=(1, 2)) == 0
    better = (loss < crowd.best_loss[index]) | without_rows
    chosen = index[better]
    on_device = chosen.to(next(iter(crowd.models.params.values())).device)
    waited = crowd.rounds_since_best.index_copy(
        0, index, torch.where(better, 0, crowd.rounds_since_best[index] + 1)
    )
    return replace(
        crowd,
        best=crowd.best.scatter(on_device, crowd.models.select(on_device)),
        best_loss=crowd.best_loss.index_copy(0, chosen, loss[better].nan_to_num(nan=torch.inf)),
        rounds_since_best=waited,
        early_stopped=crowd.early_stopped | (waited > patience)
        if patience
        else crowd.early_stopped,
    )


def count_bytes(task: TrainingTask, mixes: tuple[PeerAverage, ...]) -> dict[str, int]:
    """What would travel between real machines: every peer that is listened to sends what is
    mixed, and what it tells besides.
    """
    initial, sent = task.model.initial, task.communicated_params()
    owner = task.method.part_filling("peers")
    assert owner is not None
    assert owner.peers is not None
    told = owner.peers.extra_bytes * task.info.num_clients
    total = 0
    for number, (peers, names) in enumerate(mixes):
        mixed = pytree.select_keys(
            initial.params, [name for name in sent if names is None or name in names]
        )
        size = pytree.nbytes(mixed) + (
            pytree.nbytes(pytree.select_keys(initial.buffers, task.communicated_buffers()))
            if names is None
            else 0
        )
        total += int((peers >= 0).sum()) * (size + (told if number == 0 else 0))
    return {"bytes_up": total, "bytes_down": total}
