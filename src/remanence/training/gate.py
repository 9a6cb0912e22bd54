"""Checks what clients send before any of it reaches a model.

Every reply is checked between the engine and the aggregation, and so are the losses of peers'
models. A rejected reply changes neither the global model nor the client's state. Without a server
the client returns to its model from before the averaging. A chunk with wrong names, shapes or
dtypes is rejected whole; values, weights, rounds and norms are checked client by client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.engine import Rejection
from remanence.core.pytree import Tree
from remanence.core.remote_params import RemoteParams
from remanence.core.types import ModelState, Reply
from remanence.training.reply_schema import Failure, ReplySchema, check_schema, reorder
from remanence.training.task import PERSONAL

UNKNOWN_CLIENT = -1  # the client of a reply without a valid client number


def validate_replies(
    chunks: Iterable[Reply], expected: ReplySchema
) -> tuple[Reply | None, list[Rejection]]:
    """Separate valid replies from invalid ones.

    Args:
        chunks: Replies of one client or more each, in any order.
        expected: What a valid reply looks like.

    Returns:
        The valid replies in the order of the cohort (None if there are none), and the rejections.
    """
    valid: list[Reply] = []
    rejections: list[Rejection] = []
    seen: set[int] = set()
    for chunk in chunks:
        clients, failure = client_ids(chunk), check_schema(chunk, expected)
        if failure is not None:
            rejections += [Rejection(client, *failure) for client in clients or [UNKNOWN_CLIENT]]
            continue
        if not clients:
            continue
        chunk, accepted = reorder(chunk, expected), []
        failures = _check_values(chunk, expected)
        for position, (client, problem) in enumerate(zip(clients, failures, strict=True)):
            if problem is None and client in seen:
                problem = "duplicate", "it replied more than once; the first reply counts"
            if problem is None:
                seen.add(client)
                accepted.append(position)
            else:
                rejections.append(Rejection(client, *problem))
        if len(accepted) == len(clients):
            valid.append(chunk)
        elif accepted:
            valid.append(chunk.select(torch.tensor(accepted, device=chunk.client.device)))
    if not valid:
        return None, sorted(rejections)
    replies = Reply.concat(valid)
    order = torch.argsort(replies.client)
    in_order = torch.equal(order, torch.arange(len(order), device=order.device))
    return replies if in_order else replies.select(order), sorted(rejections)


def validate_probe_losses(
    candidates: Tensor, losses: Tensor, num_examples: Tensor
) -> tuple[Tensor, Tensor, list[Rejection]]:
    """Reject peers whose models have no valid loss on the examples of a client that tried them.

    Args:
        candidates: [K, m] int64, the peers that each client tried; -1: none.
        losses: [K, m], NaN where there is no peer.
        num_examples: [K], training examples of each client. A client without any cannot compute a
            loss, and its peers are not rejected.

    Returns:
        The losses, infinite for rejected pairs; the rejected pairs, [K, m] bool; one rejection
        for each rejected peer.
    """
    tried = (candidates >= 0) & (num_examples > 0).to(candidates.device).unsqueeze(1)
    rejected = tried & ~(torch.isfinite(losses) & (losses >= 0))
    if not bool(rejected.any()):
        return losses, rejected, []
    reason = (
        "its model has no valid loss on the examples of a client that tried it: NaN, infinity or"
        " less than 0"
    )
    peers = torch.unique(candidates[rejected]).tolist()
    return (
        losses.masked_fill(rejected, math.inf),
        rejected,
        [Rejection(int(peer), "probe", reason) for peer in peers],
    )


def find_nonfinite(models: ModelState) -> tuple[Tensor, list[Rejection]]:
    """The clients whose models in a stack hold NaN or infinity, so that no peer may use them.

    A second check: replies are checked when they arrive, but the average of a client's model with
    its peers' may overflow.

    Returns:
        [K] bool, and a rejection for each of these clients.
    """
    finite = pytree.finite({"params": models.params, "buffers": models.buffers}, models.num_models)
    reason = "its model holds NaN or infinity, and no peer uses it"
    bad = (~finite).nonzero().flatten().tolist()
    return ~finite, [Rejection(client, "not-finite", reason) for client in bad]


def client_ids(chunk: Reply) -> list[int]:
    """The client numbers of a chunk; UNKNOWN_CLIENT in place of an invalid one."""
    try:
        numbers = chunk.client.reshape(-1).tolist()
    except (AttributeError, RuntimeError, NotImplementedError):  # not a tensor, or a meta tensor
        return [UNKNOWN_CLIENT]
    return [
        int(number) if isinstance(number, int | float) and math.isfinite(number) else UNKNOWN_CLIENT
        for number in numbers
    ]


def _check_values(chunk: Reply, expected: ReplySchema) -> list[Failure | None]:
    """Client, round, finiteness, weight and norm of each client of a chunk."""
    remote = chunk.params if isinstance(chunk.params, RemoteParams) else None
    params = {} if remote is not None else chunk.params
    communicated: Tree = {"params": params, "buffers": chunk.buffers, "payload": chunk.payload}
    finite = pytree.finite(communicated, chunk.num_clients)
    if remote is not None:  # the worker that holds the parameters has checked them
        finite = finite & remote.finite
    if expected.client_state is not None:
        finite = finite & _is_valid_state(chunk)
    clients = chunk.client.tolist()
    columns = zip(
        clients,
        chunk.round.tolist(),
        chunk.weight.tolist(),
        finite.tolist(),
        _update_norms(chunk, expected, clients),
        strict=True,
    )
    return [_check_client(expected, *values) for values in columns]


def _is_valid_state(chunk: Reply) -> Tensor:
    """Whether each client may keep its state: finite personal parameters, and no NaN elsewhere. A
    part may keep infinity, such as the best loss before the first one. -> bool [k]
    """
    personal = chunk.client_state.get(PERSONAL, {})
    others = {name: tree for name, tree in chunk.client_state.items() if name != PERSONAL}
    has_nan = torch.zeros(chunk.num_clients, dtype=torch.bool, device=chunk.client.device)
    for x in pytree.leaves(others):
        has_nan = has_nan | torch.isnan(x).reshape(chunk.num_clients, -1).any(dim=1)
    return pytree.finite(personal, chunk.num_clients) & ~has_nan.cpu()


def _check_client(
    expected: ReplySchema, client: int, round: int, weight: float, finite: bool, norm: float
) -> Failure | None:
    if client not in expected.clients:
        return "unknown-client", "it is not in this round's cohort"
    if round != expected.round:
        return "wrong-round", f"it replied for round {round}, not {expected.round}"
    if not finite:
        return "not-finite", "its model, payload or state holds NaN or infinity"
    if not 0 < weight < math.inf:
        return "weight", f"its weight is {weight}, not a positive number"
    if weight > expected.weight_cap:
        cap = f"{expected.weight_cap:g} (round.weight_cap)"
        return "weight", f"its weight of {weight:g} is above the cap of {cap}"
    if not norm <= expected.max_norm:
        limit = f"{expected.max_norm:g} (round.max_norm)"
        return "norm", f"its model moved by {norm:.4g}, beyond the limit of {limit}"
    return None


def _update_norms(chunk: Reply, expected: ReplySchema, clients: list[int]) -> list[float]:
    """How far each model moved, in float64; 0 where there is no limit."""
    if not math.isfinite(expected.max_norm) or expected.start is None:
        return [0.0] * chunk.num_clients
    if isinstance(chunk.params, RemoteParams):
        return [float(norm) for norm in chunk.params.update_norm.tolist()]
    start = expected.start.params
    if expected.stacked:  # clients outside the cohort, rejected anyway, take model 0
        positions = {client: position for position, client in enumerate(expected.clients)}
        index = torch.tensor(
            [positions.get(client, 0) for client in clients],
            dtype=torch.int64,
            device=chunk.client.device,
        )
        start = pytree.take(pytree.select_keys(start, chunk.params), index)
    squares = torch.zeros(chunk.num_clients, dtype=torch.float64, device=chunk.client.device)
    for name, x in chunk.params.items():
        squares = squares + (x.double() - start[name].double()).square().reshape(
            chunk.num_clients, -1
        ).sum(dim=1)
    return [float(norm) for norm in squares.sqrt().tolist()]
