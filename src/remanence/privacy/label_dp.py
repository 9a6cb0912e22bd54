"""Label counts with noise of their own: nothing, not even the client's own loss, reads the true
ones.

How many examples of each class a client has is sensitive, and Flashback sends it. The Gaussian
mechanism (Dwork and Roth, "The algorithmic foundations of differential privacy", 2014, appendix A)
hides any one example in it: an example changes one count by 1. The noise is drawn once for a
client's data and not again in every round, which would average it away; so the cost does not grow
with the rounds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from remanence.core import rng
from remanence.core.compose import part
from remanence.core.declarations import CLIENT, EACH_TIME_STEP, EXAMPLE, LABEL_COUNTS, Mechanism
from remanence.core.errors import check_range
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
    there. The number of its rows, by which clients are weighed, is taken to be public.

    noise: the deviation, in examples. delta: at which epsilon is reported.
    """
    check_range(noise > 0, NAME, "noise", "above 0", noise)
    check_range(0 < delta < 1, NAME, "delta", "between 0 and 1", delta)

    def blur(counts: Tensor, key: Key) -> Tensor:
        drawn = rng.normal(key.fold_in(NAME).tensor(), counts.shape, torch.float64).to(counts)
        blurred = (counts + noise * drawn).clamp(min=0)
        return blurred if bool(blurred.any()) else torch.ones_like(counts)

    return Part(
        NAME,
        privatize_stats=blur,
        static=("noise", "delta"),
        mechanisms=(
            Mechanism(
                EXAMPLE,
                covers=LABEL_COUNTS,
                drawn_at=CLIENT,
                noise=noise,
                spent=EACH_TIME_STEP,
                delta=delta,
                subject="label counts",
            ),
        ),
    )


def privatize_counts(
    blur: Part | None, counts: Tensor, clients: np.ndarray, time_step: int, key: Key
) -> Tensor:
    """The label counts of some clients as their method shows them; `key` is the experiment's.
    counts: [k, C]
    """
    if blur is None or blur.privatize_stats is None or not len(clients):
        return counts
    show = blur.privatize_stats
    return torch.stack(
        [
            show(mine, key.fold_in("facts", int(client), time_step))
            for client, mine in zip(clients, counts, strict=True)
        ]
    )
