"""One RunState <-> safetensors and JSON.

    checkpoints/round-0000012/state.safetensors     the server: model and state
    checkpoints/round-0000012/manifest.json         written last: round, lengths of the append-only
    files, SHA-256 of everything checkpoints/own/client-0000003.round-0000012.safetensors     what a
    client keeps, written only when it changed

A checkpoint appears by the rename of its folder, so it is there whole or not at all; the last two
are kept. On loading, everything is checked, and one that cannot be trusted is named and passed over
for the one before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from remanence.config import Experiment
from remanence.core import pytree
from remanence.core.errors import CheckpointError
from remanence.core.files import flush, flush_folder, sha256, write_atomically
from remanence.core.pytree import Tree
from remanence.core.types import ModelState, Reply
from remanence.results.checkpoint_schema import check_schema
from remanence.training.server_step import Server
from remanence.training.state import ClientModels, RunState, StaleReply

FORMAT = 1
KEPT = 2
ORDER = "order"  # of the names in a safetensors file, which does not keep it
MANIFEST, STATE, OWN = "manifest.json", "state.safetensors", "client_states"


def fingerprint(spec: Experiment) -> str:
    """What makes two runs the same experiment; how long they go or wait, how often they save,
    where the data lie and which cluster works does not.
    """
    content = spec.model_dump(
        mode="json",
        exclude={"rounds": True, "timeout": True, "ray": True, "checkpoint": True, "data": {"dir"}},
    )
    return sha256(json.dumps(content, sort_keys=True).encode())


class CheckpointStore:
    """The checkpoints of one run. `run` identifies the experiment, so that a foreign checkpoint
    is recognized.
    """

    def __init__(self, folder: Path, run: str):
        self.folder, self.run = folder, run
        self.saved_own: Mapping[int, Tree] = {}
        self.own_files: dict[int, dict[str, str]] = {}  # by client: file and sha256
        self.last_round = -1

    def save(self, state: RunState) -> None:
        """Write a checkpoint; does nothing if this round is saved already."""
        if state.round == self.last_round:
            return
        (self.folder / OWN).mkdir(parents=True, exist_ok=True)
        own_files = dict(self.own_files)
        for client, kept in state.client_states.items():
            # states are immutable: the same object is the same content
            if self.saved_own.get(client) is not kept:
                content = _to_bytes(kept)
                name = f"client-{client:07d}.round-{state.round:07d}.safetensors"
                write_atomically(self.folder / OWN / name, content)
                own_files[client] = {"file": name, "sha256": sha256(content)}
        content = _to_bytes(as_tree(state))
        manifest = {
            "program": "remanence",
            "format": FORMAT,
            "run": self.run,
            "round": state.round,
            "time_step": state.time_step,
            "file_lengths": dict(state.file_lengths),
            "files": {STATE: sha256(content)},
            "client_states": {str(client): entry for client, entry in own_files.items()},
        }
        self._write_folder(
            f"round-{state.round:07d}", {STATE: content, MANIFEST: json.dumps(manifest).encode()}
        )
        self.saved_own, self.own_files, self.last_round = (
            state.client_states,
            own_files,
            state.round,
        )
        self._prune()

    def load(
        self, device: torch.device, warn: Callable[[str], None], schema: RunState | None = None
    ) -> RunState | None:
        """The newest checkpoint that can be trusted; None where there is none at all.

        form: a state of the same experiment, which it must resemble if the run is to go on from it.
        """
        folders = self._folders()
        complaints = []
        for folder in reversed(folders):
            try:
                state = self._read(folder, device)
                if schema is not None:
                    check_schema(state, schema)
                    self._check_file_lengths(state.file_lengths)
            except (KeyError, TypeError, ValueError, AttributeError, OSError) as odd:
                error = CheckpointError(
                    f"its {MANIFEST} says what no manifest of ours would"
                    f" ({type(odd).__name__}: {odd})"
                )
            except CheckpointError as refused:
                error = refused
            else:
                self.last_round = state.round
                return state
            complaints.append(f"{folder.name}: {error}")
            warn(f"checkpoint {folder.name} is not used: {error}")
        if folders:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used ({'; '.join(complaints)}): start"
                " anew with --overwrite"
            )
        return None

    def _read(self, folder: Path, device: torch.device) -> RunState:
        manifest = read_manifest(folder)
        if manifest["run"] != self.run:
            raise CheckpointError("it belongs to another experiment")
        tree = _from_bytes(
            _read_verified(folder / STATE, manifest["files"].get(STATE)), device, STATE
        )
        own, own_files = {}, {}
        for client, entry in manifest["client_states"].items():
            name = Path(str(entry["file"])).name  # never outside the folder
            own[int(client)] = _from_bytes(
                _read_verified(self.folder / OWN / name, entry["sha256"]), torch.device("cpu"), name
            )
            own_files[int(client)] = {"file": name, "sha256": str(entry["sha256"])}
        self.saved_own, self.own_files = own, own_files
        committed = {str(name): int(length) for name, length in manifest["file_lengths"].items()}
        state = RunState(
            int(manifest["round"]), int(manifest["time_step"]), _as_server(tree), own, committed
        )
        state = replace(
            state,
            extra_servers=tuple(
                _as_server(tree["extra_servers"][str(number)])
                for number in range(len(tree.get("extra_servers", {})))
            ),
            model_of_client=tree["model_of_client"].cpu() if "model_of_client" in tree else None,
            assignment_state=tree.get("assignment_state", {}),
            client_models=_as_client_models(tree["client_models"])
            if "client_models" in tree
            else None,
            stale=tuple(
                _as_stale(tree["stale"][str(number)])
                for number in range(len(tree.get("stale", {})))
            ),
        )
        models = [server.model for server in state.global_models] + (
            [state.client_models.models] if state.client_models is not None else []
        )
        if not all(
            bool(torch.isfinite(value).all()) for model in models for value in model.params.values()
        ):
            raise CheckpointError("its model holds NaN or infinity")
        return state

    def _check_file_lengths(self, committed: Mapping[str, int]) -> None:
        """The append-only files must hold what the checkpoint vouches for; cut back to more
        than there is, they would be filled with zeros.
        """
        for name, length in committed.items():
            path = self.folder.parent / name
            if Path(name).name != name or length < 0:
                raise CheckpointError(f"its {MANIFEST} names a file {name!r:.40} of {length} bytes")
            there = path.stat().st_size if path.is_file() else 0
            if there < length:
                raise CheckpointError(f"{name} has {there} bytes, and it vouches for {length}")

    def _write_folder(self, name: str, contents: dict[str, bytes]) -> None:
        temporary, final = self.folder / f".{name}.{os.getpid()}.tmp", self.folder / name
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            for file_name, content in contents.items():
                with (temporary / file_name).open("wb") as file:
                    file.write(content)
                    flush(file)
            flush_folder(temporary)
            if final.exists():  # left by a run that this one repeats
                shutil.rmtree(final)
            os.replace(temporary, final)
            flush_folder(self.folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _folders(self) -> list[Path]:
        return (
            sorted(path for path in self.folder.glob("round-*") if path.is_dir())
            if self.folder.is_dir()
            else []
        )

    def _prune(self) -> None:
        """Keep the last two checkpoints and the client files they name; leftovers of killed
        processes go too.
        """
        folders = self._folders()
        for folder in folders[:-KEPT]:
            shutil.rmtree(folder, ignore_errors=True)
        named = {entry["file"] for entry in self.own_files.values()}
        for folder in folders[-KEPT:-1]:
            try:
                named |= {
                    str(entry["file"]) for entry in read_manifest(folder)["client_states"].values()
                }
            except CheckpointError:
                continue
        for path in (self.folder / OWN).iterdir():
            if path.name not in named:
                path.unlink(missing_ok=True)
        for path in self.folder.glob(".round-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)


def as_tree(state: RunState) -> Tree:
    """All of a state that is one tree of tensors; what clients keep has files of its own."""

    def server_tree(server: Server) -> Tree:
        return {
            "params": server.model.params,
            "buffers": server.model.buffers,
            "state": server.state,
        }

    tree = server_tree(state.server)
    if state.extra_servers:
        tree["extra_servers"] = {
            str(number): server_tree(other) for number, other in enumerate(state.extra_servers)
        }
    if state.model_of_client is not None:
        tree |= {
            "model_of_client": state.model_of_client,
            "assignment_state": state.assignment_state,
        }
    if state.stale:
        tree["stale"] = {str(number): _stale_tree(late) for number, late in enumerate(state.stale)}
    if state.client_models is not None:
        crowd = state.client_models
        models = {
            name: {"params": model.params, "buffers": model.buffers}
            for name, model in (("models", crowd.models), ("best", crowd.best))
        }
        rest = {
            "best_loss": crowd.best_loss,
            "rounds_since_best": crowd.rounds_since_best,
            "early_stopped": crowd.early_stopped,
            "peers": crowd.peers,
            "peer_counts": crowd.peer_counts,
        }
        tree["client_models"] = models | rest
    return tree


def _stale_tree(late: StaleReply) -> Tree:
    reply = {
        name: value
        for name, value in late.reply._asdict().items()
        if not isinstance(value, dict) or value
    }
    return {
        "reply": reply,
        "base_model": late.base_model._asdict(),
        "arrival_round": torch.tensor(late.arrival_round),
    }


def _as_stale(tree: Tree) -> StaleReply:
    nothing: dict[str, Any] = {"params": {}, "buffers": {}, "payload": {}, "client_state": {}}
    return StaleReply(
        Reply(**nothing | tree["reply"]), _as_model(tree["base_model"]), int(tree["arrival_round"])
    )


def _as_model(tree: Tree) -> ModelState:
    model = ModelState(tree.get("params", {}), tree.get("buffers", {}))
    if not all(isinstance(branch, dict) for branch in model):
        raise CheckpointError(f"{STATE} does not hold a model")
    return model


def _as_server(tree: Tree) -> Server:
    if not isinstance(tree.get("state", {}), dict):
        raise CheckpointError(f"{STATE} does not hold a model")
    return Server(_as_model(tree), tree.get("state", {}))


def _as_client_models(tree: Tree) -> ClientModels:
    models, best = _as_model(tree["models"]), _as_model(tree["best"])
    counts = {
        name: tree[name].cpu()
        for name in ("best_loss", "rounds_since_best", "early_stopped", "peer_counts")
    }
    return ClientModels(models=models, best=best, peers=tree.get("peers", {}), **counts)


def read_manifest(folder: Path) -> dict[str, Any]:
    """A manifest, after checking that it is ours and not from the future."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"its {MANIFEST} cannot be read ({type(error).__name__})") from None
    if not isinstance(manifest, dict) or manifest.get("program") != "remanence":
        raise CheckpointError("it was not written by remanence")
    if not isinstance(manifest.get("format"), int) or manifest["format"] > FORMAT:
        raise CheckpointError(
            f"it has format {manifest.get('format')} and this version reads up to {FORMAT}:"
            " update remanence"
        )
    kinds = {
        "files": dict,
        "client_states": dict,
        "file_lengths": dict,
        "round": int,
        "time_step": int,
        "run": str,
    }
    if not all(isinstance(manifest.get(name), kind) for name, kind in kinds.items()):
        raise CheckpointError(f"its {MANIFEST} is incomplete")
    return manifest


def _read_verified(path: Path, digest: str | None) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror})") from None
    if sha256(content) != digest:
        raise CheckpointError(f"{path.name} is damaged: its SHA-256 is not the manifest's")
    return content


def _to_bytes(tree: Tree) -> bytes:
    """Empty branches vanish in flattening. The order of names is kept beside the tensors: sums
    over a tree depend on it in their last bits.
    """
    flat = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in pytree.flatten(tree).items()
    }
    return save_tensors(flat, metadata={ORDER: json.dumps(list(flat))})


def _from_bytes(content: bytes, device: torch.device, name: str) -> Tree:
    try:
        flat = load_tensors(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not a safetensors file ({error})") from None
    try:
        order = json.loads(header["__metadata__"][ORDER])
        return pytree.unflatten({key: flat[key].to(device) for key in order})
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{name} is not a file of ours ({type(error).__name__}: {error})"
        ) from None
