"""Checkpoints: the state of a run as files that can be verified.

    checkpoints/round-0000012/state.safetensors     the server: model and state
    checkpoints/round-0000012/manifest.json         written last: round, lengths of the append-only
                                                    files, SHA-256 of every file
    checkpoints/client_states/client-0000003.round-0000012.safetensors
                                                    what a client keeps, written when it changed

A checkpoint appears by renaming its folder, so it is complete or absent; the last two are kept. On
loading, everything is verified; a checkpoint that fails is reported, and the one before it is used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from remanence.config import Experiment
from remanence.core.errors import CheckpointError, InputError
from remanence.core.files import flush_folder, sha256, write_atomically
from remanence.core.memory import check_memory
from remanence.core.pytree import Tree
from remanence.core.safe_path import flush
from remanence.core.types import ModelState
from remanence.results.checkpoint_codec import add_tree, as_tree, from_bytes, to_bytes
from remanence.results.checkpoint_schema import check_schema
from remanence.results.readers import read_json
from remanence.training.server_step import Server
from remanence.training.state import RunState

FORMAT = 1
KEPT = 2
HEADER_FACTOR = 100  # JSON takes at most so many times the memory of its text
MANIFEST, STATE, OWN = "manifest.json", "state.safetensors", "client_states"


def fingerprint(config: Experiment) -> str:
    """A hash of the settings that determine the results, without the number of rounds. Timeouts,
    the interval of checkpoints, the folder of the data, the memory for reading them and the Ray
    cluster are left out.
    """
    content = config.model_dump(
        mode="json",
        exclude={
            "rounds": True,
            "timeout": True,
            "ray": True,
            "checkpoint": True,
            "data": {"dir", "max_bytes"},
        },
    )
    return sha256(json.dumps(content, sort_keys=True).encode())


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: Of the checkpoints.
        run: The fingerprint of the experiment; checkpoints with another one are refused.
    """

    def __init__(self, folder: Path, run: str):
        self.folder, self.run = folder, run
        self.saved_states: Mapping[int, Tree] = {}
        self.client_files: dict[int, dict[str, str]] = {}  # by client: file and sha256
        self.last_round = -1

    def save(self, state: RunState) -> None:
        """Write a checkpoint; does nothing if this round is saved already."""
        if state.round == self.last_round:
            return
        (self.folder / OWN).mkdir(parents=True, exist_ok=True)
        client_files = dict(self.client_files)
        for client, kept in state.client_states.items():
            # states are immutable: the same object is the same content
            if self.saved_states.get(client) is not kept:
                content = to_bytes(kept)
                name = f"client-{client:07d}.round-{state.round:07d}.safetensors"
                write_atomically(self.folder / OWN / name, content)
                client_files[client] = {"file": name, "sha256": sha256(content)}
        content = to_bytes(as_tree(state))
        manifest = {
            "program": "remanence",
            "format": FORMAT,
            "run": self.run,
            "round": state.round,
            "time_step": state.time_step,
            "file_lengths": dict(state.file_lengths),
            "files": {STATE: sha256(content)},
            "client_states": {str(client): entry for client, entry in client_files.items()},
        }
        self._write_folder(
            f"round-{state.round:07d}", {STATE: content, MANIFEST: json.dumps(manifest).encode()}
        )
        self.saved_states, self.client_files, self.last_round = (
            state.client_states,
            client_files,
            state.round,
        )
        self._prune()

    def load(
        self, device: torch.device, warn: Callable[[str], None], schema: RunState | None = None
    ) -> RunState | None:
        """Load the newest checkpoint that passes all checks; None where there is none at all.

        Args:
            device: Of the server's state.
            warn: Is called with a message for each checkpoint that fails.
            schema: A state of the same experiment, which the loaded one must resemble if the run
                is to continue from it.
        """
        folders = self._folders()
        failures = []
        for folder in reversed(folders):
            try:
                state = self._read(folder, device)
                if schema is not None:
                    check_schema(state, schema)
                    self._check_file_lengths(state.file_lengths)
            except InputError:  # too large for the limit of memory, not damaged
                raise
            except (KeyError, TypeError, ValueError, AttributeError, OSError) as odd:
                error = CheckpointError(
                    f"its {MANIFEST} has an entry of the wrong form ({type(odd).__name__}: {odd})"
                )
            except CheckpointError as refused:
                error = refused
            else:
                self.last_round = state.round
                return state
            failures.append(f"{folder.name}: {error}")
            warn(f"checkpoint {folder.name} is not used: {error}")
        if folders:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used ({'; '.join(failures)}): start"
                " anew with --overwrite"
            )
        return None

    def _read(self, folder: Path, device: torch.device) -> RunState:
        manifest = read_manifest(folder)
        if manifest["run"] != self.run:
            raise CheckpointError("it belongs to another experiment")
        client_states, client_files = {}, {}
        own = [self._own_file(entry) for entry in manifest["client_states"].values()]
        check_memory(
            folder,
            {
                "the state": _file_bytes(folder / STATE),
                "the clients' states": sum(map(_file_bytes, own)),
            },
        )
        tree = from_bytes(
            _read_verified(folder / STATE, manifest["files"].get(STATE)), device, STATE
        )
        for client, entry in manifest["client_states"].items():
            path = self._own_file(entry)
            client_states[int(client)] = from_bytes(
                _read_verified(path, entry["sha256"]), torch.device("cpu"), path.name
            )
            client_files[int(client)] = {"file": path.name, "sha256": str(entry["sha256"])}
        self.saved_states, self.client_files = client_states, client_files
        file_lengths = {str(name): int(length) for name, length in manifest["file_lengths"].items()}
        empty = Server(ModelState({}, {}), {})
        state = RunState(
            int(manifest["round"]), int(manifest["time_step"]), empty, client_states, file_lengths
        )
        state = add_tree(state, tree)
        models = [server.model for server in state.global_models] + (
            [state.client_models.models] if state.client_models is not None else []
        )
        if not all(
            bool(torch.isfinite(value).all()) for model in models for value in model.params.values()
        ):
            raise CheckpointError("its model holds NaN or infinity")
        return state

    def _own_file(self, entry: Mapping[str, Any]) -> Path:
        """The file of a client's state, never outside the folder."""
        return self.folder / OWN / Path(str(entry["file"])).name

    def _check_file_lengths(self, file_lengths: Mapping[str, int]) -> None:
        """Refuse a checkpoint that records a greater length of an append-only file than the file
        has: truncating the file to that length would fill it with zeros.
        """
        for name, length in file_lengths.items():
            path = self.folder.parent / name
            if Path(name).name != name or length < 0:
                raise CheckpointError(f"its {MANIFEST} names a file {name!r:.40} of {length} bytes")
            size = path.stat().st_size if path.is_file() else 0
            if size < length:
                raise CheckpointError(f"{name} has {size} bytes, and it covers {length}")

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
        """Delete all but the last two checkpoints and the client files they name, and what killed
        processes left.
        """
        folders = self._folders()
        for folder in folders[:-KEPT]:
            shutil.rmtree(folder, ignore_errors=True)
        named = {entry["file"] for entry in self.client_files.values()}
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


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest, and check that this version can use it."""
    try:
        manifest = read_json(folder / MANIFEST)
    except InputError:
        raise
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


def _file_bytes(path: Path) -> int:
    """What a file of tensors takes: its content, its header as JSON, and a copy of the tensors."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
    except OSError:
        return 0  # the reader says which file is missing
    return 2 * size + HEADER_FACTOR * min(header, size)


def _read_verified(path: Path, digest: str | None) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror})") from None
    if sha256(content) != digest:
        raise CheckpointError(f"{path.name} is damaged: its SHA-256 is not the manifest's")
    return content
