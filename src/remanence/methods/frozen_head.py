"""Frozen head: the classifier stays at its initial values, an answer sheet that all clients share
and nobody can spoil.

An option of any method: Hong et al., "FedWAvg", 2022, section 6 and figure 3; after Oh et al.,
"FedBABU", ICLR 2022.
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
        validate=lambda optimizer, world: need_head("frozen_head", world),
    )


def head_names(world: TaskInfo) -> tuple[str, ...]:
    return world.head


def need_head(name: str, world: TaskInfo) -> None:
    """Refuse a network whose classifier cannot be told from its body."""
    if not world.head:
        raise InputError(
            f"{name} needs a model with a classifier of its own, and this one has no"
            f" linear layer with {world.num_classes} outputs:"
            " end it with nn.Linear, or name its last layer `head`"
        )
