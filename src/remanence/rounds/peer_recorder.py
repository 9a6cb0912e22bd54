"""What a run without a server writes down: every client's model on its own concept, and who
listened to whom.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from remanence.core.engine import Engine, PairCounts
from remanence.core.types import ModelState
from remanence.experiment.build import BuiltExperiment
from remanence.results.ledger import HEARD, PEERS_AT_MOST, SIMILARITY, peers_type
from remanence.results.run import EXAMPLES, PEERS
from remanence.results.summary import summarize
from remanence.rounds.recorder import NOT_EVALUATED, Writer
from remanence.training.state import ClientModels, RunState


class PeerRecorder(Writer):
    """Evaluates what the spec asks for where every client has a model of its own, and appends it.

    The model that counts is a client's best on its validation rows; it is tested on every concept,
    and the line speaks of the client's own one.
    """

    def __init__(self, folder: Path, experiment: BuiltExperiment, committed: dict[str, int]):
        self.clients = experiment.task.info.num_clients
        names = (
            *((PEERS,) if self.clients <= PEERS_AT_MOST else ()),
            *((EXAMPLES,) if experiment.config.record.examples else ()),
        )
        super().__init__(folder, experiment, committed, names)

    def after(
        self,
        engine: Engine,
        state: RunState,
        line: dict[str, Any],
        heard: Tensor,
        moments: dict[str, ModelState],
        answered: np.ndarray,
    ) -> dict[str, Any]:
        """-> the line for the test split, as it was written.

        heard: [K, K], how often k listened to j in this round; moments: all clients' models in the
            course of it; answered: who trained
        """
        assert state.client_models is not None
        place: dict[str, Any] = {"round": state.round, "time_step": state.time_step}
        line = line | {"same_cluster_share": self._share_of_own_cluster(state, heard)}
        if not self.should_evaluate(state.round):
            return self.write_metrics(
                {**place, "model": "personal", "split": "test", **NOT_EVALUATED, **line}
            )
        if len(answered):
            self._write_moments(engine, state, moments, answered, place)
        self._write_peers(state, place)
        written = self._write_best(engine, state, state.client_models, place, line)
        if "valid" in self.splits:
            everybody = np.arange(self.clients)
            scores = engine.score_pairs(
                state.client_models.best, everybody, everybody, "valid", state.time_step
            )
            summary = summarize(scores.confusion.sum(dim=0).numpy(), float(scores.loss.sum()))
            self.write_metrics({**place, "model": "personal", "split": "valid", **summary, **line})
        return written

    def _write_best(
        self,
        engine: Engine,
        state: RunState,
        crowd: ClientModels,
        place: dict[str, Any],
        line: dict[str, Any],
    ) -> dict[str, Any]:
        scores = engine.score(crowd.best, "test")  # [K, concepts]
        confusion, loss = scores.confusion.numpy(), scores.loss.numpy()
        for client, concept in np.ndindex(*loss.shape):
            columns = place | {
                "moment": "personal",
                "split": "test",
                "model": client,
                "owner": self.concept_id(concept),
            }
            self.write_counts(
                confusion[client, concept],
                float(loss[client, concept]),
                **columns,
                weight=1 / self.clients,
            )
        own, everybody = self.population.at(state.time_step).cluster, np.arange(self.clients)
        mine, lost = confusion[everybody, own], loss[everybody, own]
        rows = mine.sum(axis=(1, 2))
        accuracy = np.trace(mine, axis1=1, axis2=2) / rows
        # every client counts the same, however many test rows its concept has
        summary = summarize((mine / rows[:, None, None]).mean(axis=0), float((lost / rows).mean()))
        worst = np.sort(accuracy)[: max(1, self.clients // 10)]
        spread = {
            "worst_client": float(accuracy.min()),
            "bottom_decile": float(worst.mean()),
            "spread": float(accuracy.std()),
        }
        honest = np.ones(self.clients)
        # what attackers do to themselves is no success
        honest[self.experiment.adversary.clients] = 0.0
        success = self.attack_success(crowd.best, honest / max(honest.sum(), 1.0))
        return self.write_metrics(
            {**place, "model": "personal", "split": "test", **summary, **spread, **success, **line}
        )

    def _write_moments(
        self,
        engine: Engine,
        state: RunState,
        moments: dict[str, ModelState],
        answered: np.ndarray,
        place: dict[str, Any],
    ) -> None:
        """The models of those that trained, on their own concepts and, where asked for, on
        every training row.
        """
        concept = self.population.at(state.time_step).cluster[answered]
        for moment, models in moments.items():
            if self.spec.record.local:
                scores = engine.score_pairs(models, answered, concept, "test", state.time_step)
                self._write_pairs(scores, answered, concept, place | {"moment": moment})
            if self.spec.record.examples:
                examined = engine.score_pairs(
                    models, answered, answered, "train", state.time_step, examples=True
                )
                self.write_examples(examined.examples, answered, **place, moment=moment)

    def _write_pairs(
        self, scores: PairCounts, clients: np.ndarray, concepts: np.ndarray, columns: dict[str, Any]
    ) -> None:
        for number, (client, concept) in enumerate(
            zip(clients.tolist(), concepts.tolist(), strict=True)
        ):
            confusion, loss = scores.confusion[number].numpy(), float(scores.loss[number])
            owner, share = self.concept_id(concept), 1 / len(clients)
            self.write_counts(
                confusion, loss, **columns, split="test", model=client, owner=owner, weight=share
            )

    def _share_of_own_cluster(self, state: RunState, heard: Tensor) -> float | None:
        """Of all that was heard, what came from the listener's own cluster; None where nobody
        listened.
        """
        cluster, total = self.population.at(state.time_step).cluster, int(heard.sum())
        alike = cluster[:, None] == cluster[None, :]
        return float((heard.numpy() * alike).sum() / total) if total else None

    def _write_peers(self, state: RunState, place: dict[str, Any]) -> None:
        if PEERS not in self.files:
            return
        assert state.client_models is not None
        tables = [(HEARD, state.client_models.peer_counts.numpy())]
        owner = self.experiment.task.method.part_filling("peers")
        if owner is not None and owner.peers is not None and owner.peers.similarity:
            table = state.client_models.peers[owner.name][owner.peers.similarity]
            tables.append((SIMILARITY, table.cpu().numpy()))
        for kind, values in tables:
            record = np.zeros(1, dtype=peers_type(self.clients))
            record["round"], record["time_step"], record["kind"], record["values"] = (
                place["round"],
                place["time_step"],
                kind,
                values,
            )
            self.files[PEERS].write(record.tobytes())
