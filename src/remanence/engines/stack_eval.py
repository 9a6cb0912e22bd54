"""How the engine `vectorized` evaluates a stack of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remanence.core import memory_format
from remanence.core.engine import ConfusionCounts, PairCounts, Result
from remanence.core.errors import first_line
from remanence.core.model import Model
from remanence.core.types import ModelState
from remanence.data.batches import Examples
from remanence.engines import evaluation
from remanence.engines.base import BaseEngine
from remanence.engines.compiled_eval import ROWS, compile_for_eval
from remanence.engines.evaluation import predict_logits_stacked
from remanence.engines.memory import is_out_of_memory, rows_per_forward
from remanence.engines.run_slices import pad_rows
from remanence.kernels.grouped_conv import with_convolutions
from remanence.training.task import TrainingTask

# Examples from which on one network with convolutions fills a GPU alone (measured with ten CNNs).
GPU_FILL_ROWS = 1_000


class StackEvaluator(BaseEngine):
    """Evaluates models that are stacked along a leading axis.

    Args:
        task: What the models do.
        stack: The most models evaluated together.
        compiled: Compile the forward pass of a single model?
    """

    def __init__(self, task: TrainingTask, stack: int, compiled: bool):
        super().__init__()
        self.task, self.stack, self.compiled = task, stack, compiled
        self.cuda = task.info.device.type == "cuda"
        # Examples of one forward pass, over all models; halved where memory does not suffice.
        self.max_rows = rows_per_forward(task)
        self.use_kernels = self.cuda  # for convolutions outside the steps
        self.eval_model = self._compile_eval()

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        groups = evaluation.eval_groups(self.task, split, owners, time_step)
        return self.score_groups(models, split, groups)

    def score_groups(
        self, models: ModelState, split: str, groups: Sequence[np.ndarray]
    ) -> ConfusionCounts:
        """Evaluate every model of a stack on every group of examples.

        Args:
            models: Stacked [m, ...].
            split: The split of the examples.
            groups: The ids of each group.
        """
        return self.with_enough_memory(lambda: self._score_groups(models, split, groups))

    @torch.no_grad()
    def _score_groups(
        self, models: ModelState, split: str, groups: Sequence[np.ndarray]
    ) -> ConfusionCounts:
        ids, group, count = evaluation.flatten_groups(groups, self.task.info.device)
        examples = evaluation.examples_of(self.task, split)
        counter = evaluation.ConfusionCounter(
            models.num_models, count, self.task.info.num_classes, ids.device
        )
        for rows, some, logits in self._predict_rows(models, examples, ids):
            counter.add(some.start, logits, examples.labels(ids[rows]), group[rows])
        return counter.scores()

    def score_pairs(
        self,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int = 0,
        examples: bool = False,
    ) -> PairCounts:
        held = evaluation.split_rows(self.task, split, time_step)
        rows = [held.for_client(int(owner)) for owner in owners]
        return self.score_on_rows(models, which, rows, split, examples)

    def score_on_rows(
        self,
        models: ModelState,
        which: np.ndarray,
        rows: Sequence[np.ndarray],
        split: str,
        examples: bool,
    ) -> PairCounts:
        """Evaluate model which[i] of a stack on the examples rows[i]."""
        return self.with_enough_memory(
            lambda: self._score_on_rows(models, which, rows, split, examples)
        )

    @torch.no_grad()
    def _score_on_rows(
        self,
        models: ModelState,
        which: np.ndarray,
        rows: Sequence[np.ndarray],
        split: str,
        examples: bool,
    ) -> PairCounts:
        task, device = self.task, self.task.info.device
        counter = evaluation.PairCounter(len(which), task.info.num_classes, device, examples)
        sizes = np.array([len(part) for part in rows])
        # largest first: the pairs of a stack then have about as many examples
        order = np.argsort(-sizes, kind="stable")
        for first in range(0, len(order), self.stack):
            pairs = order[first : first + self.stack]
            if sizes[pairs[0]] == 0:
                break
            stacked = models.select(torch.from_numpy(which[pairs]).to(device))
            self._count_stack(counter, stacked, pairs, [rows[pair] for pair in pairs], split)
        return counter.scores()

    def _count_stack(
        self,
        counter: evaluation.PairCounter,
        models: ModelState,
        pairs: np.ndarray,
        rows: Sequence[np.ndarray],
        split: str,
    ) -> None:
        """Count one stack, each of whose models has its own examples."""
        task, data = self.task, evaluation.examples_of(self.task, split)
        ids, weight = pad_rows(rows, int(rows[0][0]), task.info.device, task.info.dtype)
        pair = torch.from_numpy(pairs).to(ids.device).unsqueeze(1).expand_as(ids)
        pair = torch.where(weight > 0, pair, counter.pairs)
        step = self.rows_per_pass(models)
        for first in range(0, ids.shape[1], step):
            window = (slice(None), slice(first, first + step))
            logits = self.predict_stacked(task, models, data.inputs(ids[window]), 0)
            counter.add(
                pair[window].flatten(),
                logits.flatten(0, 1),
                data.labels(ids[window].flatten()),
                ids[window].flatten(),
            )

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        return self.with_enough_memory(lambda: self._predict_logits(models, ids))

    def _predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        logits = torch.empty(0, device=ids.device)
        for rows, some, part in self._predict_rows(models, self.task.train, ids):
            if not len(logits):
                logits = part.new_empty(models.num_models, len(ids), *part.shape[2:])
            logits[some, rows] = part
        return logits

    @torch.no_grad()
    def _predict_rows(
        self, models: ModelState, examples: Examples, ids: Tensor
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """All models on the same examples, in parts.

        A network with convolutions fills a GPU alone; the models of the stack then take turns, with
        images channels-last.

        Args:
            models: Stacked [m, ...].
            examples: Where the examples are.
            ids: [n]

        Yields:
            Which examples, which models, and their logits [m, n, C].
        """
        in_turn = self.cuda and self.task.model.has_convolutions and len(ids) >= GPU_FILL_ROWS
        row_step, model_step = (
            (self.max_rows, 1) if in_turn else (self.rows_per_pass(models), self.stack)
        )
        for first_row in range(0, len(ids) or 1, row_step):
            rows = slice(first_row, first_row + row_step)
            x = examples.inputs(ids[rows])
            x = memory_format.to_channels_last(x) if in_turn else x
            for first in range(0, models.num_models, model_step):
                some = slice(first, first + model_step)
                if in_turn:
                    logits = self.eval_model.predict(models.select(first), x).logits.unsqueeze(0)
                else:
                    logits = self.predict_stacked(self.task, models.select(some), x, None)
                yield rows, some, logits

    def predict_stacked(
        self, task: TrainingTask, models: ModelState, x: Tensor, dim: int | None
    ) -> Tensor:
        """As `predict_logits_stacked`, with our kernels for convolutions where they work."""
        return self.with_kernels(predict_logits_stacked)(task, models, x, dim)

    def with_kernels(self, compute: Callable[..., Result]) -> Callable[..., Result]:
        """The same function with our kernels for convolutions.

        A kernel may fail where torch does not: without a compiler, or for a second derivative.
        `compute` is then called again without kernels, which is safe because it is pure.
        """

        def attempt(*arguments: Any) -> Result:
            if not self.use_kernels:
                return compute(*arguments)
            try:
                return with_convolutions(compute)(*arguments)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                answer = compute(*arguments)  # fails again where the kernels are not the cause
                self.use_kernels = False
                self.degraded_reasons.append(
                    f"convolutions are left to torch ({first_line(error)})"
                )
                return answer

        return attempt

    def _compile_eval(self) -> Model:
        """The network for many examples of one model."""
        rows = min(ROWS[self.task.info.device.type], self.max_rows)
        return compile_for_eval(self.task.model, self.compiled, self.degraded_reasons, rows)

    def rows_per_pass(self, models: ModelState) -> int:
        """Examples of one forward pass of these models, or of as many as a stack holds."""
        most = self.max_rows if self.cuda else evaluation.CPU_ROWS
        return min(most, max(1, self.max_rows // min(models.num_models, self.stack)))

    def with_enough_memory(self, score: Callable[[], Result]) -> Result:
        """Call again with half of the examples in a forward pass until memory suffices."""
        while True:
            try:
                return score()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or self.max_rows == 1:
                    raise
            self.max_rows //= 2
            self.eval_model = self._compile_eval()
            if self.cuda:
                torch.cuda.empty_cache()
