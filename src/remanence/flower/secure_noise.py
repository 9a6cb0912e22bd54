"""Protective noise must not follow from the experiment's seed, which all sites know: in a
federation it is drawn from the operating system and the keys are not stored.

Parts declare where their noise is drawn (`Mechanism.drawn_at`): at the coordinator or at the
client, and so at its site. The generator is not a cryptographic one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.contexts import ServerContext
from remanence.core.declarations import AT_CLIENT, AT_SERVER, LABEL_COUNTS, UNDECLARED
from remanence.core.rng import Key
from remanence.core.slots import Part
from remanence.core.types import ClientStats
from remanence.experiment.build import BuiltExperiment
from remanence.flower.site_storage import SiteStorage
from remanence.training.task import TrainingTask

# slots of a part that are called with a ServerContext, besides `aggregate`
SERVER_FUNCTIONS = (
    "client_weights",
    "server_update",
    "server_train",
    "update_server_state",
    "broadcast",
)


def draw_key() -> Key:
    """A random key from the operating system."""
    return Key(secrets.randbits(64))


def secret_noise(p: Part) -> Part:
    """A part that declares protective noise at the server, with a secret key in every call of its
    server functions; any other part as it is.
    """
    if not any(mechanism.drawn_at == AT_SERVER for mechanism in p.mechanisms):
        return p
    changes: dict[str, Any] = {
        slot: _with_secret_key(getattr(p, slot))
        for slot in SERVER_FUNCTIONS
        if getattr(p, slot) is not None
    }
    if p.aggregate is not None:
        changes["aggregate"] = p.aggregate._replace(
            partial=_with_secret_key(p.aggregate.partial),
            finalize=_with_secret_key(p.aggregate.finalize),
        )
    return replace(p, **changes)


def _with_secret_key(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return function(
            *(a._replace(key=draw_key()) if isinstance(a, ServerContext) else a for a in args)
        )

    return call


def needs_secret_noise(task: TrainingTask) -> bool:
    """Whether clients draw protective noise in training. A site then draws all random numbers of a
    round from a secret key.

    Noise on label counts is an exception: `fixed_stats` draws it. A part that may draw noise
    without declaring it counts as one that does: one that adds noise to gradients, and one with an
    undeclared payload leaf.
    """
    sent = task.payload_spec()
    return any(_may_draw_noise(p, pytree.flatten(sent.get(p.name, {}))) for p in task.method.parts)


def _may_draw_noise(p: Part, payload: Iterable[str]) -> bool:
    declared = any(m.drawn_at == AT_CLIENT and m.covers != LABEL_COUNTS for m in p.mechanisms)
    noises_gradients = any(transform.stage == "noise" for transform in p.transforms)
    return declared or noises_gradients or any(p.disclosure(path) is UNDECLARED for path in payload)


def fixed_stats(
    experiment: BuiltExperiment, storage: SiteStorage, clients: list[int], time_step: int
) -> ClientStats:
    """Statistics of a site's clients, stacked [k, ...]. Noise on label counts is drawn once for a
    run and time step and stored: repeated draws would average out.
    """
    if experiment.task.method.part_filling("privatize_stats") is None:
        return experiment.client_stats(np.array(clients), time_step)
    rows = []
    for client in clients:
        stats = storage.load_stats(client, time_step)
        if stats is None:
            reseeded = replace(
                experiment,
                config=experiment.config.model_copy(update={"seed": secrets.randbits(63)}),
            )
            drawn = reseeded.client_stats(np.array([client]), time_step)
            stats = {"size": drawn.size[0], "label_counts": drawn.label_counts[0]}
            storage.store_stats(client, time_step, stats)
        rows.append(stats)
    device = experiment.task.info.device
    return ClientStats(
        *(torch.stack([row[name] for row in rows]).to(device) for name in ClientStats._fields)
    )
