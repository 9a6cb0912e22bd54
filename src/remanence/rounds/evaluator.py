"""Evaluates the models of a round with a server, and returns their counts. The settings `record.*`
choose what is evaluated; `writer.py` stores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from remanence.core.engine import Engine, PairCounts
from remanence.core.types import ModelState
from remanence.experiment.build import BuiltExperiment
from remanence.results.ledger import ALL, GLOBAL
from remanence.results.summary import summarize
from remanence.rounds import personalization
from remanence.rounds.attack_success import attack_success
from remanence.rounds.privacy_budget import guarantees_of, last_round
from remanence.rounds.records import Evaluation, ExampleRecords, ModelCounts, Record
from remanence.training.server_step import Server, ServerResult
from remanence.training.state import RunState

PERSONAL_BATCH = 32  # personal models in memory at a time
NOT_EVALUATED = dict.fromkeys(("accuracy", "per_class", "loss", "macro_f1"))


class Evaluator:
    """What both kinds of rounds share: when and on which splits models are evaluated, and the
    success of attacks.
    """

    def __init__(self, experiment: BuiltExperiment, engine: Engine):
        self.experiment, self.engine, self.config = experiment, engine, experiment.config
        self.population, self.classes = experiment.task.population, len(experiment.dataset.classes)
        self.clients = np.arange(self.population.num_clients)
        self.guarantees = guarantees_of(experiment)
        # a privacy budget may end the run early
        self.last_round = last_round(self.guarantees, self.config.total_rounds)
        self.success = attack_success(experiment.task, experiment.dataset, experiment.adversary)

    def should_evaluate(self, round: int) -> bool:
        """Every `record.every` rounds, from round `record.first` of a time step where it is set; in
        the last one of a time step, in the last of all, and where the clients' models are
        evaluated.
        """
        record = self.config.record
        return self._is_due(round, record.every, record.first) or self.should_evaluate_local(round)

    def should_evaluate_local(self, round: int) -> bool:
        """With `record.local`: in every round that is evaluated, or, with `record.local_every`,
        in round 1 and every so many rounds.
        """
        record = self.config.record
        if not record.local:
            return False
        if not record.local_every:
            return self._is_due(round, record.every, record.first)
        return round == 1 or self._is_due(round, record.local_every)

    def _is_due(self, round: int, every: int, first: int = 0) -> bool:
        counted = round
        if first:
            counted = (round - 1) % self.config.rounds + 1 - first  # rounds of the time step
        regular = counted >= 0 and counted % every == 0
        return regular or round % self.config.rounds == 0 or round == self.last_round

    @property
    def splits(self) -> list[str]:
        has_valid = self.config.record.validation and len(self.population.at(0).valid.ids) > 0
        return ["test", "valid"] if has_valid else ["test"]

    def concept_id(self, number: int) -> int:
        """A concept in the column `owner`; ALL where there is only one."""
        return number if self.population.num_concepts > 1 else ALL

    def attack_success(self, models: ModelState, shares: np.ndarray) -> dict[str, float]:
        """The share of test examples on which an attack succeeds, if it has a goal.

        Args:
            models: Stacked.
            shares: Of each model in the mean, summing to 1.
        """
        if self.success is None:
            return {}
        return {"attack_success": float((self.success(models) * shares).sum())}

    def score_examples(
        self, models: ModelState, which: np.ndarray, clients: np.ndarray, columns: dict[str, Any]
    ) -> ExampleRecords:
        """Model which[i] on every training example of clients[i]."""
        scores = self.engine.score_pairs(
            models, which, clients, "train", columns["time_step"], examples=True
        )
        assert scores.examples is not None
        return ExampleRecords(scores.examples, clients, columns)


class ServerEvaluator(Evaluator):
    """Evaluates global models before and after aggregation, and the clients' local models."""

    def __init__(self, experiment: BuiltExperiment, engine: Engine):
        super().__init__(experiment, engine)
        self.model = experiment.metadata["evaluated"]
        # by split, of the current global models: the next round's "before"
        self.counts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        personal = self.config.record.personal > 0 and personalization.has_personal_models(
            experiment.task
        )
        self.personal_clients = self.config.record.personal if personal else 0
        self.finetune_engine = (
            personalization.make_finetune_engine(experiment) if personal else None
        )

    def before_training(self, state: RunState, time_step: int) -> list[Record]:
        """Counts of the global models before local training, to compare local models with."""
        round, records = state.round + 1, list[Record]()
        if not self.should_evaluate_local(round):
            return records
        # the models are the same, but the number of clients in each concept has changed
        if time_step != state.time_step:
            self._score(state.global_models, state, state.time_step)
            records += self._global_counts("before_drift", round, state.time_step)
            self.counts.pop("valid", None)
        self._score(state.global_models, state, time_step)
        return records + self._global_counts("before", round, time_step)

    def after_training(
        self,
        state: RunState,
        time_step: int,
        clients: np.ndarray,
        local_models: Callable[[], ModelState],
        shares: np.ndarray,
    ) -> list[Record]:
        """Counts of every client's model after local training.

        Args:
            state: At the beginning of the round.
            time_step: Of the round.
            clients: [k] whose replies are used.
            local_models: Returns their models as a stack; not called where they are not evaluated,
                since they may be on other machines.
            shares: [k] of each client in the aggregation.
        """
        columns = {"round": state.round + 1, "time_step": time_step}
        records, local = list[Record](), self.should_evaluate_local(columns["round"])
        examples = self.config.record.examples and self.should_evaluate(columns["round"])
        if not (local or examples):
            return records
        models = local_models()
        if examples:
            used = state.models_used_by(clients)
            records += [
                self.score_examples(state.models, used, clients, columns | {"moment": "before"}),
                self.score_examples(
                    models, np.arange(len(clients)), clients, columns | {"moment": "local"}
                ),
            ]
        if not local:
            return records
        scores = self.engine.score(models, "test")
        for (number, concept), loss in np.ndenumerate(scores.loss.numpy()):
            model_columns = {
                "moment": "local",
                "split": "test",
                "model": int(clients[number]),
                "owner": self.concept_id(concept),
                "weight": float(shares[number]),
            }
            confusion = scores.confusion[number, concept].numpy()
            records.append(ModelCounts(confusion, float(loss), columns | model_columns))
        holders = clients[self.population.at(time_step).valid.sizes[clients] > 0]
        holders = holders[: self.config.record.cross]
        if "valid" in self.splits and len(holders):
            records += self._cross_client_counts(state, models, clients, holders, columns)
        return records

    def _cross_client_counts(
        self,
        state: RunState,
        models: ModelState,
        clients: np.ndarray,
        holders: np.ndarray,
        columns: dict[str, Any],
    ) -> Iterator[ModelCounts]:
        """The models of some of the round's clients on each other's validation examples, before
        and after local training.
        """
        columns, time_step = columns | {"split": "valid"}, columns["time_step"]
        used = state.models_used_by(holders)
        received = self.engine.score_pairs(state.models, used, holders, "valid", time_step)
        yield from _pair_counts(received, GLOBAL - used, holders, columns | {"moment": "before"})
        index = np.flatnonzero(np.isin(clients, holders))
        which, owners = np.repeat(index, len(holders)), np.tile(holders, len(holders))
        trained = self.engine.score_pairs(models, which, owners, "valid", time_step)
        yield from _pair_counts(trained, clients[which], owners, columns | {"moment": "local"})

    def after_round(
        self, state: RunState, updates: dict[int, ServerResult], clients: np.ndarray
    ) -> Evaluation:
        """Evaluate the global models after a round, and the clients' personal ones.

        Args:
            state: After the round.
            updates: By number of the global model.
            clients: [k] whose replies were used.
        """
        self.counts = {}
        columns = {"round": state.round, "time_step": state.time_step}
        if not self.should_evaluate(state.round):
            row = {**columns, "model": self.model, "split": "test", **NOT_EVALUATED}
            return Evaluation([], [row])
        records: list[Record] = []
        refined = any(update.merged is not update.server.model for update in updates.values())
        if refined:
            merged = [
                Server(updates[number].merged, {}) if number in updates else server
                for number, server in enumerate(state.global_models)
            ]
            self._score(tuple(merged), state, state.time_step)
            records += self._global_counts("merged", **columns)
            self.counts = {}
        self._score(state.global_models, state, state.time_step)
        records += self._global_counts("refined" if refined else "merged", **columns)
        if self.config.record.examples and len(clients):
            used, merged_columns = state.models_used_by(clients), columns | {"moment": "merged"}
            records.append(self.score_examples(state.models, used, clients, merged_columns))
        rows = self._rows(state, columns)
        if state.model_of_client is not None:
            records += self._assigned_counts(state, columns)
        personal = self._personal_counts(state, columns)
        if personal:
            total = np.sum([counts.confusion for counts in personal], axis=0)
            summary = summarize(total, sum((counts.loss for counts in personal), 0.0))
            rows.append({**columns, "model": "personal", "split": "valid", **summary})
        return Evaluation([*records, *personal], rows)

    def close(self) -> None:
        if self.finetune_engine is not None:
            self.finetune_engine.close()

    def _rows(self, state: RunState, columns: dict[str, int]) -> list[dict[str, Any]]:
        """A row of metrics.jsonl for each split."""
        success = self.attack_success(state.models, state.model_shares())
        rows = []
        for split in self.splits:
            summary = summarize(*self._weighted_confusion(split, state))
            summary |= success if split == "test" else {}
            rows.append({**columns, "model": self.model, "split": split, **summary})
        return rows

    def _score(self, servers: tuple[Server, ...], state: RunState, time_step: int) -> None:
        """Count, once for each split: every global model on every concept's test examples, and
        on the validation examples of the clients that use it.
        """
        models = ModelState.stack([server.model for server in servers])
        if "test" not in self.counts:
            scores = self.engine.score(models, "test")
            self.counts["test"] = scores.confusion.numpy(), scores.loss.numpy()
        if "valid" in self.splits and "valid" not in self.counts:
            if len(servers) == 1:
                scores = self.engine.score(models, "valid", None, time_step)
                self.counts["valid"] = scores.confusion.numpy(), scores.loss.numpy()
            else:
                used = state.models_used_by(self.clients)
                pairs = self.engine.score_pairs(models, used, self.clients, "valid", time_step)
                confusion = np.zeros((len(servers), self.classes, self.classes), dtype=np.int64)
                loss = np.zeros(len(servers))
                np.add.at(confusion, used, pairs.confusion.numpy())
                np.add.at(loss, used, pairs.loss.numpy())
                self.counts["valid"] = confusion[:, None], loss[:, None]

    def _global_counts(self, moment: str, round: int, time_step: int) -> list[Record]:
        records: list[Record] = []
        for split, (confusion, loss) in self.counts.items():
            for number, group in np.ndindex(*loss.shape):
                columns = {
                    "round": round,
                    "time_step": time_step,
                    "moment": moment,
                    "split": split,
                    "model": GLOBAL - number,
                    "owner": self.concept_id(group) if split == "test" else ALL,
                }
                records.append(
                    ModelCounts(confusion[number, group], float(loss[number, group]), columns)
                )
        return records

    def _assigned_counts(self, state: RunState, columns: dict[str, int]) -> list[Record]:
        """Where there are several global models: the one that each client uses, on every
        concept, as if it were the client's own.
        """
        confusion, loss = self.counts["test"]
        used, records = state.models_used_by(self.clients), list[Record]()
        for client, concept in np.ndindex(len(used), self.population.num_concepts):
            model = int(used[client])
            records.append(
                ModelCounts(
                    confusion[model, concept],
                    float(loss[model, concept]),
                    columns
                    | {
                        "moment": "personal",
                        "split": "test",
                        "model": client,
                        "owner": self.concept_id(concept),
                        "weight": 1 / self.population.num_clients,
                    },
                )
            )
        return records

    def _weighted_confusion(self, split: str, state: RunState) -> tuple[np.ndarray, float]:
        """One table of all models and concepts: validation examples are pooled; on the test
        split every client has the same weight.
        """
        confusion, loss = self.counts[split]
        if split == "valid" or loss.size == 1:
            return confusion.sum(axis=(0, 1)), float(loss.sum())
        used = state.models_used_by(self.clients)
        cluster = self.population.at(state.time_step).cluster
        shares = np.zeros(loss.shape)
        np.add.at(shares, (used, cluster), 1 / self.population.num_clients)
        shares = shares / np.array([len(test) for test in self.population.test_ids])
        return np.einsum("sg,sgij->ij", shares, confusion), float((shares * loss).sum())

    def _personal_counts(self, state: RunState, columns: dict[str, int]) -> list[ModelCounts]:
        """Every client's personal model on the client's own validation examples."""
        holders = np.flatnonzero(self.population.at(state.time_step).valid.sizes)
        holders = holders[: self.personal_clients]
        found: list[ModelCounts] = []
        for first in range(0, len(holders), PERSONAL_BATCH):
            clients = holders[first : first + PERSONAL_BATCH]
            scores = personalization.score_models(
                self.experiment, self.finetune_engine, self.engine, state, clients
            )
            personal = columns | {"moment": "personal", "split": "valid"}
            found += _pair_counts(scores, clients, clients, personal)
        return found


def _pair_counts(
    scores: PairCounts, models: np.ndarray, owners: np.ndarray, columns: dict[str, Any]
) -> Iterator[ModelCounts]:
    for number, (model, owner) in enumerate(zip(models.tolist(), owners.tolist(), strict=True)):
        yield ModelCounts(
            scores.confusion[number].numpy(),
            float(scores.loss[number]),
            columns | {"model": model, "owner": owner},
        )
