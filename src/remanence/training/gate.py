"""Refuses what is bad before it touches a model.

Every reply passes here on its way from an engine to an aggregator, whatever the engine, and so does
what a client hears of its peers' models. A refused reply changes nothing: neither the global model
nor the client's own state. Chunks whose names, shapes or dtypes are wrong are refused whole;
values, weights, rounds and norms are judged client by client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.engine import Engine, Rejection
from remanence.core.pytree import Params, Tree
from remanence.core.remote_params import RemoteParams, to_meta
from remanence.core.types import ModelState, Reply

UNKNOWN_CLIENT = -1  # who sent a reply that does not say so
# bytes beyond twice the expected ones that still count as a wrong name or dtype, not as oversized
SIZE_SLACK = 1 << 16


class ReplySchema(NamedTuple):
    """What a good reply of this round looks like."""

    round: int
    clients: tuple[int, ...]  # the cohort, in order
    params: Params  # one client's: names, shapes and dtypes
    buffers: Params
    payload: Tree  # by part: the form of what else travels up
    weight_cap: float
    max_norm: float = math.inf  # how far a model may have moved from where it began
    # where it began: one model for all, or a stack in the order of the cohort; needed for a norm
    start: ModelState | None = None
    stacked: bool = False  # is `start` a stack?
    # what a client keeps; None: not checked. It never travels, but an engine could lose or mix it
    # up
    client_state: Tree | None = None


Failure = tuple[str, str]  # code, reason


def validate_replies(
    chunks: Iterable[Reply], expected: ReplySchema
) -> tuple[Reply | None, list[Rejection]]:
    """The good replies in cohort order (None where there are none), and the refused ones."""
    good: list[Reply] = []
    refusals: list[Rejection] = []
    seen: set[int] = set()
    for chunk in chunks:
        fault = _check_schema(chunk, expected)
        clients = client_ids(chunk)
        if fault is not None:
            refusals += [Rejection(client, *fault) for client in clients or [UNKNOWN_CLIENT]]
            continue
        if not clients:
            continue
        chunk, keep = _reorder(chunk, expected), []
        for place, (client, judged) in enumerate(
            zip(clients, _check_values(chunk, expected), strict=True)
        ):
            if judged is None and client in seen:
                judged = (
                    "duplicate",
                    "it replied more than once in this round; the first reply counts",
                )
            if judged is None:
                seen.add(client)
                keep.append(place)
            else:
                refusals.append(Rejection(client, *judged))
        if keep:
            good.append(
                chunk
                if len(keep) == len(clients)
                else chunk.select(torch.tensor(keep, device=chunk.client.device))
            )
    if not good:
        return None, sorted(refusals)
    joined = Reply.concat(good)
    order = torch.argsort(joined.client)
    in_order = torch.equal(order, torch.arange(len(order), device=order.device))
    return joined if in_order else joined.select(order), sorted(refusals)


def add_declined(refusals: list[Rejection], engine: Engine) -> list[Rejection]:
    """With those of clients that said themselves, through the engine, why they do not reply;
    most engines have no such clients.
    """
    return sorted([*refusals, *engine.pop_declined()])


def validate_probe_losses(
    probed: Tensor, losses: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, list[Rejection]]:
    """What clients heard of the models they tried, without what is no loss at all: it counts as
    infinite, and that peer is not mixed with.

    probed: [K, m] int64, -1: nobody; losses: [K, m], NaN for nobody; rows: [K], a client without
    any cannot judge -> losses, refused pairs [K, m] bool, one refusal for each peer, whoever tried
    it.
    """
    asked = (probed >= 0) & (rows > 0).to(probed.device).unsqueeze(1)
    refused = asked & ~(torch.isfinite(losses) & (losses >= 0))
    if not bool(refused.any()):
        return losses, refused, []
    peers = torch.unique(probed[refused]).tolist()
    reason = (
        "its model has no loss on the rows of a client that tried it, only NaN, infinity or"
        " less than 0"
    )
    return (
        losses.masked_fill(refused, math.inf),
        refused,
        [Rejection(int(peer), "probe", reason) for peer in peers],
    )


def find_nonfinite(models: ModelState) -> tuple[Tensor, list[Rejection]]:
    """Whose models in a stack hold NaN or infinity: nobody may hear them. -> [K] bool, a
    refusal for each
    """
    count = models.num_models
    sound = pytree.finite({"params": models.params, "buffers": models.buffers}, count)
    bad = (~sound).nonzero().flatten().tolist()
    return ~sound, [
        Rejection(
            client, "not-finite", "its model holds NaN or infinity, and no peer listens to it"
        )
        for client in bad
    ]


def client_ids(chunk: Reply) -> list[int]:
    """The numbers a chunk claims to come from; NOBODY where that is no number."""
    try:
        numbers = chunk.client.reshape(-1).tolist()
    except (AttributeError, RuntimeError, NotImplementedError):  # no tensor, or one without content
        return [UNKNOWN_CLIENT]
    return [
        int(number) if isinstance(number, int | float) and math.isfinite(number) else UNKNOWN_CLIENT
        for number in numbers
    ]


def _check_schema(chunk: Reply, expected: ReplySchema) -> Failure | None:
    """Names, shapes and dtypes: exact, because a shape that merely broadcasts would pass unseen."""
    numbers = (chunk.client, chunk.round, chunk.weight, chunk.loss)
    if not all(_is_plain(x) for x in numbers):
        return "dtype", "client, round, weight and loss must be plain tensors"
    if chunk.client.dim() != 1 or any(x.shape != chunk.client.shape for x in numbers):
        return "shape", "client, round, weight and loss must be one number each for every client"
    if (
        chunk.client.dtype != torch.int64
        or chunk.round.dtype != torch.int64
        or not chunk.weight.is_floating_point()
    ):
        return "dtype", "client and round must be whole numbers, and the weight a number"
    forms: tuple[tuple[str, Any, Tree], ...] = (
        ("parameter", to_meta(chunk.params), expected.params),
        ("buffer", chunk.buffers, expected.buffers),
        ("extra", chunk.payload, expected.payload),
    )
    sent, wanted = {}, {}
    for kind, tree, form in forms:
        try:
            sent[kind], wanted[kind] = pytree.flatten(tree), pytree.flatten(form)
        except (ValueError, AttributeError, TypeError, RecursionError) as problem:
            return "names", f"its {kind}s are not the expected ones: {problem}"
        # an outline of ours: values are elsewhere, and need not be here
        far = tree is not chunk.params and kind == "parameter"
        odd = next((name for name, x in sent[kind].items() if not (far or _is_plain(x))), None)
        if odd is not None:
            return "dtype", f"{kind} {odd} is not a plain tensor"
    size, usual = (
        sum(x.numel() * x.element_size() for flat in side.values() for x in flat.values())
        for side in (sent, wanted)
    )
    if size > chunk.num_clients * (2 * usual + SIZE_SLACK):
        return (
            "oversized",
            f"it sent {size / max(chunk.num_clients, 1):.0f} bytes where {usual} are expected",
        )
    for kind in sent:
        if fault := _compare(kind, sent[kind], wanted[kind], chunk.num_clients):
            return fault
    return _check_client_state(chunk, expected)


def _check_client_state(chunk: Reply, expected: ReplySchema) -> Failure | None:
    if expected.client_state is None:
        return None
    try:
        kept = pytree.flatten(chunk.client_state)
    except (ValueError, AttributeError, TypeError, RecursionError) as problem:
        return "names", f"what it keeps is not what it kept before: {problem}"
    return _compare("state", kept, pytree.flatten(expected.client_state), chunk.num_clients)


def _reorder(chunk: Reply, expected: ReplySchema) -> Reply:
    """The chunk with its trees laid out as expected: empty branches, which hold nothing that
    could be wrong, come and go, and would not fit together.
    """
    own = (
        chunk.client_state
        if expected.client_state is None
        else _reorder_like(expected.client_state, chunk.client_state)
    )
    params = (
        chunk.params
        if isinstance(chunk.params, RemoteParams)
        else _reorder_like(expected.params, chunk.params)
    )
    buffers, extras = (
        _reorder_like(expected.buffers, chunk.buffers),
        _reorder_like(expected.payload, chunk.payload),
    )
    return chunk._replace(params=params, buffers=buffers, payload=extras, client_state=own)


def _reorder_like(form: Tree, tree: Tree) -> Tree:
    return {
        name: _reorder_like(value, tree.get(name, {})) if isinstance(value, dict) else tree[name]
        for name, value in form.items()
    }


def _compare(kind: str, sent: Params, wanted: Params, k: int) -> Failure | None:
    if set(sent) != set(wanted):
        odd = sorted(set(sent) ^ set(wanted))[0]
        return "names", (
            f"its {kind}s are not the expected ones: {odd} is"
            f" {'missing' if odd in wanted else 'unknown'}"
        )
    for name, tensor in sent.items():
        if tensor.shape != (k, *wanted[name].shape):
            return "shape", (
                f"{kind} {name} has shape {tuple(tensor.shape[1:])}, not"
                f" {tuple(wanted[name].shape)}"
            )
        if tensor.dtype != wanted[name].dtype:
            return "dtype", f"{kind} {name} is {tensor.dtype}, not {wanted[name].dtype}"
    return None


def _is_plain(x: object) -> bool:
    """A dense tensor with content: arithmetic on anything else fails only later, in an
    aggregator.
    """
    return (
        isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta and not x.is_quantized
    )


def _check_values(chunk: Reply, expected: ReplySchema) -> list[Failure | None]:
    """Client, round, weight, finiteness and norm of what travels, for each client of a chunk;
    one transfer from the device.
    """
    far, came = (
        (chunk.params, {}) if isinstance(chunk.params, RemoteParams) else (None, chunk.params)
    )
    travels: Tree = {"params": came, "buffers": chunk.buffers, "payload": chunk.payload}
    sound = pytree.finite(travels, chunk.num_clients)
    # of models that stayed with a worker, the worker has looked
    finite = (sound if far is None else sound & far.finite).tolist()
    clients, rounds, weights = chunk.client.tolist(), chunk.round.tolist(), chunk.weight.tolist()
    norms = _measure_norms(chunk, expected, clients)
    judged: list[Failure | None] = []
    for client, round, weight, good, norm in zip(
        clients, rounds, weights, finite, norms, strict=True
    ):
        if client not in expected.clients:
            judged.append(("unknown-client", "it was not asked in this round"))
        elif round != expected.round:
            judged.append(("wrong-round", f"it answered for round {round}, not {expected.round}"))
        elif not good:
            judged.append(("not-finite", "its model or what came with it holds NaN or infinity"))
        elif not 0 < weight < math.inf:
            judged.append(("weight", f"its weight is {weight}, not a positive number"))
        elif weight > expected.weight_cap:
            judged.append(
                (
                    "weight",
                    f"its weight of {weight:g} is above the cap of {expected.weight_cap:g}"
                    " (round.weight_cap)",
                )
            )
        elif not norm <= expected.max_norm:
            judged.append(
                (
                    "norm",
                    f"its model moved by {norm:.4g}, beyond the limit of {expected.max_norm:g}"
                    " (round.max_norm)",
                )
            )
        else:
            judged.append(None)
    return judged


def _measure_norms(chunk: Reply, expected: ReplySchema, clients: list[int]) -> list[float]:
    """How far each model of a chunk is from where it began, in float64; 0 where nobody asks."""
    if not math.isfinite(expected.max_norm) or expected.start is None:
        return [0.0] * chunk.num_clients
    if isinstance(chunk.params, RemoteParams):
        return [float(norm) for norm in chunk.params.update_norm.tolist()]
    start = expected.start.params
    if expected.stacked:  # strangers are refused anyway, so any model does for them
        places = {client: place for place, client in enumerate(expected.clients)}
        index = torch.tensor(
            [places.get(client, 0) for client in clients],
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
