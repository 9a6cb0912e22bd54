"""FedBABU: clients train the body with a fixed random head; each then fine-tunes a model of its
own.

Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image classification", ICLR
2022, algorithm 1.

    step                                          slot         function
    train and average the body, head fixed        frozen       head_names
    fine-tune tau_f epochs, for evaluation        personalize  trainable
"""

from __future__ import annotations

from collections.abc import Sequence

from remanence.core.compose import part
from remanence.core.errors import InputError
from remanence.core.expressions import PlainText
from remanence.core.ranges import check_range
from remanence.core.slots import Part, Phase
from remanence.core.types import TaskInfo
from remanence.methods.frozen_head import head_names, need_head

TRAINABLE = ("all", "head", "body")


@part
def fedbabu(*, finetune_epochs: int = 5, part: PlainText = "all") -> Part:
    """Training as with `frozen_head`; for evaluation every client starts from the global model and
    fine-tunes it on its own training examples.

    The fine-tuned models are evaluated on the clients' own validation examples
    (`model = "personal"` in the metrics) and discarded: they do not change the training. Our
    reading: fine-tuning uses the experiment's loss, batch size and optimizer, with the learning
    rate of the round.

    Args:
        finetune_epochs: Epochs of fine-tuning, the paper's tau_f.
        part: What is fine-tuned: "all", "head" or "body". The paper compares the three and chooses
            the whole network.
    """
    check_range(
        finetune_epochs >= 1, "fedbabu", "finetune_epochs", "of at least 1", finetune_epochs
    )
    if part not in TRAINABLE:
        raise InputError(f"fedbabu: part must be one of {', '.join(TRAINABLE)}, not {part!r}")

    def trainable(info: TaskInfo, names: Sequence[str]) -> Sequence[str]:
        return [name for name in names if part == "all" or (name in info.head) == (part == "head")]

    return Part(
        "fedbabu",
        static=("finetune_epochs", "part"),
        frozen=head_names,
        personalize=Phase(epochs=finetune_epochs, trainable=trainable),
        validate=lambda optimizer, info: need_head("fedbabu", info),
    )
