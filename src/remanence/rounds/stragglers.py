"""Who answers in time: over-selection, deadlines, and what becomes of those who are late. Time
is simulated, so that the same clients are late everywhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from remanence.core.engine import ClientWork
from remanence.core.types import Reply
from remanence.engines.client_plan import expected_steps
from remanence.experiment.build import BuiltExperiment
from remanence.experiment.system import (
    merge_stale,
    on_time_mask,
    rebase_stale,
    response_times,
    round_duration,
    rounds_late,
)
from remanence.training.state import RunState, StaleReply


class StragglerSplit(NamedTuple):
    """The outcome of waiting for the answers of a round."""

    replies: Reply | None  # what the server uses: in time, or late from earlier rounds
    stale: tuple[StaleReply, ...]  # what is still under way
    extra_metrics: dict[str, Any]  # for the line about the round


def split_stragglers(
    experiment: BuiltExperiment, state: RunState, job: ClientWork, replies: Reply | None
) -> StragglerSplit:
    """Divide the answers of a round into those in time and those late; without slow clients and
    deadlines everybody is in time.
    """
    spec, task = experiment.config.round, experiment.task
    if not experiment.has_stragglers:
        return StragglerSplit(replies, (), {})
    steps = expected_steps(task, job)
    times = response_times(job.clients, steps, experiment.seconds, job.key)
    limit = experiment.deadline(times)
    used = on_time_mask(times, experiment.cohort_size, limit)
    length = round_duration(times, used, experiment.cohort_size, limit)
    told = {"invited": len(job.clients), "late": int((~used).sum()), "simulated_seconds": length}
    if replies is None:
        return StragglerSplit(None, state.stale, told)
    place = np.searchsorted(job.clients, replies.client.cpu().numpy())
    in_time = replies.select(_index(used[place], replies)) if used[place].any() else None
    if spec.late == "discard":
        return StragglerSplit(in_time, (), told)
    delays = rounds_late(times, length)
    waiting = list(state.stale)
    for number in np.flatnonzero(~used[place]).tolist():
        one = replies.select(slice(number, number + 1))
        waiting.append(StaleReply(one, job.start, job.round + max(1, int(delays[place[number]]))))
    arrived = [late for late in waiting if late.arrival_round <= job.round]
    for late in arrived:
        in_time = merge_stale(
            in_time,
            rebase_stale(late.reply, late.base_model, job.start, job.round, float(spec.staleness)),
        )
    return StragglerSplit(
        in_time,
        tuple(late for late in waiting if late.arrival_round > job.round),
        told | {"stale_used": len(arrived)},
    )


def late_mask(experiment: BuiltExperiment, job: ClientWork) -> tuple[np.ndarray, dict[str, Any]]:
    """Who misses the deadline of a round without a server, where every client waits for itself
    alone. -> [k] bool, what the line says of it
    """
    if not experiment.has_stragglers or not len(job.clients):
        return np.zeros(len(job.clients), dtype=bool), {}
    times = response_times(
        job.clients, expected_steps(experiment.task, job), experiment.seconds, job.key
    )
    limit = experiment.deadline(times)
    late = times > limit
    return late, {
        "invited": len(job.clients),
        "late": int(late.sum()),
        "simulated_seconds": float(min(limit, times.max())),
    }


def _index(mask: np.ndarray, replies: Reply) -> torch.Tensor:
    return torch.from_numpy(np.flatnonzero(mask)).to(replies.client.device)
