"""The manifest of a checkpoint: the round it was written after, and the hashes of all files that
belong to it.

    checkpoints/round-0000012/state.safetensors     the server: model and state
    checkpoints/round-0000012/manifest.json         the run, round and time step; SHA-256 of the
                                                    state, of the clients' states, and of the
                                                    append-only files up to their length
    checkpoints/client_states/client-0000003.round-0000012.safetensors
                                                    what a client keeps, written when it changed

The round, the time step, the digests of the clients' states and the names of the append-only files
are in the state as well (`bound_to_state`): a manifest that was changed does not agree with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from remanence.core.errors import CheckpointError, OverMemoryLimit
from remanence.core.files import FilePrefix, sha256
from remanence.core.memory import check_memory, json_bytes
from remanence.core.safe_path import SafePath

FORMAT = 2
CHECKPOINTS = "checkpoints"  # the folder, in that of the run
MANIFEST, STATE, OWN = "manifest.json", "state.safetensors", "client_states"
LARGEST_MANIFEST = 1 << 30  # bytes: it has a line for each of millions of clients
_ROUND = re.compile(r"round-(\d{1,9})", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ClientFile(NamedTuple):
    """The file of a client's state, and the hash of its content."""

    file: str
    sha256: str


class RunFile(NamedTuple):
    """How much of an append-only file belongs to a checkpoint, and the hash of that part."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What belongs to a checkpoint.

    Args:
        run: The fingerprint of the experiment.
        round: The number of finished rounds.
        time_step: Of the last round.
        state: SHA-256 of the state.
        client_files: By client.
        run_files: Append-only files of the run, by name.
    """

    run: str
    round: int
    time_step: int
    state: str
    client_files: Mapping[int, ClientFile]
    run_files: Mapping[str, RunFile]

    def to_bytes(self) -> bytes:
        content = {
            "program": "remanence",
            "format": FORMAT,
            "run": self.run,
            "round": self.round,
            "time_step": self.time_step,
            "run_files": {name: part._asdict() for name, part in self.run_files.items()},
            "files": {STATE: self.state},
            "client_states": {
                str(client): part._asdict() for client, part in self.client_files.items()
            },
        }
        return json.dumps(content).encode()


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Which checkpoint was read.

    Args:
        round: The number of rounds finished then.
        skipped: A sentence for each newer checkpoint, which cannot be used.
    """

    round: int
    skipped: tuple[str, ...] = ()

    @property
    def lost_everything(self) -> bool:
        """Whether only the state before round 1 could be read, although there were later ones."""
        return bool(self.skipped) and self.round == 0

    def describe(self) -> str:
        """A sentence about the checkpoints that were not used; empty where there are none."""
        if not self.skipped:
            return ""
        what = (
            "nothing is trained" if self.round == 0 else f"the state is that of round {self.round}"
        )
        return f"{'; '.join(self.skipped)}: {what}"


def bound_to_state(
    round: int,
    time_step: int,
    client_files: Mapping[int, ClientFile],
    run_files: Mapping[str, object],
) -> dict[str, Any]:
    """The entries of a manifest that its state repeats. Hashes of append-only files are not among
    them, since these files have measured times and a state is the same in a run that was resumed.
    """
    digests = sorted((client, entry.sha256) for client, entry in client_files.items())
    return {
        "round": round,
        "time_step": time_step,
        "client_states": sha256(json.dumps(digests).encode()),
        "run_files": sorted(run_files),
    }


def folder_name(round: int) -> str:
    """The name of a checkpoint's folder."""
    return f"round-{round:07d}"


def checkpoint_folders(folder: SafePath) -> list[SafePath]:
    """The folders of checkpoints in a folder, oldest first."""
    matches = [match for name in folder.list_folders() if (match := _ROUND.fullmatch(name))]
    return [folder / match[0] for match in sorted(matches, key=lambda match: int(match[1]))]


def round_of(folder: SafePath) -> int:
    """The round of a checkpoint, by the name of its folder."""
    match = _ROUND.fullmatch(folder.name)
    return int(match[1]) if match else -1


def read_manifest(folder: SafePath) -> Manifest:
    """Read the manifest of a checkpoint, and check that this version can use it."""
    try:
        file = folder / MANIFEST
        status = file.status()
        check_memory(file, {"its content": 0 if status is None else 2 * status.st_size})
        text = file.read(LARGEST_MANIFEST)
        check_memory(file, {"its content": len(text) + json_bytes(text)})
        content = json.loads(text)
    except OverMemoryLimit:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"its {MANIFEST} cannot be read ({type(error).__name__})") from None
    if not isinstance(content, dict) or content.get("program") != "remanence":
        raise CheckpointError("it was not written by remanence")
    _check_format(content.get("format"))
    kinds = {
        **dict.fromkeys(("files", "client_states", "run_files"), dict),
        **dict.fromkeys(("round", "time_step"), int),
        "run": str,
    }
    if not all(type(content.get(name)) is kind for name, kind in kinds.items()):
        raise CheckpointError(f"its {MANIFEST} is incomplete")
    try:
        manifest = _parse(content)
    except (KeyError, TypeError, ValueError) as odd:
        raise CheckpointError(
            f"its {MANIFEST} has an entry of the wrong form ({type(odd).__name__}: {odd})"
        ) from None
    if folder.name != folder_name(manifest.round):
        raise CheckpointError(f"its {MANIFEST} is that of round {manifest.round}")
    return manifest


def newest_manifest(folder: SafePath) -> tuple[Manifest | None, list[str]]:
    """The manifest of the newest checkpoint in a folder that can be read.

    Returns:
        The manifest, or None where there is none; and a sentence for each newer one that cannot be
        read.
    """
    damaged: list[str] = []
    for checkpoint in reversed(checkpoint_folders(folder)):
        if not (checkpoint / MANIFEST).is_regular_file():
            continue
        try:
            return read_manifest(checkpoint), damaged
        except CheckpointError as error:
            damaged.append(f"checkpoint {checkpoint.name} is not used: {error}")
    return None, damaged


def _check_format(found: object) -> None:
    if type(found) is not int or found > FORMAT:
        raise CheckpointError(
            f"it has format {found} and this version reads {FORMAT}: update remanence"
        )
    if found < FORMAT:
        raise CheckpointError(
            f"it has format {found} of an earlier version, and this version reads {FORMAT}: use"
            " that version, or start anew with --overwrite"
        )


def _parse(content: Mapping[str, Any]) -> Manifest:
    clients = {
        int(client): ClientFile(str(entry["file"]), _digest(entry["sha256"]))
        for client, entry in content["client_states"].items()
    }
    run_files = {
        name: RunFile(_length(entry["bytes"]), _digest(entry["sha256"]))
        for name, entry in content["run_files"].items()
    }
    return Manifest(
        content["run"],
        content["round"],
        content["time_step"],
        _digest(content["files"][STATE]),
        clients,
        run_files,
    )


def _digest(value: object) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"{value!r:.40} is no SHA-256")
    return value


def _length(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no number of bytes")
    return value


def verify_prefix(file: SafePath, part: RunFile) -> FilePrefix:
    """Check that a file begins with the part that belongs to a checkpoint."""
    try:
        found = FilePrefix.read(file, part.bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{file.name} is missing, and it covers {part.bytes} bytes") from None
    if found.length < part.bytes:
        raise CheckpointError(f"{file.name} has {found.length} bytes, and it covers {part.bytes}")
    if found.sha256 != part.sha256:
        raise CheckpointError(
            f"{file.name} was changed: the SHA-256 of its first {part.bytes} bytes is not the"
            " manifest's"
        )
    return found
