"""What comes back in a round: what a good reply looks like, what is said of it in the log, how
many bytes travelled.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from remanence.core import pytree
from remanence.core.engine import ClientWork, Rejection
from remanence.core.types import Reply
from remanence.experiment.build import BuiltExperiment
from remanence.training.reply_schema import ReplySchema


def find_nonresponders(
    asked: np.ndarray, replies: Reply | None, refusals: list[Rejection]
) -> list[int]:
    """Who was asked and neither answered nor was refused: an engine gave up waiting for it."""
    heard = {refusal.client for refusal in refusals} | (
        set() if replies is None else set(replies.client.tolist())
    )
    return [client for client in asked.tolist() if client not in heard]


def reply_metrics(
    replies: Reply | None, refusals: list[Rejection], silent: list[int]
) -> dict[str, Any]:
    """What a line says of what came back."""
    return {
        "train_loss": None
        if replies is None
        else finite_or_none(float(replies.loss.double().mean())),
        "replies": 0 if replies is None else replies.num_clients,
        "rejected": [{"client": r.client, "code": r.code, "reason": r.reason} for r in refusals],
        "payload": {} if replies is None else mean_payload_scalars(replies),
        **({"no_response": silent} if silent else {}),
    }


def mean_payload_scalars(replies: Reply) -> dict[str, float | None]:
    """What the clients sent as single numbers, averaged: so a method's own measure can be
    followed over rounds.
    """
    single = {
        name: x.double().mean()
        for name, x in pytree.flatten(replies.payload).items()
        if x.dim() == 1
    }
    return {
        name.replace(pytree.SEPARATOR, "."): finite_or_none(float(x)) for name, x in single.items()
    }


def reply_schema(experiment: BuiltExperiment, job: ClientWork) -> ReplySchema:
    """What a good reply looks like."""
    task = experiment.task
    return ReplySchema(
        round=job.round,
        clients=tuple(int(client) for client in job.clients),
        params=pytree.select_keys(task.model.initial.params, task.communicated_params()),
        buffers=pytree.select_keys(task.model.initial.buffers, task.communicated_buffers()),
        payload=task.payload_spec(),
        weight_cap=float(experiment.config.round.weight_cap),
        max_norm=float(experiment.config.round.max_norm) or math.inf,
        start=job.start,
        stacked=job.per_client_start,
        client_state=pytree.take(job.client_state, 0) if len(job.clients) else None,
    )


def count_bytes(
    experiment: BuiltExperiment, job: ClientWork, replies: Reply | None, refused: int
) -> dict[str, int]:
    """What would travel between real machines: down the model and what is shared, up what was
    trained and the extras.
    """
    task = experiment.task
    initial = task.model.initial
    model = pytree.nbytes(
        pytree.select_keys(initial.params, task.communicated_params())
    ) + pytree.nbytes(pytree.select_keys(initial.buffers, task.communicated_buffers()))
    down = len(job.clients) * (model + pytree.nbytes(job.broadcast))
    number_of_examples = 8
    up = ((0 if replies is None else replies.num_clients) + refused) * (
        model + pytree.nbytes(task.payload_spec()) + number_of_examples
    )
    return {"bytes_up": up, "bytes_down": down}


def finite_or_none(value: float) -> float | None:
    """A number as JSON can hold it."""
    return float(value) if np.isfinite(value) else None
