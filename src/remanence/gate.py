"""Refuses bad replies before they touch a model.

Every reply passes here on its way from an engine to an aggregator, whatever the engine. A refused reply changes nothing: neither the global model nor the
client's own state. Chunks whose names, shapes or dtypes are wrong are refused whole; values, weights and rounds are judged client by client.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from remanence import trees
from remanence.trees import Params, Tree
from remanence.types import Reply


class Refusal(NamedTuple):
    """Who was refused, and why: a code for programs and a sentence for people."""

    client: int
    code: str
    reason: str


class Expected(NamedTuple):
    """What a good reply of this round looks like."""

    round: int
    clients: tuple[int, ...]  # the cohort, in order
    params: Params  # one client's: names, shapes and dtypes
    buffers: Params
    extras: Tree  # by part: the form of what else travels up
    weight_cap: float


def admit(chunks: Iterable[Reply], expected: Expected) -> tuple[Reply | None, list[Refusal]]:
    """The good replies in cohort order (None where there are none), and the refused ones."""
    good: list[Reply] = []
    refusals: list[Refusal] = []
    seen: set[int] = set()
    for chunk in chunks:
        fault = _judge_form(chunk, expected)
        clients = [int(client) for client in torch.nan_to_num(chunk.client).reshape(-1).tolist()]
        if fault is not None:
            refusals += [Refusal(client, *fault) for client in clients]
            continue
        keep = []
        for place, (client, judged) in enumerate(zip(clients, _judge_values(chunk, expected), strict=True)):
            if judged is None and client in seen:
                judged = ("duplicate", "it replied more than once in this round; the first reply counts")
            if judged is None:
                seen.add(client)
                keep.append(place)
            else:
                refusals.append(Refusal(client, *judged))
        if keep:
            good.append(chunk if len(keep) == len(clients) else chunk.pick(torch.tensor(keep, device=chunk.client.device)))
    if not good:
        return None, sorted(refusals)
    joined = Reply.join(good)
    order = torch.argsort(joined.client)
    in_order = torch.equal(order, torch.arange(len(order), device=order.device))
    return joined if in_order else joined.pick(order), sorted(refusals)


def _judge_form(chunk: Reply, expected: Expected) -> tuple[str, str] | None:
    """Names, shapes and dtypes: exact, because a shape that merely broadcasts would pass unseen."""
    if chunk.client.dim() != 1 or any(x.shape != chunk.client.shape for x in (chunk.round, chunk.weight, chunk.loss)):
        return "shape", "client, round, weight and loss must be one number each for every client"
    if chunk.client.dtype != torch.int64 or chunk.round.dtype != torch.int64 or not chunk.weight.is_floating_point():
        return "dtype", "client and round must be whole numbers, and the weight a number"
    try:
        wanted_extras, sent_extras = trees.flatten(expected.extras), trees.flatten(chunk.extras)
    except ValueError as problem:
        return "names", f"its extras are not the expected ones: {problem}"
    for kind, sent, wanted in (
        ("parameter", chunk.params, expected.params),
        ("buffer", chunk.buffers, expected.buffers),
        ("extra", sent_extras, wanted_extras),
    ):
        if set(sent) != set(wanted):
            odd = sorted(set(sent) ^ set(wanted))[0]
            return "names", f"its {kind}s are not the expected ones: {odd} is {'missing' if odd in wanted else 'unknown'}"
        for name, tensor in sent.items():
            if tensor.shape != (chunk.k, *wanted[name].shape):
                return "shape", f"{kind} {name} has shape {tuple(tensor.shape[1:])}, not {tuple(wanted[name].shape)}"
            if tensor.dtype != wanted[name].dtype:
                return "dtype", f"{kind} {name} is {tensor.dtype}, not {wanted[name].dtype}"
    return None


def _judge_values(chunk: Reply, expected: Expected) -> list[tuple[str, str] | None]:
    """Client, round, weight and finiteness of what travels, for each client of a chunk; one transfer from the device."""
    travels: Tree = {"params": chunk.params, "buffers": chunk.buffers, "extras": chunk.extras}
    finite = trees.finite(travels, chunk.k).tolist()
    clients, rounds, weights = chunk.client.tolist(), chunk.round.tolist(), chunk.weight.tolist()
    judged: list[tuple[str, str] | None] = []
    for client, round, weight, good in zip(clients, rounds, weights, finite, strict=True):
        if client not in expected.clients:
            judged.append(("unknown-client", "it was not asked in this round"))
        elif round != expected.round:
            judged.append(("wrong-round", f"it answered for round {round}, not {expected.round}"))
        elif not good:
            judged.append(("not-finite", "its model or what came with it holds NaN or infinity"))
        elif not 0 < weight < float("inf"):
            judged.append(("weight", f"its weight is {weight}, not a positive number"))
        elif weight > expected.weight_cap:
            judged.append(("weight", f"its weight of {weight:g} is above the cap of {expected.weight_cap:g} (round.weight_cap)"))
        else:
            judged.append(None)
    return judged
