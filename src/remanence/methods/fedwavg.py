"""FedWAvg: clients whose examples the last aggregation made the model forget get more weight in
the next one.

Hong et al., "Weighted averaging federated learning based on example forgetting events in label
imbalanced non-IID", Applied Sciences 2022, algorithm 1.

    line      step                                        slot             function
    2         F = 1, W = 1                                client_state     init_client_state
    5, 10-12  F_n <- examples correct before, wrong now   on_client_start  count_forgettable
    -         send F_n                                    payload          in `fedwavg`
    6-9       local training                              (default)
    5         keep the trained model for the next round   on_client_end    store_model
    14        W <- (1 - alpha) + alpha N F / sum F        client_weights   client_weights
    15        new model <- 1/N sum_n W_n w_n              (default)
"""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.core import rng
from remanence.core.compose import part
from remanence.core.contexts import ClientOps, Context, ServerContext
from remanence.core.declarations import (
    AGGREGATION,
    AT_CLIENT,
    EACH_ROUND,
    EXAMPLE,
    Disclosure,
    Mechanism,
    Remedy,
)
from remanence.core.pytree import Tree
from remanence.core.ranges import check_range
from remanence.core.slots import Part
from remanence.core.types import ClientStats, ModelState, Reply, TaskInfo


@part
def fedwavg(*, alpha: float = 0.3, every: int = 1, noise: float = 0.0) -> Part:
    """W_n = (1 - alpha) + alpha * N * F_n / sum F, and the new model is 1/N * sum_n W_n w_n; sizes
    n_k play no part.

    F_n counts the forgettable examples of client n: those of its training data that its last local
    model classified correctly and the received global model does not. It is 1 until the client's
    first count, and where no client forgot anything all weights are 1. N is the number of clients
    in the round; a client that makes no new count in it sends its last F (both are our reading: in
    the paper all clients take part). Works with any method that averages.

    Args:
        alpha: Update ratio, from 0 (a plain mean) to below 1.
        every: t, the event period: F is counted in rounds t, 2t, 3t and so on.
        noise: Standard deviation of Gaussian noise on every F that is sent, so that it does not
            reveal single examples; negative results become 0. 0: the true number.
    """
    check_range(0 <= alpha < 1, "fedwavg", "alpha", "from 0 to below 1", alpha)
    check_range(every >= 1, "fedwavg", "every", "of at least 1", every)
    check_range(noise >= 0, "fedwavg", "noise", "of at least 0", noise)

    def count_forgettable(ctx: Context, ops: ClientOps) -> tuple[Tree, Tree]:
        """Lines 5 and 10 to 12, before the local model is overwritten by the global one."""
        due = ctx.client_state["trained"] & (ctx.round % every == 0)
        counted = count_forgotten(last_local_model(ctx), ctx.start, ops)
        if noise:
            drawn = rng.normal(rng.fold_in(ctx.key, "fedwavg"), (), torch.float64).to(counted)
            counted = (counted + noise * drawn).clamp(min=0)
        forgettable = torch.where(due, counted, ctx.client_state["forgettable"])
        return {"forgettable": forgettable}, {"forgettable": forgettable}

    return Part(
        "fedwavg",
        hyper={"alpha": alpha},
        client_state=init_client_state,
        on_client_start=count_forgettable,
        on_client_end=store_model,
        payload=lambda start, info: {"forgettable": torch.ones((), dtype=info.dtype)},
        discloses={
            "forgettable": Disclosure(
                "examples",
                is_count=True,
                cure="fedwavg sends the number of forgotten examples; write fedwavg(noise=5)",
            )
        },
        mechanisms=(forgettable_noise(noise, every),) if noise else (),
        static=("every", "noise"),
        addresses=(
            Remedy(
                AGGREGATION,
                "weights clients by the examples that the last aggregation made the model forget",
                rank=1,
            ),
        ),
        client_weights=client_weights,
        payload_description="one number: its forgotten examples",
    )


def forgettable_noise(noise: float, every: int) -> Mechanism:
    """One example changes F by at most 1, so the standard deviation is the noise multiplier."""
    return Mechanism(
        EXAMPLE,
        covers="forgettable",
        drawn_at=AT_CLIENT,
        noise=noise,
        spent=EACH_ROUND,
        every=every,
        subject="a count of forgotten examples",
    )


def init_client_state(start: ModelState, stats: ClientStats, info: TaskInfo) -> Tree:
    """Line 2. A new client has no local model yet. The global model takes its place, and its count
    is discarded, because `trained` is false.
    """
    one, no = torch.ones((), dtype=info.dtype), torch.zeros((), dtype=torch.bool)
    return {"forgettable": one, "trained": no, "params": start.params, "buffers": start.buffers}


def last_local_model(ctx: Context) -> ModelState:
    # the state of a model without buffers has no such branch
    return ModelState(ctx.client_state["params"], ctx.client_state.get("buffers", {}))


def count_forgotten(local: ModelState, received: ModelState, ops: ClientOps) -> Tensor:
    """Number of examples that `local` classifies correctly and `received` does not. -> scalar"""
    (before, batch), (now, _) = ops.predict(local), ops.predict(received)
    lost = (before.logits.argmax(dim=1) == batch.y) & (now.logits.argmax(dim=1) != batch.y)  # [n]
    return (lost & (batch.weight > 0)).to(batch.weight).sum()


def store_model(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
    return {
        "params": trained.params,
        "buffers": trained.buffers,
        "trained": torch.ones_like(ctx.client_state["trained"]),
    }, {}


def client_weights(replies: Reply, srv: ServerContext) -> Tensor:
    """Line 14, equation 2. The weights sum to N, so the new model stays among the clients'
    models. -> [k]
    """
    return forgetting_weights(replies.payload["fedwavg"]["forgettable"], srv.hyper["alpha"])


def forgetting_weights(forgettable: Tensor, alpha: Tensor) -> Tensor:
    """W = (1 - alpha) + alpha * N * F / sum F, and ones where F is all zeros.

    >>> forgetting_weights(torch.tensor([3.0, 1.0]), torch.tensor(0.5))
    tensor([1.2500, 0.7500])

    forgettable: [N] -> [N]
    """
    if not bool(forgettable.any()):
        return torch.ones_like(forgettable)
    return (1 - alpha) + alpha * len(forgettable) * forgettable / forgettable.sum()
