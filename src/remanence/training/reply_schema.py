"""The names, shapes and dtypes of a valid reply, and the check of a chunk against them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.pytree import Params, Tree
from remanence.core.remote_params import RemoteParams, to_meta
from remanence.core.types import ModelState, Reply

# a reply above 2 x the expected bytes + SIZE_SLACK is rejected as oversized; the parts of a smaller
# one are compared name by name
SIZE_SLACK = 1 << 16


class ReplySchema(NamedTuple):
    """What a valid reply of a round looks like.

    Args:
        round: The number of the round.
        clients: The cohort, in order.
        params: Names, shapes and dtypes of one client's parameters.
        buffers: The same for its buffers.
        payload: The same for its payload, by part.
        weight_cap: The largest weight.
        max_norm: How far a model may move from where it started.
        start: Where it started; needed for `max_norm`.
        stacked: Whether `start` is a stack, in the order of the cohort.
        client_state: What a client keeps; None: not checked. It never travels, but an engine could
            lose it or mix it up.
    """

    round: int
    clients: tuple[int, ...]
    params: Params
    buffers: Params
    payload: Tree
    weight_cap: float
    max_norm: float = math.inf
    start: ModelState | None = None
    stacked: bool = False
    client_state: Tree | None = None


Failure = tuple[str, str]  # code, reason


def check_schema(chunk: Reply, expected: ReplySchema) -> Failure | None:
    """Names, shapes and dtypes must match exactly: a shape that merely broadcasts is wrong too."""
    if failure := _check_columns(chunk):
        return failure
    trees: tuple[tuple[str, Any, Tree], ...] = (
        ("parameters", to_meta(chunk.params), expected.params),
        ("buffers", chunk.buffers, expected.buffers),
        ("payload", chunk.payload, expected.payload),
    )
    sent, wanted = {}, {}
    for kind, tree, schema in trees:
        try:
            sent[kind], wanted[kind] = pytree.flatten(tree), pytree.flatten(schema)
        except (ValueError, AttributeError, TypeError, RecursionError) as problem:
            return "names", f"{kind}: {problem}"
        # remote parameters are represented by tensors without storage
        remote = tree is not chunk.params and kind == "parameters"
        odd = next((name for name, x in sent[kind].items() if not (remote or _is_plain(x))), None)
        if odd is not None:
            return "dtype", f"{kind}: {odd} is not a plain tensor"
    size, usual = (
        sum(x.numel() * x.element_size() for flat in side.values() for x in flat.values())
        for side in (sent, wanted)
    )
    if size > chunk.num_clients * (2 * usual + SIZE_SLACK):
        per_client = size / max(chunk.num_clients, 1)
        return "oversized", f"it sent {per_client:.0f} bytes where {usual} are expected"
    for kind in sent:
        if failure := _compare(kind, sent[kind], wanted[kind], chunk.num_clients):
            return failure
    return _check_client_state(chunk, expected)


def _check_columns(chunk: Reply) -> Failure | None:
    """The fields that hold one number for each client."""
    columns = (chunk.client, chunk.round, chunk.weight, chunk.loss)
    if not all(_is_plain(x) for x in columns):
        return "dtype", "client, round, weight and loss must be plain tensors"
    if chunk.client.dim() != 1 or any(x.shape != chunk.client.shape for x in columns):
        return "shape", "client, round, weight and loss must hold one number for each client"
    if (
        chunk.client.dtype != torch.int64
        or chunk.round.dtype != torch.int64
        or not chunk.weight.is_floating_point()
        or not chunk.loss.is_floating_point()
    ):
        return "dtype", "client and round must be int64, weight and loss floating-point numbers"
    return None


def _check_client_state(chunk: Reply, expected: ReplySchema) -> Failure | None:
    if expected.client_state is None:
        return None
    try:
        sent = pytree.flatten(chunk.client_state)
    except (ValueError, AttributeError, TypeError, RecursionError) as problem:
        return "names", f"its client state differs from the one before: {problem}"
    return _compare("client state", sent, pytree.flatten(expected.client_state), chunk.num_clients)


def _compare(kind: str, sent: Params, wanted: Params, k: int) -> Failure | None:
    if set(sent) != set(wanted):
        odd = sorted(set(sent) ^ set(wanted))[0]
        problem = "missing" if odd in wanted else "unknown"
        return "names", f"{kind}: {odd} is {problem}"
    for name, tensor in sent.items():
        shape, dtype = tuple(wanted[name].shape), wanted[name].dtype
        if tensor.shape != (k, *shape):
            return "shape", f"{kind}: {name} has shape {tuple(tensor.shape[1:])}, not {shape}"
        if tensor.dtype != dtype:
            return "dtype", f"{kind}: {name} is {tensor.dtype}, not {dtype}"
    return None


def _is_plain(x: object) -> bool:
    """Whether x is a dense tensor with storage. Arithmetic on any other fails only later, in an
    aggregator.
    """
    return (
        isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta and not x.is_quantized
    )


def reorder(chunk: Reply, expected: ReplySchema) -> Reply:
    """The chunk with the keys of its trees in the expected order and without other, empty
    branches, so that chunks can be concatenated.
    """
    client_state, params = chunk.client_state, chunk.params
    if expected.client_state is not None:
        client_state = _reorder_like(expected.client_state, client_state)
    if not isinstance(params, RemoteParams):
        params = _reorder_like(expected.params, params)
    return chunk._replace(
        params=params,
        buffers=_reorder_like(expected.buffers, chunk.buffers),
        payload=_reorder_like(expected.payload, chunk.payload),
        client_state=client_state,
    )


def _reorder_like(schema: Tree, tree: Tree) -> Tree:
    return {
        name: _reorder_like(value, tree.get(name, {})) if isinstance(value, dict) else tree[name]
        for name, value in schema.items()
    }
