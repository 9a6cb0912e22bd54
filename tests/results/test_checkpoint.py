from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from results.run_files import CONTENT, lengths_of, make_checkpoint_folder, prefixes

from remanence.config import parse_experiment
from remanence.core import pytree, safe_path
from remanence.core.files import lock, sha256
from remanence.core.pytree import Tree
from remanence.core.safe_path import SafePath
from remanence.core.types import ModelState
from remanence.results.checkpoint import CheckpointStore, fingerprint
from remanence.results.manifest import OWN, STATE, RunFile, read_manifest
from remanence.training.server_step import Server
from remanence.training.state import RunState

CPU = torch.device("cpu")
RUN = "an experiment"


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """The folder of the checkpoints in a run folder."""
    return make_checkpoint_folder(tmp_path / "run", "metrics.jsonl", "ledger.bin")


def state_at(round: int, own: dict[int, Tree] | None = None) -> RunState:
    """The state after a round: every number in it tells which."""
    params = {
        "body.weight": torch.full((2, 3), round, dtype=torch.float64),
        "head.bias": torch.tensor([0.1, round]),
    }
    buffers = {
        "norm.num_batches_tracked": torch.tensor(round),
        "norm.running_mean": torch.full((3,), 0.5 * round),
    }
    memory = {
        "part": {
            "momentum": {"body.weight": torch.ones(2, 3) * round},
            "seen": torch.tensor([True, False]),
        }
    }
    return RunState(
        round,
        round // 2,
        Server(ModelState(params, buffers), memory),
        own or {},
        prefixes(metrics_jsonl=10 * round, ledger_bin=3),
    )


def kept(value: float) -> Tree:
    return {"part": {"control": {"w": torch.tensor([value, -value])}}}


def same(a: Tree, b: Tree) -> bool:
    flat_a, flat_b = pytree.flatten(a), pytree.flatten(b)
    return flat_a.keys() == flat_b.keys() and all(
        x.dtype == flat_b[name].dtype and torch.equal(x, flat_b[name]) for name, x in flat_a.items()
    )


def assert_same(a: RunState, b: RunState) -> None:
    assert (a.round, a.time_step) == (b.round, b.time_step)
    assert lengths_of(dict(a.committed)) == lengths_of(dict(b.committed))
    assert same(a.server.model.params, b.server.model.params)
    assert same(a.server.model.buffers, b.server.model.buffers)
    assert same(a.server.state, b.server.state)
    assert a.client_states.keys() == b.client_states.keys()
    assert all(
        same(dict(a.client_states[client]), dict(b.client_states[client]))
        for client in a.client_states
    )


def load(folder: Path, warnings: list[str] | None = None, run: str = RUN) -> RunState | None:
    return CheckpointStore(folder, run).load(CPU, (warnings if warnings is not None else []).append)


def rounds_kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("round-*"))


def test_what_is_saved_is_loaded_bit_by_bit(tmp_path: Path) -> None:
    saved = state_at(12, {3: kept(0.1), 0: kept(2.0)})
    CheckpointStore(tmp_path, RUN).save(saved)
    loaded = load(tmp_path)
    assert loaded is not None
    assert_same(loaded, saved)


def test_a_state_before_any_part_remembers_anything(tmp_path: Path) -> None:
    saved = RunState(1, 0, Server(ModelState({"w": torch.zeros(2)}, {}), {}), {})
    CheckpointStore(tmp_path, RUN).save(saved)
    loaded = load(tmp_path)
    assert loaded is not None
    assert_same(loaded, saved)


def test_infinity_is_a_fine_thing_to_remember(tmp_path: Path) -> None:
    """Only the model must be finite: the best loss before the first round is infinity."""
    best = {"part": {"best": torch.tensor(float("inf"))}}
    saved = RunState(1, 0, Server(ModelState({"w": torch.zeros(2)}, {}), best), {3: best})
    CheckpointStore(tmp_path, RUN).save(saved)
    loaded = load(tmp_path)
    assert loaded is not None
    assert_same(loaded, saved)


def test_names_come_back_in_their_order(tmp_path: Path) -> None:
    """Sums over a tree run in the order of its names: another order after loading would change
    the last bits of what follows.
    """
    names = [f"layer{(7 * place) % 12}.weight" for place in range(12)]
    tree = {name: torch.zeros(1) for name in names}
    CheckpointStore(tmp_path, RUN).save(
        RunState(1, 0, Server(ModelState(tree, {}), {"part": tree}), {0: {"part": tree}})
    )
    loaded = load(tmp_path)
    assert loaded is not None
    assert list(loaded.server.model.params) == names
    assert list(loaded.server.state["part"]) == names
    assert list(loaded.client_states[0]["part"]) == names


def test_views_and_shared_memory_are_saved_as_what_they_show(tmp_path: Path) -> None:
    table = torch.arange(6.0).reshape(2, 3)
    params = {
        "a": table[:, 1],
        "b": table.T,
        "c": table,
        "d": torch.ones(2, requires_grad=True),
        "e": torch.ones(1).expand(3),
    }
    CheckpointStore(tmp_path, RUN).save(RunState(1, 0, Server(ModelState(params, {}), {}), {}))
    loaded = load(tmp_path)
    assert loaded is not None
    assert same(loaded.server.model.params, params)


def test_an_empty_or_missing_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    assert load(tmp_path / "nowhere") is None


def test_the_last_two_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    vault = CheckpointStore(tmp_path, RUN)
    for round in (1, 2, 9, 10):
        vault.save(state_at(round))
    assert rounds_kept(tmp_path) == ["round-0000009", "round-0000010"]
    loaded = load(tmp_path)
    assert loaded is not None
    assert loaded.round == 10


def test_only_changed_clients_are_written(tmp_path: Path) -> None:
    first, second, third = kept(1.0), kept(2.0), kept(3.0)
    vault = CheckpointStore(tmp_path, RUN)
    vault.save(state_at(1, {0: first, 1: second}))
    vault.save(state_at(2, {0: first, 1: third}))
    assert sorted(path.name for path in (tmp_path / OWN).iterdir()) == [
        "client-0000000.round-0000001.safetensors",
        "client-0000001.round-0000001.safetensors",  # the checkpoint before still names it
        "client-0000001.round-0000002.safetensors",
    ]
    vault.save(state_at(3, {0: first, 1: third}))
    assert sorted(path.name for path in (tmp_path / OWN).iterdir()) == [
        "client-0000000.round-0000001.safetensors",
        "client-0000001.round-0000002.safetensors",
    ]
    loaded = load(tmp_path)
    assert loaded is not None
    assert_same(loaded, state_at(3, {0: first, 1: third}))


def test_a_loaded_vault_goes_on_without_writing_what_is_there(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, RUN).save(state_at(1, {0: kept(1.0), 1: kept(2.0)}))
    vault = CheckpointStore(tmp_path, RUN)
    state = vault.load(CPU, pytest.fail)
    assert state is not None
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    vault.save(state)  # the round is saved already
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    vault.save(state_at(2, {**state.client_states, 1: kept(5.0)}))
    assert not (tmp_path / OWN / "client-0000000.round-0000002.safetensors").exists()
    loaded = load(tmp_path)
    assert loaded is not None
    assert_same(loaded, state_at(2, {0: kept(1.0), 1: kept(5.0)}))


def test_leftovers_of_a_killed_process_are_no_checkpoint_and_go(tmp_path: Path) -> None:
    vault = CheckpointStore(tmp_path, RUN)
    vault.save(state_at(1))
    half = tmp_path / ".remanence-0123456789abcdef.tmp"
    half.mkdir()
    (half / STATE).write_bytes(b"half")
    (tmp_path / OWN / ".remanence-0123456789abcdef.tmp").write_bytes(b"half")
    loaded = load(tmp_path)
    assert loaded is not None
    assert loaded.round == 1
    with lock(tmp_path.parent):  # as the next process does
        assert not half.exists()
        assert list((tmp_path / OWN).iterdir()) == []


def test_a_write_that_fails_leaves_the_checkpoints_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault = CheckpointStore(tmp_path, RUN)
    vault.save(state_at(1, {0: kept(1.0)}))

    def fail(file: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safe_path, "flush", fail)
    with pytest.raises(OSError, match="No space left"):
        vault.save(state_at(2, {0: kept(2.0)}))
    monkeypatch.undo()
    assert rounds_kept(tmp_path) == ["round-0000001"]
    assert list(tmp_path.glob(".remanence-*")) == []
    loaded = load(tmp_path)
    assert loaded is not None
    assert_same(loaded, state_at(1, {0: kept(1.0)}))
    # the same vault tries again later, and writes the client too
    vault.save(state_at(2, {0: kept(2.0)}))
    loaded = load(tmp_path)
    assert loaded is not None
    assert_same(loaded, state_at(2, {0: kept(2.0)}))


def test_the_manifest_says_what_belongs_together(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, RUN).save(state_at(2, {0: kept(2.0)}))
    manifest = read_manifest(SafePath(tmp_path) / "round-0000002")
    assert (manifest.run, manifest.round, manifest.time_step) == (RUN, 2, 1)
    assert manifest.run_files == {
        "metrics.jsonl": RunFile(20, sha256(CONTENT[:20])),
        "ledger.bin": RunFile(3, sha256(CONTENT[:3])),
    }
    assert manifest.state == sha256((tmp_path / "round-0000002" / STATE).read_bytes())
    own = manifest.client_files[0]
    assert own.sha256 == sha256((tmp_path / OWN / own.file).read_bytes())


def test_a_folder_that_was_copied_still_loads(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, RUN).save(state_at(2, {0: kept(2.0)}))
    there = tmp_path.parent.with_name("there")
    shutil.copytree(tmp_path.parent, there)
    shutil.rmtree(tmp_path.parent)
    loaded = load(there / "checkpoints")
    assert loaded is not None
    assert_same(loaded, state_at(2, {0: kept(2.0)}))


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ({"rounds": 99}, True),
        ({"checkpoint.seconds": 0}, True),
        ({"data.dir": "/elsewhere"}, True),
        ({"seed": 1}, False),
        ({"method": "wsm"}, False),
        ({"local.batch_size": 33}, False),
        ({"threads": 3}, False),
        ({"engine": "sequential"}, False),
        ({"data.name": "synthetic"}, False),
        ({"record.every": 2}, False),
    ],
)
def test_what_makes_two_runs_the_same_experiment(change: dict[str, Any], equal: bool) -> None:
    assert (fingerprint(parse_experiment()) == fingerprint(parse_experiment({}, change))) is equal
