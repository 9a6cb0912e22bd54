"""`Attack`: which clients carry it out, and what it changes. For experiments only.

An attack changes the examples that a client trains on, the reply it sends, or the loss that a peer
measures on its model. It acts before the gate, as a malicious client would. All draws are functions
of keys, so an attacked run resumes exactly.
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
from remanence.core.ranges import check_range
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply


class DataInfo(NamedTuple):
    """What an attacker knows of the dataset besides its own examples.

    Args:
        kind: of the dataset, such as "image" or "table".
        classes: the number of classes.
        high: the largest value of the dataset: of all pixels [], or of each feature of a table [f].
    """

    kind: str
    classes: int
    high: np.ndarray


# (an attacker's examples x [n, ...], their labels y [n], dataset, key) -> x, y; the same x object
# if inputs do not change
PoisonData = Callable[[np.ndarray, np.ndarray, DataInfo, Key], tuple[np.ndarray, np.ndarray]]
# (all replies of the round, attackers, the models they started from, key) -> replies; one model for
# all, or a stack in the order of the replies
TamperReplies = Callable[[Reply, np.ndarray, ModelState, Key], Reply]
# (all replies of the round, attackers, the payload leaves that are counts, by part and path) ->
# replies
TamperCounts = Callable[[Reply, np.ndarray, Sequence[tuple[str, str]]], Reply]
# (test examples x, their labels y, dataset) -> x, y on which accuracy is the success rate
AttackMeasure = Callable[[np.ndarray, np.ndarray, DataInfo], tuple[np.ndarray, np.ndarray]]
# (dataset, shape of an example): raises InputError if the attack is impossible
CheckAttack = Callable[[DataInfo, tuple[int, ...]], None]
# (probed peers [K, m], losses [K, m], attackers) -> losses
TamperProbes = Callable[[Tensor, Tensor, np.ndarray], Tensor]


@dataclass(frozen=True)
class Attack:
    """A named set of slots, like a part of a method; most attacks fill one.

    Args:
        name: its key in `ATTACKS`.
        who: the clients that carry it out.
        poison: changes training examples.
        tamper_replies: changes replies.
        tamper_counts: changes the counts of examples in replies.
        tamper_probes: changes the losses that peers measure.
        measure: makes test examples on which accuracy is the success rate of the attack.
        check: raises an error if the attack does not fit the data.
    """

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
    """The attackers of an attack: a random share of the clients, or given clients.

    Args:
        name: of the attack, for errors.
        fraction: the share of the clients.
        numbers: the clients; empty: drawn at random.
    """

    name: str
    fraction: float
    numbers: tuple[int, ...] = ()

    def attackers(self, clients: int, key: Key) -> np.ndarray:
        """Return the attackers, ascending; the same in all rounds.

        Args:
            clients: the number of clients.
            key: that of the experiment, so that attacks with equal fractions have the same
                attackers and can be combined.
        """
        if self.numbers:
            if self.numbers[-1] >= clients:
                raise InputError(
                    f"attack {self.name}: there is no client {self.numbers[-1]}: clients are"
                    f" numbered 0 to {clients - 1}"
                )
            return np.array(self.numbers, dtype=np.int64)
        # rounded half up; at least one client is benign
        count = min(math.floor(self.fraction * clients + 0.5 + 1e-9), clients - 1)
        if count == 0:
            raise InputError(
                f"attack {self.name}: fraction={self.fraction} of {clients} clients is no client:"
                f" give a fraction of at least {0.5 / clients:.2g}, or name them with clients='0'"
            )
        return np.sort(key.fold_in("attackers").permutation(clients)[:count]).astype(np.int64)


def parse_attackers(name: str, fraction: float, clients: str) -> AttackerSelection:
    """Check and parse the two options that every attack has."""
    check_range(0 < fraction < 1, f"attack {name}", "fraction", "above 0 and below 1", fraction)
    if clients.strip() and not re.fullmatch(r"\d{1,9}([\s,]+\d{1,9})*", clients.strip(), re.ASCII):
        raise InputError(
            f"attack {name}: cannot read clients={clients!r}: write the numbers of the"
            " clients, such as '3 7'"
        )
    return AttackerSelection(
        name, fraction, tuple(sorted({int(number) for number in re.findall(r"\d+", clients)}))
    )


def attacker_mask(replies: Reply, attackers: np.ndarray) -> Tensor:
    """Return which replies are from attackers. -> [k] bool"""
    return torch.isin(replies.client, torch.from_numpy(attackers).to(replies.client))


def replace_params(replies: Reply, bad: Tensor, forged: Params) -> Reply:
    """Replace the parameters of some replies. bad: [k] bool; forged: [k, ...] or [...]"""
    params = {
        name: torch.where(_broadcast(bad, x), forged[name].to(x.dtype), x)
        for name, x in replies.params.items()
    }
    return replies._replace(params=params)


def _broadcast(bad: Tensor, x: Tensor) -> Tensor:
    return bad.reshape(-1, *(1,) * (x.dim() - 1))
