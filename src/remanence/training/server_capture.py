"""How the steps of training at the server run: eagerly, or captured once and replayed in every
round. A GPU replays a CUDA graph, a CPU runs a compiled step.

A captured step reads fixed tensors, so everything that changes between rounds must enter through
`StepInputs`. A loss with a closure runs eagerly.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remanence.core.contexts import PublicLoss
from remanence.core.errors import first_line
from remanence.core.pytree import Params, Tree
from remanence.core.slots import Optimizer
from remanence.core.types import ModelState
from remanence.kernels.capture import capture, clone_tree, copy_tree, signature
from remanence.kernels.trace import TracedFunction
from remanence.training.task import TrainingTask

log = logging.getLogger("remanence")
MIN_STEPS = 10  # fewer steps are not worth capturing
MAX_CAPTURED = 2  # captured steps that a task keeps


class ServerTrainState(NamedTuple):
    """What one step hands to the next."""

    params: Params
    buffers: Params
    opt_state: Tree


class StepInputs(NamedTuple):
    """What all steps of one training read."""

    start: ModelState
    loss_args: Tree  # what the loss reads besides the batch
    public: Tensor  # [n] ids of the public set
    places: Tensor  # [steps, batch] positions in it
    keys: Tensor  # [steps]
    rates: dict[str, Tensor]  # [steps] each


# (inputs, state, number of the step [1], batch size) -> state
Step = Callable[..., ServerTrainState]


class EagerServerSteps:
    """Calls the step function directly."""

    def __init__(self, step: Step, state: ServerTrainState, inputs: StepInputs):
        self.step, self.state, self.inputs = step, state, inputs
        self.numbers = torch.arange(len(inputs.places), device=inputs.places.device)

    def take(self, step: int, batch_size: int) -> None:
        """Take the step with this number."""
        self.state = self.step(self.inputs, self.state, self.numbers[step : step + 1], batch_size)

    def read(self) -> ServerTrainState:
        """The current state."""
        return self.state


class CapturedServerSteps:
    """Runs the step on tensors of its own: one CUDA graph for each batch size, or without a GPU
    one compiled step if `compile`, else eager ones.
    """

    def __init__(
        self, step: Step, state: ServerTrainState, inputs: StepInputs, compile: bool = False
    ):
        self.step, self.compile = step, compile
        self.state, self.inputs = clone_tree(state, inputs)
        self.number = torch.zeros(1, dtype=torch.int64, device=inputs.places.device)
        self.replays: dict[int, Callable[[], None]] = {}  # by batch size

    def fits(self, state: ServerTrainState, inputs: StepInputs) -> bool:
        """Whether these tensors have the names, shapes and dtypes of the captured ones."""
        return bool(signature((self.state, self.inputs)) == signature((state, inputs)))

    def begin(self, state: ServerTrainState, inputs: StepInputs) -> CapturedServerSteps:
        """Copy the state and the inputs of another training in, and return self."""
        copy_tree((self.state, self.inputs), (state, inputs))
        self.number.zero_()
        return self

    def take(self, step: int, batch_size: int) -> None:
        """Take the next step; steps must be taken in order."""
        if batch_size not in self.replays:
            self.replays[batch_size] = self._capture(batch_size)
        self.replays[batch_size]()

    def read(self) -> ServerTrainState:
        """A copy of the current state."""
        state: ServerTrainState
        (state,) = clone_tree(self.state)
        return state

    def _capture(self, batch_size: int) -> Callable[[], None]:
        step: Callable[..., ServerTrainState] = partial(self.step, batch_size=batch_size)
        if self.compile:
            try:
                step = TracedFunction(step, (self.inputs, self.state, self.number), compile=True)
                # the first call runs the compiler
                step(self.inputs, self.state, self.number)
            except Exception as error:  # the compiler may fail in any way, and so may a user's loss
                self.compile, step = False, partial(self.step, batch_size=batch_size)
                log.warning(
                    f"training at the server could not be compiled ({first_line(error)}): its"
                    " steps run eagerly"
                )

        def compute() -> ServerTrainState:
            return step(self.inputs, self.state, self.number)

        def take() -> None:
            copy_tree(self.state, compute())
            self.number.add_(1)

        return capture(compute, take) if self.number.is_cuda else take


class _CachedSteps(NamedTuple):
    task: TrainingTask
    loss: PublicLoss
    optimizer: Optimizer
    steps: CapturedServerSteps


def get_steps(
    task: TrainingTask,
    step: Step,
    loss: PublicLoss,
    optimizer: Optimizer,
    state: ServerTrainState,
    inputs: StepInputs,
    compile: bool,
) -> EagerServerSteps | CapturedServerSteps:
    """The steps of one training at the server, captured where that is possible and pays off.

    Args:
        task: The run's task.
        step: One step with this loss and optimizer.
        loss: The loss on the public set.
        optimizer: The optimizer of this training.
        state: The state before the first step.
        inputs: What all steps read.
        compile: Whether steps on a CPU are compiled, as the clients' steps are.
    """
    if (
        (compile or task.info.device.type == "cuda")
        and len(inputs.places) >= MIN_STEPS
        and is_pure(loss)
    ):
        return get_captured(task, step, loss, optimizer, state, inputs, compile)
    return EagerServerSteps(step, state, inputs)


def get_captured(
    task: TrainingTask,
    step: Step,
    loss: PublicLoss,
    optimizer: Optimizer,
    state: ServerTrainState,
    inputs: StepInputs,
    compile: bool = False,
) -> CapturedServerSteps:
    """The captured steps of an earlier round if they fit, else new ones; see `get_steps`."""
    cache: list[_CachedSteps] = task.engine_cache.setdefault("server steps", [])
    for cached in cache:
        if (
            cached.task is task
            and cached.loss is loss
            and cached.optimizer is optimizer
            and cached.steps.fits(state, inputs)
        ):
            return cached.steps.begin(state, inputs)
    steps = CapturedServerSteps(step, state, inputs, compile)
    cache[:] = [*cache, _CachedSteps(task, loss, optimizer, steps)][-MAX_CAPTURED:]
    return steps.begin(state, inputs)


def is_pure(loss: Any) -> bool:
    """Whether the loss is a function without a closure. A bound method has its object as one."""
    return isinstance(loss, types.FunctionType) and loss.__closure__ is None
