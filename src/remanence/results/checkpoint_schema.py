"""Checks that a saved state belongs to an experiment. Digests detect damaged files; names, shapes
and dtypes detect an intact state of another experiment.
"""

from __future__ import annotations

from remanence.core import pytree
from remanence.core.errors import CheckpointError
from remanence.core.pytree import Tree
from remanence.training.state import RunState


def check_schema(state: RunState, schema: RunState) -> None:
    """Refuse a state whose models or tables over clients differ in form from the experiment's.

    Args:
        state: Loaded.
        schema: A state of the experiment.
    """
    if (state.client_models is None) != (schema.client_models is None) or (
        state.model_of_client is None
    ) != (schema.model_of_client is None):
        raise CheckpointError("it is of another kind of method")
    wanted = _models_tree(schema)
    for server in state.global_models:
        _compare(
            {"params": server.model.params, "buffers": server.model.buffers},
            wanted["server"],
            "model",
        )
    if state.client_models is not None:
        _compare(
            _models_tree(state)["client_models"], wanted["client_models"], "table over clients"
        )
    if state.model_of_client is not None and schema.model_of_client is not None:
        _compare(
            {"model_of_client": state.model_of_client},
            {"model_of_client": schema.model_of_client},
            "table over clients",
        )
        if int(state.model_of_client.min()) < 0 or int(state.model_of_client.max()) >= len(
            state.global_models
        ):
            raise CheckpointError("clients use a model that it does not hold")


def _models_tree(state: RunState) -> Tree:
    tree: Tree = {
        "server": {"params": state.server.model.params, "buffers": state.server.model.buffers}
    }
    if state.client_models is not None:
        clients = state.client_models
        tree["client_models"] = {"models": clients.models._asdict(), "best": clients.best._asdict()}
        tree["client_models"] |= {
            name: getattr(clients, name)
            for name in ("best_loss", "rounds_since_best", "early_stopped", "peer_counts")
        }
    return tree


def _compare(tree: Tree, schema: Tree, what: str) -> None:
    found, wanted = pytree.flatten(tree), pytree.flatten(schema)
    if found.keys() != wanted.keys():
        raise CheckpointError(
            f"its {what} has other names than the experiment's:"
            f" {sorted(found.keys() ^ wanted.keys())[0]}"
        )
    for name, value in found.items():
        if value.shape != wanted[name].shape or value.dtype != wanted[name].dtype:
            raise CheckpointError(
                f"its {what} has {name} of {tuple(value.shape)} {value.dtype}, not"
                f" {tuple(wanted[name].shape)}"
            )
