"""Everything hostile in an experiment: its attacks and who carries them out, with one call for
each place where they act.
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
    """Attacks act in the order in which they were written."""

    attacks: tuple[Attack, ...]
    attackers: Mapping[str, np.ndarray]  # by attack: client numbers, ascending
    # payload leaves that are counts of examples, by part and path
    counts: tuple[tuple[str, str], ...] = ()

    @classmethod
    def select(cls, attacks: Sequence[Attack], clients: int, key: Key) -> Adversary:
        """Choose the attackers, once for a run; `key` is the experiment's."""
        return cls(
            tuple(attacks), {attack.name: attack.who.attackers(clients, key) for attack in attacks}
        )

    @property
    def clients(self) -> np.ndarray:
        """Everybody who attacks in some way. -> ascending"""
        return np.unique(np.concatenate([np.empty(0, np.int64), *self.attackers.values()]))

    def poison(
        self, views: ConceptViews, steps: Sequence[ClientData], known: DataInfo, key: Key
    ) -> tuple[ConceptViews, tuple[ClientData, ...]]:
        """Before a run: the training rows of attackers. `key` is the experiment's."""
        return poison(views, steps, self.attacks, self.attackers, known, key)

    def tamper_replies(self, chunks: Iterable[Reply], job: ClientWork) -> Iterable[Reply]:
        """Between engine and gate: the answers of attackers, who see those of all others.
        Without such attacks the chunks stream through untouched.
        """
        active = [
            attack
            for attack in self.attacks
            if attack.tamper_replies is not None or attack.tamper_counts is not None
        ]
        if not active:
            return chunks
        came = list(chunks)
        if not came:
            return came
        replies = Reply.concat(came)
        # so that sums over honest replies have the same bits on every engine
        replies = replies.select(torch.argsort(replies.client))
        for attack in active:
            if attack.tamper_replies is not None:
                key = job.key.fold_in("attack", attack.name)
                replies = attack.tamper_replies(
                    replies, self.attackers[attack.name], _starts(job, replies), key
                )
            if attack.tamper_counts is not None:
                replies = attack.tamper_counts(replies, self.attackers[attack.name], self.counts)
        return [replies]

    def tamper_probes(self, probed: Tensor, losses: Tensor) -> Tensor:
        """Between probing and deciding, where there is no server. probed, losses: [K, m]"""
        for attack in self.attacks:
            if attack.tamper_probes is not None:
                losses = attack.tamper_probes(probed, losses, self.attackers[attack.name])
        return losses

    def show_success(
        self, x: np.ndarray, y: np.ndarray, known: DataInfo
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """By attack, where one can tell: test rows on which accuracy is the attack's rate of
        success. x, y: the plain test rows
        """
        return {
            attack.name: attack.measure(x, y, known)
            for attack in self.attacks
            if attack.measure is not None
        }


def _starts(job: ClientWork, replies: Reply) -> ModelState:
    """What the replies started from: one model for all, or a stack in their order."""
    if not job.per_client_start:
        return job.start
    place = np.searchsorted(job.clients, replies.client.cpu().numpy())
    return job.start.select(torch.from_numpy(place).to(replies.client.device))
