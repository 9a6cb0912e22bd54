"""How a site handles messages. Everything that leaves a site is made in this file.

    ping      -> the site's name, its clients, how many examples each of them has
    train     -> trained parameters and what the method declares; client state stays on this disk
    score     -> counts of correct and wrong predictions, protected as the site's policy demands
    personal  -> the same counts for the clients' personal models, which stay at the site

What of a response leaves is decided in one place, `policy.release`. A site that declines a
message, or cannot handle it, responds with a code and a reason. What follows from the message alone
is checked first, and its errors are sent in full; of an error that is raised once the site reads
its own files, only a code is sent (`refusals.py`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from remanence.config import Experiment, parse_experiment
from remanence.core import pytree
from remanence.core.engine import ClientWork
from remanence.core.errors import InputError
from remanence.core.pytree import Tree
from remanence.core.types import ModelState, Reply
from remanence.engines.table import make_engine
from remanence.experiment.build import check_names
from remanence.flower.array_codec import as_arrays, as_tree
from remanence.flower.budget import Budget
from remanence.flower.experiment_check import NamesFileOrCode, check_experiment
from remanence.flower.policy import (
    add_noise,
    check_evaluation,
    check_method,
    check_statistics,
    check_uses_counts,
    release,
    sends_exactly,
    suppress_counts,
)
from remanence.flower.refusals import Declined, refuse
from remanence.flower.settings import SiteFile
from remanence.flower.site_data import SiteTask, build_site_task
from remanence.flower.site_storage import SiteStorage
from remanence.flower.site_work import (
    check_clients,
    check_models,
    check_sizes,
    make_work,
    read_model,
)
from remanence.flower.wire import NOISED, WireArrays, WireMessage, digest_of
from remanence.rounds import personalization
from remanence.training.server_step import local_models
from remanence.training.task import PERSONAL

logger = logging.getLogger("remanence")
MAX_TASKS = 2  # experiments whose data stay in memory
Handler = Callable[[SiteTask, dict[str, Any], WireArrays], WireMessage]


class Site:
    """Handles one message after the other."""

    def __init__(self, file: SiteFile):
        self.file, self.policy, self.folder = file, file.settings.policy, file.make_state()
        self.budget = Budget(self.folder, self.policy)
        self.tasks: dict[str, SiteTask] = {}

    def answer(self, request: WireMessage) -> WireMessage:
        """Handle a message.

        Returns:
            The response; never raises, because errors are responses too.
        """
        begin, exactly = time.perf_counter(), False
        try:
            response, exactly = self.handle(request)
        except Exception as error:
            response = refuse(error, request.header.get("kind"))
        about = {
            "request": digest_of(request.header, request.arrays),
            "site": self.file.settings.name,
            "clients_here": list(self.file.clients),
            "seconds": time.perf_counter() - begin,
        }
        return release(response._replace(header=response.header | about), exactly)

    def handle(self, request: WireMessage) -> tuple[WireMessage, bool]:
        """Handle a message at the site itself: errors are raised.

        Returns:
            The response, and whether values that reveal label counts or single examples may leave
            in it.
        """
        kind = request.header.get("kind")
        handlers: dict[Any, Handler] = {
            "ping": self._ping,
            "train": self._train,
            "score": self._score,
            "personal": self._score_personal,
        }
        if not isinstance(kind, str) or kind not in handlers:
            raise Declined("malformed", f"this site cannot handle a message of kind {kind!r}")
        site_task = self._task(request.header)
        response = handlers[kind](site_task, request.header, request.arrays)
        return response, sends_exactly(self.policy, site_task.task.method)

    def _ping(self, site_task: SiteTask, header: dict[str, Any], arrays: WireArrays) -> WireMessage:
        info = {
            "kind": "site_info",
            "simulated": site_task.simulated,
            "sizes": site_task.sizes(list(self.file.clients)),
            "evaluates": self._evaluates(site_task),
        }
        return WireMessage(info, {})

    def _evaluates(self, site_task: SiteTask) -> bool:
        """Whether counts can leave for every client here, so that none are requested in vain."""
        try:
            noised = self._check_evaluation(site_task)
        except Declined:
            return False
        return not noised or self.budget.covers(self.file.clients)

    def _check_evaluation(self, site_task: SiteTask) -> bool:
        return check_evaluation(self.policy, site_task.task.method, site_task.own_statistics)

    def _train(
        self, site_task: SiteTask, header: dict[str, Any], arrays: WireArrays
    ) -> WireMessage:
        storage, round = self._storage(header), int(header["round"])
        digest = digest_of(header, arrays)
        stored = storage.find_reply(round, digest)
        if stored is not None:
            logger.info("round %d: a repeated request gets the stored reply", round)
            return stored
        storage.check_round(round)
        work = make_work(self.file, site_task, storage, header, arrays)
        clients, phases = work.clients.tolist(), work.num_phases
        check_sizes(self.policy, site_task.task, clients, work.time_step, phases)
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
        fields = {"kind": "trained", "round": round, "clients": replies.client.tolist()}
        counts: WireArrays = {}
        if header["validate"]:
            try:
                counts = self._validate(site_task, work, replies)
            except Declined as declined:
                logger.warning("round %d: no counts: %s", round, declined.reason)
                fields["withheld"] = ["valid"]
        reply = release(
            WireMessage(fields, as_arrays(trained) | counts),
            sends_exactly(self.policy, site_task.task.method),
        )
        storage.store_reply(round, digest, reply)
        logger.info("round %d: trained clients %s", round, header["clients"])
        return reply

    def _score(
        self, site_task: SiteTask, header: dict[str, Any], arrays: WireArrays
    ) -> WireMessage:
        self._check_evaluation(site_task)
        models = read_model(as_tree(arrays, "models", site_task.task.info.device))
        which = np.array(header["which"], dtype=np.int64)
        owners = np.array(header["owners"], dtype=np.int64)
        check_clients(owners.tolist(), self.file.clients)
        check_models(site_task.task, models, which, owners)
        split = str(header["split"])
        if split not in ("train", "valid", "test") or (split == "test" and site_task.simulated):
            raise Declined("malformed", f"this site has no {split!r} examples of its own")
        time_step = int(header["time_step"])
        counts = self._counts(site_task, models, which, owners, split, time_step)
        return WireMessage({"kind": "counts"}, counts)

    def _score_personal(
        self, site_task: SiteTask, header: dict[str, Any], arrays: WireArrays
    ) -> WireMessage:
        """Make personal models as `personalization.make_models` does, from the states that the
        header names, and score them.
        """
        if self._check_evaluation(site_task):
            raise Declined(
                "policy",
                "a personal model is made from training examples and stays at this site, so the"
                " noise on counts (policy.epsilon) would not cover them: set record.personal to 0",
            )
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
        counts = self._counts(site_task, models, one_each, work.clients, "valid", work.time_step)
        return WireMessage({"kind": "counts"}, counts)

    def _validate(self, site_task: SiteTask, work: ClientWork, replies: Reply) -> WireArrays:
        """Counts of the trained models on validation examples. Sent with the reply, they save a
        message for methods that need them in every round.
        """
        models = local_models(work.start, replies, stacked=work.per_client_start)
        one_each = np.arange(len(work.clients))
        counts = self._counts(site_task, models, one_each, work.clients, "valid", work.time_step)
        return {name if name == NOISED else f"valid/{name}": x for name, x in counts.items()}

    def _counts(
        self,
        site_task: SiteTask,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int,
    ) -> WireArrays:
        """Evaluate models, and return the counts that the site's policy allows. Noised ones are
        paid for before anything is computed.
        """
        noised = self._check_evaluation(site_task)
        if noised:
            self.budget.spend(Counter(owners.tolist()))
        scores = site_task.engine.score_pairs(models, which, owners, split, time_step)
        if noised:  # the losses of single examples have no bound, so no noise covers their sum
            counts = add_noise(self.policy, scores.confusion.numpy())
            return {NOISED: counts}
        confusion, loss = suppress_counts(
            self.policy, scores.confusion.numpy(), scores.loss.numpy()
        )
        return {"confusion": confusion, "loss": loss}

    def _task(self, header: dict[str, Any]) -> SiteTask:
        """The experiment at this site, built once and kept, if the policy allows its method. Every
        message contains the experiment, because any of them may be the first that the site
        receives.
        """
        if not all(isinstance(header.get(name), dict) for name in ("experiment", "examples")):
            raise Declined("malformed", "the message describes no experiment and its examples")
        key = _experiment_digest(header)
        if key not in self.tasks:
            config = self._read_experiment(header)
            site_task = build_site_task(self.file, config, header["examples"])
            while len(self.tasks) >= MAX_TASKS:
                self.tasks.pop(next(iter(self.tasks))).engine.close()
            self.tasks[key] = site_task
        site_task = self.tasks[key]
        check_method(self.policy, site_task.task)
        check_uses_counts(self.policy, site_task.task.method, site_task.uses_counts)
        check_statistics(site_task.task.method, site_task.own_statistics)
        return site_task

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
