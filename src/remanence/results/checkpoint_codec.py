"""The state of a run as one tree of tensors, and trees as safetensors bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from remanence.core import pytree
from remanence.core.errors import CheckpointError
from remanence.core.pytree import Tree
from remanence.core.types import ModelState, Reply
from remanence.training.server_step import Server
from remanence.training.state import CLIENT_TABLES, ClientModels, RunState, StaleReply

# our one entry of a file's metadata, since safetensors does not keep the order of several; the file
# of equal states is the same
METADATA = "remanence"
ORDER, BOUND = "order", "bound"  # of the tensors' names; entries of the manifest


def as_tree(state: RunState) -> Tree:
    """The state as one tree of tensors, without what clients keep."""

    def server_tree(server: Server) -> Tree:
        return {
            "params": server.model.params,
            "buffers": server.model.buffers,
            "state": server.state,
        }

    tree = server_tree(state.server)
    if state.extra_servers:
        tree["extra_servers"] = {
            str(number): server_tree(server) for number, server in enumerate(state.extra_servers)
        }
    if state.model_of_client is not None:
        tree |= {
            "model_of_client": state.model_of_client,
            "assignment_state": state.assignment_state,
        }
    if state.stale:
        tree["stale"] = {
            str(number): _stale_tree(stale) for number, stale in enumerate(state.stale)
        }
    if state.client_models is not None:
        clients = state.client_models
        tree["client_models"] = {
            "models": clients.models._asdict(),
            "best": clients.best._asdict(),
            "peers": clients.peers,
            **{name: getattr(clients, name) for name in CLIENT_TABLES},
        }
    return tree


def add_tree(state: RunState, tree: Tree) -> RunState:
    """The state with the values of a tree that `as_tree` has made."""
    stale, extra_servers = tree.get("stale", {}), tree.get("extra_servers", {})
    return replace(
        state,
        server=_as_server(tree),
        extra_servers=tuple(
            _as_server(extra_servers[str(number)]) for number in range(len(extra_servers))
        ),
        model_of_client=tree["model_of_client"].cpu() if "model_of_client" in tree else None,
        assignment_state=tree.get("assignment_state", {}),
        client_models=_as_client_models(tree["client_models"]) if "client_models" in tree else None,
        stale=tuple(_as_stale(stale[str(number)]) for number in range(len(stale))),
    )


def _stale_tree(stale: StaleReply) -> Tree:
    reply = {
        name: value
        for name, value in stale.reply._asdict().items()
        if not isinstance(value, dict) or value
    }
    return {
        "reply": reply,
        "base_model": stale.base_model._asdict(),
        "arrival_round": torch.tensor(stale.arrival_round),
    }


def _as_stale(tree: Tree) -> StaleReply:
    empty: dict[str, Any] = {"params": {}, "buffers": {}, "payload": {}, "client_state": {}}
    return StaleReply(
        Reply(**empty | tree["reply"]), _as_model(tree["base_model"]), int(tree["arrival_round"])
    )


def _as_model(tree: Tree) -> ModelState:
    model = ModelState(tree.get("params", {}), tree.get("buffers", {}))
    if not all(isinstance(branch, dict) for branch in model):
        raise CheckpointError("state.safetensors does not hold a model")
    return model


def _as_server(tree: Tree) -> Server:
    if not isinstance(tree.get("state", {}), dict):
        raise CheckpointError("state.safetensors does not hold a model")
    return Server(_as_model(tree), tree.get("state", {}))


def _as_client_models(tree: Tree) -> ClientModels:
    models, best = _as_model(tree["models"]), _as_model(tree["best"])
    tables = {name: tree[name].cpu() for name in CLIENT_TABLES}
    return ClientModels(models=models, best=best, peers=tree.get("peers", {}), **tables)


def to_bytes(tree: Tree, bound: Mapping[str, Any] | None = None) -> bytes:
    """A tree as a safetensors file, without empty branches. It stores the order of the names,
    since sums over a tree depend on it in their last bits.

    Args:
        tree: The tree.
        bound: Entries of a manifest that are stored with it.
    """
    flat = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in pytree.flatten(tree).items()
    }
    return save_tensors(flat, metadata=make_metadata(list(flat), bound))


def make_metadata(order: list[str], bound: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The metadata of a safetensors file of ours."""
    return {METADATA: json.dumps({ORDER: order, BOUND: dict(bound or {})})}


def read_bound(content: bytes) -> dict[str, Any]:
    """The entries of a manifest that `to_bytes` has stored."""
    bound: dict[str, Any] = _read_metadata(content)[BOUND]
    return bound


def _read_metadata(content: bytes) -> dict[str, Any]:
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata: dict[str, Any] = json.loads(header["__metadata__"][METADATA])
    return metadata


def from_bytes(content: bytes, device: torch.device, name: str) -> Tree:
    """The tree of a safetensors file, on a device; `name` is for messages."""
    try:
        flat = load_tensors(content)
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not a safetensors file ({error})") from None
    try:
        order = _read_metadata(content)[ORDER]
        return pytree.unflatten({key: flat[key].to(device) for key in order})
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{name} is not a file of ours ({type(error).__name__}: {error})"
        ) from None
