"""Noise that protects somebody must not follow from a seed that everybody is told: in a federation
it comes from the operating system, unwritten.

At the coordinator this is the noise of `dp`, at a site that of `dp_sgd`, of `dp_counts` and of
FedWAvg's counts. The generator is not a cryptographic one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from remanence.core.rng import Key
from remanence.core.slots import Method, Part, ServerContext
from remanence.core.types import ClientStats
from remanence.experiment.build import BuiltExperiment
from remanence.flower.site_storage import SiteStorage


def draw_key() -> Key:
    return Key(secrets.randbits(64))


def secret_noise(p: Part) -> Part:
    """The coordinator's part `dp` with noise of its own in every call; any other part as it is."""
    if p.name != "dp" or p.aggregate is None:
        return p

    def secretly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, srv: ServerContext) -> Any:
            return function(first, srv._replace(key=draw_key()))

        return call

    return replace(
        p,
        aggregate=p.aggregate._replace(finalize=secretly(p.aggregate.finalize)),
        update_server_state=None
        if p.update_server_state is None
        else secretly(p.update_server_state),
    )


def needs_secret_noise(method: Method) -> bool:
    """Do clients draw noise that protects their rows? Then a site's whole randomness in a round
    is its own.
    """
    return any(
        p.name == "dp_sgd" or (p.name == "fedwavg" and bool(p.arguments.get("noise")))
        for p in method.parts
    )


def fixed_stats(
    experiment: BuiltExperiment, memory: SiteStorage, clients: list[int], time_step: int
) -> ClientStats:
    """Facts of a site's clients. Noised label counts are drawn once a run and time step and
    kept: drawn anew, they would average out. -> [k, ...]
    """
    if experiment.task.method.part_filling("privatize_stats") is None:
        return experiment.client_stats(torch.tensor(clients).numpy(), time_step)
    rows = []
    for client in clients:
        kept = memory.load_stats(client, time_step)
        if kept is None:
            own = replace(
                experiment,
                config=experiment.config.model_copy(update={"seed": secrets.randbits(63)}),
            )
            drawn = own.client_stats(torch.tensor([client]).numpy(), time_step)
            kept = {"size": drawn.size[0], "label_counts": drawn.label_counts[0]}
            memory.store_stats(client, time_step, kept)
        rows.append(kept)
    device = experiment.task.info.device
    return ClientStats(
        *(torch.stack([row[name] for row in rows]).to(device) for name in ClientStats._fields)
    )
