"""Makes bad replies: one of each named kind, and random mixtures by seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from remanence.core import pytree
from remanence.core.types import ModelState, Reply
from remanence.training.reply_schema import ReplySchema

HUGE = 1e12


def _first(tree: dict[str, Any]) -> str:
    return next(iter(tree))


def _with_param(reply: Reply, change: Callable[[torch.Tensor], Any]) -> Reply:
    name = _first(dict(reply.params))
    return reply._replace(params={**reply.params, name: change(reply.params[name])})


def _poke(reply: Reply, value: float) -> Reply:
    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.view(-1)[0] = value
        return x

    return _with_param(reply, change)


def _poke_extras(reply: Reply) -> Reply:
    extras = pytree.clone(reply.payload)
    floating = [x for x in pytree.leaves(extras) if x.is_floating_point()]
    floating[0].view(-1)[0] = math.nan
    return reply._replace(payload=extras)


def _drop_name(reply: Reply) -> Reply:
    name = _first(dict(reply.params))
    return reply._replace(params={key: value for key, value in reply.params.items() if key != name})


def _weigh(value: float) -> Callable[[Reply], Reply]:
    return lambda reply: reply._replace(weight=torch.full_like(reply.weight, value))


# one reply -> what comes instead
KINDS: dict[str, Callable[[Reply], Reply | list[Reply]]] = {
    "one client sends NaN": lambda reply: _poke(reply, math.nan),
    "one client sends infinity": lambda reply: _poke(reply, math.inf),
    "NaN in the payload": _poke_extras,
    "a wrong shape": lambda reply: _with_param(reply, lambda x: torch.cat([x, x], dim=-1)),
    "a wrong shape that would broadcast": lambda reply: _with_param(reply, lambda x: x[..., :1]),
    "a wrong dtype": lambda reply: _with_param(reply, lambda x: x.half()),
    "a value that is not a tensor": lambda reply: _with_param(reply, lambda x: x.tolist()),
    "a name is missing": _drop_name,
    "an additional name": lambda reply: reply._replace(
        params={**reply.params, "spy": torch.zeros(reply.num_clients, 1)}
    ),
    "a payload that the method does not declare": lambda reply: reply._replace(
        payload={**reply.payload, "spy": {"x": torch.zeros(reply.num_clients)}}
    ),
    "a payload a hundred times too large": lambda reply: reply._replace(
        params={**reply.params, "spy": torch.zeros(reply.num_clients, 1 << 18)}
    ),
    "a client that was not sampled": lambda reply: reply._replace(client=reply.client + 1000),
    "the same client twice": lambda reply: [reply, reply],
    "a reply to an earlier round": lambda reply: reply._replace(round=reply.round - 1),
    "a reply to a later round": lambda reply: reply._replace(round=reply.round + 1),
    "a negative number of examples": _weigh(-5.0),
    "a huge number of examples": _weigh(HUGE),
    "NaN examples": _weigh(math.nan),
    "no examples": _weigh(0.0),
    "a model that moved beyond round.max_norm": lambda reply: _with_param(reply, lambda x: x + 1e6),
}


# -------------------------------------------------------------------------------------- for fuzzing

COHORT = (2, 5, 7, 11)


def expect_small() -> ReplySchema:
    params = {"w": torch.zeros(2, 3), "b": torch.zeros(())}
    buffers, extras = {"n": torch.zeros((), dtype=torch.int64)}, {"part": {"e": torch.zeros(2)}}
    return ReplySchema(
        4,
        COHORT,
        params,
        buffers,
        extras,
        1000.0,
        max_norm=1e4,
        start=ModelState(params, buffers),
        client_state={"part": {"kept": torch.zeros(2)}},
    )


def _good(client: int) -> Reply:
    value = torch.full((1,), float(client))
    return Reply(
        client=torch.tensor([client]),
        round=torch.tensor([4]),
        params={"w": torch.full((1, 2, 3), float(client)), "b": value.clone()},
        buffers={"n": torch.tensor([client])},
        payload={"part": {"e": torch.full((1, 2), float(client))}},
        weight=value.double(),
        client_state={"part": {"kept": torch.full((1, 2), float(client))}},
        loss=value.clone(),
    )


def _odd_tensor(draw: random.Random) -> Any:
    shape = tuple(draw.choice((0, 1, 1, 2, 3)) for _ in range(draw.randrange(4)))
    value = draw.choice((0.0, 1.0, -1.0, math.nan, math.inf, 1e38, 3.0))
    kind = draw.choice(
        (
            torch.float32,
            torch.float64,
            torch.int64,
            torch.bool,
            torch.complex64,
            torch.float16,
            torch.uint8,
        )
    )
    odd = (
        None,
        3,
        "text",
        [1.0],
        {},
        {"x": torch.zeros(1)},
        {"a/b": torch.zeros(1)},
        {3: torch.zeros(1)},
        torch.zeros(1, device="meta"),
    )
    if draw.random() < 0.2:
        return draw.choice(odd)
    if not kind.is_floating_point and not kind.is_complex and not math.isfinite(value):
        value = 1.0
    made = torch.full(
        shape,
        value if kind.is_floating_point or kind.is_complex else abs(value) % 100,
        dtype=torch.float64,
    ).to(kind)
    return (
        made.to_sparse() if draw.random() < 0.05 and made.dim() and kind.is_floating_point else made
    )


def _change_anything(reply: Reply, draw: random.Random) -> Reply:
    field = draw.choice(Reply._fields)
    old = getattr(reply, field)
    if not isinstance(old, dict) or draw.random() < 0.2:
        return reply._replace(**{field: _odd_tensor(draw)})
    tree = pytree.clone(old) if draw.random() < 0.5 else dict(old)
    name = draw.choice([*tree, "other", "part", "a/b", ""])
    if draw.random() < 0.3:
        tree.pop(name, None)
    else:
        tree[name] = _odd_tensor(draw)
    return reply._replace(**{field: tree})


def spoil_reply(seed: int) -> Iterator[Reply]:
    """Chunks of a round: some valid, some with a named fault, some with random faults."""
    draw = random.Random(seed)
    for _ in range(draw.randint(1, 5)):
        reply = _good(draw.choice(COHORT))
        if draw.random() < 0.3:
            try:
                reply = Reply.concat([reply, _good(draw.choice(COHORT))])
            except (RuntimeError, TypeError):
                continue
        way = draw.random()
        if way < 0.25:
            yield reply
        elif way < 0.5:
            came = KINDS[draw.choice(list(KINDS))](reply)
            yield from came if isinstance(came, list) else [came]
        else:
            for _ in range(draw.randint(1, 2)):
                try:
                    reply = _change_anything(reply, draw)
                except (AttributeError, TypeError):  # a mutated value cannot be copied
                    break
            yield reply
