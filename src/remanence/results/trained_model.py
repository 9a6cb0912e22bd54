"""The trained model of a run, from its newest checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn

from remanence.core import pytree
from remanence.core.compose import parse_method
from remanence.core.errors import CheckpointError, InputError
from remanence.core.memory import check_memory
from remanence.core.model import init_module, state_of
from remanence.core.process_state import preserve_process_state
from remanence.core.rng import Key
from remanence.core.types import ModelState
from remanence.experiment.networks import apply_model_changes, build_module
from remanence.experiment.run_sizes import model_bytes
from remanence.methods import PARTS
from remanence.results.checkpoint import CheckpointStore, fingerprint
from remanence.results.checkpoint_schema import check_schema
from remanence.results.manifest import CHECKPOINTS, LoadedCheckpoint
from remanence.training.server_step import Server
from remanence.training.state import ClientModels, RunState

if TYPE_CHECKING:
    from remanence.results.run import Run


class TrainedModel(NamedTuple):
    """A model, and the checkpoint that it was read from."""

    module: nn.Module
    checkpoint: LoadedCheckpoint


@preserve_process_state()
def load_model(
    run: Run, module: nn.Module | None = None, client: int | None = None
) -> TrainedModel:
    """The global model of the newest checkpoint, or that of a client where clients have their own,
    in evaluation mode on the CPU.

    It expects normalized inputs.
    """
    if module is None and "model" in run.metadata.get("objects", []):
        raise InputError(
            f"{run.folder} was trained with a model object: load it with"
            " rem.load(DIR).model(module=...)"
        )
    if module is None:
        shape, classes = tuple(run.metadata["shape"]), len(run.metadata["class_names"])
        key = Key(run.config.seed)
        with run.settings_named():
            size = model_bytes(run.config.model, shape, classes, torch.float32)
        check_memory(run.folder, {"its model and a checkpoint of it": 2 * size})
        with run.settings_named():
            module = init_module(
                lambda: build_module(run.config.model, shape, classes), key.fold_in("model")
            )
            method = parse_method(run.config.method, PARTS)
            module = apply_model_changes(method, module, classes, key)
    module = module.to(torch.float64 if run.config.precision == "fp64" else torch.float32)
    store = CheckpointStore(run.files / CHECKPOINTS, fingerprint(run.config))
    check = partial(_check_models, state_of(module), int(run.metadata["clients"]))
    state = store.load(torch.device("cpu"), lambda text: None, check)
    if state is None:
        raise InputError(f"{run.folder} has no checkpoint yet: let it run for some rounds first")
    model = _pick_model(run, state, client)
    values = {**model.params, **model.buffers}
    try:
        module.load_state_dict(values, strict=False)
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint of {run.folder} does not fit its network {run.config.model}:"
            f" {_last_line(error)}"
        ) from None
    return TrainedModel(module.eval(), store.loaded)


def _check_models(model: ModelState, clients: int, state: RunState) -> None:
    """Refuse a state whose models do not fit the network. It may be of any kind of method, since
    one that was given as an object is not known here.
    """
    schema = RunState(0, 0, Server(model, {}), {})
    if state.model_of_client is not None:
        schema = replace(schema, model_of_client=torch.zeros(clients, dtype=torch.int64))
    if state.client_models is not None:
        models = ModelState(*(pytree.broadcast(tree, clients) for tree in model))
        counts = torch.zeros(clients, dtype=torch.int64)
        schema = replace(
            schema,
            client_models=ClientModels(
                models=models,
                best=models,
                best_loss=counts.double(),
                rounds_since_best=counts,
                early_stopped=counts.bool(),
                valid_accuracy=counts.double(),
                peers={},
                peer_counts=counts.expand(clients, clients),
            ),
        )
    check_schema(state, schema)


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()


def _pick_model(run: Run, state: RunState, client: int | None) -> ModelState:
    """The server's model; a client's best one where there is no server; or the one a client
    uses where there are several.
    """
    if state.client_models is None and state.model_of_client is None:
        if client is not None:
            raise InputError(
                f"{run.folder} has one model for all clients: leave out client={client}"
            )
        return state.server.model
    count = int(run.metadata["clients"])
    if client is None or not 0 <= client < count:
        problem = "no client was named" if client is None else f"there is no client {client}"
        raise InputError(
            f"{run.folder} has models of the clients' own, and {problem}: name one from 0"
            f" to {count - 1} (--client 0, or client=0)"
        )
    return (
        state.client_models.best.select(client)
        if state.client_models is not None
        else state.global_models[int(state.models_used_by(np.array([client]))[0])].model
    )
