"""The loop as fast as one core makes it: images channels-last, what a phase leaves alone looked at
once, steps written down or compiled.

It is what a worker process runs. `sequential` itself stays plain, because it is the oracle; both give the
same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from remanence.core.errors import first_line
from remanence.core.pytree import Params
from remanence.core.slots import Context
from remanence.core.types import Batch, ModelState
from remanence.engines.compiled_eval import compile_for_eval
from remanence.engines.frozen_prefix import PrefixSplit, find_split
from remanence.engines.sequential import SequentialEngine
from remanence.engines.traced_step import Arguments, TracedStep
from remanence.training.client_step import TrainState, train_step
from remanence.training.gradients import grad_func
from remanence.training.task import ClientIndices, TrainingTask

CACHE_BYTES = 2**28  # bytes of activations that may be kept
# forms of a phase's arguments for which steps are written down: beyond that it would never end
FORMS = 16
# of batches, for which steps are written down; where they are compiled, which takes longer, one
WIDTHS = 4

StepRows = tuple[Batch, Tensor, Tensor]


class FastSequentialEngine(SequentialEngine):
    """`steps`: "eager", "captured" (written down once and then called without the Python they came
    from) or "compiled" (fused, too).
    """

    def __init__(self, task: TrainingTask, execution: str = "eager"):
        super().__init__(task, channels_last=task.info.device.type == "cpu")
        self.execution = "eager" if execution == "auto" else execution
        self.eval_task = replace(
            task,
            model=compile_for_eval(task.model, self.execution == "compiled", self.degraded_reasons),
        )
        self.splits: dict[tuple[str, ...], PrefixSplit | None] = {}  # by what is trained
        self.traced: dict[tuple[str, ...], list[TracedStep]] = {}

    def find_split(self, trained: tuple[str, ...]) -> PrefixSplit | None:
        """Where the network can be cut in a phase that trains these parameters."""
        if trained not in self.splits:
            split = find_split(self.task, trained)
            self.splits[trained] = split and split._replace(
                frozen_prefix=compile_for_eval(
                    split.frozen_prefix, self.execution == "compiled", self.degraded_reasons
                )
            )
        return self.splits[trained]

    def take_steps(
        self,
        task: TrainingTask,
        progress: TrainState,
        fixed: Params,
        ctx: Context,
        rows: ClientIndices,
        ids: Tensor,
        widths: np.ndarray,
    ) -> tuple[TrainState, list[Tensor]]:
        split, seen = self.find_split(tuple(progress.params)), torch.unique(ids)
        if split is None or split.width * len(seen) > CACHE_BYTES:
            return self.step_through(task, progress, fixed, ctx, rows, ids, widths)
        buffers = progress.buffers
        behind = split.with_cached_features(
            task, ModelState({**fixed, **progress.params}, buffers), seen
        )
        short = progress._replace(buffers=split.suffix_params(buffers))
        after, losses = self.step_through(
            behind, short, split.suffix_params(fixed), ctx, rows, ids, widths
        )
        return after._replace(buffers=buffers | after.buffers), losses

    def step_through(
        self,
        task: TrainingTask,
        progress: TrainState,
        fixed: Params,
        ctx: Context,
        rows: ClientIndices,
        ids: Tensor,
        widths: np.ndarray,
    ) -> tuple[TrainState, list[Tensor]]:
        """Written down where that is asked for and possible, else plainly; once it proved
        impossible, plainly for good.
        """
        if self.execution != "eager":
            try:
                return self._replay(task, progress, fixed, ctx, rows, ids, widths)
            except Exception as error:
                self.degraded_reasons.append(
                    f"steps could not be written down ({first_line(error)})"
                )
                self.execution = "eager"
                self.traced.clear()
        return super().take_steps(task, progress, fixed, ctx, rows, ids, widths)

    def _replay(
        self,
        task: TrainingTask,
        progress: TrainState,
        fixed: Params,
        ctx: Context,
        rows: ClientIndices,
        ids: Tensor,
        widths: np.ndarray,
    ) -> tuple[TrainState, list[Tensor]]:
        losses: list[Tensor] = []
        # both rely on rows that are all real
        alone = task.model.depends_on_batch or any(p.centralized for p in task.method.parts)
        moments = (
            self.iter_batches(task, ctx, ids, widths)
            if alone
            else self._iter_padded(task, ctx, ids, widths)
        )
        # one run, unless batches must not be padded
        for _, run in itertools.groupby(moments, key=lambda moment: len(moment[0].weight)):
            batch, number, key = first = next(run)
            arguments = (
                progress,
                fixed,
                batch,
                rows,
                ctx._replace(tracker_state=progress.tracker_state, step=number, key=key),
            )
            step, moments_left = self._find_step(task, arguments), itertools.chain([first], run)  # noqa: B031 (what is left of it)
            progress, some = step.run_steps(arguments, moments_left)
            losses += some
        return progress, losses

    def _iter_padded(
        self, task: TrainingTask, ctx: Context, ids: Tensor, widths: np.ndarray
    ) -> Iterator[StepRows]:
        """The same batches in few widths, up to the widest of the experiment: what is too much
        repeats a row and weighs nothing.
        """
        steps, narrow = ids.shape
        wide = max(narrow, min(task.batch_size, task.population.max_client_size))
        padded = torch.cat([ids, ids[:, :1].expand(steps, wide - narrow)], dim=1)
        # in row w the first w are 1
        weights = torch.ones(wide + 1, wide, dtype=task.info.dtype, device=ids.device).tril(-1)
        rounded = round_widths(widths, wide, 1 if self.execution == "compiled" else WIDTHS)
        moments = self.iter_batches(task, ctx, padded, rounded)
        for (batch, number, key), width, room in zip(
            moments, widths.tolist(), rounded.tolist(), strict=True
        ):
            yield batch._replace(weight=weights[width, :room]), number, key

    def _find_step(self, task: TrainingTask, arguments: Arguments) -> TracedStep:
        """One that was written down for arguments of this form."""
        known = self.traced.setdefault(tuple(arguments[0].params), [])
        found = next((step for step in known if step.fits(arguments)), None)
        if found is None:
            if len(known) == FORMS:
                raise ValueError(f"more than {FORMS} different forms of arguments")
            found = TracedStep(
                partial(train_step, task, grad_func),
                arguments,
                self.execution == "compiled",
            )
            known.append(found)
        return found


def round_widths(widths: np.ndarray, widest: int, kinds: int) -> np.ndarray:
    """Each width rounded up to one of so many, the widest among them.

    >>> round_widths(np.array([50, 3, 13, 26]), widest=50, kinds=4)
    array([50, 13, 13, 38])
    """
    allowed = -(-widest * np.arange(1, kinds + 1) // kinds)
    return np.asarray(allowed[np.searchsorted(allowed, widths)])
