"""How a site handles messages. Everything that leaves a site is made in this file.

    ping      -> the site's name, its clients, how many examples each of them has
    train     -> trained parameters and what the method declares; client state stays on this disk
    score     -> counts of correct and wrong predictions, protected as the site's policy demands
    personal  -> the same counts for the clients' personal models, which stay at the site

A site that declines a message, or cannot handle it, responds with a code and a reason. What
follows from the message alone is checked first, and its errors are sent in full; of an error that
is raised once the site reads its own files, only a code is sent (`refusals.py`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from remanence.config import Experiment, parse_experiment
from remanence.core import pytree
from remanence.core.declarations import REPLY, RESPONSE_HEADER
from remanence.core.engine import ClientWork
from remanence.core.errors import InputError
from remanence.core.pytree import Tree
from remanence.core.types import ModelState, Reply
from remanence.engines.table import make_engine
from remanence.experiment.build import check_names
from remanence.flower.array_codec import as_arrays, as_tree
from remanence.flower.experiment_check import NamesFileOrCode, check_experiment
from remanence.flower.policy import check_evaluation, check_method, privatize_counts
from remanence.flower.refusals import Declined, decline, refuse
from remanence.flower.settings import SiteFile
from remanence.flower.site_data import SiteTask, build_site_task
from remanence.flower.site_storage import SiteStorage
from remanence.flower.site_work import check_clients, make_work, read_model
from remanence.flower.wire import WireArrays, WireMessage, digest_of
from remanence.rounds import personalization
from remanence.training.server_step import local_models
from remanence.training.task import PERSONAL

logger = logging.getLogger("remanence")
MAX_TASKS = 2  # experiments whose data stay in memory
Handler = Callable[[dict[str, Any], WireArrays], WireMessage]


class Site:
    """Handles one message after the other."""

    def __init__(self, file: SiteFile):
        self.file, self.policy, self.folder = file, file.settings.policy, file.make_state()
        self.tasks: dict[str, SiteTask] = {}

    def answer(self, request: WireMessage) -> WireMessage:
        """Handle a message.

        Returns:
            The response; never raises, because errors are responses too.
        """
        begin = time.perf_counter()
        try:
            response = self.handle(request)
        except Exception as error:
            response = refuse(error, request.header.get("kind"))
        response = decline_undeclared(response)
        response.header.setdefault("request", digest_of(request.header, request.arrays))
        response.header.update(
            site=self.file.settings.name,
            clients_here=list(self.file.clients),
            seconds=time.perf_counter() - begin,
        )
        return response

    def handle(self, request: WireMessage) -> WireMessage:
        """Handle a message at the site itself: errors are raised."""
        kind = request.header.get("kind")
        handlers: dict[Any, Handler] = {
            "ping": self._ping,
            "train": self._train,
            "score": self._score,
            "personal": self._score_personal,
        }
        if not isinstance(kind, str) or kind not in handlers:
            raise Declined("malformed", f"this site cannot handle a message of kind {kind!r}")
        return handlers[kind](request.header, request.arrays)

    def _ping(self, header: dict[str, Any], arrays: WireArrays) -> WireMessage:
        site_task = self._task(header)
        info = {
            "kind": "site_info",
            "simulated": site_task.simulated,
            "sizes": site_task.sizes(list(self.file.clients)),
            "evaluates": self.policy.evaluate,
        }
        return WireMessage(info, {})

    def _train(self, header: dict[str, Any], arrays: WireArrays) -> WireMessage:
        site_task, storage = self._task(header), self._storage(header)
        round = int(header["round"])
        digest = digest_of(header, arrays)
        stored = storage.find_reply(round, digest)
        if stored is not None:
            logger.info("round %d: a repeated request gets the stored reply", round)
            return stored
        storage.check_round(round)
        work = make_work(self.file, site_task, storage, header, arrays)
        chunks = Reply.concat(list(site_task.engine.train(work)))
        replies = chunks.select(torch.argsort(chunks.client))
        if site_task.task.is_stateful:
            started_from = zip(header["clients"], header["state_rounds"], strict=True)
            for position, (client, start_round) in enumerate(started_from):
                state = pytree.take(replies.client_state, position)
                storage.store(int(client), round, state, int(start_round))
        trained: Tree = {
            "params": replies.params,
            "buffers": replies.buffers,
            "payload": replies.payload,
            "weight": replies.weight,
            "loss": replies.loss,
        }
        counts: WireArrays = {}
        if header["validate"] and self.policy.evaluate:
            counts = self._validate(site_task, work, replies)
        reply = WireMessage(
            {
                "kind": "trained",
                "round": round,
                "clients": replies.client.tolist(),
                "request": digest,
            },
            as_arrays(trained) | counts,
        )
        storage.store_reply(round, digest, reply)
        logger.info("round %d: trained clients %s", round, header["clients"])
        return reply

    def _score(self, header: dict[str, Any], arrays: WireArrays) -> WireMessage:
        check_evaluation(self.policy)
        site_task = self._task(header)
        models = read_model(as_tree(arrays, "models", site_task.task.info.device))
        which = np.array(header["which"], dtype=np.int64)
        owners = np.array(header["owners"], dtype=np.int64)
        check_clients(owners.tolist(), self.file.clients)
        split = str(header["split"])
        if split not in ("train", "valid", "test") or (split == "test" and site_task.simulated):
            raise Declined("malformed", f"this site has no {split!r} examples of its own")
        return self._counts(site_task, models, which, owners, split, int(header["time_step"]))

    def _score_personal(self, header: dict[str, Any], arrays: WireArrays) -> WireMessage:
        """Make personal models as `personalization.make_models` does, from the states that the
        header names, and score them.
        """
        check_evaluation(self.policy)
        site_task = self._task(header)
        work = make_work(self.file, site_task, self._storage(header), header, arrays)
        personal = work.client_state.get(PERSONAL, {})
        models = ModelState(
            *(
                pytree.broadcast(tree, len(work.clients)) | personal.get(kind, {})
                for kind, tree in work.start._asdict().items()
            )
        )
        finetune_task = personalization.finetune_task(site_task.task)
        if finetune_task is not None:
            state = {name: tree for name, tree in work.client_state.items() if name != PERSONAL}
            finetune_work = work._replace(start=models, per_client_start=True, client_state=state)
            engine = make_engine("sequential", finetune_task)
            tuned = Reply.concat(list(engine.train(finetune_work)))
            models = ModelState(models.params | tuned.params, models.buffers | tuned.buffers)
        one_each = np.arange(len(work.clients))
        return self._counts(site_task, models, one_each, work.clients, "valid", work.time_step)

    def _validate(self, site_task: SiteTask, work: ClientWork, replies: Reply) -> WireArrays:
        """Counts of the trained models on validation examples. Sent with the reply, they save a
        message for methods that need them in every round.
        """
        models = local_models(work.start, replies, stacked=work.per_client_start)
        one_each = np.arange(len(work.clients))
        counts = self._counts(site_task, models, one_each, work.clients, "valid", work.time_step)
        return {f"valid/{name}": array for name, array in counts.site_arrays.items()}

    def _counts(
        self,
        site_task: SiteTask,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int,
    ) -> WireMessage:
        """Score models and apply the site's policy to the counts."""
        scores = site_task.engine.score_pairs(models, which, owners, split, time_step)
        confusion, loss = privatize_counts(
            self.policy, scores.confusion.numpy(), scores.loss.numpy()
        )
        return WireMessage({"kind": "counts"}, {"confusion": confusion, "loss": loss})

    def _task(self, header: dict[str, Any]) -> SiteTask:
        """The experiment at this site, built once and kept, if the policy allows its method. Every
        message contains the experiment, because any of them may be the first that the site
        receives.
        """
        key = _experiment_digest(header)
        if key not in self.tasks:
            config = self._read_experiment(header)
            site_task = build_site_task(self.file, config, header["examples"])
            while len(self.tasks) >= MAX_TASKS:
                self.tasks.pop(next(iter(self.tasks))).engine.close()
            self.tasks[key] = site_task
        check_method(self.policy, self.tasks[key].task)
        return self.tasks[key]

    def _read_experiment(self, header: dict[str, Any]) -> Experiment:
        """The experiment of a message. Nothing is opened or built yet, so an error follows from
        the experiment alone and its text may be sent.
        """
        try:
            config = parse_experiment(header["experiment"])
            check_experiment(config, self.policy.code)
            check_names(config)
        except NamesFileOrCode as error:
            raise Declined("policy", str(error)) from None
        except InputError as error:
            raise Declined("setup", str(error)) from None
        return config

    def _storage(self, header: dict[str, Any]) -> SiteStorage:
        return SiteStorage(self.folder, str(header.get("run")), _experiment_digest(header))


def _experiment_digest(header: dict[str, Any]) -> str:
    content = [header.get("experiment"), header.get("examples")]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def decline_undeclared(response: WireMessage) -> WireMessage:
    """The response, or a decline if one of its fields does not declare what it reveals."""
    roots = {name.partition(pytree.SEPARATOR)[0] for name in response.arrays}
    unknown = sorted(set(response.header) - set(RESPONSE_HEADER)) + sorted(roots - set(REPLY))
    if not unknown:
        return response
    logger.error("not sent: the field %s does not declare what it reveals", unknown[0])
    return decline("failed", "a field of the response is not declared")
