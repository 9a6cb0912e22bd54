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
from remanence.core.types import Optimiser, PublicLoss, Start
from remanence.kernels.capture import capture, copies, copy_into, kinds_of
from remanence.kernels.trace import Written
from remanence.training.client_step import Task

log = logging.getLogger("remanence")
FEWEST = 10  # steps for which recording pays
KEPT = 2  # recordings of a run


class Moving(NamedTuple):
    """What one step hands to the next."""

    params: Params
    buffers: Params
    slots: Tree


class Scene(NamedTuple):
    """What stays the same from the first to the last step, with what each of them looks up."""

    start: Start
    given: Tree  # what the loss knows of this round
    public: Tensor  # [n] ids of the public set
    places: Tensor  # [steps, batch] positions in it
    keys: Tensor  # [steps]
    rates: dict[str, Tensor]  # [steps] each


Step = Callable[..., Moving]  # (scene, moving, number of the step [1], width) -> moving


class PlainSteps:
    """One after the other."""

    def __init__(self, step: Step, moving: Moving, scene: Scene):
        self.step, self.moving, self.scene = step, moving, scene
        self.numbers = torch.arange(len(scene.places), device=scene.places.device)

    def take(self, step: int, width: int) -> None:
        self.moving = self.step(self.scene, self.moving, self.numbers[step : step + 1], width)

    def read(self) -> Moving:
        return self.moving


class RecordedSteps:
    """The same from memory of its own, for each width one CUDA graph or, without a GPU, one
    compiled step if `compile` and plain ones on that memory if not.
    """

    def __init__(self, step: Step, moving: Moving, scene: Scene, compile: bool = False):
        self.step, self.compile = step, compile
        self.moving, self.scene = copies(moving, scene)
        self.number = torch.zeros(1, dtype=torch.int64, device=scene.places.device)
        self.replays: dict[int, Callable[[], None]] = {}

    def fits(self, moving: Moving, scene: Scene) -> bool:
        return bool(kinds_of((self.moving, self.scene)) == kinds_of((moving, scene)))

    def begin(self, moving: Moving, scene: Scene) -> RecordedSteps:
        copy_into((self.moving, self.scene), (moving, scene))
        self.number.zero_()
        return self

    def take(self, step: int, width: int) -> None:
        if width not in self.replays:
            self.replays[width] = self._record(width)
        self.replays[width]()

    def read(self) -> Moving:
        moving: Moving
        (moving,) = copies(self.moving)
        return moving

    def _record(self, width: int) -> Callable[[], None]:
        step: Callable[..., Moving] = partial(self.step, width=width)
        if self.compile:
            try:
                step = Written(step, (self.scene, self.moving, self.number), compile=True)
                # the compiler is called by the first step
                step(self.scene, self.moving, self.number)
            except Exception as error:  # it may fail in any way, and the loss may be a user's
                self.compile, step = False, partial(self.step, width=width)
                log.warning(
                    f"training at the server could not be compiled ({first_line(error)}): its"
                    " steps are plain ones"
                )

        def compute() -> Moving:
            return step(self.scene, self.moving, self.number)

        def take() -> None:
            copy_into(self.moving, compute())
            self.number.add_(1)

        return capture(compute, take) if self.number.is_cuda else take


class _Known(NamedTuple):
    task: Task
    loss: PublicLoss
    optimiser: Optimiser
    steps: RecordedSteps


def find_steps(
    task: Task,
    step: Step,
    loss: PublicLoss,
    optimiser: Optimiser,
    moving: Moving,
    scene: Scene,
    compile: bool,
) -> PlainSteps | RecordedSteps:
    """`step` is one step with this loss and optimiser. Written down where that is possible and
    pays: on a CPU, if the clients' steps are compiled, too.
    """
    if (
        (compile or task.world.device.type == "cuda")
        and len(scene.places) >= FEWEST
        and is_pure(loss)
    ):
        return find_recorded(task, step, loss, optimiser, moving, scene, compile)
    return PlainSteps(step, moving, scene)


def find_recorded(
    task: Task,
    step: Step,
    loss: PublicLoss,
    optimiser: Optimiser,
    moving: Moving,
    scene: Scene,
    compile: bool = False,
) -> RecordedSteps:
    """Those of an earlier round where they fit, else new ones."""
    kept: list[_Known] = task.memo.setdefault("server steps", [])
    for known in kept:
        if (
            known.task is task
            and known.loss is loss
            and known.optimiser is optimiser
            and known.steps.fits(moving, scene)
        ):
            return known.steps.begin(moving, scene)
    steps = RecordedSteps(step, moving, scene, compile)
    kept[:] = [*kept, _Known(task, loss, optimiser, steps)][-KEPT:]
    return steps.begin(moving, scene)


def is_pure(loss: Any) -> bool:
    """Is it a function that remembers nothing?"""
    return getattr(loss, "__closure__", loss) is None
