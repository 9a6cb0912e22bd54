"""Reads a message with work for the site's own clients; `work_header` writes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container
from dataclasses import replace
from typing import Any

import numpy as np

from remanence.core.engine import ClientWork
from remanence.core.pytree import Tree
from remanence.core.rng import Key
from remanence.core.types import ModelState
from remanence.flower.array_codec import as_tree
from remanence.flower.refusals import Declined
from remanence.flower.secure_noise import draw_key, fixed_stats, needs_secret_noise
from remanence.flower.settings import SiteFile
from remanence.flower.site_data import SiteTask
from remanence.flower.site_storage import SiteStorage
from remanence.flower.wire import WireArrays
from remanence.training.server_step import Server
from remanence.training.state import NO_STATE, RunState, load_client_states


def make_work(
    file: SiteFile,
    site_task: SiteTask,
    storage: SiteStorage,
    header: dict[str, Any],
    arrays: WireArrays,
) -> ClientWork:
    """The work of a message, with the clients' stored state and the statistics of their data.

    Args:
        file: The site's settings.
        site_task: The experiment at this site.
        storage: The site's files of this run.
        header: The header of the message.
        arrays: The arrays of the message.
    """
    check_clients(header["clients"], file.clients)
    task, time_step = site_task.task, int(header["time_step"])
    clients = np.array(header["clients"], dtype=np.int64)
    start = read_model(as_tree(arrays, "start", task.info.device))
    stats = fixed_stats(site_task.experiment, storage, clients.tolist(), time_step)
    per_client_start = bool(header["per_client_start"])
    state = RunState(
        round=int(header["round"]),
        time_step=time_step,
        # the first state of a new client is made from this model
        server=Server(task.model.initial if per_client_start else start, {}),
        client_states=_load_states(file, site_task, storage, header),
    )
    local_task = replace(task, clients_remote=False)
    # clients with data of their own draw from secret keys, whatever their parts declare
    secret = not site_task.simulated or needs_secret_noise(task)
    return ClientWork(
        round=state.round,
        time_step=time_step,
        clients=clients,
        start=start,
        per_client_start=per_client_start,
        broadcast=as_tree(arrays, "broadcast", task.info.device),
        client_state=load_client_states(state, local_task, clients, stats),
        stats=stats,
        optimizer_hparams={
            str(name): float(value) for name, value in header["optimizer_hparams"].items()
        },
        key=draw_key() if secret else Key(int(header["key"])),
        num_phases=int(header["num_phases"]),
    )


def read_model(tree: Tree) -> ModelState:
    return ModelState(tree.get("params", {}), tree.get("buffers", {}))


def check_clients(clients: list[int], own: Container[int]) -> None:
    """Decline clients of other sites."""
    foreign = next((client for client in clients if client not in own), None)
    if foreign is not None:
        raise Declined("unknown-client", f"client {foreign} is not a client of this site")


def _load_states(
    file: SiteFile, site_task: SiteTask, storage: SiteStorage, header: dict[str, Any]
) -> dict[int, Tree]:
    """The clients' states after the rounds that the header names. A client that has not trained in
    this run has none.
    """
    states: dict[int, Tree] = {}
    if not site_task.task.is_stateful:
        return states
    for client, round in zip(header["clients"], header["state_rounds"], strict=True):
        if round == NO_STATE:
            continue
        state = storage.load(int(client), int(round))
        if state is not None:
            states[int(client)] = state
        elif not file.settings.restart:
            stored = ", ".join(map(str, storage.rounds(int(client)))) or "none"
            raise Declined(
                "state-lost",
                f"the state of client {client} after round {round} is missing (stored rounds:"
                f" {stored}): restore the folder {storage.root.name},"
                " or set restart = true in site.toml to begin with a first state",
            )
    return states


def digest_of(header: dict[str, Any], arrays: WireArrays) -> str:
    """A hash of a request: repeated requests have the same one."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
