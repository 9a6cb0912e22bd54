"""An engine that trains and evaluates one client, one peer and one batch at a time, with nn.Module,
autograd and torch.optim alone.

It runs in the same round as the other engines, so that results can be compared number by number,
and shares only the plan of batches with them. Peers are selected and averaged by the round, as for
the other engines, which favors it a little.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from remanence.bench.baselines import fit, plain_model
from remanence.core import pytree
from remanence.core.engine import ClientWork, ConfusionCounts, PairCounts
from remanence.core.slots import Phase
from remanence.core.types import ModelState, Reply
from remanence.engines import client_plan, evaluation
from remanence.engines.base import BaseEngine
from remanence.experiment.build import BuiltExperiment


class PlainEngine(BaseEngine):
    """For methods whose phases end by whether the validation loss has fallen, as HAST's do."""

    name = "plain"

    def __init__(self, experiment: BuiltExperiment):
        super().__init__()
        self.experiment, self.task = experiment, experiment.task
        self.module = plain_model(experiment)

    def train(self, work: ClientWork) -> Iterator[Reply]:
        for place, client in enumerate(work.clients.tolist()):
            self._load(work.start.select(place) if work.per_client_start else work.start)
            for number, phase in enumerate(client_plan.phases_of(self.task, work)):
                before = self._state()
                self._fit(work, client, number, phase)
                if phase.accept is not None and not self._improved(before, work, client):
                    self._load(before)
            client_state = pytree.take(work.client_state, slice(place, place + 1))
            yield client_plan.make_reply(
                self.task,
                work,
                np.array([client]),
                ModelState.stack([self._state()]),
                {},
                client_state,
                torch.zeros(1),  # no mean loss for the log
            )

    def _fit(self, work: ClientWork, client: int, number: int, phase: Phase) -> None:
        rows = torch.from_numpy(
            self.task.population.at(work.time_step).train.for_client(client)
        ).to(self.task.info.device)
        trained = set(self.task.trained_params(phase))
        for name, param in self.module.named_parameters():
            param.requires_grad_(name in trained)
        plan = client_plan.plan_phase(self.task, work, client, number, phase)
        fit(self.module, self.experiment, work, rows, plan.indices, plan.batch_sizes, None)

    def _improved(self, before: ModelState, work: ClientWork, client: int) -> bool:
        now, ids = self._state(), self.task.population.at(work.time_step).valid.for_client(client)
        new = self._mean_loss(ids)
        self._load(before)
        old = self._mean_loss(ids)
        self._load(now)
        return new < old

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        raise NotImplementedError("a timed round evaluates nothing")

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        raise NotImplementedError("a round without a server has no public set")

    def score_pairs(
        self,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int = 0,
        examples: bool = False,
    ) -> PairCounts:
        rows, classes = (
            evaluation.split_rows(self.task, split, time_step),
            self.task.info.num_classes,
        )
        confusion, loss = (
            torch.zeros(len(which), classes, classes, dtype=torch.int64),
            torch.zeros(len(which), dtype=torch.float64),
        )
        for pair, (model, owner) in enumerate(zip(which.tolist(), owners.tolist(), strict=True)):
            ids = rows.for_client(owner)
            self._load(models.select(model))
            loss[pair] = self._mean_loss(ids) * len(ids)
            confusion[pair, 0, 0] = len(ids)  # a round needs the mean loss alone
        return PairCounts(confusion, loss)

    @torch.no_grad()
    def _mean_loss(self, ids: np.ndarray) -> float:
        examples, total = (
            self.task.train,
            torch.zeros((), dtype=torch.float64, device=self.task.info.device),
        )
        for batch in torch.split(
            torch.from_numpy(ids).to(self.task.info.device), self.task.batch_size
        ):
            total += cross_entropy(
                self.module(examples.inputs(batch)), examples.y[batch], reduction="sum"
            ).double()
        return float(total) / len(ids)

    def _load(self, model: ModelState) -> None:
        self.module.load_state_dict({**model.params, **model.buffers}, strict=False)

    def _state(self) -> ModelState:
        params = {name: value.detach().clone() for name, value in self.module.named_parameters()}
        return ModelState(
            params, {name: value.detach().clone() for name, value in self.module.named_buffers()}
        )
