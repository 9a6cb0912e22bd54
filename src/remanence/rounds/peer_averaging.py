"""Without a server: each client selects peers and averages its model with theirs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.compose import BoundHook
from remanence.core.contexts import PeerContext
from remanence.core.engine import Engine, Rejection
from remanence.core.pytree import Tree
from remanence.core.rng import Key
from remanence.core.slots import Part, PeerAverage, PeerSelection
from remanence.core.types import ModelState
from remanence.experiment.build import BuiltExperiment
from remanence.training import gate
from remanence.training.state import ClientModels
from remanence.training.task import TrainingTask


class SelectedPeers(NamedTuple):
    """The peers that each client averages with."""

    averages: tuple[PeerAverage, ...]  # one after the other
    candidates: Tensor  # [K, m] peers whose models each client has evaluated; -1: none
    state: Tree  # by part: the state of the peer selection
    rejections: list[Rejection]  # of clients whose models no peer may use


def select_peers(
    experiment: BuiltExperiment,
    engine: Engine,
    client_models: ClientModels,
    round: int,
    online: np.ndarray,
    active: np.ndarray,
    key: Key,
) -> SelectedPeers:
    """Score the candidates that the method returns, and have the method select from them.

    Args:
        experiment: Names the method and which clients reach each other.
        engine: Scores candidates on the training examples of the client that considers them.
        client_models: At the beginning of the round.
        round: From 1.
        online: [K] bool, clients whose models can be used.
        active: [K] bool, clients that take part.
        key: The round's.
    """
    task, time_step = experiment.task, experiment.config.time_step(round)
    part, peers = peer_selection(task)
    nonfinite, rejections = gate.find_nonfinite(client_models.models)
    assert experiment.topology is not None  # there is no server
    adjacency = (
        experiment.topology & online[None, :] & active[:, None] & ~nonfinite.numpy()[None, :]
    )
    population = task.population.at(time_step)
    ctx = PeerContext(
        round=(round - 1) % experiment.config.rounds + 1,
        state=client_models.peers,
        adjacency=torch.from_numpy(adjacency).to(task.info.device),
        true_cluster=torch.from_numpy(population.cluster).to(task.info.device),
        hyper=task.hparam_tensors(),
        key=key.fold_in("peers"),
        info=task.info,
    )
    candidates = BoundHook(part, peers.candidates)(ctx)
    losses = experiment.adversary.tamper_probes(
        candidates, _score_candidates(engine, client_models.models, candidates, time_step)
    )
    losses, bad, probe_rejections = gate.validate_probe_losses(
        candidates, losses, torch.from_numpy(population.train.sizes)
    )
    averages, state = BoundHook(part, peers.select)(candidates, losses, ctx)
    return SelectedPeers(
        drop_rejected_peers(averages, candidates, bad),
        candidates,
        {part.name: state} if state else {},
        rejections + probe_rejections,
    )


def peer_selection(task: TrainingTask) -> tuple[Part, PeerSelection]:
    """The part of the method that selects peers, and its rules."""
    part = task.method.part_filling("peers")
    assert part is not None
    assert part.peers is not None
    return part, part.peers


def drop_rejected_peers(
    averages: tuple[PeerAverage, ...], candidates: Tensor, bad: Tensor
) -> tuple[PeerAverage, ...]:
    """The averages without pairs whose candidate was rejected, whatever the method selected.

    Args:
        averages: As selected.
        candidates: [K, m].
        bad: [K, m] bool.
    """
    if not bool(bad.any()):
        return averages
    rejected = torch.where(bad, candidates, -2)  # -2 equals no peer, and not -1 for none either

    def keep(peers: Tensor) -> Tensor:
        dropped = (peers.unsqueeze(2) == rejected.unsqueeze(1)).any(dim=2)
        return torch.where(dropped, -1, peers)

    return tuple(average._replace(peers=keep(average.peers)) for average in averages)


def _score_candidates(
    engine: Engine, models: ModelState, candidates: Tensor, time_step: int
) -> Tensor:
    """The mean loss of candidates' models on each client's own training examples.

    Args:
        engine: Scores.
        models: Of all clients, stacked.
        candidates: [K, m]; -1: none.
        time_step: Of the round.

    Returns:
        [K, m] float64; NaN where there is no candidate.
    """
    table = candidates.cpu().numpy()
    losses = torch.full(candidates.shape, torch.nan, dtype=torch.float64)
    clients, column = np.nonzero(table >= 0)
    if len(clients):
        scores = engine.score_pairs(models, table[clients, column], clients, "train", time_step)
        losses[clients, column] = scores.mean_loss()
    return losses.to(candidates.device)


def average_with_peers(
    task: TrainingTask, models: ModelState, averages: tuple[PeerAverage, ...], sizes: Tensor
) -> ModelState:
    """Average every client's model with its peers', weighted by numbers of training examples.

    Peers' models are those of the beginning of the round; the client's own is the one averaged so
    far. Parameters that are frozen or personal are not sent, and not averaged.

    Args:
        task: Names what is communicated.
        models: [K, ...].
        averages: One after the other.
        sizes: [K].
    """
    sent, sent_buffers = set(task.communicated_params()), set(task.communicated_buffers())
    params, buffers = dict(models.params), dict(models.buffers)
    for peers, names in averages:
        if peers.shape[1] == 0:
            continue
        peers = peers.to(task.info.device)
        exists = peers >= 0
        # no peer: the client itself, with weight 0
        clients = torch.arange(len(peers), device=peers.device).unsqueeze(1)
        index = torch.where(exists, peers, clients)
        examples = sizes.double().to(peers.device)
        peer_examples = examples[index] * exists  # [K, m]
        total = examples + peer_examples.sum(dim=1)
        weight, peer_weights = examples / total, peer_examples / total.unsqueeze(1)
        for name in params:
            if name in sent and (names is None or name in names):
                params[name] = _average(
                    params[name], models.params[name], index, weight, peer_weights
                )
        for name in buffers if names is None else ():
            if name in sent_buffers:
                # a counter of batches has no mean
                merge = _average if buffers[name].is_floating_point() else _elementwise_max
                buffers[name] = merge(
                    buffers[name], models.buffers[name], index, weight, peer_weights
                )
    return ModelState(params, buffers)


def _average(
    own: Tensor, peers: Tensor, index: Tensor, weight: Tensor, peer_weights: Tensor
) -> Tensor:
    """own, peers: [K, ...]; index, peer_weights: [K, m]; weight: [K]"""
    shape = (-1, *(1,) * (own.dim() - 1))
    result = weight.to(own).reshape(shape) * own
    # peers one after the other: no copy of m models for every client
    for column in range(index.shape[1]):
        result = result + peer_weights[:, column].to(own).reshape(shape) * peers[index[:, column]]
    return result


def _elementwise_max(
    own: Tensor, peers: Tensor, index: Tensor, weight: Tensor, peer_weights: Tensor
) -> Tensor:
    """As `_average`; a peer of weight 0 is left out."""
    result = own
    for column in range(index.shape[1]):
        counts = (peer_weights[:, column] > 0).reshape(-1, *(1,) * (own.dim() - 1))
        result = torch.where(counts, torch.maximum(result, peers[index[:, column]]), result)
    return result


def count_peers(averages: tuple[PeerAverage, ...], clients: int) -> Tensor:
    """How often each client uses the model of each other one in these averages. -> [K, K] int64"""
    counts = torch.zeros(clients, clients + 1, dtype=torch.int64)
    for peers, _ in averages:
        index = torch.where(peers >= 0, peers, clients).cpu()  # the last column: no peer
        counts.scatter_add_(1, index, torch.ones_like(index))
    return counts[:, :clients]


def count_peer_bytes(
    task: TrainingTask, averages: tuple[PeerAverage, ...], candidates: Tensor
) -> dict[str, int]:
    """Bytes between real machines.

    A candidate sends its whole model and what the method sends besides. The first average uses the
    candidates' models as they were sent; of the other peers, and in later averages, each one sends
    the parameters that are averaged.

    Args:
        task: Names what is communicated.
        averages: One after the other.
        candidates: [K, m]; -1: none.
    """
    extra = peer_selection(task)[1].extra_bytes * task.info.num_clients
    total = int((candidates >= 0).sum()) * (_model_bytes(task, None) + extra)
    for number, (peers, names) in enumerate(averages):
        sends = peers >= 0
        if number == 0:
            sends = sends & ~(peers.unsqueeze(2) == candidates.unsqueeze(1)).any(dim=2)
        total += int(sends.sum()) * _model_bytes(task, names)
    return {"bytes_up": total, "bytes_down": total}


def _model_bytes(task: TrainingTask, names: tuple[str, ...] | None) -> int:
    """Bytes of what clients send of these parameters; None: of all, and of the buffers."""
    initial, sent = task.model.initial, task.communicated_params()
    params = [name for name in sent if names is None or name in names]
    buffers = task.communicated_buffers() if names is None else ()
    return pytree.nbytes(pytree.select_keys(initial.params, params)) + pytree.nbytes(
        pytree.select_keys(initial.buffers, buffers)
    )
