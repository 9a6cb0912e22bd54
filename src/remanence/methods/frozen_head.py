"""Frozen head: the classifier keeps its initial values, which all clients share.

Joins any method: Hong et al., "FedWAvg", 2022, section 6 and figure 3; after Oh et al.,
"FedBABU", ICLR 2022.

    the classifier is neither trained nor sent   slot frozen   head_names
"""

from __future__ import annotations

from remanence.core.compose import part
from remanence.core.errors import InputError
from remanence.core.slots import Part
from remanence.core.types import TaskInfo


@part
def frozen_head() -> Part:
    """The parameters of the classifier are neither trained nor sent, by the clients or by the
    server.
    """
    return Part(
        "frozen_head",
        frozen=head_names,
        validate=lambda optimizer, info: need_head("frozen_head", info),
    )


def head_names(info: TaskInfo) -> tuple[str, ...]:
    return info.head


def need_head(name: str, info: TaskInfo) -> None:
    """Refuse a network whose classifier cannot be separated from its body."""
    if not info.head:
        raise InputError(
            f"{name} needs a model with a classifier of its own, and this one has no"
            f" linear layer with {info.num_classes} outputs:"
            " end it with nn.Linear, or name its last layer `head`"
        )
