"""Checkpoints that are damaged, foreign or hostile: named, and passed over for the one before."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from results.run_files import CONTENT, lengths_of, make_checkpoint_folder, prefixes
from safetensors.torch import save

from remanence.core.errors import CheckpointError
from remanence.core.files import sha256
from remanence.core.types import ModelState
from remanence.results.checkpoint import CheckpointStore
from remanence.results.checkpoint_codec import make_metadata, read_bound
from remanence.results.manifest import FORMAT, MANIFEST, OWN, STATE, ClientFile, bound_to_state
from remanence.training.server_step import Server
from remanence.training.state import RunState

CPU = torch.device("cpu")
RUN = "an experiment"


def state_at(round: int) -> RunState:
    """Everything in it tells the round."""
    here = torch.tensor([float(round)])
    return RunState(
        round,
        0,
        Server(ModelState({"w": here}, {}), {"part": {"m": here}}),
        {0: {"part": {"kept": here}}},
        prefixes(metrics_jsonl=round),
    )


def assert_whole(state: RunState | None, round: int) -> None:
    assert state is not None
    assert state.round == round
    assert lengths_of(dict(state.committed)) == lengths_of(prefixes(metrics_jsonl=round))
    tensors = [
        state.server.model.params["w"],
        state.server.state["part"]["m"],
        state.client_states[0]["part"]["kept"],
    ]
    assert [tensor.tolist() for tensor in tensors] == [[float(round)]] * 3


def load(folder: Path, warnings: list[str] | None = None, run: str = RUN) -> RunState | None:
    return CheckpointStore(folder, run).load(CPU, (warnings if warnings is not None else []).append)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def replace_state(
    folder: Path, tensors: dict[str, torch.Tensor] | None, bound: dict[str, Any] | None = None
) -> None:
    """A state file with an honest digest."""
    bound = bound or read_bound((folder / STATE).read_bytes())
    metadata = make_metadata(list(tensors or {}), bound)
    content = save(tensors, metadata=metadata) if tensors is not None else b"\xff" * 100
    (folder / STATE).write_bytes(content)
    change_manifest(folder, lambda manifest: manifest["files"].update({STATE: sha256(content)}))


NEW_OWN = "client-0000000.round-0000002.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (
        lambda f: flip_a_byte(f / STATE),
        "state.safetensors is damaged: its SHA-256 is not the manifest's",
    ),
    "cut short": (
        lambda f: (f / STATE).write_bytes((f / STATE).read_bytes()[:20]),
        "state.safetensors is damaged",
    ),
    "no state": (lambda f: (f / STATE).unlink(), "state.safetensors cannot be read"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "its manifest.json cannot be read"),
    "an empty manifest": (
        lambda f: (f / MANIFEST).write_bytes(b""),
        "its manifest.json cannot be read",
    ),
    "binary manifest": (
        lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe\x00"),
        "its manifest.json cannot be read",
    ),
    "a list": (lambda f: (f / MANIFEST).write_text("[]"), "it was not written by remanence"),
    "another program": (
        lambda f: change_manifest(f, lambda m: m.update(program="other")),
        "it was not written by remanence",
    ),
    "from the future": (
        lambda f: change_manifest(f, lambda m: m.update(format=99)),
        "it has format 99 .*: update remanence",
    ),
    "no format": (lambda f: change_manifest(f, lambda m: m.pop("format")), "it has format None"),
    "another experiment": (
        lambda f: change_manifest(f, lambda m: m.update(run="other")),
        "it belongs to another experiment",
    ),
    "incomplete": (
        lambda f: change_manifest(f, lambda m: m.pop("client_states")),
        "its manifest.json is incomplete",
    ),
    "a round in words": (
        lambda f: change_manifest(f, lambda m: m.update(round="two")),
        "its manifest.json is incomplete",
    ),
    "files in a list": (
        lambda f: change_manifest(f, lambda m: m.update(files=[])),
        "its manifest.json is incomplete",
    ),
    "no digest": (
        lambda f: change_manifest(f, lambda m: m.update(files={})),
        "its manifest.json has an entry of the wrong form",
    ),
    "of an earlier version": (
        lambda f: change_manifest(f, lambda m: m.update(format=FORMAT - 1)),
        "has format 1 of an earlier version, and this version reads 2: use that version",
    ),
    "another round": (
        lambda f: change_manifest(f, lambda m: m.update(round=7)),
        "its manifest.json is that of round 7",
    ),
    "another round, and the folder renamed": (
        lambda f: (
            change_manifest(f, lambda m: m.update(round=7)) or f.rename(f.parent / "round-0000007")
        ),
        "its manifest.json has another round than its state.safetensors",
    ),
    "another time step": (
        lambda f: change_manifest(f, lambda m: m.update(time_step=3)),
        "its manifest.json has another time_step than its state.safetensors",
    ),
    "a client left out": (
        lambda f: change_manifest(f, lambda m: m.update(client_states={})),
        "its manifest.json has another client_states than its state.safetensors",
    ),
    "a file of the run left out": (
        lambda f: change_manifest(f, lambda m: m.update(run_files={})),
        "its manifest.json has another run_files than its state.safetensors",
    ),
    "a flipped bit in a file of the run": (
        lambda f: (f.parents[1] / "metrics.jsonl").write_bytes(b"\x00\x03"),
        "metrics.jsonl was changed: the SHA-256 of its first 2 bytes is not the manifest's",
    ),
    "a file of the run that is cut short": (
        lambda f: (f.parents[1] / "metrics.jsonl").write_bytes(CONTENT[:1]),
        "metrics.jsonl has 1 bytes, and it covers 2",
    ),
    "another length of a file of the run": (
        lambda f: change_manifest(f, lambda m: m["run_files"]["metrics.jsonl"].update(bytes=1)),
        "metrics.jsonl was changed",
    ),
    "not safetensors": (
        lambda f: replace_state(f, None),
        "state.safetensors is not a safetensors file",
    ),
    "not a number": (
        lambda f: replace_state(f, {"params/w": torch.tensor([1.0, float("nan")])}),
        "holds NaN or infinity",
    ),
    "infinite": (
        lambda f: replace_state(f, {"params/w": torch.tensor([float("-inf")])}),
        "its model holds NaN or infinity",
    ),
    "a damaged client": (lambda f: flip_a_byte(f.parent / OWN / NEW_OWN), f"{NEW_OWN} is damaged"),
    "a missing client": (
        lambda f: (f.parent / OWN / NEW_OWN).unlink(),
        f"{NEW_OWN} cannot be read",
    ),
}

# As above, but nothing is merely lost: the manifest says things that no manifest of ours says.
STRANGE: dict[str, Callable[[Path], Any]] = {
    "a client without a file": lambda f: change_manifest(
        f, lambda m: m.update(client_states={"0": "client"})
    ),
    "a client with half an entry": lambda f: change_manifest(
        f, lambda m: m["client_states"]["0"].pop("sha256")
    ),
    "a client in words": lambda f: change_manifest(
        f, lambda m: m.update(client_states={"zero": m["client_states"]["0"]})
    ),
    "a name with a zero byte": lambda f: change_manifest(
        f, lambda m: m["client_states"]["0"].update(file="client\x00")
    ),
    "a length in words": lambda f: change_manifest(
        f, lambda m: m["run_files"]["metrics.jsonl"].update(bytes="long")
    ),
    "a length of nothing": lambda f: change_manifest(
        f, lambda m: m["run_files"]["metrics.jsonl"].update(bytes=None)
    ),
    "a tensor that is also a folder": lambda f: replace_state(
        f, {"params": torch.zeros(1), "params/w": torch.zeros(1)}
    ),
    "a model that is one tensor": lambda f: replace_state(f, {"params": torch.zeros(1)}),
    "a manifest too deep to read": lambda f: (f / MANIFEST).write_text("[" * 100_000),
}


@pytest.fixture
def two_checkpoints(tmp_path: Path) -> Path:
    folder = make_checkpoint_folder(tmp_path / "run", "metrics.jsonl")
    vault = CheckpointStore(folder, RUN)
    vault.save(state_at(1))
    vault.save(state_at(2))
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over(two_checkpoints: Path, damage: str) -> None:
    spoil, complaint = DAMAGES[damage]
    spoil(two_checkpoints / "round-0000002")
    warnings: list[str] = []
    assert_whole(load(two_checkpoints, warnings), 1)
    assert len(warnings) == 1
    assert re.search(f"checkpoint round-000000[27] is not used: .*{complaint}", warnings[0])


@pytest.mark.parametrize("damage", STRANGE)
def test_a_strange_checkpoint_is_passed_over_too(two_checkpoints: Path, damage: str) -> None:
    STRANGE[damage](two_checkpoints / "round-0000002")
    warnings: list[str] = []
    assert_whole(load(two_checkpoints, warnings), 1)
    assert [warning.split(":")[0] for warning in warnings] == [
        "checkpoint round-0000002 is not used"
    ]


def test_when_none_can_be_trusted_the_run_stops_and_says_why(two_checkpoints: Path) -> None:
    for folder in two_checkpoints.glob("round-*"):
        flip_a_byte(folder / STATE)
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint in .* can be used \(.*round-0000002 .*; .*round-0000001 .*--overwrite",
    ):
        load(two_checkpoints)


def test_a_foreign_checkpoint_is_recognized(two_checkpoints: Path) -> None:
    with pytest.raises(CheckpointError, match="it belongs to another experiment"):
        load(two_checkpoints, run="another")


def test_a_manifest_cannot_reach_outside_its_folder(two_checkpoints: Path) -> None:
    secret = two_checkpoints.parent / f"{two_checkpoints.name}-secret.safetensors"
    content = save({"part/kept": torch.tensor([6.0])})
    secret.write_bytes(content)
    entry = {"file": f"../../{secret.name}", "sha256": sha256(content)}
    bound = bound_to_state(2, 0, {0: ClientFile(**entry)}, ["metrics.jsonl"])
    replace_state(two_checkpoints / "round-0000002", {"params/w": torch.tensor([2.0])}, bound)
    change_manifest(
        two_checkpoints / "round-0000002",
        lambda manifest: manifest.update(client_states={"0": entry}),
    )
    warnings: list[str] = []
    assert_whole(load(two_checkpoints, warnings), 1)
    assert "is not the name of a file" in warnings[0]


def test_a_run_that_goes_on_from_the_older_one_replaces_the_damaged_one(
    two_checkpoints: Path,
) -> None:
    flip_a_byte(two_checkpoints / "round-0000002" / STATE)
    vault = CheckpointStore(two_checkpoints, RUN)
    assert_whole(vault.load(CPU, lambda _: None), 1)
    vault.save(state_at(2))
    warnings: list[str] = []
    assert_whole(load(two_checkpoints, warnings), 2)
    assert warnings == []
