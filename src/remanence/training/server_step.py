"""The server's half of a round: from the clients' replies to the next global model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from remanence.aggregators.mean import apply_delta, mean, size_weights
from remanence.core import pytree
from remanence.core.compose import BoundHook, ComposedMethod, check_pair
from remanence.core.contexts import ServerContext
from remanence.core.engine import Engine
from remanence.core.errors import AggregationFailed
from remanence.core.pytree import Params, Tree
from remanence.core.remote_params import RemoteParams
from remanence.core.rng import Key
from remanence.core.slots import Aggregate
from remanence.core.types import ModelState, Reply
from remanence.training.server_training import make_server_ops
from remanence.training.task import PERSONAL, TrainingTask

# The random stream of each server-side function, by slot. The words are part of the random keys:
# they never change. Both halves of an aggregation have the same stream.
STREAMS = {
    "broadcast": ("share",),
    "client_weights": ("server", "weigh"),
    "aggregate": ("server", "combine"),
    "server_update": ("server", "apply"),
    "server_train": ("server", "refine"),
    "update_server_state": ("server", "absorb"),
}
FIT_STREAM = ("server", "fit")  # of the batches in which `server_train` trains


@dataclass(frozen=True)
class Server:
    """A global model and the server's state."""

    model: ModelState
    state: Tree  # by part


@dataclass(frozen=True)
class ServerResult:
    """What the server computed in a round."""

    server: Server
    # the model after aggregation and before server-side training; the same object as the server's
    # model if the method does not train at the server
    merged: ModelState
    weights: Tensor  # [k] float64 on the device, summing to 1


def init_server(task: TrainingTask) -> Server:
    """The server before the first round."""
    initial = task.model.initial
    state = {
        part.name: part.server_state(initial, task.info)
        for part in task.method.parts
        if part.server_state is not None
    }
    return Server(initial, pytree.to(state, task.info.device))


def make_broadcast(task: TrainingTask, server: Server, round: int, key: Key) -> Tree:
    """What the server sends to the clients besides the model, by part."""
    srv = _make_context(task, server, round, 0, key.fold_in(*STREAMS["broadcast"]))
    return {hook.name: hook(srv) for hook in task.method.hooks("broadcast")}


def update(
    task: TrainingTask,
    server: Server,
    replies: Reply,
    round: int,
    key: Key,
    optimizer_hparams: dict[str, float],
    engine: Engine,
    discount: Tensor | None = None,
) -> ServerResult:
    """Aggregate replies and update the global model.

    Args:
        task: The run's task.
        server: The server before the round.
        replies: The accepted replies of k clients.
        round: The number of the round, from 1.
        key: The round's randomness.
        optimizer_hparams: The clients' learning rate and so on in this round.
        engine: Evaluates models on the public set, if the method trains at the server.
        discount: [k] the factor of each reply's weight, whatever gives the weights; None: 1.

    Returns:
        The server after the round, with the weights of the replies.

    Raises:
        AggregationFailed: If the weights or the new model are not finite.
    """
    method, state = task.method, dict(server.state)

    def context(slot: str) -> ServerContext:
        current, stream = replace(server, state=state), key.fold_in(*STREAMS[slot])
        return _make_context(task, current, round, replies.num_clients, stream)

    weights = _client_weights(task, replies, discount, context("client_weights"))
    aggregate = aggregator_of(method)
    total = _partial_sum(aggregate, weights, replies, context("aggregate"))
    delta = aggregate.finalize(total, context("aggregate"))
    update_hook = method.hook("server_update")
    if update_hook is None:
        params = apply_delta(server.model.params, delta)
    else:
        returned = update_hook(server.model.params, delta, context("server_update"))
        params, changed = check_pair(update_hook, "server_update", returned, "parameters, state")
        _check_names(update_hook, "server_update", params, server.model.params)
        state[update_hook.name] = _check_state(update_hook, "server_update", changed, state)
    merge_buffers = aggregate.buffers or average_buffers
    merged = ModelState(params, merge_buffers(server.model.buffers, replies.buffers, weights))
    model = merged
    if method.hook("server_train") is not None:
        srv = context("server_train")
        model = _train_at_server(task, server, merged, replies, key, optimizer_hparams, engine, srv)
    for state_hook in method.hooks("update_server_state"):
        changed = state_hook(replies, context("update_server_state"))
        state[state_hook.name] = _check_state(state_hook, "update_server_state", changed, state)
    _check_finite(model, server.model)
    return ServerResult(Server(model, state), merged, weights)


def aggregator_of(method: ComposedMethod) -> Aggregate:
    """The method's aggregation, each half bound to its own part's state; FedAvg's mean if no part
    brings one.
    """
    part = method.part_filling("aggregate")
    if part is None or part.aggregate is None:
        return mean
    return part.aggregate._replace(
        partial=BoundHook(part, part.aggregate.partial),
        finalize=BoundHook(part, part.aggregate.finalize),
    )


def _client_weights(
    task: TrainingTask, replies: Reply, discount: Tensor | None, srv: ServerContext
) -> Tensor:
    """The replies' weights, summing to 1. -> [k] float64 on the device"""
    hook = task.method.hook("client_weights")
    raw = size_weights(replies, srv) if hook is None else _check_weights(hook(replies, srv))
    if discount is not None:
        raw = raw.double() * discount.to(raw.device)
    return _normalize(raw).to(task.info.device)


def _train_at_server(
    task: TrainingTask,
    server: Server,
    merged: ModelState,
    replies: Reply,
    key: Key,
    optimizer_hparams: dict[str, float],
    engine: Engine,
    srv: ServerContext,
) -> ModelState:
    """The aggregated model after the method's `server_train` hook."""
    hook = task.method.hook("server_train")
    assert hook is not None
    complete = partial(local_models, server.model, personal=False)

    def train(engine: Engine) -> ModelState:
        fit_key = key.fold_in(*FIT_STREAM)
        ops = make_server_ops(task, optimizer_hparams, fit_key, engine, complete)
        model: ModelState = hook(merged, server.model, replies, ops, srv)
        return model

    # runs that share an engine use it one at a time
    return engine.run_exclusive(train)


def _partial_sum(aggregate: Aggregate, weights: Tensor, replies: Reply, srv: ServerContext) -> Tree:
    """The first half of an aggregation, computed here or on the workers that hold the models."""
    remote = replies.params
    if aggregate.is_decomposable and isinstance(remote, RemoteParams):
        return remote.store.partial_sum(remote.shard, remote.index, weights, srv)
    return aggregate.partial(weights, replies, srv)


def _check_weights(raw: Tensor) -> Tensor:
    """Raise unless a part's weights [k] are valid. The gate has checked the replies' own."""
    on_host = raw.double().cpu()
    if (
        not bool(torch.isfinite(on_host).all())
        or bool((on_host < 0).any())
        or float(on_host.sum()) <= 0
    ):
        raise AggregationFailed(
            "the clients' weights are not numbers of at least 0 with a positive sum"
        )
    return raw


def _check_state(hook: BoundHook, slot: str, changed: Tree, state: Tree) -> Tree:
    """A part's new state; raises unless it has the entries of the old one, in the same shapes and
    dtypes, as checkpoints need it.
    """
    old = pytree.flatten(state.get(hook.name, {}))
    _check_names(hook, slot, changed, old)
    for path, value in pytree.flatten(changed).items():
        before = old[path]
        if value.shape != before.shape or value.dtype != before.dtype:
            was, now = (
                f"{tuple(before.shape)} {before.dtype}",
                f"{tuple(value.shape)} {value.dtype}",
            )
            raise TypeError(f"{hook.name}: {slot} changes {path} of its state from {was} to {now}")
    return changed


def _check_names(hook: BoundHook, slot: str, new: Tree, old: Params) -> None:
    """Raise unless a function at the server returns exactly the entries of what it replaces, which
    is given with one level of names.
    """
    returned, wanted = set(pytree.flatten(new)), set(old)
    if returned != wanted:
        path = sorted(returned ^ wanted)[0]
        problem = "does not return" if path in wanted else "returns, without having received it,"
        raise TypeError(
            f"{hook.name}: {slot} {problem} {path}: return all entries, changed or not, such as"
            " params | changed"
        )


def _check_finite(model: ModelState, before: ModelState) -> None:
    """Raise if a parameter or a new buffer is NaN or infinite. On a GPU the host waits here for the
    aggregation.
    """
    # a buffer that is never sent may hold infinity, such as a mask
    new = {name: x for name, x in model.buffers.items() if x is not before.buffers[name]}
    if not bool(pytree.finite({"params": model.params, "buffers": new}, 1).all()):
        raise AggregationFailed("the new model holds NaN or infinity")


def _normalize(raw: Tensor) -> Tensor:
    """Weights that sum to one. raw: [k] -> [k] float64"""
    raw = raw.double()
    return raw / raw.sum()


def average_buffers(current: Params, sent: Params, weights: Tensor) -> Params:
    """The weighted mean of the clients' buffers; counters take the largest value.

    Args:
        current: The server's buffers, which keep the values of those that did not travel.
        sent: The clients' buffers, [k, ...].
        weights: [k], summing to 1.
    """
    averaged = {
        name: pytree.weighted_sum(weights, {name: value})[name]
        if value.is_floating_point()
        else value.amax(dim=0)
        for name, value in sent.items()
    }
    return current | averaged


def local_models(
    start: ModelState, replies: Reply, *, stacked: bool = False, personal: bool = True
) -> ModelState:
    """The clients' complete models, stacked: what they sent, and what did not travel.

    Args:
        start: The model that the clients started from.
        replies: The clients' replies.
        stacked: Whether `start` is a stack with one model for each client.
        personal: Whether the clients' personal parameters and buffers are included. A server
            never has them.
    """
    complete = (
        start
        if stacked
        else ModelState(
            pytree.broadcast(start.params, replies.num_clients),
            pytree.broadcast(start.buffers, replies.num_clients),
        )
    )
    own = replies.client_state.get(PERSONAL, {}) if personal else {}
    return ModelState(
        complete.params | replies.params | own.get("params", {}),
        complete.buffers | replies.buffers | own.get("buffers", {}),
    )


def _make_context(
    task: TrainingTask, server: Server, round: int, num_replies: int, key: Key
) -> ServerContext:
    return ServerContext(
        round, server.model, num_replies, server.state, task.hparam_tensors(), key, task.info
    )
