"""Compose parts into a method, slot by slot, and check that they fit together.

`ComposedMethod` is what the rest of the program reads: every function is bound to the subtree of
its own part, so that names cannot clash and no function reads another part's state.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ParamSpec

from remanence.core import expressions
from remanence.core.declarations import (
    CLIENT,
    EACH_PASS,
    EACH_ROUND,
    EACH_TIME_STEP,
    EXAMPLE,
    LABEL_COUNTS,
    MODEL,
    REVEALS,
    SERVER,
    Mechanism,
)
from remanence.core.errors import InputError
from remanence.core.slots import (
    STAGES,
    Context,
    Method,
    Optimizer,
    Part,
    PeerContext,
    ServerContext,
)
from remanence.core.types import TaskInfo

# slots that at most one part of a method fills, and what messages call them
EXCLUSIVE_SLOTS = {
    "loss": "loss",
    "gradient": "computation of the gradient",
    "optimizer": "local optimizer",
    "client_weights": "weights of the clients",
    "aggregate": "aggregation of replies",
    "server_update": "server's optimizer",
    "server_train": "training at the server",
    "phases": "phases of local training",
    "peers": "choice of peers",
    "model_assignment": "assignment of clients to global models",
    "privatize_stats": "protection of label counts",
    "personalize": "fine-tuning of personal models",
}
# slots that have no meaning without a server
SERVER_SLOTS = (
    "client_weights",
    "aggregate",
    "server_update",
    "server_train",
    "update_server_state",
    "server_state",
    "broadcast",
    "model_assignment",
    "personalize",
)
# slots that belong to a single global model
STATEFUL_SERVER_SLOTS = (
    "server_state",
    "broadcast",
    "server_train",
    "update_server_state",
    "personal",
    "personalize",
)

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
        text: Parts joined by `+`.
        table: The constructors of parts by name.

    Raises:
        InputError: The text cannot be read, or its parts do not fit together.
    """
    return check(
        Method(
            tuple(
                expressions.instantiate(call, table, "method")
                for call in expressions.parse_parts(text)
            )
        )
    )


def check(method: Method) -> Method:
    """Raise `InputError` for parts that do not fit together; return the method."""
    for name, count in Counter(p.name for p in method.parts).items():
        if count > 1:
            raise InputError(f"method {describe(method)!r} has {name} twice: write it once")
    for slot, words in EXCLUSIVE_SLOTS.items():
        filled = [p.name for p in method.parts if getattr(p, slot) is not None]
        if len(filled) > 1:
            raise InputError(
                f"{filled[0]} and {filled[1]} cannot be combined: both replace the {words};"
                " keep one of them"
            )
    without_server = next((p.name for p in method.parts if p.peers is not None), None)
    for p in method.parts if without_server else ():
        wanted = next((slot for slot in SERVER_SLOTS if getattr(p, slot) is not None), None)
        if wanted or p.centralized:
            raise InputError(
                f"{without_server} and {p.name} cannot be combined: {p.name} works at a"
                f" server, and {without_server} has none; keep one of them"
            )
    with_several = next((p.name for p in method.parts if p.model_assignment is not None), None)
    for p in method.parts if with_several else ():
        if p.name != with_several and (
            p.centralized or any(getattr(p, slot) is not None for slot in STATEFUL_SERVER_SLOTS)
        ):
            raise InputError(
                f"{with_several} and {p.name} cannot be combined: {with_several} has"
                f" several global models, and {p.name} is made for one; keep one of them"
            )
    for p in method.parts:
        for transform in p.transforms:
            if transform.stage not in STAGES:
                raise InputError(
                    f"{p.name}: a transform's stage is one of {', '.join(STAGES)}, not"
                    f" {transform.stage!r}"
                )
        _check_declarations(p)
    return method


def _check_declarations(p: Part) -> None:
    for path, disclosure in p.discloses.items():
        if disclosure.reveals not in REVEALS:
            raise InputError(
                f"{p.name}: {path} reveals one of {', '.join(REVEALS)}, not {disclosure.reveals!r}"
            )
    for mechanism in p.mechanisms:
        # a mistyped word would hide noise from the accountant, or from sites that draw it in secret
        for field, allowed in (
            ("unit", (CLIENT, EXAMPLE)),
            ("covers", (MODEL, LABEL_COUNTS, *p.discloses)),
            ("drawn_at", (CLIENT, SERVER)),
            ("spent", (EACH_PASS, EACH_ROUND, EACH_TIME_STEP)),
        ):
            if getattr(mechanism, field) not in allowed:
                raise InputError(
                    f"{p.name}: {field} of a Mechanism is one of {', '.join(allowed)}, not"
                    f" {getattr(mechanism, field)!r}"
                )
        if mechanism.covers == LABEL_COUNTS and p.privatize_stats is None:
            raise InputError(
                f"{p.name} declares noise on label counts and does not fill privatize_stats:"
                " draw the noise there"
            )


def describe(method: Method) -> str:
    """The expression that makes this method."""
    return "+".join(str(expressions.Call(p.name, p.arguments)) for p in method.parts)


class BoundHook:
    """A function of a part, called with a context narrowed to that part's subtrees."""

    def __init__(self, part: Part, function: Callable[..., Any]):
        self.name, self.function = part.name, function

    def __call__(self, *args: Any) -> Any:
        # where the context stands differs from slot to slot: it is recognized by its type
        return self.function(
            *(
                scope_context(arg, self.name)
                if isinstance(arg, Context | ServerContext | PeerContext)
                else arg
                for arg in args
            )
        )


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
        return [BoundHook(p, function) for p, function in self._filled(slot)]

    def part_filling(self, slot: str) -> Part | None:
        """The part that fills a slot; None where no part does."""
        return next((p for p in self.parts if getattr(p, slot) is not None), None)

    def trackers(self, half: str) -> list[BoundHook]:
        """One half, `init` or `step`, of every tracker."""
        return [BoundHook(p, getattr(track, half)) for p, track in self._filled("step_tracker")]

    def optimizer(self) -> Optimizer | None:
        """The optimizer a part brings, which then sees that part's subtree."""
        owner = self.part_filling("optimizer")
        if owner is None or owner.optimizer is None:
            return None
        return owner.optimizer._replace(step=BoundHook(owner, owner.optimizer.step))

    def transforms(self) -> list[BoundHook]:
        """Gradient transforms, by stage and then by name."""
        staged = sorted(self._filled("transforms"), key=lambda pair: STAGES.index(pair[1].stage))
        return [BoundHook(p, transform.function) for p, transform in staged]

    def _filled(self, slot: str) -> Iterator[tuple[Part, Any]]:
        for p in self.parts:
            value = getattr(p, slot)
            if isinstance(value, tuple) and not hasattr(value, "_fields"):
                yield from ((p, item) for item in value)
            elif value is not None:
                yield p, value

    def frozen(self, info: TaskInfo) -> frozenset[str]:
        """Parameters that keep their initial values everywhere."""
        return frozenset(name for p, function in self._filled("frozen") for name in function(info))

    def personal(self, info: TaskInfo) -> frozenset[str]:
        """Parameters that are trained but never leave the client."""
        return frozenset(
            name for p, function in self._filled("personal") for name in function(info)
        )

    @property
    def mechanisms(self) -> list[tuple[Part, Mechanism]]:
        """All protective noise that is declared, with the part that draws it."""
        return [(p, mechanism) for p in self.parts for mechanism in p.mechanisms]

    @property
    def hyper(self) -> dict[str, dict[str, float]]:
        return {p.name: dict(p.hyper) for p in self.parts if p.hyper}

    @property
    def is_stateful(self) -> bool:
        """Does any client keep something between rounds?"""
        return any(p.client_state is not None for p in self.parts)
