"""A site's answers: what it does with a message, and the only place where anything of its data
turns into something that leaves.

    hello     -> its name, its clients, how many rows each of them has train     -> trained
    parameters and what the method declares, never more; what a client keeps stays on this disk
    score     -> counts of right and wrong predictions, suppressed or noised as its policy says
    personal  -> the same counts of its clients' personal models, which never leave

A site that will not or cannot do what it is asked says so with a code and a sentence; a defect of
ours is told by its type alone: its text may hold data.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from remanence.config import Experiment, parse_experiment
from remanence.core import pytree
from remanence.core.declarations import GREETING, REPLY
from remanence.core.engine import ClientWork
from remanence.core.errors import RemanenceError
from remanence.core.pytree import Tree
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply
from remanence.engines.table import make_engine
from remanence.flower.array_codec import as_arrays, as_tree
from remanence.flower.policy import (
    Declined,
    check_code,
    check_evaluation,
    check_method,
    privatize_counts,
)
from remanence.flower.secure_noise import draw_key, fixed_stats, needs_secret_noise
from remanence.flower.settings import SiteFile
from remanence.flower.site_data import SiteTask, build_site_task
from remanence.flower.site_storage import SiteStorage
from remanence.flower.wire import WireArrays, WireMessage
from remanence.rounds import personalization
from remanence.training.server_step import Server, local_models
from remanence.training.state import NO_STATE, RunState, load_client_states
from remanence.training.task import PERSONAL
from remanence.version import __version__

log = logging.getLogger("remanence")
MAX_TASKS = 2  # experiments whose data stay in memory


class Site:
    """Answers one message after the other."""

    def __init__(self, file: SiteFile):
        self.file, self.policy, self.folder = file, file.settings.policy, file.make_state()
        self.benches: dict[str, SiteTask] = {}

    def answer(self, request: WireMessage) -> WireMessage:
        """Never raises: whatever goes wrong is an answer too."""
        about, begin = request.header, time.perf_counter()
        answers: dict[Any, Callable[[dict[str, Any], WireArrays], WireMessage]] = {
            "hello": self._ping,
            "train": self._train,
            "score": self._score,
            "personal": self._score_personal,
        }
        try:
            if about.get("kind") not in answers:
                raise Declined("malformed", f"this site does not know how to {about.get('kind')!r}")
            reply = answers[about["kind"]](about, request.arrays)
        except Declined as declined:
            log.warning("declined %s: %s (%s)", about.get("kind"), declined.reason, declined.code)
            reply = WireMessage(
                {"kind": "declined", "code": declined.code, "reason": declined.reason}, {}
            )
        except RemanenceError as error:
            log.warning("cannot %s: %s", about.get("kind"), error)
            reply = WireMessage({"kind": "declined", "code": "setup", "reason": str(error)}, {})
        except Exception as error:
            log.exception("%s failed", about.get("kind"))
            reply = WireMessage(
                {
                    "kind": "declined",
                    "code": "failed",
                    "reason": f"{type(error).__name__}; the site's own log says more",
                },
                {},
            )
        reply = _decline_undeclared(reply)
        reply.header.update(
            site=self.file.settings.name,
            clients_here=list(self.file.clients),
            seconds=time.perf_counter() - begin,
        )
        return reply

    # ----------------------------------------------------------------------------- the four answers

    def _ping(self, about: dict[str, Any], arrays: WireArrays) -> WireMessage:
        clients = list(self.file.clients)
        told = {"kind": "hello", "version": __version__, "kept": self._client_state(about)}
        bench = self._task(about)
        check_method(self.policy, bench.task)
        return WireMessage(
            {
                **told,
                "shared": bench.shared,
                "sizes": bench.sizes(clients),
                "evaluates": self.policy.evaluate,
            },
            {},
        )

    def _train(self, about: dict[str, Any], arrays: WireArrays) -> WireMessage:
        bench, memory, round = self._task(about), self._storage(about), int(about["round"])
        check_method(self.policy, bench.task)
        digest = digest_of(about, arrays)
        told = memory.find_reply(round, digest)
        if told is not None:
            log.info("round %d: this request came before, and gets the answer it got", round)
            return told
        job = self._job(bench, memory, about, arrays)
        chunks = Reply.concat(list(bench.engine.train(job)))
        replies = chunks.select(torch.argsort(chunks.client))
        for place, (client, named) in (
            enumerate(zip(about["clients"], about["from"], strict=True))
            if bench.task.is_stateful
            else ()
        ):
            memory.store(int(client), round, pytree.take(replies.client_state, place), int(named))
        up: Tree = {
            "params": replies.params,
            "buffers": replies.buffers,
            "payload": replies.payload,
        }
        numbers = {"weight": replies.weight, "loss": replies.loss}
        counts = (
            self._validate(bench, job, replies)
            if about["validate"] and self.policy.evaluate
            else {}
        )
        reply = WireMessage(
            {"kind": "trained", "round": round, "clients": replies.client.tolist()},
            as_arrays(up | numbers) | counts,
        )
        memory.store_reply(round, digest, reply)
        log.info("round %d: trained clients %s", round, about["clients"])
        return reply

    def _score(self, about: dict[str, Any], arrays: WireArrays) -> WireMessage:
        check_evaluation(self.policy)
        bench, device = self._task(about), self._task(about).task.info.device
        models = self._model(as_tree(arrays, "models", device))
        which, owners = (
            np.array(about["which"], dtype=np.int64),
            np.array(about["owners"], dtype=np.int64),
        )
        self._check_clients(owners.tolist())
        split = str(about["split"])
        if split not in ("train", "valid", "test") or (split == "test" and bench.shared):
            raise Declined("malformed", f"this site has no rows of {split!r} of its own")
        scores = bench.engine.score_pairs(models, which, owners, split, int(about["time_step"]))
        return self._label_counts(scores.confusion.numpy(), scores.loss.numpy())

    def _score_personal(self, about: dict[str, Any], arrays: WireArrays) -> WireMessage:
        """As `personalization.make_models` makes them, with the state that the coordinator names."""
        check_evaluation(self.policy)
        bench = self._task(about)
        job = self._job(bench, self._storage(about), about, arrays)
        mine = job.client_state.get(PERSONAL, {})
        models = ModelState(
            *(
                pytree.broadcast(tree, len(job.clients)) | mine.get(kind, {})
                for kind, tree in job.start._asdict().items()
            )
        )
        tuning = personalization.finetune_task(bench.task)
        if tuning is not None:
            own = {name: tree for name, tree in job.client_state.items() if name != PERSONAL}
            tuned = Reply.concat(
                list(
                    make_engine("sequential", tuning).train(
                        job._replace(start=models, per_client_start=True, client_state=own)
                    )
                )
            )
            models = ModelState(models.params | tuned.params, models.buffers | tuned.buffers)
        scores = bench.engine.score_pairs(
            models, np.arange(len(job.clients)), job.clients, "valid", job.time_step
        )
        return self._label_counts(scores.confusion.numpy(), scores.loss.numpy())

    # ------------------------------------------------------------------------------- what they need

    def _validate(self, bench: SiteTask, job: ClientWork, replies: Reply) -> WireArrays:
        """Where a method goes by validation rows, the trained models' counts on them come with
        the reply: a message less.
        """
        models = local_models(job.start, replies, stacked=job.per_client_start)
        scores = bench.engine.score_pairs(
            models, np.arange(len(job.clients)), job.clients, "valid", job.time_step
        )
        told = self._label_counts(scores.confusion.numpy(), scores.loss.numpy()).site_arrays
        return {f"valid/{name}": array for name, array in told.items()}

    def _label_counts(self, confusion: np.ndarray, loss: np.ndarray) -> WireMessage:
        shown, lost = privatize_counts(self.policy, confusion, loss)
        return WireMessage({"kind": "counts"}, {"confusion": shown, "loss": lost})

    def _task(self, about: dict[str, Any]) -> SiteTask:
        """Built once for an experiment, then kept; the experiment comes with every message,
        because any of them may be the first one here.
        """
        key = hashlib.sha256(
            json.dumps([about.get("spec"), about.get("data")], sort_keys=True).encode()
        ).hexdigest()
        if key not in self.benches:
            spec: Experiment = parse_experiment(about["spec"])
            check_code(self.policy, spec.model)
            bench = build_site_task(self.file, spec, about["data"])
            while len(self.benches) >= MAX_TASKS:
                self.benches.pop(next(iter(self.benches))).engine.close()
            self.benches[key] = bench
        return self.benches[key]

    def _storage(self, about: dict[str, Any]) -> SiteStorage:
        return SiteStorage(self.folder, str(about.get("run")))

    def _client_state(self, about: dict[str, Any]) -> dict[str, list[int]]:
        memory = self._storage(about)
        return {str(client): memory.rounds(client) for client in self.file.clients}

    def _check_clients(self, clients: list[int]) -> None:
        foreign = next((client for client in clients if client not in self.file.clients), None)
        if foreign is not None:
            raise Declined("unknown-client", f"client {foreign} does not live here")

    def _model(self, tree: Tree) -> ModelState:
        return ModelState(tree.get("params", {}), tree.get("buffers", {}))

    def _job(
        self, bench: SiteTask, memory: SiteStorage, about: dict[str, Any], arrays: WireArrays
    ) -> ClientWork:
        """The coordinator's job for the clients that live here, with what they keep and the
        facts of their data.
        """
        self._check_clients(about["clients"])
        task, clients, time_step = (
            bench.task,
            np.array(about["clients"], dtype=np.int64),
            int(about["time_step"]),
        )
        start = self._model(as_tree(arrays, "start", task.info.device))
        facts = fixed_stats(bench.experiment, memory, clients.tolist(), time_step)
        state = RunState(
            round=int(about["round"]),
            time_step=time_step,
            # what a newcomer's first state is made from
            server=Server(task.model.initial if about["personal_start"] else start, {}),
            client_states=self._cached_reply(bench, memory, about),
        )
        return ClientWork(
            round=state.round,
            time_step=time_step,
            clients=clients,
            start=start,
            per_client_start=bool(about["personal_start"]),
            broadcast=as_tree(arrays, "shared", task.info.device),
            client_state=load_client_states(
                state, replace(task, clients_remote=False), clients, facts
            ),
            stats=facts,
            optimizer_hparams={str(name): float(value) for name, value in about["rule"].items()},
            key=draw_key() if needs_secret_noise(task) else Key(int(about["key"])),
            num_phases=int(about["phases"]),
        )

    def _cached_reply(
        self, bench: SiteTask, memory: SiteStorage, about: dict[str, Any]
    ) -> dict[int, Tree]:
        """What the clients kept after the rounds that the coordinator names; who never trained
        in this run has nothing yet.
        """
        kept: dict[int, Tree] = {}
        for client, named in (
            zip(about["clients"], about["from"], strict=True) if bench.task.is_stateful else ()
        ):
            if named == NO_STATE:
                continue
            found = memory.load(int(client), int(named))
            if found is not None:
                kept[int(client)] = found
            elif not self.file.settings.restart:
                here = ", ".join(map(str, memory.rounds(int(client)))) or "none"
                raise Declined(
                    "state-lost",
                    f"what client {client} kept after round {named} is not here (rounds"
                    f" that are: {here}): bring the folder {self.folder.name} back,"
                    " or set restart = true in site.toml to begin with a first state",
                )
        return kept


def _decline_undeclared(reply: WireMessage) -> WireMessage:
    """The reply, or a refusal where it has a field of which it is not declared what it reveals."""
    roots = {name.partition(pytree.SEPARATOR)[0] for name in reply.site_arrays}
    unknown = sorted(set(reply.header) - set(GREETING)) + sorted(roots - set(REPLY))
    if not unknown:
        return reply
    log.error("not sent: the field %s does not declare what it reveals", unknown[0])
    return WireMessage(
        {"kind": "declined", "code": "failed", "reason": "a field of the reply is not declared"}, {}
    )


def digest_of(about: dict[str, Any], arrays: WireArrays) -> str:
    """What makes two requests the same."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
