"""Differential privacy of label counts: all functions of a method, also the client's own loss, read
noised counts.

A client's label counts are sensitive, and Flashback sends them. The Gaussian mechanism (Dwork and
Roth, "The algorithmic foundations of differential privacy", 2014, appendix A) protects single
examples in them: an example changes one count by 1. The noise is drawn once for a client's data,
since noise drawn anew in every round would average out; so the cost does not grow with the rounds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from remanence.core import rng
from remanence.core.compose import part
from remanence.core.declarations import AT_CLIENT, EACH_TIME_STEP, EXAMPLE, LABEL_COUNTS, Mechanism
from remanence.core.ranges import check_range
from remanence.core.rng import Key
from remanence.core.slots import Part

NAME = "dp_counts"
# for parts that read or send label counts
CURE = f"add {NAME}, whose noise hides single examples in them"


@part
def dp_counts(*, noise: float = 5.0, delta: float = 1e-5) -> Part:
    """n_c <- max(0, n_c + N(0, noise^2)) for every class c of a client, once for its data of a time
    step; all ones where nothing is left.

    All functions read these counts: Flashback at client and server, and the losses wsm,
    fedlc, fedrs, masked_ce and tce. About half of the classes that a client lacks then seem to be
    present. The client's number of examples, its weight in the aggregation, is treated as public.

    Args:
        noise: Standard deviation, in examples.
        delta: At which epsilon is reported.
    """
    check_range(noise > 0, NAME, "noise", "above 0", noise)
    check_range(0 < delta < 1, NAME, "delta", "between 0 and 1", delta)

    def add_noise(counts: Tensor, key: Key) -> Tensor:
        drawn = rng.normal(key.fold_in(NAME).tensor(), counts.shape, torch.float64).to(counts)
        noised = (counts + noise * drawn).clamp(min=0)
        return noised if bool(noised.any()) else torch.ones_like(counts)

    return Part(
        NAME,
        privatize_stats=add_noise,
        static=("noise", "delta"),
        mechanisms=(
            Mechanism(
                EXAMPLE,
                covers=LABEL_COUNTS,
                drawn_at=AT_CLIENT,
                noise=noise,
                spent=EACH_TIME_STEP,
                delta=delta,
                subject="label counts",
            ),
        ),
    )


def privatize_label_counts(
    filled_by: Part | None, counts: Tensor, clients: np.ndarray, time_step: int, key: Key
) -> Tensor:
    """The label counts of some clients as the functions of their method read them.

    Args:
        filled_by: The part of the method that fills `privatize_stats`, if any.
        counts: [k, C] true label counts.
        clients: [k]
        time_step: Noise is drawn once for each client and time step.
        key: The experiment's.
    """
    if filled_by is None or filled_by.privatize_stats is None or not len(clients):
        return counts
    privatize = filled_by.privatize_stats
    # the strings given to fold_in are part of the random streams: they never change
    return torch.stack(
        [
            privatize(own_counts, key.fold_in("facts", int(client), time_step))
            for client, own_counts in zip(clients, counts, strict=True)
        ]
    )
