"""Scores of models on the sites' examples: the coordinator sends models, sites send counts.

Counts that a site does not send are 0, as for a client without examples. With counts that a site
has noised come no losses: they are NaN.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.engine import ClientWork, PairCounts
from remanence.core.pytree import Params
from remanence.core.types import ModelState, Reply
from remanence.flower.array_codec import as_arrays
from remanence.flower.node_registry import Node
from remanence.flower.session import ReplyWait, RequestResult, Session
from remanence.flower.wire import NOISED, WireMessage
from remanence.flower.work_header import work_header
from remanence.training.task import TrainingTask

ScoringMessage = tuple[Node, np.ndarray, WireMessage]  # node, positions of the pairs, message


class CachedCounts(NamedTuple):
    """A client's model and its counts on the client's validation examples."""

    time_step: int
    params: Params
    buffers: Params
    confusion: torch.Tensor  # [1, C, C]
    loss: torch.Tensor  # [1]


class RemoteScorer:
    """Has models evaluated at the sites, and stores the counts that were sent with replies."""

    def __init__(self, task: TrainingTask, session: Session):
        self.task, self.session = task, session
        # by client: the counts of its last two models
        self.cached_counts: dict[int, list[CachedCounts]] = defaultdict(list)

    def score_pairs(
        self,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int,
        use_cache: bool = True,
    ) -> PairCounts:
        """Score model which[i] on the examples of client owners[i].

        Args:
            models: A stack of models.
            which: Which of the models, for each pair.
            owners: Which client, for each pair.
            split: "train", "valid" or "test".
            time_step: The time step of the clients' data.
            use_cache: Use counts that were sent with the models, where there are any.
        """
        if split != "valid" or not use_cache:
            return self._score_at_sites(models, which, owners, split, time_step)
        cached = [
            self._lookup(models, number, owner, time_step)
            for number, owner in zip(which, owners, strict=True)
        ]
        missing = np.array([counts is None for counts in cached], dtype=bool)
        scores = self._score_at_sites(models, which[missing], owners[missing], split, time_step)
        found = [counts for counts in cached if counts is not None]
        if not found:
            return scores
        confusion = scores.confusion.new_zeros(len(which), *scores.confusion.shape[1:])
        loss = scores.loss.new_zeros(len(which))
        mask = torch.from_numpy(missing)
        confusion[mask], loss[mask] = scores.confusion, scores.loss
        confusion[~mask] = torch.cat([counts.confusion for counts in found])
        loss[~mask] = torch.cat([counts.loss for counts in found])
        return PairCounts(confusion, loss)

    def score_personal(self, work: ClientWork) -> PairCounts:
        """Score personal models on their owners' validation examples. The models are made at the
        sites and stay there.
        """
        shared_arrays = as_arrays({"start": work.start._asdict(), "broadcast": work.broadcast})
        messages = []
        for node, positions in self.session.registry.group_by_node(work.clients)[0]:
            header = work_header(work, positions)
            message = self.session.make_message("personal", header, {}, shared_arrays)
            messages.append((node, positions, message))
        return self._request_counts(messages, work.clients, len(work.clients))

    def cache_counts(self, result: RequestResult, reply: Reply, time_step: int) -> None:
        """Store the counts on validation examples that were sent with trained models."""
        counts = read_counts(result, reply.num_clients, self.task.info.num_classes, "valid/")
        one_per_client = all(
            x.dim() and len(x) == reply.num_clients
            for x in pytree.leaves({"params": dict(reply.params), "buffers": reply.buffers})
        )
        if counts is None or not one_per_client:  # the gate has not checked the reply yet
            return
        confusion, loss = counts
        for position, client in enumerate(result.request.clients):
            params = pytree.take(dict(reply.params), position)
            buffers = pytree.take(reply.buffers, position)
            one = slice(position, position + 1)
            entry = CachedCounts(time_step, params, buffers, confusion[one], loss[one])
            self.cached_counts[client] = [*self.cached_counts[client][-1:], entry]

    def _lookup(
        self, models: ModelState, number: int, owner: int, time_step: int
    ) -> CachedCounts | None:
        """The counts that a site has sent for exactly this model."""
        for cached in self.cached_counts.get(owner, ()):
            same_params = all(
                torch.equal(models.params[name][number], value)
                for name, value in cached.params.items()
            )
            if (
                cached.time_step == time_step
                and same_params
                and all(
                    torch.equal(models.buffers[name][number], value)
                    for name, value in cached.buffers.items()
                )
            ):
                return cached
        return None

    def _score_at_sites(
        self, models: ModelState, which: np.ndarray, owners: np.ndarray, split: str, time_step: int
    ) -> PairCounts:
        messages = []
        for node, positions in self.session.registry.group_by_node(owners)[0]:
            # each site gets only the models it needs
            used, local = np.unique(which[positions], return_inverse=True)
            selected = models.select(torch.from_numpy(used).to(self.task.info.device))
            header = {
                "split": split,
                "time_step": time_step,
                "which": local.tolist(),
                "owners": owners[positions].tolist(),
            }
            arrays = as_arrays({"models": selected._asdict()})
            message = self.session.make_message("score", header, arrays)
            messages.append((node, positions, message))
        return self._request_counts(messages, owners, len(which))

    def _request_counts(
        self, messages: list[ScoringMessage], owners: np.ndarray, pairs: int
    ) -> PairCounts:
        """Send messages to the sites that evaluate, and collect their counts."""
        classes = self.task.info.num_classes
        confusion = torch.zeros(pairs, classes, classes, dtype=torch.int64)
        loss = torch.zeros(pairs, dtype=torch.float64)
        positions_of = {id(message): positions for _, positions, message in messages}
        requests = [
            (node, tuple(sorted(set(owners[positions].tolist()))), message)
            for node, positions, message in messages
            if node.evaluates and not node.budget_spent
        ]
        wait = ReplyWait(self.session.timeouts.reply_timeout)
        for result in self.session.request("evaluate", requests, "counts", wait):
            positions = positions_of[id(result.request.message)]
            counts = read_counts(result, len(positions), classes)
            if counts is None:
                self._log_missing(result)
                continue
            confusion[torch.from_numpy(positions)], loss[torch.from_numpy(positions)] = counts
        return PairCounts(confusion, loss)

    def _log_missing(self, result: RequestResult) -> None:
        """Log why a site sent no counts; once, where it would say the same to every request."""
        node, code = result.request.node, result.code or "malformed"
        clients = ", ".join(map(str, result.request.clients))
        reason = result.reason or "its counts are not valid"
        if code == "budget":
            node.budget_spent = True
            self.session.log(
                f"site {node.name} sends no more counts in this run: {reason} ({code})"
            )
        elif code != "policy" or code not in node.logged:
            node.logged.add(code)
            self.session.log(f"no counts of clients {clients}: {reason} ({code})")


def read_counts(
    result: RequestResult, pairs: int, classes: int, prefix: str = ""
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Validate the counts in a site's response.

    Returns:
        The confusion counts and the summed losses, which are NaN where the counts are noised; None
        unless they have the right shapes and dtypes, no count is negative and every loss that was
        sent is finite.
    """
    if result.message is None:
        return None
    arrays = result.message.arrays
    confusion, loss = (arrays.get(prefix + name) for name in ("confusion", "loss"))
    if confusion is None and NOISED in arrays:
        exact, confusion, loss = False, arrays[NOISED], np.full(pairs, np.nan)
    else:
        exact = True
    if confusion is None or loss is None or confusion.dtype != np.int64 or loss.dtype != np.float64:
        return None
    if (
        confusion.shape != (pairs, classes, classes)
        or loss.shape != (pairs,)
        or (confusion < 0).any()
        or (exact and not np.isfinite(loss).all())
    ):
        return None
    return torch.from_numpy(confusion.copy()), torch.from_numpy(loss.copy())
