"""What a run writes down: metrics.jsonl and the ledger, both append-only, both cut back to what a checkpoint vouches for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from remanence import trees
from remanence.experiment import Experiment
from remanence.files import flush
from remanence.metrics.accuracy import summarise
from remanence.metrics.ledger import ALL, GLOBAL, header, make_record
from remanence.results import LEDGER, METRICS
from remanence.server import Update, local_models
from remanence.state import RunState
from remanence.types import Engine, Reply, Scores, Start


class Recorder:
    """Evaluates what the spec asks for and appends it."""

    def __init__(self, folder: Path, experiment: Experiment, committed: dict[str, int]):
        self.experiment, self.spec = experiment, experiment.spec
        self.files = {name: _open_at(folder / name, committed.get(name, 0)) for name in (METRICS, LEDGER)}
        if self.files[LEDGER].tell() == 0:
            self.files[LEDGER].write(header(experiment.source.classes))
        self.scores: dict[str, Scores] = {}  # of the current global model, by split: the next round's "before"

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
        for file in self.files.values():
            file.close()

    def _score(self, engine: Engine, model: Start) -> None:
        if not self.scores:
            self.scores = {split: engine.score(_one(model), split) for split in self.splits()}

    def _ledger(self, scores: Scores, place: int, **columns: Any) -> None:
        confusion, loss = scores.confusion[place].sum(dim=0).numpy(), float(scores.loss[place].sum())
        record = make_record(len(self.experiment.source.classes), confusion, loss=loss, owner=ALL, **columns)
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
