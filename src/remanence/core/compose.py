"""Compose parts into a method, slot by slot, and check that they fit together.

`ComposedMethod` is what the rest of the program reads: every function is bound to the subtree of
its own part, so that names cannot clash and no function reads another part's state.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ParamSpec

from torch import Tensor

from remanence.core import expressions
from remanence.core.compose_checks import check
from remanence.core.contexts import Context, PeerContext, ServerContext
from remanence.core.declarations import Mechanism
from remanence.core.errors import InputError
from remanence.core.slots import STAGES, Method, Optimizer, Part
from remanence.core.types import ClientStats, TaskInfo

P = ParamSpec("P")


def part(constructor: Callable[P, Part]) -> Callable[P, Part]:
    """Decorate the constructor of a part: the part records the arguments it was made with,
    defaults included.
    """
    signature = inspect.signature(constructor)

    @functools.wraps(constructor)
    def make(*args: P.args, **kwargs: P.kwargs) -> Part:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return replace(constructor(*args, **kwargs), arguments=dict(bound.arguments))

    return make


def parse_method(text: str, table: Mapping[str, Callable[..., Part]]) -> Method:
    """Parse a method such as `fedprox(mu=0.1)+wsm`.

    Args:
        text: Parts joined by `+`. A part outside of this package is named by its import path,
            `package.module:function(option=1)`.
        table: The constructors of parts by name.

    Raises:
        InputError: The text cannot be read, or its parts do not fit together.
    """
    return check(Method(tuple(_make_part(call, table) for call in expressions.parse_parts(text))))


def _make_part(call: expressions.Call, table: Mapping[str, Callable[..., Part]]) -> Part:
    made = expressions.instantiate(call, table, "method")
    if not isinstance(made, Part):
        raise InputError(
            f"method {call.name!r} makes a {type(made).__name__}: it must be a function that"
            " returns a Part, see remanence.extend"
        )
    return made


def describe(method: Method) -> str:
    """The expression that makes this method."""
    return "+".join(str(expressions.Call(p.name, p.arguments)) for p in method.parts)


# what a function of a slot that looks up a missing name may have overlooked
MISSING_NAME = {
    "regularizers": "a regularizer is also called with a model of one parameter: write a term that"
    " looks up names as a transform",
    "transforms": "personal parameters are trained and are not in info.communicated: leave those"
    " without an entry as they are (`if name in ...`)",
}


class BoundHook:
    """A function of a part, called with a context narrowed to that part's subtrees, and without
    label counts unless the part declares that it reads them.
    """

    def __init__(self, part: Part, function: Callable[..., Any], slot: str = ""):
        self.name, self.function, self.slot = part.name, function, slot
        self.reads_label_counts, self.hyper = part.reads_label_counts, part.hyper

    def __call__(self, *args: Any) -> Any:
        # the position of the context differs by slot: find it by type
        scoped = (
            self._scope(arg) if isinstance(arg, Context | ServerContext | PeerContext) else arg
            for arg in args
        )
        try:
            return self.function(*scoped)
        except KeyError as error:
            self._explain(error)
            raise

    def _explain(self, error: KeyError) -> None:
        """Add to an error what an author may have overlooked."""
        name = error.args[0] if error.args else ""
        if self.slot in MISSING_NAME:
            error.add_note(f"{self.name}: {MISSING_NAME[self.slot]}")
        if isinstance(name, str) and name.isidentifier() and name not in self.hyper:
            error.add_note(f"{self.name}: if {name} is a hyper-parameter, declare it in Part.hyper")

    def _scope(self, ctx: Any) -> Any:
        scoped = scope_context(ctx, self.name)
        if self.reads_label_counts or not isinstance(ctx, Context):
            return scoped
        # per-example gradients hide all statistics (training/per_example.py)
        if not isinstance(ctx.stats, ClientStats):
            return scoped
        return scoped._replace(stats=WithoutLabelCounts(self.name, ctx.stats))


class WithoutLabelCounts:
    """The statistics of a client for a part that does not declare that it reads label counts:
    privacy checks rely on the declaration.
    """

    def __init__(self, part: str, stats: ClientStats):
        self.part, self.stats = part, stats

    @property
    def size(self) -> Tensor:
        return self.stats.size

    @property
    def label_counts(self) -> Tensor:
        raise InputError(
            f"{self.part} reads ctx.stats.label_counts and does not declare it: write"
            " reads_label_counts=True in its Part"
        )


def check_pair(hook: BoundHook, slot: str, returned: Any, wanted: str) -> tuple[Any, Any]:
    """What a hook has returned, which must be two values; `wanted` names them."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"{hook.name}: {slot} must return ({wanted}), not {type(returned).__name__}"
            + (f" of {len(returned)}" if isinstance(returned, tuple) else "")
        )
    return returned


def scope_context(ctx: Any, name: str) -> Any:
    """A context of a client, of the server or of peers, with the subtrees of one part only."""
    subtrees = [
        field
        for field in ("broadcast", "client_state", "tracker_state", "state", "hyper")
        if field in ctx._fields
    ]
    return ctx._replace(**{field: getattr(ctx, field).get(name, {}) for field in subtrees})


class ComposedMethod:
    """A checked method with its hooks by slot. Parts are in the order of their names, so that sums
    over them have stable bits.
    """

    def __init__(self, method: Method):
        self.method = check(method)
        self.parts = tuple(sorted(method.parts, key=lambda p: p.name))

    def hook(self, slot: str) -> BoundHook | None:
        """The function of a slot that at most one part fills; None where no part does."""
        p = self.part_filling(slot)
        return None if p is None else BoundHook(p, getattr(p, slot))

    def hooks(self, slot: str) -> list[BoundHook]:
        """All functions of a slot that any number of parts fill."""
        return [BoundHook(p, function, slot) for p, function in self._filled(slot)]

    def part_filling(self, slot: str) -> Part | None:
        """The part that fills a slot; None where no part does."""
        return next((p for p in self.parts if getattr(p, slot) is not None), None)

    def trackers(self, function: str) -> list[BoundHook]:
        """The function `init` or `step` of every tracker."""
        return [BoundHook(p, getattr(track, function)) for p, track in self._filled("step_tracker")]

    def optimizer(self) -> Optimizer | None:
        """A part's optimizer, bound to the part's subtree; None where no part fills the slot."""
        filled_by = self.part_filling("optimizer")
        if filled_by is None or filled_by.optimizer is None:
            return None
        return filled_by.optimizer._replace(step=BoundHook(filled_by, filled_by.optimizer.step))

    def transforms(self) -> list[BoundHook]:
        """Gradient transforms, by stage and then by name."""
        staged = sorted(self._filled("transforms"), key=lambda pair: STAGES.index(pair[1].stage))
        return [BoundHook(p, transform.function, "transforms") for p, transform in staged]

    def _filled(self, slot: str) -> Iterator[tuple[Part, Any]]:
        for p in self.parts:
            value = getattr(p, slot)
            # a named tuple is one value
            if isinstance(value, tuple) and not hasattr(value, "_fields"):
                yield from ((p, item) for item in value)
            elif value is not None:
                yield p, value

    def frozen(self, info: TaskInfo) -> frozenset[str]:
        """Parameters that keep their initial values everywhere."""
        return frozenset(name for p, function in self._filled("frozen") for name in function(info))

    def personal(self, info: TaskInfo) -> frozenset[str]:
        """Parameters that are trained, and buffers, that never leave the client."""
        return frozenset(
            name for p, function in self._filled("personal") for name in function(info)
        )

    @property
    def has_server(self) -> bool:
        """Whether a server aggregates; without one, clients average with peers."""
        return self.part_filling("peers") is None

    @property
    def has_several_models(self) -> bool:
        """Whether there is more than one trained model: several global ones, or one a client."""
        return not self.has_server or self.part_filling("model_assignment") is not None

    @property
    def mechanisms(self) -> list[tuple[Part, Mechanism]]:
        """All protective noise that is declared, with the part that draws it."""
        return [(p, mechanism) for p in self.parts for mechanism in p.mechanisms]

    @property
    def hyper(self) -> dict[str, dict[str, float]]:
        return {p.name: dict(p.hyper) for p in self.parts if p.hyper}

    @property
    def counts_validation_labels(self) -> bool:
        """Whether the label counts that its functions read include validation examples."""
        return any(p.counts_validation_labels for p in self.parts)

    @property
    def is_stateful(self) -> bool:
        """Does any client keep something between rounds?"""
        return any(p.client_state is not None for p in self.parts)
