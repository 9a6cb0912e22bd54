"""A run folder whose files were changed after the run: what disagrees is named, and is neither
continued, evaluated nor shown.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from trust.faults import record_trial

import remanence as rem
from remanence.cli.main import app
from remanence.core import pytree
from remanence.core.errors import NOTHING_LEARNED, CheckpointError, InputError, RemanenceError
from remanence.core.files import sha256
from remanence.core.safe_path import SafePath
from remanence.exports import evaluate, export
from remanence.reports import write_report
from remanence.results.checkpoint import MANIFEST, OWN, STATE, CheckpointStore
from remanence.results.checkpoint_codec import from_bytes, to_bytes
from remanence.results.run import CHECKPOINTS, CONFUSIONS, EXAMPLES, EXPERIMENT, LEDGER, METRICS

FAULT = "files of a run changed after the run"


def make_run(folder: Path, **changes: Any) -> Path:
    rem.run(
        method="scaffold",
        data="synthetic(samples=80, classes=2, features=3)",
        model="mlp(hidden=2)",
        clients=2,
        rounds=3,
        engine="sequential",
        quiet=True,
        out=folder,
        set={"checkpoint.seconds": 0, "threads": 1, "record.examples": True} | changes,
    )
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "run", **{"record.confusion": True})


@pytest.fixture(scope="module")
def only_the_first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run: besides the last state only the one before round 1 was saved."""
    return make_run(tmp_path_factory.mktemp("short") / "run", **{"checkpoint.seconds": 1000})


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def newest(run: Path) -> Path:
    return sorted((run / CHECKPOINTS).glob("round-*"))[-1]


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    entries = json.loads((folder / MANIFEST).read_text())
    change(entries)
    (folder / MANIFEST).write_text(json.dumps(entries))


def change_metrics(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the first line, and keep its length."""
    first, rest = (run / METRICS).read_bytes().split(b"\n", 1)
    line = json.loads(first)
    change(line)
    new = json.dumps(line).encode()
    (run / METRICS).write_bytes(new.ljust(len(first))[: max(len(new), len(first))] + b"\n" + rest)


CHANGED: dict[str, Callable[[Path], Any]] = {
    METRICS: lambda run: change_metrics(run, lambda line: line.update(accuracy=0.9)),
    LEDGER: lambda run: flip(run / LEDGER, 300),
    CONFUSIONS: lambda run: flip(run / CONFUSIONS, 40),
    EXAMPLES: lambda run: flip(run / EXAMPLES, 40),
}
USES: dict[str, Callable[[Path], object]] = {
    "resume": lambda run: rem.resume(run, rounds=4, quiet=True),
    "evaluate": lambda run: evaluate(rem.load(run)),
    "export": lambda run: export(rem.load(run)),
    "model": lambda run: rem.load(run).model(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", CHANGED)
def test_no_command_goes_on_from_a_changed_record(run: Path, name: str, use: str) -> None:
    CHANGED[name](run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(
        CheckpointError, match=rf"no checkpoint .* can be used .*{name} was changed"
    ):
        USES[use](run)
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {path: content for path, content in after.items() if path.name != ".lock"} == {
        path: content for path, content in before.items() if path.name != ".lock"
    }
    record_trial(FAULT, "refused by name; nothing was written")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method", "scaffo,d"),
        ("model", "mlp(hidden='x')"),
        ("model", "mlp(hidd"),
        ("name", "synthetic(samples=80 classes=2)"),
        ("partition", "i(id"),
        ("schedule", "((("),
        ("speed", "equal("),
        ("optimizer", "sgd(lr=0/1)"),
    ],
)
def test_an_error_about_changed_settings_names_their_file(run: Path, key: str, value: str) -> None:
    text = (run / EXPERIMENT).read_text()
    changed = re.sub(rf'^{key} = ".*"$', f'{key} = "{value}"', text, flags=re.M)
    assert changed != text
    (run / EXPERIMENT).write_text(changed)
    refusals = {}
    for name, use in (USES | {"report": write_report}).items():
        try:
            use(run)
        except RemanenceError as error:
            refusals[name] = str(error)
    assert "resume" in refusals
    for name, sentence in refusals.items():
        assert f"{run}/" in sentence, f"{name} names no file: {sentence}"


@pytest.mark.parametrize("name", [METRICS, CONFUSIONS, EXAMPLES])
def test_a_report_names_a_changed_record_instead_of_showing_it(run: Path, name: str) -> None:
    CHANGED[name](run)
    with pytest.raises(InputError, match=f"{name} is damaged: it was changed"):
        write_report(run)


def test_a_report_names_a_changed_ledger_and_leaves_it_out(run: Path) -> None:
    CHANGED[LEDGER](run)
    page = write_report(run).read_text()
    assert re.search(r"Warning: .*ledger\.bin is damaged: it was changed", page)


@pytest.mark.parametrize("name", CHANGED)
def test_a_report_names_a_record_that_was_cut_short_or_deleted(run: Path, name: str) -> None:
    content = (run / name).read_bytes()
    for spoil in (lambda path: path.write_bytes(content[:60]), Path.unlink):
        spoil(run / name)
        with pytest.raises(InputError, match=f"{name} is damaged: it has"):
            {
                METRICS: lambda run: run.metrics,
                LEDGER: lambda run: run.ledger,
                CONFUSIONS: lambda run: run.confusions,
                EXAMPLES: lambda run: run.examples,
            }[name](rem.load(run))


def test_what_follows_the_newest_checkpoint_is_shown(run: Path) -> None:
    """A run that is still writing is ahead of its checkpoint."""
    line = json.loads((run / METRICS).read_text().splitlines()[-1])
    with (run / METRICS).open("a") as file:
        file.write(json.dumps(line | {"round": 4}) + "\n")
    assert rem.load(run).metrics[-1]["round"] == 4


def test_a_report_says_that_the_newest_manifest_cannot_be_read(run: Path) -> None:
    change_manifest(newest(run), lambda entries: entries.update(round=7))
    page = write_report(run).read_text()
    assert "checkpoint round-0000003 is not used: its manifest.json is that of round 7" in page


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"accuracy": 9.0}, "an accuracy of 9, and it is 0 to 1"),
        ({"per_class": [0.5, -0.5]}, "a per_class that is not a list of numbers from 0 to 1"),
        ({"replies": -3}, "a replies of -3, and it is 0 or more"),
        ({"seconds": -1.0}, "a seconds of -1, and it is 0 or more"),
    ],
)
def test_numbers_out_of_range_are_refused_without_checkpoints_too(
    run: Path, changes: dict[str, Any], fault: str
) -> None:
    shutil.rmtree(run / CHECKPOINTS)
    change_metrics(run, lambda line: line.update(changes))
    with pytest.raises(InputError, match=rf"metrics\.jsonl is damaged: line 1 has {fault}"):
        write_report(run)


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "round": (lambda m: m.update(round=2), "its manifest.json is that of round 2"),
    "time step": (lambda m: m.update(time_step=1), "another time_step than its state"),
    "a client's state left out": (
        lambda m: m["client_states"].pop("1"),
        "another client_states than its state",
    ),
    "two clients exchanged": (
        lambda m: m.update(client_states=dict(zip("10", m["client_states"].values(), strict=True))),
        "another client_states than its state",
    ),
    "a record left out": (
        lambda m: m.get("run_files", m.get("file_lengths")).pop(LEDGER),
        "another run_files than its state",
    ),
}


@pytest.mark.parametrize("change", MANIFESTS)
def test_a_changed_manifest_is_not_used(run: Path, change: str) -> None:
    edit, reason = MANIFESTS[change]
    change_manifest(newest(run), edit)
    found = evaluate(rem.load(run))
    assert found["round"] == 2
    assert found["skipped"] == [f"checkpoint round-0000003 is not used: {_all(found, reason)}"]


def _all(found: dict[str, Any], reason: str) -> str:
    """The whole reason, which has these words."""
    (text,) = found["skipped"]
    assert reason in text
    return str(text.partition("is not used: ")[2])


def test_a_damaged_checkpoint_is_named_in_every_result(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(newest(run) / STATE)
    reason = "checkpoint round-0000003 is not used: state.safetensors is damaged"
    found = evaluate(rem.load(run))
    assert found["evaluated"].startswith("global model after round 2 on")
    assert (found["round"], [text.split(":")[0] for text in found["skipped"]]) == (
        2,
        ["checkpoint round-0000003 is not used"],
    )
    with pytest.warns(UserWarning, match=f"{reason}.*: the state is that of round 2"):
        rem.load(run).model()
    for command in (["evaluate", str(run)], ["export", str(run)]):
        assert not app(command, standalone_mode=False)
        shown = capsys.readouterr()
        assert "after round 2" in shown.out
        assert reason in shown.err
        assert not app([*command, "--json"], standalone_mode=False)
        shown = capsys.readouterr()
        result = json.loads(shown.out)
        assert result["round"] == 2
        assert reason in result["skipped"][0]
    described = json.loads((run / "export" / "model.json").read_text())
    assert described["round"] == 2
    app(["resume", str(run), "--json"], standalone_mode=False)
    (resumed,) = json.loads(capsys.readouterr().out)["resumed"]
    assert (resumed["run"], resumed["round"]) == ("run", 2)
    assert reason in resumed["skipped"][0]
    app(["evaluate", str(run), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["round"] == 3


def test_resume_prints_where_it_went_on_from(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(newest(run) / STATE)
    app(["resume", str(run), "--rounds", "4"], standalone_mode=False)
    shown = capsys.readouterr()
    assert "run: resumed after round 2" in shown.out
    assert "run: checkpoint round-0000003 is not used: state.safetensors is damaged" in shown.err


def test_resuming_a_comparison_names_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rem.compare(
        ["fedavg", "fedprox"],
        data="synthetic(samples=40, classes=2, features=3)",
        model="mlp(hidden=2)",
        clients=2,
        rounds=2,
        engine="sequential",
        out=tmp_path / "two",
        quiet=True,
        set={"checkpoint.seconds": 0, "threads": 1},
    )
    shutil.rmtree(tmp_path / "two" / "runs" / "fedprox-seed0" / CHECKPOINTS / "round-0000002")
    app(["resume", str(tmp_path / "two"), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["resumed"] == [
        {"run": "fedprox-seed0", "round": 1, "skipped": []}
    ]


def test_where_nothing_trained_is_left_the_exit_code_says_so(
    only_the_first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(only_the_first, tmp_path / "run")
    assert not app(["evaluate", str(run)], standalone_mode=False)
    flip(newest(run) / STATE)
    for command in (["evaluate", str(run)], ["evaluate", str(run), "--json"], ["export", str(run)]):
        assert app(command, standalone_mode=False) == NOTHING_LEARNED == 65
        assert "round-0000003 is not used: " in (shown := capsys.readouterr().err)
        assert "nothing is trained" in shown
    rem.resume(run, quiet=True)  # trains again what was lost
    assert not app(["evaluate", str(run)], standalone_mode=False)


def replace_tensor(run: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Write the newest state again, with other tensors and an honest digest."""
    file = newest(run) / STATE
    content = file.read_bytes()
    tensors = load(content)
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    changed = change(tensors.pop(name))
    tensors |= {} if changed is None else {name: changed}
    for key, text in metadata.items():
        entries = json.loads(text)
        names = entries["order"] if isinstance(entries, dict) else entries
        if changed is None:
            names.remove(name)
        metadata[key] = json.dumps(entries)
    content = save(tensors, metadata)
    file.write_bytes(content)
    change_manifest(newest(run), lambda entries: entries["files"].update({STATE: sha256(content)}))


TENSORS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "a parameter is missing": ("params/{first}", lambda x: None, "its model lacks params/"),
    "another shape": ("params/{first}", lambda x: x[:1], "its model has params/"),
    "another dtype": ("params/{first}", lambda x: x.double(), "its model has params/"),
}


@pytest.mark.parametrize("use", ["resume", "evaluate", "export", "model"])
@pytest.mark.parametrize("kind", TENSORS)
def test_a_state_with_another_form_is_no_state(run: Path, kind: str, use: str) -> None:
    name, change, reason = TENSORS[kind]
    first = next(iter(dict(rem.load(run).model().named_parameters())))
    replace_tensor(run, name.format(first=first), change)
    shutil.rmtree(run / CHECKPOINTS / "round-0000002")
    with pytest.raises(CheckpointError, match=f"round-0000003 is not used: {reason}"):
        USES[use](run)


def test_a_part_of_the_method_whose_state_is_missing(run: Path) -> None:
    tensors = load((newest(run) / STATE).read_bytes())
    name = next(key for key in tensors if key.startswith("state/"))
    replace_tensor(run, name, lambda x: None)
    shutil.rmtree(run / CHECKPOINTS / "round-0000002")
    with pytest.raises(CheckpointError, match="its server state lacks"):
        USES["resume"](run)


def test_a_client_whose_state_lacks_a_tensor(run: Path) -> None:
    """Digests are honest, as far as the state of the server."""

    from remanence.results.manifest import read_manifest

    cpu = torch.device("cpu")
    manifest = read_manifest(SafePath(run) / CHECKPOINTS / "round-0000003")
    store = CheckpointStore(run / CHECKPOINTS, manifest.run)
    state = store.load(cpu, pytest.fail)
    assert state is not None
    flat = pytree.flatten(from_bytes(to_bytes(state.client_states[0]), cpu, "client"))
    flat.pop(next(iter(flat)))
    store.last_round = -1
    states = {**state.client_states, 0: pytree.unflatten(flat)}
    (run / CHECKPOINTS / OWN / manifest.client_files[0].file).unlink()
    store.save(replace(state, client_states=states))
    shutil.rmtree(run / CHECKPOINTS / "round-0000002")
    with pytest.raises(CheckpointError, match="its state of client 0 lacks"):
        USES["resume"](run)
