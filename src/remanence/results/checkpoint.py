"""Checkpoints: the state of a run as files that can be verified; `manifest.py` lists the files.

A checkpoint appears by renaming its folder, so it is complete or absent; the last two are kept. On
loading, everything is verified; a checkpoint that fails is reported, and the one before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from remanence.config import Experiment
from remanence.core.errors import CheckpointError, InputError, OverMemoryLimit
from remanence.core.files import FilePrefix, sha256
from remanence.core.memory import check_memory
from remanence.core.pytree import Tree
from remanence.core.safe_path import SafePath
from remanence.core.types import ModelState
from remanence.results.checkpoint_codec import (
    add_tree,
    as_tree,
    from_bytes,
    read_bound,
    to_bytes,
)
from remanence.results.manifest import (
    MANIFEST,
    OWN,
    STATE,
    ClientFile,
    LoadedCheckpoint,
    Manifest,
    RunFile,
    bound_to_state,
    checkpoint_folders,
    folder_name,
    read_manifest,
    round_of,
    verify_prefix,
)
from remanence.results.readers import read_bytes
from remanence.training.server_step import Server
from remanence.training.state import RunState

KEPT = 2
FILES_AT_ONCE = 64  # clients' states that are flushed to the disk together
HEADER_FACTOR = 100  # parsed JSON takes at most this many times the memory of its text


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
        folder: Of the checkpoints; the append-only files of the run are beside it.
        run: The fingerprint of the experiment; checkpoints with another one are refused.
    """

    def __init__(self, folder: Path | SafePath, run: str):
        self.folder, self.run = SafePath.of_file(folder), run
        self.saved_states: Mapping[int, Tree] = {}
        self.client_files: dict[int, ClientFile] = {}
        self.last_round = -1
        self.loaded = LoadedCheckpoint(0)

    def save(self, state: RunState) -> None:
        """Write a checkpoint; does nothing if this round is saved already."""
        if state.round == self.last_round:
            return
        client_files = {**self.client_files, **self._write_client_states(state)}
        bound = bound_to_state(state.round, state.time_step, client_files, state.committed)
        content = to_bytes(as_tree(state), bound)
        manifest = Manifest(
            self.run,
            state.round,
            state.time_step,
            sha256(content),
            client_files,
            {name: RunFile(part.length, part.sha256) for name, part in state.committed.items()},
        )
        files = {STATE: content, MANIFEST: manifest.to_bytes()}
        (self.folder / folder_name(state.round)).write_folder(files)
        self.saved_states, self.client_files, self.last_round = (
            state.client_states,
            client_files,
            state.round,
        )
        self._prune()

    def load(
        self,
        device: torch.device,
        warn: Callable[[str], None],
        check: Callable[[RunState], None] | None = None,
    ) -> RunState | None:
        """Load the newest checkpoint that passes all checks; None where there is none at all.
        `loaded` then says which one it is.

        Args:
            device: Of the server's state.
            warn: Is called with a message for each checkpoint that fails.
            check: Raises a `CheckpointError` for a state that is not of the experiment.
        """
        (self.folder / OWN).is_folder()  # a link is refused before any work
        skipped: list[str] = []
        for folder in reversed(checkpoint_folders(self.folder)):
            try:
                state = self._read(folder, device, check)
            except OverMemoryLimit:
                raise
            except (KeyError, TypeError, ValueError, AttributeError, OSError) as odd:
                error = CheckpointError(
                    f"it has an entry of the wrong form ({type(odd).__name__}: {odd})"
                )
            except CheckpointError as refused:
                error = refused
            else:
                self.last_round = state.round
                self.loaded = LoadedCheckpoint(state.round, tuple(skipped))
                return state
            skipped.append(f"checkpoint {folder.name} is not used: {error}")
            warn(skipped[-1])
        if skipped:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used ({'; '.join(skipped)}): start"
                " anew with --overwrite"
            )
        return None

    def delete_newer(self) -> None:
        """Delete the checkpoints after the one that was loaded, which could not be used. Files of
        the run are about to be cut to the length that belongs to the loaded one.
        """
        for folder in checkpoint_folders(self.folder):
            if round_of(folder) > self.last_round:
                folder.delete_folder()

    def _write_client_states(self, state: RunState) -> dict[int, ClientFile]:
        """Write the clients' states that have changed since the last checkpoint."""
        (self.folder / OWN).make_folder()
        changed = [
            client
            for client, kept in state.client_states.items()
            # states are immutable: the same object is the same content
            if self.saved_states.get(client) is not kept
        ]
        written: dict[int, ClientFile] = {}
        for first in range(0, len(changed), FILES_AT_ONCE):
            contents = {
                client: to_bytes(state.client_states[client])
                for client in changed[first : first + FILES_AT_ONCE]
            }
            files = {
                client: ClientFile(
                    f"client-{client:07d}.round-{state.round:07d}.safetensors", sha256(content)
                )
                for client, content in contents.items()
            }
            (self.folder / OWN).write_files(
                {files[client].file: content for client, content in contents.items()}
            )
            written |= files
        return written

    def _read(
        self,
        folder: SafePath,
        device: torch.device,
        check: Callable[[RunState], None] | None,
    ) -> RunState:
        manifest = read_manifest(folder)
        if manifest.run != self.run:
            raise CheckpointError("it belongs to another experiment")
        own = [self.folder / OWN / entry.file for entry in manifest.client_files.values()]
        parts = {
            "the state": _file_bytes(folder / STATE),
            "the clients' states": sum(map(_file_bytes, own)),
        }
        check_memory(folder, parts)
        content = _read_verified(folder / STATE, manifest.state)
        tree = from_bytes(content, device, STATE)
        bound = bound_to_state(
            manifest.round, manifest.time_step, manifest.client_files, manifest.run_files
        )
        stored = read_bound(content)
        for name, value in bound.items():
            if stored.get(name) != value:
                raise CheckpointError(f"its {MANIFEST} has another {name} than its {STATE}")
        client_states = {
            client: from_bytes(
                _read_verified(self.folder / OWN / entry.file, entry.sha256),
                torch.device("cpu"),
                entry.file,
            )
            for client, entry in manifest.client_files.items()
        }
        empty = Server(ModelState({}, {}), {})
        state = RunState(manifest.round, manifest.time_step, empty, client_states)
        state = add_tree(state, tree)
        _check_finite(state)
        if check is not None:
            check(state)
        committed = self._verify_run_files(manifest.run_files)
        self.saved_states, self.client_files = client_states, dict(manifest.client_files)
        return replace(state, committed=committed)

    def _verify_run_files(self, run_files: Mapping[str, RunFile]) -> dict[str, FilePrefix]:
        return {
            name: verify_prefix(self.folder.parent / name, part) for name, part in run_files.items()
        }

    def _prune(self) -> None:
        """Delete all but the last two checkpoints and the client files they name."""
        folders = checkpoint_folders(self.folder)
        for folder in folders[:-KEPT]:
            folder.delete_folder()
        named = {entry.file for entry in self.client_files.values()}
        for folder in folders[-KEPT:-1]:
            try:
                named |= {entry.file for entry in read_manifest(folder).client_files.values()}
            except CheckpointError:
                continue
        own = self.folder / OWN
        for name in own.list_files():
            if name not in named:
                (own / name).delete()


def _check_finite(state: RunState) -> None:
    models = [server.model for server in state.global_models]
    models += [state.client_models.models] if state.client_models is not None else []
    if not all(
        bool(torch.isfinite(value).all()) for model in models for value in model.params.values()
    ):
        raise CheckpointError("its model holds NaN or infinity")


def _file_bytes(file: SafePath) -> int:
    """What a file of tensors takes: its content, its header as JSON, and a copy of the tensors."""
    try:
        status = file.status()
        header = int.from_bytes(file.read(8), "little")
    except OSError:
        return 0  # the reader says which file is missing
    size = 0 if status is None else status.st_size
    return 2 * size + HEADER_FACTOR * min(header, size)


def _read_verified(file: SafePath, digest: str) -> bytes:
    try:
        content = read_bytes(file)
    except InputError as error:
        raise CheckpointError(str(error)) from None
    if content is None:
        raise CheckpointError(f"{file.name} cannot be read (there is no such file)")
    if sha256(content) != digest:
        raise CheckpointError(f"{file.name} is damaged: its SHA-256 is not the manifest's")
    return content
