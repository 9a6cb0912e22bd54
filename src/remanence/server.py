"""The server's half of a round: weigh, combine, apply, refine, absorb."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from remanence import trees
from remanence.aggregators.mean import mean, move, weigh_by_size
from remanence.compose import Scoped
from remanence.data.batches import plan_batches
from remanence.keys import Key
from remanence.local import PERSONAL, Task, differentiate_plain, weighted_mean
from remanence.trees import Params, Tree
from remanence.types import Batch, Combine, Context, Facts, Forward, Output, Reply, ServerContext, Start


@dataclass(frozen=True)
class Server:
    """A global model and what the server remembers, by part."""

    model: Start
    state: Tree


@dataclass(frozen=True)
class Update:
    """A round at the server, with the model at each moment."""

    server: Server
    merged: Start  # after aggregation, before refinement; the server's model itself where nothing refines
    weights: Tensor  # [k] float64, summing to 1


def found(task: Task) -> Server:
    """The server before the first round."""
    start = task.model.initial
    state = {p.name: p.server(start, task.world) for p in task.method.parts if p.server is not None}
    return Server(start, trees.to(state, task.world.device))


def share(task: Task, server: Server, round: int, key: Key) -> Tree:
    """What goes down to the clients besides the model."""
    srv = _context(task, server.model, server.state, round, key.fold("share"))
    return {hook.name: hook(srv) for hook in task.method.many("share")}


class Unusable(Exception):
    """Replies that passed the gate one by one do not make a model together; the round is abandoned."""


def update(task: Task, server: Server, replies: Reply, round: int, key: Key, rule: dict[str, float]) -> Update:
    """From replies to the next global model."""
    method, state = task.method, dict(server.state)

    def srv(slot: str) -> ServerContext:
        return _context(task, server.model, state, round, key.fold("server", slot))

    weights = _normalise((method.one("weigh") or weigh_by_size)(replies, srv("weigh")))
    owner = method.owner("combine")
    combine = mean if owner is None or owner.combine is None else Combine(*(Scoped(owner, half) for half in owner.combine))
    delta = combine.finish(combine.partial(weights.to(task.world.device), replies, srv("combine")), srv("combine"))
    apply_ = method.one("apply")
    params, changed = (apply_ or move)(server.model.params, delta, srv("apply"))
    if apply_ is not None:
        state[apply_.name] = changed
    merged = refined = Start(params, average_buffers(server.model.buffers, replies.buffers, weights))
    refine = method.one("refine")
    if refine is not None:
        refined = refine(merged, server.model, replies, lend_fit(task, rule, key.fold("server", "fit")), srv("refine"))
    for absorb in method.many("absorb"):
        state[absorb.name] = absorb(replies, srv("absorb"))
    if not all(bool(torch.isfinite(value).all()) for value in refined.params.values()):
        raise Unusable("the new model holds NaN or infinity")
    return Update(Server(refined, state), merged, weights)


def _normalise(raw: Tensor) -> Tensor:
    """Weights that sum to one. raw: [k] -> [k] float64 on the host"""
    raw = raw.double().cpu()
    if not bool(torch.isfinite(raw).all()) or bool((raw < 0).any()) or float(raw.sum()) <= 0:
        raise Unusable("the clients' weights are not numbers of at least 0 with a positive sum")
    return raw / raw.sum()


def average_buffers(current: Params, sent: Params, weights: Tensor) -> Params:
    """Statistics are averaged like parameters; counters take the largest value."""
    averaged = {
        name: trees.weighted_sum(weights, {name: value})[name] if value.is_floating_point() else value.amax(dim=0)
        for name, value in sent.items()
    }
    return current | averaged


def local_models(start: Start, replies: Reply) -> Start:
    """The clients' models as a stack, completed by what did not travel: the frozen part, and each client's own."""
    whole, mine = Start(trees.expand(start.params, replies.k), trees.expand(start.buffers, replies.k)), replies.own.get(PERSONAL, {})
    return Start(whole.params | replies.params | mine.get("params", {}), whole.buffers | replies.buffers | mine.get("buffers", {}))


def lend_fit(task: Task, rule: dict[str, float], key: Key) -> Any:
    """Training on the server's public set, with the clients' optimiser and batch size."""
    calls = itertools.count()

    def fit(model: Start, loss: Callable[[Output, Batch, Forward], Tensor], *, epochs: int = 1) -> Start:
        here, names = key.fold("call", next(calls)), task.sent_names()
        params, buffers = trees.restrict(model.params, names), model.buffers
        fixed = {name: value for name, value in model.params.items() if name not in names}
        slots, plan = task.optimiser.init(params), plan_batches(here.fold("plan"), len(task.public), task.batch, epochs=epochs)
        numbers, device = task.tensors(rule), task.world.device
        for step, width in enumerate(plan.widths):
            ids = task.public[torch.from_numpy(plan.rows[step, :width])].to(device)
            step_key = here.fold("step", step).tensor().to(device)
            weight = torch.ones(int(width), dtype=task.world.dtype, device=device)
            batch = Batch(task.train.augmented(ids, step_key), task.train.labels(ids), weight, ids)

            def forward(other: Start, x: Tensor | None = None, batch: Batch = batch) -> Output:
                with torch.no_grad():
                    return task.model.judge_rows(other, batch.x if x is None else x)

            def objective(
                params: Params, batch: Batch = batch, buffers: Params = buffers, step_key: Tensor = step_key, forward: Any = forward
            ) -> tuple[Tensor, Tree]:
                out, new = task.model.apply({**fixed, **params}, buffers, batch.x, step_key)
                return weighted_mean(loss(out, batch, forward), batch.weight), new

            grads, buffers = differentiate_plain(objective, params)
            params, slots = task.optimiser.step(params, grads, slots, _fit_context(task, model, numbers, step, step_key))
        return Start(model.params | params, buffers)

    return fit


def _context(task: Task, start: Start, state: Tree, round: int, key: Key) -> ServerContext:
    return ServerContext(round, start, state, task.number_tensors(), key, task.world)


def _fit_context(task: Task, start: Start, rule: dict[str, Tensor], step: int, key: Tensor) -> Context:
    """An optimiser asks only for its numbers; the server has no client and no facts."""
    nobody, zero = torch.tensor(-1), torch.tensor(step)
    return Context(nobody, zero, start, {}, {}, Facts(zero, zero), zero, zero, {}, rule, key, task.world)
