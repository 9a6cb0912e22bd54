"""Checks that the parts of a method fit together, and that each slot has a value of its type."""

from __future__ import annotations

import math
import re
from collections import Counter

from remanence.core.declarations import (
    AT_CLIENT,
    AT_SERVER,
    CLIENT,
    EACH_PASS,
    EACH_ROUND,
    EACH_TIME_STEP,
    EXAMPLE,
    LABEL_COUNTS,
    MODEL,
    REVEALS,
)
from remanence.core.errors import InputError
from remanence.core.slots import (
    STAGES,
    Aggregate,
    Method,
    ModelAssignment,
    Optimizer,
    Part,
    PeerSelection,
    Phase,
    StepTracker,
    Transform,
)

# slots that at most one part of a method fills, and their names in messages
EXCLUSIVE_SLOTS = {
    "loss": "loss",
    "gradient": "computation of the gradient",
    "optimizer": "local optimizer",
    "project": "projection of the parameters",
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

# keys in a client's state, beside those of parts
RESERVED_NAMES = ("personal", "site")

# what a slot takes: a record, a tuple of functions or a single function
SLOT_TYPES = {
    "optimizer": Optimizer,
    "aggregate": Aggregate,
    "peers": PeerSelection,
    "model_assignment": ModelAssignment,
    "personalize": Phase,
    "step_tracker": StepTracker,
}
SLOTS_WITH_SEVERAL = ("loss_terms", "regularizers", "transforms")
FUNCTION_SLOTS = (
    "loss",
    "gradient",
    "project",
    "client_weights",
    "server_update",
    "server_train",
    "phases",
    "privatize_stats",
    "on_client_start",
    "on_client_end",
    "update_server_state",
    "frozen",
    "personal",
    "client_state",
    "payload",
    "server_state",
    "broadcast",
    "modify_model",
    "validate",
)


def check(method: Method) -> Method:
    """Raise `InputError` for parts that do not fit together; return the method."""
    names = "+".join(p.name for p in method.parts)
    for name, count in Counter(p.name for p in method.parts).items():
        if count > 1:
            raise InputError(f"method {names!r} has {name} twice: write it once")
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
        _check_name(p)
        _check_slots(p)
        for transform in p.transforms:
            if transform.stage not in STAGES:
                raise InputError(
                    f"{p.name}: a transform's stage is one of {', '.join(STAGES)}, not"
                    f" {transform.stage!r}"
                )
        _check_declarations(p)
    return method


def _check_slots(p: Part) -> None:
    """Raise `InputError` for a field that holds another kind of value than its slot takes."""
    for slot, kind in SLOT_TYPES.items():
        value = getattr(p, slot)
        if value is not None and not isinstance(value, kind):
            raise InputError(
                f"{p.name}: {slot} must be of the type {kind.__name__}, not {type(value).__name__}"
            )
    for slot in SLOTS_WITH_SEVERAL:
        value = getattr(p, slot)
        wanted = "Transform" if slot == "transforms" else "function"
        if not isinstance(value, tuple) or hasattr(value, "_fields"):
            raise InputError(
                f"{p.name}: {slot} must be a tuple of {wanted}s, not {type(value).__name__};"
                f" a tuple of one is written ({wanted.lower()},)"
            )
        for item in value:
            if not (isinstance(item, Transform) if wanted == "Transform" else callable(item)):
                raise InputError(f"{p.name}: {slot} must hold {wanted}s, not {type(item).__name__}")
    for slot in FUNCTION_SLOTS:
        value = getattr(p, slot)
        if value is not None and not callable(value):
            raise InputError(f"{p.name}: {slot} must be a function, not {type(value).__name__}")


def _check_name(p: Part) -> None:
    """Raise `InputError` for a name that cannot be the key of a subtree of state."""
    if not re.fullmatch(r"[A-Za-z]\w*", p.name, re.ASCII) or p.name in RESERVED_NAMES:
        raise InputError(
            f"a part cannot be called {p.name!r}: a name has letters, digits and _, begins with a"
            f" letter, and is not {' or '.join(RESERVED_NAMES)}"
        )


def _check_declarations(p: Part) -> None:
    for path, disclosure in p.discloses.items():
        if disclosure.reveals not in REVEALS:
            raise InputError(
                f"{p.name}: {path} reveals one of {', '.join(REVEALS)}, not {disclosure.reveals!r}"
            )
    for mechanism in p.mechanisms:
        # a mistyped word would hide noise from the accountant, and from sites that draw it secretly
        for field, allowed in (
            ("unit", (CLIENT, EXAMPLE)),
            ("covers", (MODEL, LABEL_COUNTS, *p.discloses)),
            ("drawn_at", (AT_CLIENT, AT_SERVER)),
            ("spent", (EACH_PASS, EACH_ROUND, EACH_TIME_STEP)),
        ):
            if getattr(mechanism, field) not in allowed:
                raise InputError(
                    f"{p.name}: {field} of a Mechanism is one of {', '.join(allowed)}, not"
                    f" {getattr(mechanism, field)!r}"
                )
        for field, wanted, good in (
            ("noise", "a number of at least 0", 0 <= mechanism.noise < math.inf),
            ("every", "at least 1", mechanism.every >= 1),
            ("delta", "from 0 to below 1", 0 <= mechanism.delta < 1),
            ("budget", "a number of at least 0", 0 <= mechanism.budget < math.inf),
        ):
            if not good:
                raise InputError(
                    f"{p.name}: {field} of a Mechanism is {wanted}, not"
                    f" {getattr(mechanism, field)!r}"
                )
        if mechanism.covers == LABEL_COUNTS and p.privatize_stats is None:
            raise InputError(
                f"{p.name} declares noise on label counts and does not fill privatize_stats:"
                " draw the noise there"
            )
