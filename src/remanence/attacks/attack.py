"""An attack: who carries it out, and what it touches.

For experiments alone. An attack acts just before the gate, where a hostile client would: on the
rows it trains on, on what it answers, or on how its model seems to do when a peer tries it.
Everything is drawn from keys, so an attacked run resumes exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from remanence.core.errors import InputError
from remanence.core.pytree import Params
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply


class DataInfo(NamedTuple):
    """What an attacker knows of the whole data set besides its own rows."""

    kind: str  # image | table | tokens
    classes: int
    high: np.ndarray  # the largest value there is: of an image [], of each feature of a table [f]


# (its rows x [n, ...], their labels y [n], the data set, key) -> x, y; the same x object where
# inputs stay as they are
PoisonData = Callable[[np.ndarray, np.ndarray, DataInfo, Key], tuple[np.ndarray, np.ndarray]]
# (all replies of the round, attackers, the model they started from, key) -> replies; `start` is one
# model for all, or a stack in the order of the replies
TamperReplies = Callable[[Reply, np.ndarray, ModelState, Key], Reply]
# (all replies of the round, attackers, the payload leaves that are counts, by part and path) ->
# replies
TamperCounts = Callable[[Reply, np.ndarray, Sequence[tuple[str, str]]], Reply]
# (test rows x, their labels y, the data set) -> x, y on which accuracy is the rate of success
AttackMeasure = Callable[[np.ndarray, np.ndarray, DataInfo], tuple[np.ndarray, np.ndarray]]
# (the data set, shape of an example): raises InputError where the attack cannot work
CheckAttack = Callable[[DataInfo, tuple[int, ...]], None]
# (probed peers [K, m], losses [K, m], attackers) -> losses
TamperProbes = Callable[[Tensor, Tensor, np.ndarray], Tensor]


@dataclass(frozen=True)
class Attack:
    """A named set of slots, like a part of a method; most attacks fill one."""

    name: str
    who: AttackerSelection
    poison: PoisonData | None = None
    tamper_replies: TamperReplies | None = None
    tamper_counts: TamperCounts | None = None
    tamper_probes: TamperProbes | None = None
    measure: AttackMeasure | None = None
    check: CheckAttack | None = None


@dataclass(frozen=True)
class AttackerSelection:
    """The attackers: a fixed random share of the clients, or those with these numbers."""

    name: str  # of the attack, for sentences
    fraction: float
    numbers: tuple[int, ...] = ()

    def attackers(self, clients: int, key: Key) -> np.ndarray:
        """The same all through a run. `key` is the experiment's: attacks of the same fraction fall
        on the same clients, so they work together.

        -> ascending int64
        """
        if self.numbers:
            if self.numbers[-1] >= clients:
                raise InputError(
                    f"attack {self.name}: there is no client {self.numbers[-1]}: clients are"
                    f" numbered 0 to {clients - 1}"
                )
            return np.array(self.numbers, dtype=np.int64)
        # a half counts, and somebody stays honest
        count = min(math.floor(self.fraction * clients + 0.5 + 1e-9), clients - 1)
        if count == 0:
            cure = f"give a fraction of at least {0.5 / clients:.2g}, or name them with clients='0'"
            raise InputError(
                f"attack {self.name}: fraction={self.fraction} of {clients} clients is nobody:"
                f" {cure}"
            )
        return np.sort(key.fold_in("attackers").permutation(clients)[:count]).astype(np.int64)


def parse_attackers(name: str, fraction: float, clients: str) -> AttackerSelection:
    """The two options that every attack has, checked."""
    if not 0 < fraction < 1:
        raise InputError(
            f"attack {name}: fraction must be a number above 0 and below 1, not {fraction}"
        )
    if clients.strip() and not re.fullmatch(r"\d{1,9}([\s,]+\d{1,9})*", clients.strip(), re.ASCII):
        raise InputError(
            f"attack {name}: cannot read clients={clients!r}: write the numbers of the"
            " clients, such as '3 7'"
        )
    return AttackerSelection(
        name, fraction, tuple(sorted({int(number) for number in re.findall(r"\d+", clients)}))
    )


def attacker_mask(replies: Reply, attackers: np.ndarray) -> Tensor:
    """Which replies come from attackers. -> [k] bool"""
    return torch.isin(replies.client, torch.from_numpy(attackers).to(replies.client))


def replace_params(replies: Reply, bad: Tensor, forged: Params) -> Reply:
    """The replies with the parameters of some of them forged. bad: [k] bool; forged: [k, ...]
    or [...]
    """
    params = {
        name: torch.where(_like(bad, x), forged[name].to(x.dtype), x)
        for name, x in replies.params.items()
    }
    return replies._replace(params=params)


def _like(bad: Tensor, x: Tensor) -> Tensor:
    return bad.reshape(-1, *(1,) * (x.dim() - 1))
