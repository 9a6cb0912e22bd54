"""Evaluates the clients' models of a round without a server, and returns their counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from remanence.core.types import ModelState
from remanence.metrics.clients import accuracy_spread, bottom_decile, worst_client
from remanence.results.ledger import PEER_COUNTS, SIMILARITY
from remanence.results.summary import summarize
from remanence.rounds.evaluator import NOT_EVALUATED, Evaluator
from remanence.rounds.records import Evaluation, ModelCounts, PeerTable, Record
from remanence.training.state import ClientModels, RunState


class PeerEvaluator(Evaluator):
    """Evaluates the model of every client.

    The primary model of a client is its best one on its validation examples. It is evaluated on
    every concept; metrics.jsonl has its results on the client's own one.
    """

    def after_round(
        self,
        state: RunState,
        client_models: ClientModels,
        moments: dict[str, ModelState],
        trained: np.ndarray,
    ) -> Evaluation:
        """Evaluate a round.

        Args:
            state: After the round.
            client_models: Of this state.
            moments: All clients' models in the course of the round: before, merged, local.
            trained: The clients that trained.
        """
        columns: dict[str, Any] = {"round": state.round, "time_step": state.time_step}
        if not self.should_evaluate(state.round):
            row = {**columns, "model": "personal", "split": "test", **NOT_EVALUATED}
            return Evaluation([], [row])
        records: list[Record] = []
        if len(trained):
            for moment, models in moments.items():
                records += self._moment_records(models, trained, columns | {"moment": moment})
        records += self._peer_tables(client_models, columns)
        best, row = self._score_best(state, client_models, columns)
        rows = [row]
        if "valid" in self.splits:
            scores = self.engine.score_pairs(
                client_models.best, self.clients, self.clients, "valid", state.time_step
            )
            summary = summarize(scores.confusion.sum(dim=0).numpy(), float(scores.loss.sum()))
            rows.append({**columns, "model": "personal", "split": "valid", **summary})
        return Evaluation(records + best, rows)

    def same_cluster_share(self, time_step: int, peer_counts: Tensor) -> float | None:
        """The share of used peers that are in the client's own cluster; None where no client used
        any.

        Args:
            time_step: Of the round.
            peer_counts: [K, K], how often client k used the model of client j.
        """
        cluster, total = self.population.at(time_step).cluster, int(peer_counts.sum())
        same = cluster[:, None] == cluster[None, :]
        return float((peer_counts.numpy() * same).sum() / total) if total else None

    def _score_best(
        self, state: RunState, client_models: ClientModels, columns: dict[str, Any]
    ) -> tuple[list[Record], dict[str, Any]]:
        """The best models on every concept -> records, and the row of the test split."""
        scores = self.engine.score(client_models.best, "test")  # [K, concepts]
        confusion, loss = scores.confusion.numpy(), scores.loss.numpy()
        records: list[Record] = []
        for client, concept in np.ndindex(*loss.shape):
            place = {
                "moment": "personal",
                "split": "test",
                "model": client,
                "owner": self.concept_id(concept),
                "weight": 1 / len(self.clients),
            }
            counts = confusion[client, concept], float(loss[client, concept])
            records.append(ModelCounts(*counts, columns | place))
        own = self.population.at(state.time_step).cluster
        own_confusion, own_loss = confusion[self.clients, own], loss[self.clients, own]
        examples = own_confusion.sum(axis=(1, 2))
        accuracy = np.trace(own_confusion, axis1=1, axis2=2) / examples
        # every client has the same weight, however many test examples its concept has
        summary = summarize(
            (own_confusion / examples[:, None, None]).mean(axis=0),
            float((own_loss / examples).mean()),
        )
        spread = {
            "worst_client": worst_client(accuracy),
            "bottom_decile": bottom_decile(accuracy),
            "spread": accuracy_spread(accuracy),
        }
        honest = np.ones(len(self.clients))
        honest[self.experiment.adversary.clients] = 0.0  # an attacker's own model is no success
        success = self.attack_success(client_models.best, honest / max(honest.sum(), 1.0))
        row = {**columns, "model": "personal", "split": "test", **summary, **spread, **success}
        return records, row

    def _moment_records(
        self, models: ModelState, trained: np.ndarray, columns: dict[str, Any]
    ) -> list[Record]:
        """The models of the clients that trained, on their own concepts and, where they are
        recorded, on single training examples.
        """
        records: list[Record] = []
        if self.should_evaluate_local(columns["round"]):
            concepts = self.population.at(columns["time_step"]).cluster[trained]
            scores = self.engine.score_pairs(
                models, trained, concepts, "test", columns["time_step"]
            )
            for number, client in enumerate(trained.tolist()):
                place = {
                    "split": "test",
                    "model": client,
                    "owner": self.concept_id(int(concepts[number])),
                    "weight": 1 / len(trained),
                }
                counts = scores.confusion[number].numpy(), float(scores.loss[number])
                records.append(ModelCounts(*counts, columns | place))
        if self.config.record.examples:
            records.append(self.score_examples(models, trained, trained, columns))
        return records

    def _peer_tables(self, client_models: ClientModels, columns: dict[str, Any]) -> list[PeerTable]:
        tables = [PeerTable(PEER_COUNTS, client_models.peer_counts.numpy(), columns)]
        part = self.experiment.task.method.part_filling("peers")
        if part is not None and part.peers is not None and part.peers.similarity:
            similarity = client_models.peers[part.name][part.peers.similarity]
            tables.append(PeerTable(SIMILARITY, similarity.cpu().numpy(), columns))
        return tables
