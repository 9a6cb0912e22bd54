"""What a run writes down: metrics.jsonl and the ledger, both append-only, both cut back to what a checkpoint vouches for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from remanence import personal, trees
from remanence.experiment import Experiment
from remanence.files import flush
from remanence.metrics.accuracy import summarise
from remanence.metrics.ledger import ALL, GLOBAL, header, make_record
from remanence.results import LEDGER, METRICS
from remanence.server import Update, local_models
from remanence.state import RunState
from remanence.types import Engine, Reply, Scores, Start

PERSONAL_AT_ONCE = 32  # personal models in memory at a time


class Recorder:
    """Evaluates what the spec asks for and appends it."""

    def __init__(self, folder: Path, experiment: Experiment, committed: dict[str, int]):
        self.experiment, self.spec = experiment, experiment.spec
        self.files = {name: _open_at(folder / name, committed.get(name, 0)) for name in (METRICS, LEDGER)}
        if self.files[LEDGER].tell() == 0:
            self.files[LEDGER].write(header(experiment.source.classes))
        self.scores: dict[str, Scores] = {}  # of the current global model, by split: the next round's "before"
        wanted = self.spec.record.personal > 0 and personal.has_personal_models(experiment.task)
        self.personal_clients = self.spec.record.personal if wanted else 0
        self.tuner = personal.make_tuner(experiment) if wanted else None

    def due(self, round: int) -> bool:
        return round % self.spec.record.every == 0 or round == self.spec.rounds

    def splits(self) -> list[str]:
        has_validation = self.spec.record.validation and len(self.experiment.task.population.at(0).valid.ids) > 0
        return ["test", "valid"] if has_validation else ["test"]

    def before(self, engine: Engine, state: RunState) -> None:
        """The global model before local training, where the local models will be compared with it."""
        round = state.round + 1
        if self.spec.record.local and self.due(round):
            self._score(engine, state.server.model)
            for split, scores in self.scores.items():
                self._ledger(scores, 0, round=round, time_step=state.time_step, moment="before", split=split, model=GLOBAL)

    def local(self, engine: Engine, state: RunState, replies: Reply, update: Update) -> None:
        """Every client's model after local training; `state` is the one the round began with."""
        round = state.round + 1
        if not (self.spec.record.local and self.due(round)):
            return
        scores = engine.score(local_models(state.server.model, replies), "test")
        for place, client in enumerate(replies.client.tolist()):
            weight = float(update.weights[place])
            self._ledger(scores, place, round=round, time_step=state.time_step, moment="local", split="test", model=client, weight=weight)

    def after(self, engine: Engine, update: Update | None, state: RunState, line: dict[str, Any]) -> dict[str, Any]:
        """The global model after the round -> the line for the test split, as it was written."""
        self.scores = {}
        place = {"round": state.round, "time_step": state.time_step}
        if not self.due(state.round):
            nothing = dict.fromkeys(("accuracy", "per_class", "loss", "macro_f1"))
            return self._line({**place, "model": "global", "split": "test", **nothing, **line})
        refined = update is not None and update.merged is not update.server.model
        if update is not None and refined:
            for split in self.splits():
                self._ledger(engine.score(_one(update.merged), split), 0, **place, moment="merged", split=split, model=GLOBAL)
        self._score(engine, state.server.model)
        written = {}
        for split, scores in self.scores.items():
            self._ledger(scores, 0, **place, moment="refined" if refined else "merged", split=split, model=GLOBAL)
            confusion, loss = scores.confusion[0].sum(dim=0).numpy(), float(scores.loss[0].sum())
            written[split] = self._line({**place, "model": "global", "split": split, **summarise(confusion, loss), **line})
        self._personal(engine, state, line)
        return written["test"]

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
        if self.tuner is not None:
            self.tuner.close()
        for file in self.files.values():
            file.close()

    def _personal(self, engine: Engine, state: RunState, line: dict[str, Any]) -> None:
        """Every client's personal model on the client's own validation rows; the line has the counts of all these clients together."""
        place = {"round": state.round, "time_step": state.time_step}
        holders = np.flatnonzero(self.experiment.task.population.at(state.time_step).valid.sizes)[: self.personal_clients]
        total, loss = np.zeros((len(self.experiment.source.classes),) * 2, dtype=np.int64), 0.0
        for first in range(0, len(holders), PERSONAL_AT_ONCE):
            some = holders[first : first + PERSONAL_AT_ONCE]
            models = personal.make_models(self.experiment, self.tuner, state, some)
            for number, client in enumerate(some.tolist()):
                one = models.take(slice(number, number + 1))
                scores = engine.score(one, "valid", np.array([client]), state.time_step)
                self._ledger(scores, 0, **place, moment="personal", split="valid", model=client, owner=client)
                total, loss = total + scores.confusion[0, 0].numpy(), loss + float(scores.loss[0, 0])
        if len(holders):
            self._line({**place, "model": "personal", "split": "valid", **summarise(total, loss), **line})

    def _score(self, engine: Engine, model: Start) -> None:
        if not self.scores:
            self.scores = {split: engine.score(_one(model), split) for split in self.splits()}

    def _ledger(self, scores: Scores, place: int, **columns: Any) -> None:
        confusion, loss = scores.confusion[place].sum(dim=0).numpy(), float(scores.loss[place].sum())
        record = make_record(len(self.experiment.source.classes), confusion, loss=loss, **{"owner": ALL} | columns)
        self.files[LEDGER].write(record.tobytes())

    def _line(self, line: dict[str, Any]) -> dict[str, Any]:
        self.files[METRICS].write(json.dumps(line, allow_nan=False).encode() + b"\n")
        return line


def _one(model: Start) -> Start:
    """A stack of one model."""
    return Start(*(trees.map(lambda x: x.unsqueeze(0), tree) for tree in model))


def _open_at(path: Path, length: int) -> Any:
    """Open for appending, with everything beyond the committed length cut off."""
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(length)
    file.seek(length)
    return file


def finite_or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
