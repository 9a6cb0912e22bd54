"""The steps of training at the server: plainly, or written down once and repeated in every round,
on a GPU as a recording, on a CPU compiled.

A recording reads fixed places in memory, so whatever changes from round to round has to come in
through them: a loss that remembers something of its own (a closure) is run plainly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remanence.core.errors import first_line
from remanence.core.pytree import Params, Tree
from remanence.core.slots import Optimizer, PublicLoss
from remanence.core.types import ModelState
from remanence.kernels.capture import capture, clone_tree, copy_tree, signature
from remanence.kernels.trace import TracedFunction
from remanence.training.task import TrainingTask

log = logging.getLogger("remanence")
MIN_STEPS = 10  # steps for which recording pays
KEPT = 2  # recordings of a run


class ServerTrainState(NamedTuple):
    """What one step hands to the next."""

    params: Params
    buffers: Params
    opt_state: Tree


class StepInputs(NamedTuple):
    """What stays the same from the first to the last step, with what each of them looks up."""

    start: ModelState
    loss_args: Tree  # what the loss knows of this round
    public: Tensor  # [n] ids of the public set
    places: Tensor  # [steps, batch] positions in it
    keys: Tensor  # [steps]
    rates: dict[str, Tensor]  # [steps] each


Step = Callable[..., ServerTrainState]  # (scene, moving, number of the step [1], width) -> moving


class EagerServerSteps:
    """One after the other."""

    def __init__(self, step: Step, moving: ServerTrainState, scene: StepInputs):
        self.step, self.moving, self.scene = step, moving, scene
        self.numbers = torch.arange(len(scene.places), device=scene.places.device)

    def take(self, step: int, width: int) -> None:
        self.moving = self.step(self.scene, self.moving, self.numbers[step : step + 1], width)

    def read(self) -> ServerTrainState:
        return self.moving


class CapturedServerSteps:
    """The same from memory of its own, for each width one CUDA graph or, without a GPU, one
    compiled step if `compile` and plain ones on that memory if not.
    """

    def __init__(
        self, step: Step, moving: ServerTrainState, scene: StepInputs, compile: bool = False
    ):
        self.step, self.compile = step, compile
        self.moving, self.scene = clone_tree(moving, scene)
        self.number = torch.zeros(1, dtype=torch.int64, device=scene.places.device)
        self.replays: dict[int, Callable[[], None]] = {}

    def fits(self, moving: ServerTrainState, scene: StepInputs) -> bool:
        return bool(signature((self.moving, self.scene)) == signature((moving, scene)))

    def begin(self, moving: ServerTrainState, scene: StepInputs) -> CapturedServerSteps:
        copy_tree((self.moving, self.scene), (moving, scene))
        self.number.zero_()
        return self

    def take(self, step: int, width: int) -> None:
        if width not in self.replays:
            self.replays[width] = self._record(width)
        self.replays[width]()

    def read(self) -> ServerTrainState:
        moving: ServerTrainState
        (moving,) = clone_tree(self.moving)
        return moving

    def _record(self, width: int) -> Callable[[], None]:
        step: Callable[..., ServerTrainState] = partial(self.step, width=width)
        if self.compile:
            try:
                step = TracedFunction(step, (self.scene, self.moving, self.number), compile=True)
                # the compiler is called by the first step
                step(self.scene, self.moving, self.number)
            except Exception as error:  # it may fail in any way, and the loss may be a user's
                self.compile, step = False, partial(self.step, width=width)
                log.warning(
                    f"training at the server could not be compiled ({first_line(error)}): its"
                    " steps are plain ones"
                )

        def compute() -> ServerTrainState:
            return step(self.scene, self.moving, self.number)

        def take() -> None:
            copy_tree(self.moving, compute())
            self.number.add_(1)

        return capture(compute, take) if self.number.is_cuda else take


class _Known(NamedTuple):
    task: TrainingTask
    loss: PublicLoss
    optimizer: Optimizer
    steps: CapturedServerSteps


def get_steps(
    task: TrainingTask,
    step: Step,
    loss: PublicLoss,
    optimizer: Optimizer,
    moving: ServerTrainState,
    scene: StepInputs,
    compile: bool,
) -> EagerServerSteps | CapturedServerSteps:
    """`step` is one step with this loss and optimizer. Written down where that is possible and
    pays: on a CPU, if the clients' steps are compiled, too.
    """
    if (
        (compile or task.info.device.type == "cuda")
        and len(scene.places) >= MIN_STEPS
        and is_pure(loss)
    ):
        return get_captured(task, step, loss, optimizer, moving, scene, compile)
    return EagerServerSteps(step, moving, scene)


def get_captured(
    task: TrainingTask,
    step: Step,
    loss: PublicLoss,
    optimizer: Optimizer,
    moving: ServerTrainState,
    scene: StepInputs,
    compile: bool = False,
) -> CapturedServerSteps:
    """Those of an earlier round where they fit, else new ones."""
    kept: list[_Known] = task.engine_cache.setdefault("server steps", [])
    for known in kept:
        if (
            known.task is task
            and known.loss is loss
            and known.optimizer is optimizer
            and known.steps.fits(moving, scene)
        ):
            return known.steps.begin(moving, scene)
    steps = CapturedServerSteps(step, moving, scene, compile)
    kept[:] = [*kept, _Known(task, loss, optimizer, steps)][-KEPT:]
    return steps.begin(moving, scene)


def is_pure(loss: Any) -> bool:
    """Is it a function that remembers nothing?"""
    return getattr(loss, "__closure__", loss) is None
