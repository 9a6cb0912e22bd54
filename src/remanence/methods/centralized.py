"""Centralized training: one model on all clients' data in one place, an upper bound for federated
methods; and what it forgets from batch to batch.

Hong et al., "FedWAvg", 2022, section 3.1 and table 1.

    step                                        slot           function
    a batch again, after the step on the next   step_tracker   recheck_previous_batch
    numbers of forgetting events                on_client_end  report
"""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.core.compose import part
from remanence.core.contexts import ClientOps, Context
from remanence.core.declarations import Disclosure
from remanence.core.pytree import Tree
from remanence.core.slots import Part, StepTracker
from remanence.core.types import Batch, ModelState, Output, TaskInfo

EVENTS = ("right_to_wrong", "margin_rise")


@part
def centralized(*, events: bool = True) -> Part:
    """Pools the examples of all clients; a round is the local epochs over all of them. Counts
    forgetting events of every example.

    A batch A is evaluated right after the step on it, and again after the step on the next batch B.
    `right_to_wrong` counts A's examples that were classified correctly and no longer are;
    `margin_rise` those whose margin error max_{c != y} z_c - z_y grew, which includes nearly all of
    the former. The paper calls both forgetting events and leaves the margin error open; ours
    follows Toneva et al., ICLR 2019, and so does evaluating A after its own step. The last batch of
    a round has no successor and is not evaluated again.

    Args:
        events: Count them (two more forward passes a step). Their numbers in a round are in the
            metrics under "payload", those of each example in the client state.
    """
    if not events:
        return Part("centralized", static=("events",), centralized=True)
    return Part(
        "centralized",
        centralized=True,
        step_tracker=StepTracker(init_counts, recheck_previous_batch),
        on_client_end=report,
        client_state=lambda start, stats, info: init_events(info),
        payload=lambda start, info: {name: torch.zeros((), dtype=torch.int64) for name in EVENTS},
        discloses=dict.fromkeys(EVENTS, Disclosure("examples")),
        static=("events",),
        payload_description="the numbers of forgetting events; the examples are in one place"
        " already",
    )


def init_events(info: TaskInfo) -> Tree:
    return {
        name: torch.zeros(info.num_examples, dtype=torch.int64, device=info.device)
        for name in EVENTS
    }


def init_counts(ctx: Context, ops: ClientOps) -> Tree:
    """Events of each example in this round, and the batch to evaluate again: before the first step
    a placeholder whose examples cannot have events.
    """
    info, size = ctx.info, ctx.info.batch_size
    empty = {
        "x": torch.zeros(size, *info.example_shape, dtype=info.example_dtype, device=info.device),
        "y": torch.zeros(size, dtype=torch.int64, device=info.device),
        "ids": torch.zeros(size, dtype=torch.int64, device=info.device),
        # an example that is wrong cannot become wrong,
        "right": torch.zeros(size, dtype=torch.bool, device=info.device),
        # and no margin error is larger than infinity
        "error": torch.full((size,), torch.inf, dtype=info.dtype, device=info.device),
    }
    return {"counts": init_events(info), "last": empty}


def recheck_previous_batch(
    tracker_state: Tree,
    before: ModelState,
    after: ModelState,
    batch: Batch,
    ops: ClientOps,
    ctx: Context,
) -> Tree:
    """Evaluate batch A again, after the step on batch B; then B itself. B fills the first places of
    the stored batch, so that its shape does not depend on the size of B.
    """
    last = tracker_state["last"]
    right, error = correct_and_margin(ops.forward(after, last["x"]), last["y"])
    is_event = {"right_to_wrong": last["right"] & ~right, "margin_rise": error > last["error"]}
    counts = {
        name: tracker_state["counts"][name].index_add(0, last["ids"], is_event[name].long())
        for name in EVENTS
    }
    right, error = correct_and_margin(ops.forward(after, batch.x), batch.y)
    now = {"x": batch.x, "y": batch.y, "ids": batch.ids, "right": right, "error": error}
    empty = init_counts(ctx, ops)["last"]
    return {
        "counts": counts,
        "last": {
            name: torch.cat([now[name].to(rest), rest[len(batch.y) :]])
            for name, rest in empty.items()
        },
    }


def correct_and_margin(out: Output, y: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each prediction is correct [B], and the margin error [B]."""
    true = y.unsqueeze(1)  # [B, 1]
    others = out.logits.scatter(1, true, float("-inf"))  # [B, C]
    return out.logits.argmax(dim=1) == y, others.amax(dim=1) - out.logits.gather(1, true).squeeze(1)


def report(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
    counts = ctx.tracker_state["counts"]
    return {name: ctx.client_state[name] + counts[name] for name in EVENTS}, {
        name: counts[name].sum() for name in EVENTS
    }
