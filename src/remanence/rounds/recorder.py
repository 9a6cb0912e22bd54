"""What a run writes down: metrics.jsonl and the ledger, all append-only, all cut back to what a
checkpoint vouches for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from remanence.core.engine import Engine, ExampleResults
from remanence.core.files import flush
from remanence.core.types import ModelState
from remanence.experiment.build import BuiltExperiment
from remanence.results.ledger import (
    ALL,
    EXAMPLE,
    GLOBAL,
    MOMENTS,
    SPLITS,
    confusion_type,
    header,
    make_record,
)
from remanence.results.run import CONFUSIONS, EXAMPLES, LEDGER, METRICS
from remanence.results.summary import summarize
from remanence.rounds import personalization
from remanence.rounds.attack_success import attack_success
from remanence.rounds.privacy_budget import guarantees_of, last_round
from remanence.training.server_step import Server, ServerResult
from remanence.training.state import RunState

PERSONAL_BATCH = 32  # personal models in memory at a time
# of a round that is not evaluated
NOT_EVALUATED = dict.fromkeys(("accuracy", "per_class", "loss", "macro_f1"))


class Writer:
    """The append-only files of a run."""

    def __init__(
        self,
        folder: Path,
        experiment: BuiltExperiment,
        committed: dict[str, int],
        names: tuple[str, ...],
    ):
        self.experiment, self.spec = experiment, experiment.config
        self.population, self.classes = experiment.task.population, len(experiment.dataset.classes)
        # a privacy budget may end the run early
        self.last = last_round(guarantees_of(experiment), self.spec.total_rounds)
        wanted = [METRICS, LEDGER, *names]
        wanted += [CONFUSIONS] if self.spec.record.confusion else []
        self.files = {name: _open_at(folder / name, committed.get(name, 0)) for name in wanted}
        if self.files[LEDGER].tell() == 0:
            self.files[LEDGER].write(header(experiment.dataset.classes))
        self.success = attack_success(experiment.task, experiment.dataset, experiment.adversary)

    def should_evaluate(self, round: int) -> bool:
        """Is this round evaluated? The last one of every time step is, and the last of all."""
        return (
            round % self.spec.record.every == 0
            or round % self.spec.rounds == 0
            or round == self.last
        )

    @property
    def splits(self) -> list[str]:
        has_validation = self.spec.record.validation and len(self.population.at(0).valid.ids) > 0
        return ["test", "valid"] if has_validation else ["test"]

    def concept_id(self, number: int) -> int:
        """A concept in the column `owner`: where there is only one, the rows are everybody's."""
        return number if self.population.num_concepts > 1 else ALL

    def write_counts(self, confusion: np.ndarray, loss: float, **columns: Any) -> None:
        """One record of the ledger."""
        columns = {"owner": ALL} | columns
        self.files[LEDGER].write(
            make_record(self.classes, confusion, loss=loss, **columns).tobytes()
        )
        if self.spec.record.confusion and columns["split"] == "test":
            record = np.zeros(1, dtype=confusion_type(self.classes))
            record["moment"], record["split"] = (
                MOMENTS.index(columns["moment"]),
                SPLITS.index("test"),
            )
            for name in ("round", "time_step", "model", "owner"):
                record[name] = columns[name]
            record["confusion"] = confusion
            self.files[CONFUSIONS].write(record.tobytes())

    def attack_success(self, models: ModelState, shares: np.ndarray) -> dict[str, float]:
        """How often an attack gets its way, where one has a goal. models: stacked; shares: of
        each in the mean, summing to 1
        """
        return (
            {}
            if self.success is None
            else {"attack_success": float((self.success(models) * shares).sum())}
        )

    def write_metrics(self, line: dict[str, Any]) -> dict[str, Any]:
        """One line of metrics.jsonl."""
        self.files[METRICS].write(json.dumps(line, allow_nan=False).encode() + b"\n")
        return line

    def write_examples(
        self, results: ExampleResults | None, clients: np.ndarray, **columns: Any
    ) -> None:
        """One record for every example; clients: of each pair."""
        assert results is not None
        records = np.zeros(len(results.ids), dtype=EXAMPLE)
        records["moment"] = MOMENTS.index(columns.pop("moment"))
        records["client"], records["id"] = clients[results.pair], results.ids
        records["correct"], records["margin"] = results.correct, results.margin
        for name, value in columns.items():
            records[name] = value
        self.files[EXAMPLES].write(records.tobytes())

    def commit(self) -> dict[str, int]:
        """Flush to the operating system -> the lengths that belong to the state."""
        for file in self.files.values():
            file.flush()
        return {name: file.tell() for name, file in self.files.items()}

    def sync(self) -> None:
        """Flush to the disk, before a checkpoint vouches for it."""
        for file in self.files.values():
            flush(file)

    def close(self) -> None:
        """All of them, also where the first cannot be written to the end because the disk is
        full.
        """
        with contextlib.ExitStack() as stack:
            for file in self.files.values():
                stack.callback(file.close)


class Recorder(Writer):
    """Evaluates what the spec asks for where there is a server, and appends it."""

    def __init__(self, folder: Path, experiment: BuiltExperiment, committed: dict[str, int]):
        super().__init__(
            folder, experiment, committed, (EXAMPLES,) if experiment.config.record.examples else ()
        )
        self.model = experiment.metadata["evaluated"]
        # by split, of the current global models: the next round's "before"
        self.counts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        wanted = self.spec.record.personal > 0 and personalization.has_personal_models(
            experiment.task
        )
        self.personal_clients = self.spec.record.personal if wanted else 0
        self.finetune_engine = personalization.make_finetune_engine(experiment) if wanted else None

    def before(self, engine: Engine, state: RunState, time_step: int) -> None:
        """The global models before local training, where the local models will be compared with
        them.
        """
        round = state.round + 1
        if not (self.spec.record.local and self.should_evaluate(round)):
            return
        # the same models; what differs is how many clients are in which concept
        if time_step != state.time_step:
            self._score(engine, state.global_models, state, state.time_step)
            self._write_models("before_drift", round, state.time_step)
            self.counts.pop("valid", None)
        self._score(engine, state.global_models, state, time_step)
        self._write_models("before", round, time_step)

    def local(
        self,
        engine: Engine,
        state: RunState,
        time_step: int,
        clients: np.ndarray,
        gather: Callable[[], ModelState],
        weights: np.ndarray,
    ) -> None:
        """Every client's model after local training; where nobody looks at them they are not even
        gathered, for they may lie far away.

        clients, weights: [k]; gather() -> a stack of k; `state` is the one the round began with
        """
        place, record = {"round": state.round + 1, "time_step": time_step}, self.spec.record
        if not ((record.local or record.examples) and self.should_evaluate(place["round"])):
            return
        models = gather()
        if record.examples:
            self._example_eval(engine, state, clients, models, place)
        if not record.local:
            return
        scores = engine.score(models, "test")
        for number, client in enumerate(clients.tolist()):
            for concept, (confusion, loss) in enumerate(
                zip(scores.confusion[number].numpy(), scores.loss[number].tolist(), strict=True)
            ):
                owner, weight = self.concept_id(concept), float(weights[number])
                self.write_counts(
                    confusion,
                    loss,
                    **place,
                    moment="local",
                    split="test",
                    model=client,
                    owner=owner,
                    weight=weight,
                )
        some = clients[self.population.at(time_step).valid.sizes[clients] > 0][: record.cross]
        if "valid" in self.splits and len(some):
            self._cross_client_eval(engine, state, models, clients, some, place)

    def _cross_client_eval(
        self,
        engine: Engine,
        state: RunState,
        models: ModelState,
        clients: np.ndarray,
        some: np.ndarray,
        place: dict[str, int],
    ) -> None:
        """Some of a round's models on each other's validation rows, and what those rows' owners
        received.
        """
        used = state.models_used_by(some)
        received = engine.score_pairs(state.models, used, some, "valid", place["time_step"])
        columns: dict[str, Any] = place | {"split": "valid"}
        for number, client in enumerate(some.tolist()):
            confusion, loss = received.confusion[number].numpy(), float(received.loss[number])
            self.write_counts(
                confusion,
                loss,
                **columns,
                moment="before",
                model=GLOBAL - int(used[number]),
                owner=client,
            )
        index = np.flatnonzero(np.isin(clients, some))
        which, owners = np.repeat(index, len(some)), np.tile(some, len(some))
        after = engine.score_pairs(models, which, owners, "valid", place["time_step"])
        for pair, (number, owner) in enumerate(zip(which.tolist(), owners.tolist(), strict=True)):
            confusion, loss = after.confusion[pair].numpy(), float(after.loss[pair])
            self.write_counts(
                confusion, loss, **columns, moment="local", model=int(clients[number]), owner=owner
            )

    def _example_eval(
        self,
        engine: Engine,
        state: RunState,
        clients: np.ndarray,
        models: ModelState,
        place: dict[str, int],
    ) -> None:
        """Every training row of the round's clients, before and after their training."""
        step = place["time_step"]
        before = engine.score_pairs(
            state.models, state.models_used_by(clients), clients, "train", step, examples=True
        )
        self.write_examples(before.examples, clients, **place, moment="before")
        after = engine.score_pairs(
            models, np.arange(len(clients)), clients, "train", step, examples=True
        )
        self.write_examples(after.examples, clients, **place, moment="local")

    def after(
        self,
        engine: Engine,
        updates: dict[int, ServerResult],
        state: RunState,
        line: dict[str, Any],
        asked: np.ndarray,
    ) -> dict[str, Any]:
        """The global models after the round -> the line for the test split, as it was written.
        updates: by model; asked: the round's clients
        """
        self.counts = {}
        place = {"round": state.round, "time_step": state.time_step}
        if not self.should_evaluate(state.round):
            return self.write_metrics(
                {**place, "model": self.model, "split": "test", **NOT_EVALUATED, **line}
            )
        refined = any(update.merged is not update.server.model for update in updates.values())
        if refined:
            merged = [
                Server(updates[number].merged, {}) if number in updates else server
                for number, server in enumerate(state.global_models)
            ]
            self._score(engine, tuple(merged), state, state.time_step)
            self._write_models("merged", **place)
            self.counts = {}
        self._score(engine, state.global_models, state, state.time_step)
        self._write_models("refined" if refined else "merged", **place)
        if self.spec.record.examples and len(asked):
            scores = engine.score_pairs(
                state.models,
                state.models_used_by(asked),
                asked,
                "train",
                state.time_step,
                examples=True,
            )
            self.write_examples(scores.examples, asked, **place, moment="merged")
        written = {}
        used = state.models_used_by(np.arange(self.population.num_clients))
        success = self.attack_success(
            state.models, np.bincount(used, minlength=len(state.global_models)) / len(used)
        )
        for split in self.splits:
            summary = summarize(*self._weighted_confusion(split, state)) | (
                success if split == "test" else {}
            )
            written[split] = self.write_metrics(
                {**place, "model": self.model, "split": split, **summary, **line}
            )
        if state.model_of_client is not None:
            self._write_assigned(state, place)
        self._personal(engine, state, line)
        return written["test"]

    def close(self) -> None:
        if self.finetune_engine is not None:
            self.finetune_engine.close()
        super().close()

    def _score(
        self, engine: Engine, servers: tuple[Server, ...], state: RunState, time_step: int
    ) -> None:
        """Count, once for each split: every global model on every concept's test rows, and on
        the validation rows of the clients that use it.
        """
        models = ModelState.stack([server.model for server in servers])
        if "test" not in self.counts:
            scores = engine.score(models, "test")
            self.counts["test"] = scores.confusion.numpy(), scores.loss.numpy()
        if "valid" in self.splits and "valid" not in self.counts:
            if len(servers) == 1:
                scores = engine.score(models, "valid", None, time_step)
                self.counts["valid"] = scores.confusion.numpy(), scores.loss.numpy()
            else:
                everybody = np.arange(self.population.num_clients)
                used = state.models_used_by(everybody)
                pairs = engine.score_pairs(models, used, everybody, "valid", time_step)
                confusion, loss = (
                    np.zeros((len(servers), self.classes, self.classes), dtype=np.int64),
                    np.zeros(len(servers)),
                )
                np.add.at(confusion, used, pairs.confusion.numpy())
                np.add.at(loss, used, pairs.loss.numpy())
                self.counts["valid"] = confusion[:, None], loss[:, None]

    def _write_models(self, moment: str, round: int, time_step: int) -> None:
        for split, (confusion, loss) in self.counts.items():
            for number, group in np.ndindex(*loss.shape):
                owner = self.concept_id(group) if split == "test" else ALL
                columns = {
                    "round": round,
                    "time_step": time_step,
                    "moment": moment,
                    "split": split,
                    "model": GLOBAL - number,
                    "owner": owner,
                }
                self.write_counts(confusion[number, group], float(loss[number, group]), **columns)

    def _write_assigned(self, state: RunState, place: dict[str, int]) -> None:
        """Where there are several global models: the one that each client uses, on every
        concept, as if it were the client's own.
        """
        confusion, loss = self.counts["test"]
        for client, used in enumerate(
            state.models_used_by(np.arange(self.population.num_clients)).tolist()
        ):
            for concept in range(self.population.num_concepts):
                columns = place | {
                    "moment": "personal",
                    "split": "test",
                    "model": client,
                    "owner": self.concept_id(concept),
                }
                self.write_counts(
                    confusion[used, concept],
                    float(loss[used, concept]),
                    **columns,
                    weight=1 / self.population.num_clients,
                )

    def _weighted_confusion(self, split: str, state: RunState) -> tuple[np.ndarray, float]:
        """One table of all models and concepts: validation rows are simply pooled; on the test
        rows every client counts the same.
        """
        confusion, loss = self.counts[split]
        if split == "valid" or loss.size == 1:
            return confusion.sum(axis=(0, 1)), float(loss.sum())
        used, cluster = (
            state.models_used_by(np.arange(self.population.num_clients)),
            self.population.at(state.time_step).cluster,
        )
        shares = np.zeros(loss.shape)
        np.add.at(shares, (used, cluster), 1 / self.population.num_clients)
        shares = shares / np.array([len(test) for test in self.population.test_ids])
        return np.einsum("sg,sgij->ij", shares, confusion), float((shares * loss).sum())

    def _personal(self, engine: Engine, state: RunState, line: dict[str, Any]) -> None:
        """Every client's personal model on the client's own validation rows; the line has the
        counts of all these clients together.
        """
        place = {"round": state.round, "time_step": state.time_step}
        holders = np.flatnonzero(self.population.at(state.time_step).valid.sizes)[
            : self.personal_clients
        ]
        total, loss = np.zeros((self.classes, self.classes), dtype=np.int64), 0.0
        for first in range(0, len(holders), PERSONAL_BATCH):
            some = holders[first : first + PERSONAL_BATCH]
            scores = personalization.score_models(
                self.experiment, self.finetune_engine, engine, state, some
            )
            for number, client in enumerate(some.tolist()):
                mine, lost = scores.confusion[number].numpy(), float(scores.loss[number])
                self.write_counts(
                    mine,
                    lost,
                    **place,
                    moment="personal",
                    split="valid",
                    model=client,
                    owner=client,
                )
                total, loss = total + mine, loss + lost
        if len(holders):
            self.write_metrics(
                {**place, "model": "personal", "split": "valid", **summarize(total, loss), **line}
            )


def _open_at(path: Path, length: int) -> Any:
    """Open for appending, with everything beyond the committed length cut off."""
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(length)
    file.seek(length)
    return file
