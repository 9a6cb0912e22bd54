"""`Adversary`: the attacks of an experiment and the clients that carry them out, with one method
for each place where attacks act.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from remanence.attacks.attack import Attack, DataInfo
from remanence.attacks.poison import poison
from remanence.core.engine import ClientWork
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply
from remanence.data.concept_views import ConceptViews
from remanence.data.population import ClientData


@dataclass(frozen=True)
class Adversary:
    """The attacks of an experiment, in the order in which they act.

    Args:
        attacks: the attacks.
        attackers: the clients that carry out each attack, ascending.
        counts: the payload leaves that are counts of examples, by part and path.
    """

    attacks: tuple[Attack, ...]
    attackers: Mapping[str, np.ndarray]
    counts: tuple[tuple[str, str], ...] = ()

    @classmethod
    def select(cls, attacks: Sequence[Attack], clients: int, key: Key) -> Adversary:
        """Select the attackers, once for a run; `key` is that of the experiment."""
        return cls(
            tuple(attacks), {attack.name: attack.who.attackers(clients, key) for attack in attacks}
        )

    @property
    def clients(self) -> np.ndarray:
        """All clients that carry out an attack, ascending."""
        return np.unique(np.concatenate([np.empty(0, np.int64), *self.attackers.values()]))

    def poison(
        self, views: ConceptViews, steps: Sequence[ClientData], info: DataInfo, key: Key
    ) -> tuple[ConceptViews, tuple[ClientData, ...]]:
        """Poison the training examples of attackers, before a run; see `poison.poison`."""
        return poison(views, steps, self.attacks, self.attackers, info, key)

    def tamper_replies(self, chunks: Iterable[Reply], work: ClientWork) -> Iterable[Reply]:
        """Tamper with the replies of attackers, between engine and gate.

        Attackers know the replies of all clients of the round. Without such attacks the chunks are
        returned unchanged.
        """
        active = [
            attack
            for attack in self.attacks
            if attack.tamper_replies is not None or attack.tamper_counts is not None
        ]
        if not active:
            return chunks
        received = list(chunks)
        if not received:
            return received
        replies = Reply.concat(received)
        # sorted, so that sums over benign replies have the same bits on every engine
        replies = replies.select(torch.argsort(replies.client))
        for attack in active:
            if attack.tamper_replies is not None:
                key = work.key.fold_in("attack", attack.name)
                replies = attack.tamper_replies(
                    replies, self.attackers[attack.name], _start_models(work, replies), key
                )
            if attack.tamper_counts is not None:
                replies = attack.tamper_counts(replies, self.attackers[attack.name], self.counts)
        return [replies]

    def tamper_probes(self, probed: Tensor, losses: Tensor) -> Tensor:
        """Tamper with the losses that peers measured, without a server. probed, losses: [K, m]"""
        for attack in self.attacks:
            if attack.tamper_probes is not None:
                losses = attack.tamper_probes(probed, losses, self.attackers[attack.name])
        return losses

    def success_examples(
        self, x: np.ndarray, y: np.ndarray, info: DataInfo
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return, for each attack that has a measure, the test examples on which accuracy is the
        success rate of the attack. x, y: the test examples
        """
        return {
            attack.name: attack.measure(x, y, info)
            for attack in self.attacks
            if attack.measure is not None
        }


def _start_models(work: ClientWork, replies: Reply) -> ModelState:
    """Return the models the replies started from: one for all, or a stack in their order."""
    if not work.per_client_start:
        return work.start
    position = np.searchsorted(work.clients, replies.client.cpu().numpy())
    return work.start.select(torch.from_numpy(position).to(replies.client.device))
