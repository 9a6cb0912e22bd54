"""Late replies: deadlines, over-selection, and the use of replies that miss them.

Time is simulated, so that the same clients are late on every machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.engine import ClientWork
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply
from remanence.engines.client_plan import count_local_steps
from remanence.experiment.build import BuiltExperiment
from remanence.experiment.system import response_times
from remanence.training.state import RunState, StaleReply


class StragglerSplit(NamedTuple):
    """The replies of a round, split by when they arrive."""

    replies: Reply | None  # the replies that the server uses now: on time, or stale ones
    stale: tuple[StaleReply, ...]  # the replies that arrive in later rounds
    metrics: dict[str, Any]
    # [k] the factor of each reply's weight in the aggregation; None: 1
    discount: Tensor | None = None
    arrived: tuple[StaleReply, ...] = ()  # the stale ones among `replies`

    def postponed(self) -> tuple[StaleReply, ...]:
        """All stale replies, where this round uses none: those that arrived wait for the next."""
        waiting = (stale._replace(arrival_round=stale.arrival_round + 1) for stale in self.arrived)
        return (*self.stale, *waiting)


def split_stragglers(
    experiment: BuiltExperiment, state: RunState, work: ClientWork, replies: Reply | None
) -> StragglerSplit:
    """Split the replies of a round into those on time and those late.

    Without slow clients and deadlines all of them are on time. The server waits for a number of
    valid replies: rejected ones do not count. Late replies are discarded or, with
    `round.late=use`, used in the round in which they arrive.

    Args:
        experiment: Names the deadline, the number of replies and what becomes of late ones.
        state: Before the round; holds the stale replies of earlier rounds.
        work: Of the round.
        replies: The valid ones; None: there are none.
    """
    if not experiment.has_stragglers:
        return StragglerSplit(replies, (), {})
    times, deadline = _times(experiment, work.clients, work.time_step, work.key)
    replied = np.empty(0, dtype=np.int64) if replies is None else replies.client.cpu().numpy()
    position = np.searchsorted(work.clients, replied)
    first = on_time_mask(times[position], experiment.cohort_size, deadline)
    on_time = np.zeros(len(times), dtype=bool)
    on_time[position[first]] = True
    duration = round_duration(times, on_time, experiment.cohort_size, deadline)
    metrics = _metrics(len(times), ~first, duration)
    used = None if replies is None or not first.any() else _select(replies, first)
    if experiment.config.round.late == "discard":
        return StragglerSplit(used, (), metrics)
    pending = list(state.stale)
    delays = np.maximum(1, rounds_late(times, duration)[position])
    if replies is not None:
        for number in np.flatnonzero(~first).tolist():
            reply = replies.select(slice(number, number + 1))
            pending.append(StaleReply(reply, work.start, work.round + int(delays[number])))
    arrived = tuple(stale for stale in pending if stale.arrival_round <= work.round)
    for stale in arrived:
        used = merge_stale(
            used, rebase_stale(stale.reply, stale.base_model, work.start, work.round)
        )
    return StragglerSplit(
        used,
        tuple(stale for stale in pending if stale.arrival_round > work.round),
        metrics | {"stale_used": len(arrived)},
        _discounts(used, arrived, work.round, float(experiment.config.round.staleness)),
        arrived,
    )


def _discounts(
    used: Reply | None, arrived: tuple[StaleReply, ...], round: int, a: float
) -> Tensor | None:
    """The factor of each reply's weight: `staleness_weight` of its age. -> [k]; None: all are 1"""
    if used is None or not arrived:
        return None
    ages = {int(stale.reply.client): round - int(stale.reply.round) for stale in arrived}
    factors = [staleness_weight(ages.get(client, 0), a) for client in used.client.tolist()]
    return torch.tensor(factors, dtype=used.weight.dtype, device=used.weight.device)


def late_mask(
    experiment: BuiltExperiment, clients: np.ndarray, time_step: int, key: Key
) -> tuple[np.ndarray, dict[str, Any]]:
    """The clients that miss the deadline of a round without a server. -> [k] bool, metrics"""
    if not experiment.has_stragglers or not len(clients):
        return np.zeros(len(clients), dtype=bool), {}
    times, deadline = _times(experiment, clients, time_step, key)
    late = times > deadline
    return late, _metrics(len(late), late, float(min(deadline, times.max())))


def _times(
    experiment: BuiltExperiment, clients: np.ndarray, time_step: int, key: Key
) -> tuple[np.ndarray, float]:
    """When the replies of a round arrive, and its deadline, in simulated seconds."""
    task = experiment.task
    steps = count_local_steps(task, clients, time_step, task.phases)
    times = response_times(clients, steps, experiment.step_seconds, key)
    return times, experiment.deadline(times)


def _metrics(invited: int, late: np.ndarray, duration: float) -> dict[str, Any]:
    return {"invited": invited, "late": int(late.sum()), "simulated_seconds": duration}


def _select(replies: Reply, mask: np.ndarray) -> Reply:
    return replies.select(torch.from_numpy(np.flatnonzero(mask)).to(replies.client.device))


def on_time_mask(times: np.ndarray, wanted: int, deadline: float) -> np.ndarray:
    """The first `wanted` replies, as far as they meet the deadline; of equal times, the first in
    order.

    >>> on_time_mask(np.array([3.0, 1.0, 9.0, 2.0]), wanted=3, deadline=2.5).tolist()
    [False, True, False, True]

    times: [k] -> [k] bool
    """
    mask = np.zeros(len(times), dtype=bool)
    mask[np.argsort(times, kind="stable")[:wanted]] = True
    return mask & (times <= deadline)


def round_duration(times: np.ndarray, used: np.ndarray, wanted: int, deadline: float) -> float:
    """Simulated seconds of a round: until the last reply that is used; with fewer than wanted,
    until the deadline or, without one, until the last reply.

    >>> used = np.array([False, True, False])
    >>> round_duration(np.array([3.0, 1.0, 9.0]), used, wanted=2, deadline=2.5)
    2.5

    times: [k]; used: [k] bool
    """
    if not len(times):
        return 0.0
    last = float(times[used].max()) if used.any() else 0.0
    return last if used.sum() >= wanted or used.all() else min(deadline, float(times.max()))


def rounds_late(times: np.ndarray, duration: float) -> np.ndarray:
    """How many rounds late replies arrive, if all rounds take as long as this one.

    >>> rounds_late(np.array([2.0, 10.0, 10.5, 31.0]), duration=10.0).tolist()
    [0, 0, 1, 3]

    times: [k] -> [k] int64
    """
    if duration <= 0:
        return np.zeros(len(times), dtype=np.int64)
    return np.maximum(np.ceil(times / duration - 1e-9).astype(np.int64) - 1, 0)


def staleness_weight(age: int, a: float) -> float:
    """1 / (1 + age)^a: the weight of a reply that is `age` rounds old (Xie et al., "Asynchronous
    federated optimization", 2019).

    >>> staleness_weight(0, a=0.5), staleness_weight(3, a=0.5), staleness_weight(3, a=0)
    (1.0, 0.5, 1.0)
    """
    if age < 0:
        raise ValueError(f"a reply cannot be {age} rounds old")
    return float((1.0 + age) ** -a)


def rebase_stale(late: Reply, base: ModelState, now: ModelState, round: int) -> Reply:
    """Stale replies as replies of this round: the same update, applied to the current model.

    Averaged as they are, they would return the global model towards `base`.

    Args:
        late: Replies whose training began from `base`.
        base: The global model at that time.
        now: The current global model.
        round: The current round, from 1.
    """
    params = pytree.add(late.delta(base), pytree.select_keys(now.params, late.params))
    return late._replace(params=params, round=torch.full_like(late.round, round))


def merge_stale(replies: Reply | None, stale: Reply | None) -> Reply | None:
    """Replies on time and stale ones together, in the order of clients. No client has both: a
    client is not sampled before its late reply has arrived.
    """
    if replies is None or stale is None:
        return stale if replies is None else replies
    joined = Reply.concat([replies, stale])
    return joined.select(torch.argsort(joined.client))
