"""The trained model of a run, from its newest checkpoint."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn

from remanence.core.compose import parse_method
from remanence.core.errors import CheckpointError, InputError
from remanence.core.model import init_module
from remanence.core.process_state import preserve_process_state
from remanence.core.rng import Key
from remanence.core.types import ModelState
from remanence.experiment.networks import apply_model_changes, build_module
from remanence.methods import PARTS
from remanence.results.checkpoint import CheckpointStore, fingerprint
from remanence.training.state import RunState

if TYPE_CHECKING:
    from remanence.results.run import Run


class TrainedModel(NamedTuple):
    """A model, and the round of the checkpoint that it was read from."""

    module: nn.Module
    round: int


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
            module = init_module(
                lambda: build_module(run.config.model, shape, classes), key.fold_in("model")
            )
            method = parse_method(run.config.method, PARTS)
            module = apply_model_changes(method, module, classes, key)
    state = CheckpointStore(run.checkpoints, fingerprint(run.config)).load(
        torch.device("cpu"), lambda text: warnings.warn(text, stacklevel=4)
    )
    if state is None:
        raise InputError(f"{run.folder} has no checkpoint yet: let it run for some rounds first")
    model = _pick_model(run, state, client)
    values = {**model.params, **model.buffers}
    module = module.to(next(iter(model.params.values())).dtype)
    try:
        module.load_state_dict(values, strict=False)
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint of {run.folder} does not fit its network {run.config.model}:"
            f" {_last_line(error)}"
        ) from None
    return TrainedModel(module.eval(), state.round)


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
