"""Two sites whose data differ in one example answer the same messages, with the same random keys:
only fields that are declared to depend on examples differ.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import make_site, small_config
from typer.testing import CliRunner

from remanence.cli.main import app as command_line
from remanence.core import pytree
from remanence.core.declarations import (
    CLIENT,
    EXAMPLE,
    LABEL_COUNTS,
    MODEL,
    REPLY,
    RESPONSE_HEADER,
    UNDECLARED,
    Disclosure,
)
from remanence.experiment.build import BuiltExperiment, build
from remanence.flower import policy
from remanence.flower.discrete_noise import draw_geometric
from remanence.flower.sample_requests import make_requests
from remanence.flower.settings import read_site
from remanence.flower.site import Site
from remanence.flower.wire import WireMessage
from remanence.methods import METHODS
from remanence.testing.toy_task import as_method, fast_config

PLAIN = [fast_config(name) for name in METHODS if name != "centralized"]
PRIVATE = [
    "fedavg+dp_sgd(noise=1)",
    "scaffold+dp_sgd(noise=1)",
    "fednova+fedprox(mu=0.1)+dp_sgd(noise=1)",
    "fedbabu+dp_sgd(noise=1)",
    "flashback+dp_sgd(noise=1)+dp_counts(noise=5)",
    "fedwavg(noise=5, every=1)+dp_sgd(noise=1)",
    "fedavg+wsm+dp_counts(noise=5)",
]
OPEN = {"label_counts": True, "code": True}
NOISED = OPEN | {"epsilon": 0.5}
CLIENTS = (0, 1)
ROWS, TEST = 24, 6


def build_experiment(method: str, **changes: Any) -> BuiltExperiment:
    """The coordinator has data of its own, so that methods with a public set work."""
    public = {"data.public": 8} if any(p.needs_public_data for p in as_method(method).parts) else {}
    return build(small_config(method, **public, **{"clients.sample": 6}, **changes))


def site_with(
    folder: Path,
    experiment: BuiltExperiment,
    policy: dict[str, Any],
    change: tuple[str, int] | None,
) -> Site:
    """A site with two clients.

    Args:
        folder: Of its files.
        experiment: Names the classes.
        policy: Of the site.
        change: An array of client 0 and the row that is another example; None: none is.
    """
    (folder / "ward").mkdir(parents=True)
    for client in CLIENTS:
        draw = np.random.default_rng(client)
        arrays = {
            "x": draw.normal(size=(ROWS, 5)).astype(np.float32),
            "y": draw.integers(0, 4, ROWS),
            "x_test": draw.normal(size=(TEST, 5)).astype(np.float32),
            "y_test": draw.integers(0, 4, TEST),
        }
        if change is not None and client == 0:
            suffix, row = change
            arrays["x" + suffix][row] = 30.0  # an outlier
            arrays["y" + suffix][row] = (arrays["y" + suffix][row] + 1) % 4
        np.savez(
            folder / "ward" / f"{client}.npz",
            class_names=np.array(experiment.dataset.classes),
            **arrays,  # type: ignore[arg-type]
        )
    data = {str(client): f"npz(path='{client}.npz')" for client in CLIENTS}
    return make_site(folder, "ward", (), policy, data=data)


def answers(
    site: Site, messages: dict[str, WireMessage], monkeypatch: pytest.MonkeyPatch
) -> dict[str, WireMessage]:
    """The answers of a site whose secret keys are always the same."""
    keys = itertools.count(1)
    monkeypatch.setattr(secrets, "randbits", lambda bits: next(keys))
    below = functools.partial(draw_geometric, below=random.Random(1).randrange)
    monkeypatch.setattr(policy, "draw_geometric", below)
    return {name: site.answer(message) for name, message in messages.items()}


def changed_fields(one: WireMessage, other: WireMessage) -> set[str]:
    fields = {name for name in one.header if one.header[name] != other.header.get(name)}
    assert set(one.header) == set(other.header)
    assert set(one.arrays) == set(other.arrays)
    arrays = one.arrays.items()
    return fields | {name for name, x in arrays if not np.array_equal(x, other.arrays[name])}


def disclosure(field: str, experiment: BuiltExperiment) -> Disclosure:
    if field in RESPONSE_HEADER:
        return RESPONSE_HEADER[field]
    root, _, path = field.partition(pytree.SEPARATOR)
    if root != "payload":
        return REPLY[root]
    owner, _, leaf = path.partition(pytree.SEPARATOR)
    parts = {part.name: part for part in experiment.task.method.parts}
    return parts[owner].disclosure(leaf) if owner in parts else UNDECLARED


def is_covered(field: str, experiment: BuiltExperiment) -> bool:
    """Whether a value that depends on examples is in the account of a part, or has the noise of
    the site's policy.
    """
    method, declared = experiment.task.method, disclosure(field, experiment)
    mechanisms = [m for _, m in method.mechanisms if (m.unit, m.drawn_at) == (EXAMPLE, CLIENT)]
    covered = {mechanism.covers for mechanism in mechanisms if mechanism.noise}
    if declared.reveals == "model":  # without noise on models, the account says they are open
        return MODEL in covered or covered == {LABEL_COUNTS}
    if declared.reveals == LABEL_COUNTS and field.startswith("payload"):
        return LABEL_COUNTS in covered
    _, _, path = field.removeprefix("payload/").partition(pytree.SEPARATOR)
    return declared.noised or any(part.protects(path) for part in method.parts if path)


def one_example_apart(
    method: str,
    policy: dict[str, Any],
    split: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    **changes: Any,
) -> tuple[BuiltExperiment, dict[str, set[str]], list[dict[str, WireMessage]]]:
    """The fields of each answer that differ where one example of a split differs."""
    experiment = build_experiment(method, **changes)
    messages = make_requests(experiment, CLIENTS, 5)
    first = site_with(folder / "first", experiment, policy, None)
    given = answers(first, messages, monkeypatch)
    change = ("_test", 2)
    if split != "test":
        data = next(iter(first.tasks.values())).task.population.at(0)
        rows = {"train": data.train, "valid": data.valid}[split].for_client(0)
        change = ("", int(rows[1]))
    other = answers(site_with(folder / "other", experiment, policy, change), messages, monkeypatch)
    differing = {name: changed_fields(given[name], other[name]) for name in messages}
    return experiment, differing, [given, other]


@pytest.mark.parametrize("method", PLAIN)
def test_only_fields_that_are_declared_so_depend_on_an_example(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, differing, (given, _) = one_example_apart(
        method, OPEN, "train", tmp_path, monkeypatch
    )
    for message, fields in differing.items():
        for field in fields:
            reveals = disclosure(field, experiment).reveals
            assert reveals not in ("nothing", "size"), f"{field} of {message}"
    assert given["train"].header["kind"] == "trained", given["train"].header
    assert (
        "params" in {field.partition("/")[0] for field in differing["train"]} or method == "local"
    )
    assert "confusion" in differing["score train"]
    assert not differing["ping"] - {"seconds"}


@pytest.mark.parametrize("allowed", [OPEN, NOISED], ids=["open", "noised"])
@pytest.mark.parametrize("method", PRIVATE)
def test_under_a_privacy_part_no_other_field_depends_on_an_example(
    method: str, allowed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for sites that send label counts and exact counts with other methods."""
    experiment, differing, (given, _) = one_example_apart(
        method, allowed, "train", tmp_path, monkeypatch
    )
    for message, fields in differing.items():
        for field in fields:
            assert is_covered(field, experiment), f"{field} of {message}"
    assert given["train"].header["kind"] == "trained", given["train"].header
    assert {"loss", "seconds"} <= set(given["train"].header["withheld"])
    assert "loss" not in given["train"].arrays
    kinds = {given[f"score {split}"].header["kind"] for split in ("train", "valid", "test")}
    assert kinds == ({"counts"} if allowed is NOISED else {"declined"})
    assert given["personal"].header["kind"] == "declined"


@pytest.mark.parametrize("split", ["valid", "test"])
def test_only_counts_of_a_split_depend_on_its_examples(
    split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, differing, _ = one_example_apart("fedavg", OPEN, split, tmp_path, monkeypatch)
    changed = {name for name, fields in differing.items() if fields - {"seconds"}}
    expected = {"valid": {"score valid", "train and validate", "personal"}, "test": {"score test"}}
    assert changed == expected[split]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_one_example_changes_noised_counts_by_its_own_two_cells(
    split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another example in place of one: a count less and a count more, before the noise. The noise
    is the same for both sites, and setting negative counts to 0 brings them no farther apart.
    """
    _, _, (given, other) = one_example_apart("fedavg", NOISED, split, tmp_path, monkeypatch)
    for name in ("train", "valid", "test"):
        one, two = (side[f"score {name}"].arrays["noised"] for side in (given, other))
        distance = np.abs(one - two).sum(axis=(1, 2))
        assert distance[0] <= (2 if name == split else 0)
        assert distance[1] == 0


def test_an_outlier_cannot_be_seen_in_the_loss_under_dp_sgd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a noise of 200 the claimed epsilon is tiny; the mean loss had none."""
    _, differing, _ = one_example_apart(
        "fedavg+dp_sgd(noise=200)", OPEN, "train", tmp_path, monkeypatch
    )
    roots = {field.partition("/")[0] for field in differing["train"]}
    assert roots <= {"params"}


def test_an_example_moves_an_update_by_its_clipped_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sensitivity that the account of dp_sgd rests on: in one step on all 19 training examples
    another example takes the place of one, so their sum moves by twice the clip at most.
    """
    _, differing, (given, other) = one_example_apart(
        "fedavg+dp_sgd(clip=0.5, noise=1)",
        OPEN | {"min_steps": 1},
        "train",
        tmp_path,
        monkeypatch,
        **{"local.steps": 1, "local.batch_size": 32, "local.optimizer": "sgd(lr=0.1)"},
    )
    one, two = (side["train"].arrays for side in (given, other))
    assert one["weight"].tolist() == [19, 19]
    moved = [
        np.square(one[name] - two[name]).sum(axis=tuple(range(1, one[name].ndim)))
        for name in one
        if name.startswith("params/")
    ]
    distance = np.sqrt(np.sum(moved, axis=0))
    assert 0 < distance[0] <= 2 * 0.5 * 0.1 / 19 + 1e-12
    assert distance[1] == 0
    assert not {field for field in differing["train"] if not field.startswith("params/")}


def write_audited_site(folder: Path, policy: dict[str, Any]) -> Path:
    site = site_with(folder, build_experiment("fedavg"), policy, None)
    return site.file.path


def test_audit_shows_how_every_field_leaves(tmp_path: Path) -> None:
    """Every method, with one line of JSON for each field of each answer."""
    path = write_audited_site(tmp_path, {"epsilon": 0.5})
    before = {file: file.read_bytes() for file in path.parent.rglob("*") if file.is_file()}
    done = CliRunner().invoke(command_line, ["flower", "audit", str(path), "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert {row["method"] for row in rows} == set(METHODS) - {"centralized"}
    leaves = {
        (row["method"], row["message"], row["field"]): (row["reveals"], row["leaves"])
        for row in rows
    }
    assert leaves["fedavg", "train", "params"] == ("model", "as it is")
    assert leaves["fedavg", "train", "loss"] == ("examples", "withheld")
    assert leaves["fedavg", "ping", "sizes"] == ("size", "as it is")
    for split in ("train", "valid", "test"):
        reveals, how = leaves["fedavg", f"score {split}", "noised"]
        assert reveals == LABEL_COUNTS
        assert how.startswith("noised: epsilon 0.5 a model and client, of a budget of 8")
    assert leaves["fedavg", "personal", ""][1].startswith("declined (policy)")
    assert leaves["flashback", "train", ""][1].startswith("declined (policy)")
    assert leaves["fednova", "train", "payload/fednova/steps"] == ("size", "as it is")
    after = {file: file.read_bytes() for file in path.parent.rglob("*") if file.is_file()}
    assert after == before


def test_audit_of_one_experiment_prints_a_table(tmp_path: Path) -> None:
    from remanence.config import write_toml

    path = write_audited_site(tmp_path, OPEN | {"epsilon": 8.0})
    site = Site(read_site(path))
    site.budget.spend({1: 1})  # the audit starts from what the site has spent
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(
        write_toml(
            small_config("flashback+dp_sgd(noise=1)+dp_counts(noise=5)", **{"data.public": 8}), {}
        )
    )
    done = CliRunner().invoke(
        command_line, ["flower", "audit", str(path), str(experiment)], env={"COLUMNS": "250"}
    )
    assert done.exit_code == 0, done.output
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines()]
    rows = {cells[1]: cells[3] for cells in lines if len(cells) == 5}
    assert rows["params"] == "noised by dp_sgd"
    assert rows["payload/flashback/label_counts"] == "noised by dp_counts"
    assert rows["loss"] == "withheld"
    declined = [cells for cells in lines if len(cells) == 5 and "declined (budget)" in cells[3]]
    assert [cells[0] for cells in declined] == ["score train, score valid, score test"]
    assert "nothing was sent, spent or stored" in done.stdout
