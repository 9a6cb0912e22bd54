"""The engine `flower`: sites train their clients and count what models get right, and the
coordinator asks them.

Down goes the model, what the server shares, the round and its key, and the round whose state every
client is to start from; up comes what was trained and what the method declares. Batches are planned
at the site. Without a server, models of peers are relayed: the coordinator passes them on and could
read them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.engine import ClientWork, ConfusionCounts, PairCounts, Rejection
from remanence.core.errors import InputError
from remanence.core.pytree import Params
from remanence.core.types import ModelState, Reply
from remanence.engines.base import BaseEngine
from remanence.engines.sequential import SequentialEngine
from remanence.flower.array_codec import as_arrays, as_tree
from remanence.flower.node_registry import Node
from remanence.flower.session import ReplyWait, RequestResult, current_session
from remanence.flower.wire import WireMessage
from remanence.training.state import NO_STATE, REMOTE
from remanence.training.task import TrainingTask

# no run has as many; a number beyond what a tensor holds would be an error, not a refusal
LARGEST_ROUND = 1 << 40


class CachedCounts(NamedTuple):
    """A client's model and its counts on the client's validation rows."""

    time_step: int
    params: Params
    buffers: Params
    confusion: torch.Tensor  # [1, C, C]
    loss: torch.Tensor  # [1]


class FlowerEngine(BaseEngine):
    """Needs a session: see `session.hold`. Nothing is sent before there is something to do."""

    name = "flower"

    def __init__(self, task: TrainingTask):
        super().__init__()
        self.task, self.session = task, current_session()
        self.excuses: list[Rejection] = []
        self.desk = SequentialEngine(task)  # for the coordinator's own test set and public set
        # such methods go by validation rows in every round
        self.validates = task.method.part_filling("peers") is not None
        # by client: counts that came with its last models
        self.told: dict[int, list[CachedCounts]] = defaultdict(list)

    # ---------------------------------------------------------------------------------------- train

    def train(self, work: ClientWork) -> Iterator[Reply]:
        session, common = self.session, as_arrays({"shared": work.broadcast})
        self.excuses = [
            Rejection(client, *why) for client, why in session.roster.declined().items()
        ]
        if not work.per_client_start:
            common |= as_arrays({"start": work.start._asdict()})
        questions: list[tuple[Node, tuple[int, ...], WireMessage]] = []
        lost: list[int] = []
        for node, places in self._by_site(work.clients, lost):
            own = (
                work.start.select(torch.from_numpy(places).to(self.task.info.device))
                if work.per_client_start
                else None
            )
            mine = {} if own is None else as_arrays({"start": own._asdict()})
            parcel = session.message(
                "train", describe_work(work, places) | {"validate": self.validates}, mine, common
            )
            questions.append((node, tuple(work.clients[places].tolist()), parcel))
        self.excuses += [Rejection(client, "away", "its site is not connected") for client in lost]
        for outcome in session.ask(
            "train", questions, f"round {work.round}", self._wait(len(work.clients))
        ):
            reply = self._read_reply(outcome, work)
            if reply is not None:
                yield reply

    def pop_declined(self) -> list[Rejection]:
        """Clients of the last round that do not reply, and why; told once."""
        told, self.excuses = self.excuses, []
        return told

    def _wait(self, asked: int) -> ReplyWait:
        session, deadline = self.session, self.session.deadline
        seconds = (
            deadline.seconds if math.isfinite(deadline.seconds) else session.timeouts.reply_timeout
        )
        enough = min(math.ceil(deadline.share * asked - 1e-9), session.wanted or asked)
        return ReplyWait(seconds, enough if enough < asked else 0)

    def _read_reply(self, outcome: RequestResult, work: ClientWork) -> Reply | None:
        """A site's answer as a reply; what does not even have the form of one is refused here,
        everything else by the gate.
        """
        asked, parcel = outcome.request.clients, outcome.message
        if parcel is None:
            return self._reject(asked, outcome.code, outcome.reason)
        about, device = parcel.header, self.task.info.device
        if about.get("clients") != list(asked):  # nobody answers for another site's clients
            return self._reject(
                asked, "unknown-client", "its site answered for other clients than it was asked for"
            )
        try:
            numbers: dict[str, Any] = {
                name: torch.from_numpy(np.array(parcel.arrays[name])).to(device)
                for name in ("weight", "loss")
            }
            trained: dict[str, Any] = {
                kind: as_tree(parcel.arrays, kind, device)
                for kind in ("params", "buffers", "payload")
            }
        except (KeyError, ValueError, TypeError) as error:
            return self._reject(
                asked, "malformed", f"its answer is not a reply ({type(error).__name__})"
            )
        said = about.get("round")
        rounds = torch.full(
            (len(asked),),
            said if type(said) is int and 0 <= said < LARGEST_ROUND else NO_STATE,
            device=device,
        )
        own = {REMOTE: {"round": rounds}} if self.task.is_stateful else {}
        reply = Reply(
            client=torch.tensor(asked, device=device),
            round=rounds,
            client_state=own,
            **numbers,
            **trained,
        )
        self._cache(outcome, reply, work.time_step)
        return reply

    def _reject(self, clients: tuple[int, ...], code: str, reason: str) -> Reply | None:
        self.excuses += [Rejection(client, code, reason) for client in clients]
        self.session.log(f"clients {', '.join(map(str, clients))}: {reason} ({code})")
        return None

    def _cache(self, outcome: RequestResult, reply: Reply, time_step: int) -> None:
        """Counts on validation rows that came with the models."""
        counts = _read_counts(outcome, reply.num_clients, self.task.info.num_classes, "valid/")
        whole = all(
            x.dim() and len(x) == reply.num_clients
            for x in pytree.leaves({"params": dict(reply.params), "buffers": reply.buffers})
        )
        if counts is None or not whole:  # the gate has not seen it yet
            return
        confusion, loss = counts
        for place, client in enumerate(outcome.request.clients):
            params, buffers = (
                pytree.take(dict(reply.params), place),
                pytree.take(reply.buffers, place),
            )
            judged = CachedCounts(
                time_step, params, buffers, confusion[place : place + 1], loss[place : place + 1]
            )
            self.told[client] = [*self.told[client][-1:], judged]

    def _lookup(
        self, models: ModelState, number: int, owner: int, time_step: int
    ) -> CachedCounts | None:
        """What a site has told of this very model before."""
        for judged in self.told.get(owner, ()):
            same = all(
                torch.equal(models.params[name][number], value)
                for name, value in judged.params.items()
            )
            if (
                judged.time_step == time_step
                and same
                and all(
                    torch.equal(models.buffers[name][number], x)
                    for name, x in judged.buffers.items()
                )
            ):
                return judged
        return None

    # ---------------------------------------------------------------------------------------- count

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        if split == "public" or (split == "test" and self.session.has_test):
            return self.desk.score(models, split, owners, time_step)
        many = models.num_models
        clients = np.flatnonzero(self.session.roster.present()) if owners is None else owners
        which, asked = np.repeat(np.arange(many), len(clients)), np.tile(clients, many)
        scores = self._score_at_sites(models, which, asked, split, time_step)
        confusion = scores.confusion.reshape(many, len(clients), *scores.confusion.shape[1:])
        loss = scores.loss.reshape(many, len(clients))
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
                "record.examples keeps what models say of single examples, which never leaves"
                " a site: turn it off"
            )
        if split == "test":
            if self.session.has_test:
                return self.desk.score_pairs(models, which, owners, split, time_step)
            # one concept: the sites' test rows together
            pooled = self.score(models.select(torch.from_numpy(which)), "test")
            return PairCounts(pooled.confusion[:, 0], pooled.loss[:, 0])
        told = (
            [
                self._lookup(models, number, owner, time_step)
                for number, owner in zip(which, owners, strict=True)
            ]
            if split == "valid"
            else []
        )
        known = np.array(
            [judged is not None for judged in told] or np.zeros(len(which)), dtype=bool
        )
        scores = self._score_at_sites(models, which[~known], owners[~known], split, time_step)
        if not known.any():
            return scores
        confusion, loss = (
            scores.confusion.new_zeros(len(which), *scores.confusion.shape[1:]),
            scores.loss.new_zeros(len(which)),
        )
        asked = torch.from_numpy(~known)
        confusion[asked], loss[asked] = scores.confusion, scores.loss
        confusion[~asked] = torch.cat([judged.confusion for judged in told if judged is not None])
        loss[~asked] = torch.cat([judged.loss for judged in told if judged is not None])
        return PairCounts(confusion, loss)

    def score_personal(self, work: ClientWork) -> PairCounts:
        """Personal models are made, evaluated and kept at the sites."""
        common = as_arrays({"start": work.start._asdict(), "shared": work.broadcast})
        questions = [
            (
                node,
                places,
                self.session.message("personal", describe_work(work, places), {}, common),
            )
            for node, places in self._by_site(work.clients)
        ]
        return self._count(questions, work.clients, len(work.clients))

    def _score_at_sites(
        self, models: ModelState, which: np.ndarray, owners: np.ndarray, split: str, time_step: int
    ) -> PairCounts:
        questions = []
        for node, places in self._by_site(owners):
            # no site needs the models of the others
            used, local = np.unique(which[places], return_inverse=True)
            some = models.select(torch.from_numpy(used).to(self.task.info.device))
            about = {
                "split": split,
                "time_step": time_step,
                "which": local.tolist(),
                "owners": owners[places].tolist(),
            }
            questions.append(
                (
                    node,
                    places,
                    self.session.message("score", about, as_arrays({"models": some._asdict()})),
                )
            )
        return self._count(questions, owners, len(which))

    def _count(
        self, questions: list[tuple[Node, np.ndarray, WireMessage]], owners: np.ndarray, pairs: int
    ) -> PairCounts:
        """Ask sites for counts; where none come, they are 0, as for a client without rows."""
        classes = self.task.info.num_classes
        confusion, loss = (
            torch.zeros(pairs, classes, classes, dtype=torch.int64),
            torch.zeros(pairs, dtype=torch.float64),
        )
        places_of = {id(parcel): places for _, places, parcel in questions}
        asked = [
            (node, tuple(sorted(set(owners[places].tolist()))), parcel)
            for node, places, parcel in questions
            if node.evaluates
        ]
        for outcome in self.session.ask(
            "evaluate", asked, "counts", ReplyWait(self.session.timeouts.reply_timeout)
        ):
            places = places_of[id(outcome.request.message)]
            counts = _read_counts(outcome, len(places), classes)
            if counts is None:
                reason = outcome.reason or "its counts are not counts"
                self.session.log(
                    f"no counts of clients {', '.join(map(str, outcome.request.clients))}:"
                    f" {reason} ({outcome.code or 'malformed'})"
                )
                continue
            confusion[torch.from_numpy(places)], loss[torch.from_numpy(places)] = counts
        return PairCounts(confusion, loss)

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        return self.desk.predict_logits(models, ids)

    def close(self) -> None:
        self.desk.close()

    def _by_site(
        self, clients: np.ndarray, lost: list[int] | None = None
    ) -> list[tuple[Node, np.ndarray]]:
        """Places 0 .. n-1 by the node their client lives at; `lost` is told of clients that
        live nowhere.
        """
        places: dict[int, list[int]] = defaultdict(list)
        homes: dict[int, Node] = {}
        for place, client in enumerate(clients.tolist()):
            node = self.session.roster.node_of(client)
            if node is not None:
                homes[node.number] = node
                places[node.number].append(place)
            elif lost is not None:
                lost.append(client)
        return [(homes[number], np.array(mine, dtype=np.int64)) for number, mine in places.items()]


def describe_work(work: ClientWork, places: np.ndarray) -> dict[str, Any]:
    """What a site is told of a work besides models, for the clients at these places."""
    tags = pytree.flatten(work.client_state).get(f"{REMOTE}{pytree.SEPARATOR}round")
    return {
        "round": work.round,
        "time_step": work.time_step,
        "clients": work.clients[places].tolist(),
        "from": [NO_STATE] * len(places)
        if tags is None
        else tags[torch.from_numpy(places).to(tags.device)].tolist(),
        "personal_start": work.per_client_start,
        "rule": {name: float(value) for name, value in work.optimizer_hparams.items()},
        "key": work.key.value,
        "phases": work.num_phases,
    }


def _read_counts(
    outcome: RequestResult, pairs: int, classes: int, prefix: str = ""
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Counts from a stranger: whole numbers of at least 0 in the right shape, and finite losses."""
    if outcome.message is None:
        return None
    confusion, loss = (outcome.message.arrays.get(prefix + name) for name in ("confusion", "loss"))
    if confusion is None or loss is None or confusion.dtype != np.int64 or loss.dtype != np.float64:
        return None
    if (
        confusion.shape != (pairs, classes, classes)
        or loss.shape != (pairs,)
        or (confusion < 0).any()
        or not np.isfinite(loss).all()
    ):
        return None
    return torch.from_numpy(confusion.copy()), torch.from_numpy(loss.copy())
