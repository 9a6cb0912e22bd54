"""Evaluation, as every engine does it: which examples form a group, how predictions are counted,
and how the work is divided among workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from remanence.core.engine import ConfusionCounts, ExampleResults, PairCounts
from remanence.core.types import ModelState
from remanence.data.batches import Examples
from remanence.data.population import PartitionIndices
from remanence.training.task import TrainingTask

# Examples of one forward pass on a CPU: activations of more do not fit into the cache.
CPU_ROWS = 500
# The most counters filled at once; with many groups and classes, a few models at a time.
MAX_CELLS = 20_000_000


def examples_of(task: TrainingTask, split: str) -> Examples:
    return task.test if split == "test" else task.train


def eval_groups(
    task: TrainingTask, split: str, owners: np.ndarray | None, time_step: int
) -> list[np.ndarray]:
    """The ids of each group of examples that `Engine.score` counts."""
    if split == "test":
        return list(task.population.test_ids)
    if split == "public":
        return [task.public.numpy()]
    rows = split_rows(task, split, time_step)
    return [rows.ids] if owners is None else [rows.for_client(int(owner)) for owner in owners]


def eval_rows(
    task: TrainingTask, split: str, owners: np.ndarray | None, time_step: int
) -> tuple[Tensor, Tensor, int]:
    """The groups that `Engine.score` counts as one list. -> as `flatten_groups`"""
    return flatten_groups(eval_groups(task, split, owners, time_step), task.info.device)


def flatten_groups(
    groups: Sequence[np.ndarray], device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """-> ids [n], the group of each example [n], the number of groups"""
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return (
        torch.from_numpy(np.concatenate(groups)).to(device),
        torch.from_numpy(numbers).to(device),
        len(groups),
    )


def split_rows(task: TrainingTask, split: str, time_step: int) -> PartitionIndices:
    """The examples of every client or, on the test split, of every concept."""
    if split == "test":
        return PartitionIndices.concat(task.population.test_ids)
    client_data = task.population.at(time_step)
    return client_data.train if split == "train" else client_data.valid


@torch.no_grad()
def predict_logits(task: TrainingTask, models: ModelState, ids: Tensor) -> Tensor:
    """Logits of stacked models on training examples. ids: [n] -> [m, n, C]"""
    return torch.cat(
        [
            predict_logits_stacked(task, models, task.train.inputs(part), None)
            for part in torch.split(ids, CPU_ROWS)
        ],
        dim=1,
    )


def predict_logits_stacked(
    task: TrainingTask, models: ModelState, x: Tensor, dim: int | None
) -> Tensor:
    """Logits [m, n, C] of m stacked models, on the same inputs (dim None) or each on its own
    (dim 0).

    The models run one by one where stacking gains nothing: with a single model, and for
    convolutions on a CPU, where grouped ones take three times as long.
    """
    predict, count = task.model.predict, models.num_models
    if count == 1 or (task.info.device.type == "cpu" and task.model.has_convolutions):
        return torch.stack(
            [
                predict(models.select(number), x if dim is None else x[number]).logits
                for number in range(count)
            ]
        )
    logits: Tensor = torch.func.vmap(
        lambda model, inputs: predict(model, inputs).logits, in_dims=(0, dim)
    )(models, x)
    return logits


class ConfusionCounter:
    """Counts what models predict, by group of examples."""

    def __init__(self, models: int, groups: int, classes: int, device: torch.device):
        self.groups, self.classes = groups, classes
        self.confusion = torch.zeros(
            models, groups * classes * classes, dtype=torch.int64, device=device
        )
        self.loss = torch.zeros(models, groups, dtype=torch.float64, device=device)

    def add(self, first: int, logits: Tensor, y: Tensor, group: Tensor) -> None:
        """Count consecutive models on the same examples.

        Args:
            first: Index of the first of these models.
            logits: [m, n, C]
            y: [n] labels.
            group: [n]
        """
        count, cells = len(logits), self.confusion.shape[1]
        if count > 1 and count * cells > MAX_CELLS:
            half = count // 2
            self.add(first, logits[:half], y, group)
            return self.add(first + half, logits[half:], y, group)
        rows = slice(first, first + count)
        cell = (group * self.classes + y) * self.classes + logits.argmax(dim=2)  # [m, n]
        cell = cell + cells * torch.arange(count, device=cell.device).unsqueeze(1)
        self.confusion[rows] += torch.bincount(cell.flatten(), minlength=count * cells).reshape(
            count, cells
        )
        losses = (
            cross_entropy(logits.flatten(0, 1), y.repeat(count), reduction="none")
            .double()
            .reshape(count, -1)
        )
        self.loss[rows] += (
            losses.sum(dim=1, keepdim=True) if self.groups == 1 else self._by_group(losses, group)
        )

    def _by_group(self, losses: Tensor, group: Tensor) -> Tensor:
        """losses: [m, n] -> [m, groups]"""
        return torch.zeros(
            len(losses), self.groups, dtype=losses.dtype, device=losses.device
        ).index_add_(1, group, losses)

    def scores(self) -> ConfusionCounts:
        shape = (len(self.loss), self.groups, self.classes, self.classes)
        return ConfusionCounts(self.confusion.reshape(shape).cpu(), self.loss.cpu())


class PairCounter:
    """Counts what models predict, each on its own examples.

    Padding is counted in an additional pair after the last one, which is not returned.
    """

    def __init__(self, pairs: int, classes: int, device: torch.device, examples: bool):
        self.pairs, self.classes = pairs, classes
        self.confusion = torch.zeros(
            (pairs + 1) * classes * classes, dtype=torch.int64, device=device
        )
        self.loss = torch.zeros(pairs + 1, dtype=torch.float64, device=device)
        self.results: list[tuple[Tensor, ...]] | None = [] if examples else None

    def add(self, pair: Tensor, logits: Tensor, y: Tensor, ids: Tensor) -> None:
        """logits: [n, C]; pair, y, ids: [n]"""
        predicted = logits.argmax(dim=1)
        cell = (pair * self.classes + y) * self.classes + predicted
        self.confusion += torch.bincount(cell, minlength=len(self.confusion))
        self.loss.index_add_(0, pair, cross_entropy(logits, y, reduction="none").double())
        if self.results is not None:
            others = logits.scatter(1, y.unsqueeze(1), float("-inf")).amax(dim=1)
            margin = logits.gather(1, y.unsqueeze(1)).squeeze(1) - others
            self.results.append((pair, ids, predicted == y, margin.float()))

    def scores(self) -> PairCounts:
        confusion = self.confusion.reshape(-1, self.classes, self.classes)[: self.pairs].cpu()
        return PairCounts(
            confusion,
            self.loss[: self.pairs].cpu(),
            None if self.results is None else self._example_results(),
        )

    def _example_results(self) -> ExampleResults:
        assert self.results is not None
        columns = (
            [torch.cat(parts).cpu().numpy() for parts in zip(*self.results, strict=True)]
            if self.results
            else [np.empty(0)] * 4
        )
        pair, ids, correct, margin = columns
        order = np.lexsort((ids, pair))  # the same on every engine
        order = order[pair[order] < self.pairs]
        return ExampleResults(
            pair[order].astype(np.int64),
            ids[order].astype(np.int64),
            correct[order].astype(bool),
            margin[order].astype(np.float32),
        )


def split_evenly(count: int, num_parts: int) -> list[np.ndarray]:
    """Consecutive indices, in parts that are not empty."""
    return [part for part in np.array_split(np.arange(count), num_parts) if len(part)]


def join_pairs(counts: list[PairCounts], parts: list[np.ndarray]) -> PairCounts:
    """Counts of parts of the pairs as counts of all pairs, in their order."""
    back = torch.from_numpy(np.argsort(np.concatenate(parts), kind="stable"))
    confusion, loss = (
        torch.cat([each.confusion for each in counts])[back],
        torch.cat([each.loss for each in counts])[back],
    )
    results = [each.examples for each in counts if each.examples is not None]
    if not results:
        return PairCounts(confusion, loss)
    pair = np.concatenate([part[each.pair] for part, each in zip(parts, results, strict=True)])
    ids, correct, margin = (
        np.concatenate([each[column] for each in results]) for column in (1, 2, 3)
    )
    order = np.lexsort((ids, pair))
    return PairCounts(
        confusion, loss, ExampleResults(pair[order], ids[order], correct[order], margin[order])
    )
