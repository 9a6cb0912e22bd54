"""Checks that a saved state belongs to an experiment. Digests detect damaged files; names, shapes
and dtypes detect an intact state of another experiment, and one that lacks a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remanence.core import pytree
from remanence.core.errors import CheckpointError
from remanence.core.pytree import Tree
from remanence.training.server_step import Server
from remanence.training.state import CLIENT_TABLES, ClientModels, RunState


def check_schema(state: RunState, schema: RunState) -> None:
    """Refuse a state that differs in form from the experiment's.

    Args:
        state: Loaded.
        schema: A state of the experiment. Where it has no state of a part or of a client, these
            are not checked: a trained model is evaluated without them.
    """
    if (state.client_models is None) != (schema.client_models is None) or (
        state.model_of_client is None
    ) != (schema.model_of_client is None):
        raise CheckpointError("it is of another kind of method")
    for server in state.global_models:
        _check_server(server, schema.server)
    if state.client_models is not None and schema.client_models is not None:
        _compare(_table(state.client_models), _table(schema.client_models), "table over clients")
        _check_parts(state.client_models.peers, schema.client_models.peers, "peer selection")
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
    for form in schema.client_states.values():
        for client, kept in state.client_states.items():
            _compare(dict(kept), dict(form), f"state of client {client}")


def _check_server(server: Server, schema: Server) -> None:
    _compare(server.model._asdict(), schema.model._asdict(), "model")
    _check_parts(server.state, schema.state, "server state")


def _check_parts(found: Mapping[str, Any], schema: Mapping[str, Any], what: str) -> None:
    for part, tree in schema.items():
        _compare({part: found.get(part, {})}, {part: tree}, what)


def _table(clients: ClientModels) -> Tree:
    tree: Tree = {name: getattr(clients, name) for name in CLIENT_TABLES}
    return tree | {"models": clients.models._asdict(), "best": clients.best._asdict()}


def _compare(tree: Tree, schema: Tree, what: str) -> None:
    found, wanted = pytree.flatten(tree), pytree.flatten(schema)
    if found.keys() != wanted.keys():
        name = sorted(found.keys() ^ wanted.keys())[0]
        problem = "lacks" if name in wanted else "has other names than the experiment's:"
        raise CheckpointError(f"its {what} {problem} {name}")
    for name, value in found.items():
        if value.shape != wanted[name].shape or value.dtype != wanted[name].dtype:
            raise CheckpointError(
                f"its {what} has {name} of {tuple(value.shape)} {value.dtype}, not"
                f" {tuple(wanted[name].shape)} {wanted[name].dtype}"
            )
