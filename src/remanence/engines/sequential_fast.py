"""The engine `sequential` with optimizations for one core: images channels-last, activations of
a frozen prefix computed once, steps traced or compiled.

Worker processes run it. `sequential` itself has none of these, since it is the reference; both give
the same results within rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from remanence.core.contexts import Context
from remanence.core.errors import first_line
from remanence.core.model import Model
from remanence.core.types import ModelState
from remanence.engines.compiled_eval import compile_for_eval
from remanence.engines.frozen_prefix import PrefixSplit, find_split
from remanence.engines.sequential import BatchStep, PhaseInputs, SequentialEngine
from remanence.engines.traced_step import Arguments, TracedStep
from remanence.training.client_step import TrainState, train_step
from remanence.training.gradients import grad_func
from remanence.training.task import TrainingTask

CACHE_BYTES = 2**28  # of activations of a frozen prefix that may be kept
MAX_FORMS = 16  # forms of a phase's arguments for which steps are traced; with more, tracing fails
# Batch sizes for which steps are traced. Compiled steps, which take longer to make, have one.
BATCH_SIZES = 4


class FastSequentialEngine(SequentialEngine):
    """Trains one client after the other on one core.

    Args:
        task: What is trained.
        execution: "eager", "captured" (a step is traced once, and then called without Python) or
            "compiled" (the traced step is compiled). "auto" is "eager".
    """

    def __init__(self, task: TrainingTask, execution: str = "eager"):
        super().__init__(task, channels_last=task.info.device.type == "cpu")
        self.execution = "eager" if execution == "auto" else execution
        self.eval_task = replace(task, model=self._compile_for_eval(task.model))
        self.prefix_splits: dict[tuple[str, ...], PrefixSplit | None] = {}  # by what is trained
        self.traced: dict[tuple[str, ...], list[TracedStep]] = {}

    def _compile_for_eval(self, model: Model) -> Model:
        return compile_for_eval(model, self.execution == "compiled", self.degraded_reasons)

    def find_split(self, trained: tuple[str, ...]) -> PrefixSplit | None:
        """Where to cut the network in a phase that trains these parameters."""
        if trained not in self.prefix_splits:
            split = find_split(self.task, trained)
            self.prefix_splits[trained] = split and split._replace(
                frozen_prefix=self._compile_for_eval(split.frozen_prefix)
            )
        return self.prefix_splits[trained]

    def run_steps(self, inputs: PhaseInputs) -> tuple[TrainState, list[Tensor]]:
        state, fixed = inputs.state, inputs.fixed
        split, used = self.find_split(tuple(state.params)), torch.unique(inputs.ids)
        if split is None or split.width * len(used) > CACHE_BYTES:
            return self._try_traced(inputs)
        model = ModelState({**fixed, **state.params}, state.buffers)
        suffix_inputs = inputs._replace(
            task=split.with_cached_features(inputs.task, model, used),
            state=state._replace(buffers=split.suffix_params(state.buffers)),
            fixed=split.suffix_params(fixed),
        )
        after, losses = self._try_traced(suffix_inputs)
        return after._replace(buffers=state.buffers | after.buffers), losses

    def _try_traced(self, inputs: PhaseInputs) -> tuple[TrainState, list[Tensor]]:
        """Run traced steps where requested and possible, else eager ones.

        After one failure to trace, all later steps are eager, too.
        """
        if self.execution != "eager":
            try:
                return self._run_traced(inputs)
            except Exception as error:
                self.degraded_reasons.append(f"steps could not be traced ({first_line(error)})")
                self.execution = "eager"
                self.traced.clear()
        return super().run_steps(inputs)

    def _run_traced(self, inputs: PhaseInputs) -> tuple[TrainState, list[Tensor]]:
        task, state, fixed, ctx, rows, ids, batch_sizes = inputs
        losses: list[Tensor] = []
        # batch norm and centralized methods rely on batches without padding
        unpadded = task.model.depends_on_batch or any(p.centralized for p in task.method.parts)
        iter_batches = self.iter_batches if unpadded else self._iter_padded
        steps = iter_batches(task, ctx, ids, batch_sizes)
        # consecutive steps of one batch size
        for _, group in itertools.groupby(steps, key=lambda each: len(each[0].weight)):
            batch, number, key = first = next(group)
            step_ctx = ctx._replace(tracker_state=state.tracker_state, step=number, key=key)
            arguments = (state, fixed, batch, rows, step_ctx)
            step = self._traced_step(task, arguments)
            state, some = step.run_steps(arguments, itertools.chain([first], group))  # noqa: B031
            losses += some
        return state, losses

    def _iter_padded(
        self, task: TrainingTask, ctx: Context, ids: Tensor, batch_sizes: np.ndarray
    ) -> Iterator[BatchStep]:
        """The same batches in few sizes, up to the largest of the experiment.

        What pads a batch repeats an example with weight 0.
        """
        steps, present = ids.shape
        largest = max(present, min(task.batch_size, task.population.max_client_size))
        padded = torch.cat([ids, ids[:, :1].expand(steps, largest - present)], dim=1)
        # row w: w ones, then zeros
        weights = torch.ones(largest + 1, largest, dtype=task.info.dtype, device=ids.device).tril(
            -1
        )
        count = 1 if self.execution == "compiled" else BATCH_SIZES
        rounded = round_batch_sizes(batch_sizes, largest, count)
        for (batch, number, key), size, padded_size in zip(
            self.iter_batches(task, ctx, padded, rounded),
            batch_sizes.tolist(),
            rounded.tolist(),
            strict=True,
        ):
            yield batch._replace(weight=weights[size, :padded_size]), number, key

    def _traced_step(self, task: TrainingTask, arguments: Arguments) -> TracedStep:
        """The step that was traced for arguments of this form."""
        known = self.traced.setdefault(tuple(arguments[0].params), [])
        found = next((step for step in known if step.fits(arguments)), None)
        if found is None:
            if len(known) == MAX_FORMS:
                raise ValueError(f"more than {MAX_FORMS} different forms of arguments")
            compiled = self.execution == "compiled"
            found = TracedStep(partial(train_step, task, grad_func), arguments, compiled)
            known.append(found)
        return found


def round_batch_sizes(batch_sizes: np.ndarray, largest: int, count: int) -> np.ndarray:
    """Each batch size rounded up to one of `count`, the largest among them.

    >>> round_batch_sizes(np.array([50, 3, 13, 26]), largest=50, count=4)
    array([50, 13, 13, 38])
    """
    allowed = -(-largest * np.arange(1, count + 1) // count)
    return np.asarray(allowed[np.searchsorted(allowed, batch_sizes)])
