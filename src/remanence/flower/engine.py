"""The engine `flower`: sites train their clients, the coordinator collects the replies.

A site receives the model, the broadcast, the round and its key, and for every client the round
whose state it starts from. It sends the trained parameters and the payload. Batches are planned at
the site. In methods without a server the coordinator forwards the peers' models, so it can read
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remanence.core.engine import ClientWork, ConfusionCounts, PairCounts, Rejection
from remanence.core.errors import InputError
from remanence.core.types import ModelState, Reply
from remanence.engines.base import BaseEngine
from remanence.engines.sequential import SequentialEngine
from remanence.flower.array_codec import as_arrays, as_tree
from remanence.flower.node_registry import Node
from remanence.flower.remote_scoring import RemoteScorer
from remanence.flower.session import ReplyWait, RequestResult, Session
from remanence.flower.site_work import MAX_ROUND
from remanence.flower.wire import WireMessage
from remanence.flower.work_header import work_header
from remanence.training.state import NO_STATE, REMOTE
from remanence.training.task import TrainingTask


class FlowerEngine(BaseEngine):
    """Sends work to the sites of a session. Nothing is sent before the first call."""

    name = "flower"

    def __init__(self, task: TrainingTask, session: Session):
        super().__init__()
        self.task, self.session = task, session
        self.declined: list[Rejection] = []
        self.scorer = RemoteScorer(task, session)
        # for the coordinator's own test set and public set
        self.local_engine = SequentialEngine(task)
        # these methods use validation counts in every round, so the counts come with the reply
        self.validate_with_training = task.method.part_filling("peers") is not None

    def train(self, work: ClientWork) -> Iterator[Reply]:
        declined = self.session.registry.declined()
        self.declined = [Rejection(client, *reason) for client, reason in declined.items()]
        messages, unavailable = self._training_messages(work)
        self.declined += [
            Rejection(client, "away", "its site is not connected") for client in unavailable
        ]
        wait = self._reply_wait(len(work.clients))
        for result in self.session.request("train", messages, f"round {work.round}", wait):
            reply = self._read_reply(result, work)
            if reply is not None:
                yield reply

    def pop_declined(self) -> list[Rejection]:
        """Clients of the last round that did not reply, with reasons; clears the list."""
        declined, self.declined = self.declined, []
        return declined

    def _training_messages(
        self, work: ClientWork
    ) -> tuple[list[tuple[Node, tuple[int, ...], WireMessage]], list[int]]:
        """One message for each node with clients of this round, and the unavailable clients."""
        shared_arrays = as_arrays({"broadcast": work.broadcast})
        if not work.per_client_start:
            shared_arrays |= as_arrays({"start": work.start._asdict()})
        messages = []
        groups, unavailable = self.session.registry.group_by_node(work.clients)
        for node, positions in groups:
            site_arrays = {}
            if work.per_client_start:
                index = torch.from_numpy(positions).to(self.task.info.device)
                site_arrays = as_arrays({"start": work.start.select(index)._asdict()})
            header = work_header(work, positions) | {"validate": self.validate_with_training}
            message = self.session.make_message("train", header, site_arrays, shared_arrays)
            messages.append((node, tuple(work.clients[positions].tolist()), message))
        return messages, unavailable

    def _reply_wait(self, num_clients: int) -> ReplyWait:
        session, deadline = self.session, self.session.deadline
        seconds = (
            deadline.seconds if math.isfinite(deadline.seconds) else session.timeouts.reply_timeout
        )
        enough = min(
            math.ceil(deadline.share * num_clients - 1e-9), session.target_replies or num_clients
        )
        return ReplyWait(seconds, enough if enough < num_clients else 0)

    def _read_reply(self, result: RequestResult, work: ClientWork) -> Reply | None:
        """A site's response as a `Reply`. A response in a wrong format is rejected here, wrong
        contents are rejected by the gate.
        """
        clients, message = result.request.clients, result.message
        if message is None:
            self._reject(clients, result.code, result.reason)
            return None
        header, device = message.header, self.task.info.device
        if header.get("clients") != list(clients):  # a site replies for its own clients only
            reason = "its site replied for other clients than requested"
            self._reject(clients, "unknown-client", reason)
            return None
        try:
            numbers: dict[str, Any] = {
                name: torch.from_numpy(np.array(array)).to(device)
                for name, array in _numbers(message, len(clients)).items()
            }
            trained: dict[str, Any] = {
                kind: as_tree(message.arrays, kind, device)
                for kind in ("params", "buffers", "payload")
            }
        except (KeyError, ValueError, TypeError) as error:
            reason = f"its response is not a reply ({type(error).__name__})"
            self._reject(clients, "malformed", reason)
            return None
        number = header.get("round")
        round = number if type(number) is int and 0 <= number < MAX_ROUND else NO_STATE
        rounds = torch.full((len(clients),), round, device=device)
        reply = Reply(
            client=torch.tensor(clients, device=device),
            round=rounds,
            client_state={REMOTE: {"round": rounds}} if self.task.is_stateful else {},
            **numbers,
            **trained,
        )
        self.scorer.cache_counts(result, reply, work.time_step)
        return reply

    def _reject(self, clients: tuple[int, ...], code: str, reason: str) -> None:
        self.declined += [Rejection(client, code, reason) for client in clients]
        self.session.log(f"clients {', '.join(map(str, clients))}: {reason} ({code})")

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        if split == "public" or (split == "test" and self.session.has_test):
            return self.local_engine.score(models, split, owners, time_step)
        clients = np.flatnonzero(self.session.registry.available()) if owners is None else owners
        count = models.num_models
        which, repeated = np.repeat(np.arange(count), len(clients)), np.tile(clients, count)
        scores = self.scorer.score_pairs(models, which, repeated, split, time_step, use_cache=False)
        confusion = scores.confusion.reshape(count, len(clients), *scores.confusion.shape[1:])
        loss = scores.loss.reshape(count, len(clients))
        if owners is not None:
            return ConfusionCounts(confusion, loss)
        return ConfusionCounts(confusion.sum(dim=1, keepdim=True), loss.sum(dim=1, keepdim=True))

    def score_pairs(
        self,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int = 0,
        examples: bool = False,
    ) -> PairCounts:
        if examples:
            raise InputError(
                "record.examples stores predictions for single examples, and these never leave"
                " a site: turn it off"
            )
        if split != "test":
            return self.scorer.score_pairs(models, which, owners, split, time_step)
        if self.session.has_test:
            return self.local_engine.score_pairs(models, which, owners, split, time_step)
        # one concept: the test examples of all sites together
        pooled = self.score(models.select(torch.from_numpy(which)), "test")
        return PairCounts(pooled.confusion[:, 0], pooled.loss[:, 0])

    def score_personal(self, work: ClientWork) -> PairCounts:
        return self.scorer.score_personal(work)

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        return self.local_engine.predict_logits(models, ids)

    def close(self) -> None:
        self.local_engine.close()


def _numbers(message: WireMessage, clients: int) -> dict[str, np.ndarray]:
    """The weight and the loss of each client. The loss is NaN where the site withholds it, and
    nowhere else may it be missing.
    """
    arrays, withheld = message.arrays, message.header.get("withheld")
    hidden = isinstance(withheld, list) and "loss" in withheld
    loss = np.full(clients, np.nan) if hidden else arrays["loss"]
    return {"weight": arrays["weight"], "loss": loss}
