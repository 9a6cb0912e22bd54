"""Reads a message with work for the site's own clients; `work_header` writes it."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import replace
from typing import Any

import numpy as np

from remanence.core.engine import ClientWork
from remanence.core.pytree import Tree
from remanence.core.rng import Key
from remanence.core.types import ModelState
from remanence.data.batches import count_steps
from remanence.flower.array_codec import as_tree
from remanence.flower.policy import check_update
from remanence.flower.refusals import Declined
from remanence.flower.secure_noise import draw_key, fixed_stats, needs_secret_noise
from remanence.flower.settings import Policy, SiteFile
from remanence.flower.site_data import SiteTask
from remanence.flower.site_storage import SiteStorage
from remanence.flower.wire import WireArrays
from remanence.training.server_step import Server
from remanence.training.state import NO_STATE, RunState, load_client_states
from remanence.training.task import TrainingTask

MAX_ROUND = 1 << 40  # more rounds than any run has; a tensor cannot hold much larger numbers


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
    task, time_step = site_task.task, int(header["time_step"])
    check_header(task, header)
    check_clients(header["clients"], file.clients)
    clients = np.array(header["clients"], dtype=np.int64)
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise Declined("malformed", "an array of the message has a value that is not finite")
    start = read_model(as_tree(arrays, "start", task.info.device))
    check_start(task, start, len(clients) if header["per_client_start"] else 0)
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


def check_models(
    task: TrainingTask, models: ModelState, which: np.ndarray, owners: np.ndarray
) -> None:
    """Decline models that are not the experiment's, before the site pays for their counts."""
    given, count = models._asdict(), 0
    for kind, initial in task.model.initial._asdict().items():
        shapes = {name: tuple(x.shape[1:]) for name, x in given[kind].items()}
        counts = {len(x) for x in given[kind].values()}
        count = max(counts, default=count)
        if shapes != {name: tuple(x.shape) for name, x in initial.items()} or len(counts) > 1:
            raise Declined("malformed", f"the models' {kind} are not those of the experiment")
    if which.shape != owners.shape or which.ndim != 1 or ((which < 0) | (which >= count)).any():
        raise Declined("malformed", "the message pairs clients with models that it does not have")


def check_sizes(
    policy: Policy,
    task: TrainingTask,
    clients: list[int],
    time_step: int = 0,
    num_phases: int = 0,
) -> None:
    """Decline work whose update would come from too few examples or steps.

    Args:
        policy: The site's policy.
        task: The experiment at this site.
        clients: The clients to train.
        time_step: Of their data.
        num_phases: Only the first phases; 0: all of them.
    """
    sizes = task.population.at(time_step).train.sizes
    for client in clients:
        size = int(sizes[client])
        steps = sum(
            count_steps(size, task.batch_size, phase.epochs, phase.steps, task.drop_last)
            for phase in (task.phases[: num_phases or None] if size else ())
        )
        check_update(policy, client, size, steps)


def check_header(task: TrainingTask, header: dict[str, Any]) -> None:
    """Decline work that no coordinator sends: a client twice, numbers of a wrong type or range."""
    clients, rounds = header["clients"], header["state_rounds"]
    hparams = header["optimizer_hparams"]
    numbers = [header["round"], header["time_step"], header["key"], header["num_phases"]]
    valid = (
        isinstance(clients, list)
        and isinstance(rounds, list)
        and len(set(clients)) == len(clients) == len(rounds) > 0
        and all(type(number) is int for number in (*clients, *rounds, *numbers))
        and 0 <= header["round"] < MAX_ROUND  # 0: the warm-up of methods without a server
        and all(NO_STATE <= start <= header["round"] for start in rounds)
        and 0 <= header["time_step"] < len(task.population.time_steps)
        and header["num_phases"] >= 0
        and all(type(header.get(name, True)) is bool for name in ("per_client_start", "validate"))
        and isinstance(hparams, dict)
        and set(hparams) == set(task.optimizer.hparams)
        and all(isinstance(x, int | float) and math.isfinite(x) for x in hparams.values())
    )
    if not valid:
        raise Declined("malformed", "the header of this message is not one of work for clients")


def check_start(task: TrainingTask, start: ModelState, stacked: int) -> None:
    """Decline a model that is not of the experiment.

    Args:
        task: The experiment at this site.
        start: The model of a message.
        stacked: How many models the message has, one for each client; 0: one for all of them.
    """
    given = start._asdict()
    for kind, initial in task.model.initial._asdict().items():
        leading = (stacked,) if stacked else ()
        expected = {name: ((*leading, *x.shape), x.dtype) for name, x in initial.items()}
        found = {name: (tuple(x.shape), x.dtype) for name, x in given[kind].items()}
        if found != expected:
            raise Declined("malformed", f"the {kind} of the message are not those of a model")


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
