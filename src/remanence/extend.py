"""The stable names for authors of methods and engines.

A method is one file with a constructor that returns a `Part`:

    from remanence.extend import Context, Part, Params, Transform, part, pytree

    @part
    def pull(*, strength: float = 0.1) -> Part:
        def correct(grads: Params, params: Params, ctx: Context) -> Params:
            away = pytree.sub(params, ctx.start.params)
            return pytree.axpy(ctx.hyper["strength"], away, grads)

        return Part(
            "pull", hyper={"strength": strength}, transforms=(Transform("correct", correct),)
        )

`check_method(pull())` checks it, and `check_engine` checks an engine; both import the whole
program when they are first used. `import remanence` does not import this module, which imports
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remanence.aggregators.mean import mean, uniform_weights
from remanence.core import pytree, rng
from remanence.core.compose import part
from remanence.core.contexts import ClientOps, Context, PeerContext, ServerContext, ServerOps
from remanence.core.declarations import (
    ABSENT_CLASSES,
    AGGREGATION,
    AT_CLIENT,
    AT_SERVER,
    CLIENT,
    DRIFT,
    EACH_PASS,
    EACH_ROUND,
    EACH_TIME_STEP,
    EXAMPLE,
    HELD_CLASSES,
    LABEL_COUNTS,
    MIXING,
    MODEL,
    PEER_DRIFT,
    Disclosure,
    Mechanism,
    Remedy,
)
from remanence.core.engine import (
    ClientWork,
    ConfusionCounts,
    Engine,
    ExampleResults,
    PairCounts,
    Rejection,
)
from remanence.core.errors import InputError
from remanence.core.pytree import Params, Tree
from remanence.core.ranges import check_range
from remanence.core.rng import Key
from remanence.core.slots import (
    Aggregate,
    AssignmentDecision,
    Method,
    ModelAssignment,
    Optimizer,
    Part,
    PeerAverage,
    PeerSelection,
    Phase,
    StepTracker,
    Transform,
)
from remanence.core.types import Batch, ClientStats, ModelState, Output, Reply, TaskInfo

if TYPE_CHECKING:
    from remanence.testing import check_engine, check_method, check_model

__all__ = [
    "ABSENT_CLASSES",
    "AGGREGATION",
    "AT_CLIENT",
    "AT_SERVER",
    "CLIENT",
    "DRIFT",
    "EACH_PASS",
    "EACH_ROUND",
    "EACH_TIME_STEP",
    "EXAMPLE",
    "HELD_CLASSES",
    "LABEL_COUNTS",
    "MIXING",
    "MODEL",
    "PEER_DRIFT",
    "Aggregate",
    "AssignmentDecision",
    "Batch",
    "ClientOps",
    "ClientStats",
    "ClientWork",
    "ConfusionCounts",
    "Context",
    "Disclosure",
    "Engine",
    "ExampleResults",
    "InputError",
    "Key",
    "Mechanism",
    "Method",
    "ModelAssignment",
    "ModelState",
    "Optimizer",
    "Output",
    "PairCounts",
    "Params",
    "Part",
    "PeerAverage",
    "PeerContext",
    "PeerSelection",
    "Phase",
    "Rejection",
    "Remedy",
    "Reply",
    "ServerContext",
    "ServerOps",
    "StepTracker",
    "TaskInfo",
    "Transform",
    "Tree",
    "check_engine",
    "check_method",
    "check_model",
    "check_range",
    "mean",
    "part",
    "pytree",
    "rng",
    "uniform_weights",
]


def __getattr__(name: str) -> Any:
    """The checkers, which import the whole program."""
    if name in ("check_engine", "check_method", "check_model"):
        from remanence import testing

        return getattr(testing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
