"""The server's half of a round: weigh, combine, apply, refine, absorb."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from remanence.aggregators.mean import apply_delta, mean, size_weights
from remanence.core import pytree
from remanence.core.compose import BoundHook, ComposedMethod
from remanence.core.engine import Engine
from remanence.core.errors import AggregationFailed
from remanence.core.pytree import Params, Tree
from remanence.core.remote_params import RemoteParams
from remanence.core.rng import Key
from remanence.core.slots import Aggregate, ServerContext
from remanence.core.types import ModelState, Reply
from remanence.training.server_training import make_server_ops
from remanence.training.task import PERSONAL, TrainingTask


@dataclass(frozen=True)
class Server:
    """A global model and what the server remembers, by part."""

    model: ModelState
    state: Tree


@dataclass(frozen=True)
class ServerResult:
    """A round at the server, with the model at each moment."""

    server: Server
    # after aggregation, before refinement; the server's model itself where nothing refines
    merged: ModelState
    weights: Tensor  # [k] float64 on the device, summing to 1


def init_server(task: TrainingTask) -> Server:
    """The server before the first round."""
    start = task.model.initial
    state = {
        p.name: p.server_state(start, task.info)
        for p in task.method.parts
        if p.server_state is not None
    }
    return Server(start, pytree.to(state, task.info.device))


def make_broadcast(task: TrainingTask, server: Server, round: int, key: Key) -> Tree:
    """What goes down to the clients besides the model."""
    srv = _context(task, server.model, server.state, round, key.fold_in("share"))
    return {hook.name: hook(srv) for hook in task.method.hooks("broadcast")}


def update(
    task: TrainingTask,
    server: Server,
    replies: Reply,
    round: int,
    key: Key,
    rule: dict[str, float],
    engine: Engine,
) -> ServerResult:
    """From replies to the next global model; `engine` does what a server-side part has judged
    or trained on the public set.
    """
    method, state = task.method, dict(server.state)

    def srv(slot: str) -> ServerContext:
        return _context(task, server.model, state, round, key.fold_in("server", slot))

    weigh, combine = method.hook("client_weights"), aggregator_of(method)
    weights = _normalize(
        size_weights(replies, srv("weigh"))
        if weigh is None
        else _check_weights(weigh(replies, srv("weigh")))
    )
    weights = weights.to(task.info.device)
    delta = combine.finalize(
        _partial_sum(combine, weights, replies, srv("combine")), srv("combine")
    )
    apply_ = method.hook("server_update")
    params, changed = (apply_ or apply_delta)(server.model.params, delta, srv("apply"))
    if apply_ is not None:
        state[apply_.name] = changed
    merged = refined = ModelState(
        params, (combine.buffers or average_buffers)(server.model.buffers, replies.buffers, weights)
    )
    refine = method.hook("server_train")
    if refine is not None:
        complete = partial(local_models, server.model, seen_by_server=True)

        def work(engine: Engine) -> ModelState:
            lent = make_server_ops(task, rule, key.fold_in("server", "fit"), engine, complete)
            model: ModelState = refine(merged, server.model, replies, lent, srv("refine"))
            return model

        # runs that share an engine come to it one at a time
        refined = engine.run_exclusive(work)
    for absorb in method.hooks("update_server_state"):
        state[absorb.name] = absorb(replies, srv("absorb"))
    numbers = torch.cat([value.reshape(-1) for value in refined.params.values()])
    # the first question to the device: up to here nobody waited for it
    if not bool(torch.isfinite(numbers).all()):
        raise AggregationFailed("the new model holds NaN or infinity")
    return ServerResult(Server(refined, state), merged, weights)


def aggregator_of(method: ComposedMethod) -> Aggregate:
    """How a method's replies are combined, each half seeing its own part's state."""
    owner = method.part_filling("aggregate")
    if owner is None or owner.aggregate is None:
        return mean
    return owner.aggregate._replace(
        partial=BoundHook(owner, owner.aggregate.partial),
        finalize=BoundHook(owner, owner.aggregate.finalize),
    )


def _partial_sum(combine: Aggregate, weights: Tensor, replies: Reply, srv: ServerContext) -> Tree:
    """The first half of combining: here, or where the models lie."""
    far = replies.params
    if combine.is_decomposable and isinstance(far, RemoteParams):
        return far.store.partial_sum(far.shard, far.index, weights, srv)
    return combine.partial(weights, replies, srv)


def _check_weights(raw: Tensor) -> Tensor:
    """What a part made of the replies; at their own weights the gate has looked. raw: [k]"""
    here = raw.double().cpu()
    if not bool(torch.isfinite(here).all()) or bool((here < 0).any()) or float(here.sum()) <= 0:
        raise AggregationFailed(
            "the clients' weights are not numbers of at least 0 with a positive sum"
        )
    return raw


def _normalize(raw: Tensor) -> Tensor:
    """Weights that sum to one. raw: [k] -> [k] float64"""
    raw = raw.double()
    return raw / raw.sum()


def average_buffers(current: Params, sent: Params, weights: Tensor) -> Params:
    """Statistics are averaged like parameters; counters take the largest value."""
    averaged = {
        name: pytree.weighted_sum(weights, {name: value})[name]
        if value.is_floating_point()
        else value.amax(dim=0)
        for name, value in sent.items()
    }
    return current | averaged


def local_models(
    start: ModelState, replies: Reply, *, stacked: bool = False, seen_by_server: bool = False
) -> ModelState:
    """The clients' models as a stack, completed by what did not travel: the frozen part, and each
    client's own, which a server never sees.

    `start` is what they began with: one model for all, or `vectorized`, one for each.
    """
    whole = (
        start
        if stacked
        else ModelState(
            pytree.broadcast(start.params, replies.num_clients),
            pytree.broadcast(start.buffers, replies.num_clients),
        )
    )
    mine = {} if seen_by_server else replies.client_state.get(PERSONAL, {})
    return ModelState(
        whole.params | replies.params | mine.get("params", {}),
        whole.buffers | replies.buffers | mine.get("buffers", {}),
    )


def _context(
    task: TrainingTask, start: ModelState, state: Tree, round: int, key: Key
) -> ServerContext:
    return ServerContext(round, start, state, task.hparam_tensors(), key, task.info)
