"""The replies of a round: train, check, and describe them for metrics.jsonl."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.engine import ClientWork, Engine, Rejection
from remanence.core.pytree import Params
from remanence.core.remote_params import RemoteParams
from remanence.core.types import Reply
from remanence.experiment.build import BuiltExperiment
from remanence.training import gate
from remanence.training.reply_schema import ReplySchema


class CheckedReplies(NamedTuple):
    """What came of a round's local training."""

    valid: Reply | None  # in the order of clients
    rejected: list[Rejection]  # replies that the gate has rejected
    declined: list[Rejection]  # clients without a reply, and why: the engine names them

    @property
    def rejections(self) -> list[Rejection]:
        return sorted(self.rejected + self.declined)

    @property
    def num_sent(self) -> int:
        """How many clients sent a reply, valid or not."""
        return len(self.rejected) + (0 if self.valid is None else self.valid.num_clients)


def train_clients(experiment: BuiltExperiment, engine: Engine, work: ClientWork) -> CheckedReplies:
    """Train the clients of a round, apply attacks to their replies, and reject invalid ones."""
    # `engine.train` returns an iterator: clients train while the gate asks for the next reply
    chunks = (
        experiment.adversary.tamper_replies(engine.train(work), work) if len(work.clients) else []
    )
    valid, rejected = gate.validate_replies(chunks, reply_schema(experiment, work))
    return CheckedReplies(valid, rejected, engine.pop_declined())


def find_unmoved(replies: Reply | None, work: ClientWork) -> set[int]:
    """Clients whose valid reply has exactly the parameters that they received: their local
    training changed nothing.
    """
    if replies is None or not replies.params:
        return set()
    if isinstance(replies.params, RemoteParams):
        unmoved = (replies.params.update_norm == 0).tolist()
    else:
        unmoved = _unmoved_mask(replies.params, replies.client, work).tolist()
    return {client for client, still in zip(replies.client.tolist(), unmoved, strict=True) if still}


def _unmoved_mask(params: Params, clients: torch.Tensor, work: ClientWork) -> torch.Tensor:
    """[k] bool. Small tensors are compared first: one that differs decides for its client."""
    device = next(iter(params.values())).device
    unmoved = torch.ones(len(clients), dtype=torch.bool, device=device)
    position = {client: place for place, client in enumerate(work.clients.tolist())}
    places = torch.tensor([position[client] for client in clients.tolist()], device=device)
    for name, value in sorted(params.items(), key=lambda item: item[1].numel()):
        start = work.start.params[name]
        start = start[places] if work.per_client_start else start.unsqueeze(0)
        unmoved &= (value == start).reshape(len(clients), -1).all(dim=1)
        if not bool(unmoved.any()):
            break
    return unmoved


def find_nonresponders(invited: np.ndarray, checked: CheckedReplies) -> list[int]:
    """Clients of the round that neither replied nor were rejected: the engine gave up waiting."""
    known = {rejection.client for rejection in checked.rejections}
    if checked.valid is not None:
        known |= set(checked.valid.client.tolist())
    return [client for client in invited.tolist() if client not in known]


def reply_metrics(
    replies: Reply | None, rejections: list[Rejection], no_response: list[int]
) -> dict[str, Any]:
    """The columns of metrics.jsonl on a round's replies."""
    losses = torch.zeros(0) if replies is None else replies.loss.double()
    loss = finite_or_none(float(losses[torch.isfinite(losses)].mean()))
    return {
        "train_loss": loss,
        "replies": 0 if replies is None else replies.num_clients,
        "rejected": [{"client": r.client, "code": r.code, "reason": r.reason} for r in rejections],
        "payload": {} if replies is None else mean_payload_scalars(replies),
        **({"no_response": no_response} if no_response else {}),
    }


def mean_payload_scalars(replies: Reply) -> dict[str, float | None]:
    """The mean of each payload that is a single number, so that a method's own measure can be
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


def reply_schema(experiment: BuiltExperiment, work: ClientWork) -> ReplySchema:
    """What a valid reply looks like."""
    task = experiment.task
    return ReplySchema(
        round=work.round,
        clients=tuple(int(client) for client in work.clients),
        params=pytree.select_keys(task.model.initial.params, task.communicated_params()),
        buffers=pytree.select_keys(task.model.initial.buffers, task.communicated_buffers()),
        payload=task.payload_spec(),
        weight_cap=float(experiment.config.round.weight_cap),
        max_norm=float(experiment.config.round.max_norm) or math.inf,
        start=work.start,
        stacked=work.per_client_start,
        client_state=pytree.take(work.client_state, 0) if len(work.clients) else None,
    )


def count_bytes(experiment: BuiltExperiment, work: ClientWork, num_sent: int) -> dict[str, int]:
    """Bytes between real machines: down the model and the broadcast, up the trained model and
    the payload.

    Args:
        experiment: Names what is communicated.
        work: Of the round.
        num_sent: Clients of the round that sent a reply, whenever it arrives and whether or not it
            is used.
    """
    task = experiment.task
    initial = task.model.initial
    model = pytree.nbytes(
        pytree.select_keys(initial.params, task.communicated_params())
    ) + pytree.nbytes(pytree.select_keys(initial.buffers, task.communicated_buffers()))
    down = len(work.clients) * (model + pytree.nbytes(work.broadcast))
    number_of_examples = 8
    up = num_sent * (model + pytree.nbytes(task.payload_spec()) + number_of_examples)
    return {"bytes_up": up, "bytes_down": down}


def finite_or_none(value: float) -> float | None:
    """The value as JSON can hold it."""
    return float(value) if np.isfinite(value) else None
