"""The estimate of what a run needs, worked by hand, and the sentences for runs that need too much."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from remanence.cli.main import app
from remanence.config import parse_experiment
from remanence.core.errors import InputError
from remanence.data.dataset import ArrayDataset, DatasetSplit
from remanence.experiment import build, resources
from remanence.experiment.data_setup import tabulate_partition
from remanence.experiment.resources import (
    RunSizes,
    check_disk,
    check_resources,
    check_workers,
    estimate_resources,
)
from remanence.rounds import engine_choice

GIB = 1 << 30


def sizes_of(needs: tuple[resources.Need, ...]) -> dict[str, int]:
    return {need.what: need.size for need in needs if need.size}


# 100 clients, 10 a round, 4 rounds, 2 time steps, 3 classes, 20 examples each, a model of 1000
# bytes, clients that keep 500 bytes, 6 steps of 5 examples
SMALL = RunSizes(
    clients=100, cohort=10, rounds=4, time_steps=2, classes=3, samples=20, model=1000, reply=1000,
    client_state=500, steps=6, batch=5, data=700, validation=True,
)  # fmt: skip


def test_memory_with_a_server() -> None:
    assert sizes_of(estimate_resources(SMALL).memory) == {
        "the data": 700,
        "the examples of each client at each time step": 100 * 192 + 2 * 100 * (48 + 8 * 20),
        "what clients keep between rounds": 40 * 500,  # 4 rounds of 10 clients
        "the batches of one client": 8 * 6 * 5,
        "confusion matrices": 16 * 9,
        "the copies of the model": 6000,
        "the replies of a round": 10 * 1000,
    }
    assert estimate_resources(SMALL).steps == 4 * 10 * 6


def test_clients_without_a_server_all_have_a_model() -> None:
    needed = sizes_of(estimate_resources(SMALL._replace(decentralized=True)).memory)
    assert needed["the models of all clients"] == 2 * 100 * 1000
    assert needed["tables over pairs of clients"] == 9 * 100 * 100  # a byte and a count each
    assert needed["confusion matrices"] == 16 * 100 * 9


def test_a_machine_with_some_of_the_clients_needs_their_share() -> None:
    needed = sizes_of(estimate_resources(SMALL._replace(own=3)).memory)
    assert needed["the replies of a round"] == 3 * 1000
    assert needed["what clients keep between rounds"] == 3 * 500
    none = sizes_of(estimate_resources(SMALL._replace(own=0, decentralized=True)).memory)
    assert not none.keys() & {"the models of all clients", "the replies of a round"}


def test_no_more_clients_keep_something_than_there_are() -> None:
    needed = sizes_of(estimate_resources(SMALL._replace(rounds=1000)).memory)
    assert needed["what clients keep between rounds"] == 100 * 500


def test_local_models_are_evaluated_together() -> None:
    local = SMALL._replace(local_every=2, cross=3, concepts=2)
    assert sizes_of(estimate_resources(local).memory)["confusion matrices"] == 16 * 20 * 9
    cross = local._replace(cross=20, concepts=1)  # 10 models on the examples of 10 clients
    assert sizes_of(estimate_resources(cross).memory)["confusion matrices"] == 16 * 100 * 9


def test_models_on_a_gpu_take_none_of_the_host() -> None:
    needed = estimate_resources(SMALL._replace(gpu=True))
    assert sizes_of(needed.gpu) == {
        "the data": 700,
        "the copies of the model": 6000,
        "the replies of a round": 10_000,
    }
    assert not sizes_of(needed.memory).keys() & {"the copies of the model"}
    assert "the data" in sizes_of(needed.memory)
    assert estimate_resources(SMALL).gpu == ()


def test_files() -> None:
    """Every second of 4 rounds is evaluated, on test and validation examples; local models too."""
    recorded = SMALL._replace(every=2, local_every=2, cross=3, confusion=True, examples=True)
    tests = 2 + 2 * (1 + 10)  # the global model, and with local models it and ten others
    others = 2 + 2 * 3 * 3
    assert sizes_of(estimate_resources(recorded).disk) == {
        "metrics.jsonl": 300 * (4 + 2) + 5 * 3 * 2 * 2,
        "the ledger": (tests + others) * (34 + 12 * 3),
        "confusion matrices": tests * 4 * 9,
        "results on single examples": 3 * 2 * 10 * 20 * 30,
        "the last two checkpoints": 2 * 1000 + 40 * 500,
    }


def test_the_largest_part_and_its_cure_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "machine_memory", lambda: GIB)
    check_resources(estimate_resources(SMALL))
    with pytest.raises(
        InputError,
        match=r"at least 6\.0 GiB of memory, 3\.7 GiB of it for the replies of a round, and this"
        r" machine allows 1\.0 GiB: lower clients\.sample or use a smaller model",
    ):
        check_resources(estimate_resources(SMALL._replace(model=400_000_000, reply=400_000_000)))
    on_gpu = estimate_resources(SMALL._replace(model=400_000_000, reply=400_000_000, gpu=True))
    check_resources(on_gpu, 139 * GIB)  # a machine with more memory on its GPU
    with pytest.raises(InputError, match=r"of GPU memory, .* and the GPU has 4\.0 GiB"):
        check_resources(on_gpu, 4 * GIB)


def test_steps_without_end() -> None:
    with pytest.raises(InputError, match=r"makes 6e\+15 local steps, and no machine can end"):
        check_resources(estimate_resources(SMALL._replace(rounds=10**8, steps=6 * 10**6, batch=1)))


class Usage(NamedTuple):
    free: int


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = estimate_resources(SMALL._replace(rounds=10**7))  # about 8 GB
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(8 * GIB))
    check_disk(needed, tmp_path / "not" / "there")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(4 * GIB))
    check_disk(estimate_resources(SMALL), tmp_path)
    with pytest.raises(
        InputError, match=r"disk space, .* for metrics\.jsonl, and .*: lower rounds"
    ):
        check_disk(needed, tmp_path / "not" / "there")


def test_worker_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "machine_memory", lambda: GIB)
    check_workers(51)  # of 20 MiB each
    with pytest.raises(InputError, match=r"workers=52 need at least 1\.0 GiB of memory"):
        check_workers(52)
    monkeypatch.setattr(resources.resource, "getrlimit", lambda kind: (120, 120))
    check_workers(20)
    with pytest.raises(InputError, match=r"workers=21 need a pipe each, .* 120 files"):
        check_workers(21)


class Log:
    """A progress that keeps its messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        ({"workers": 200}, 3),
        ({"workers": 3}, 3),
        ({"workers": 200, "clients.sample": 1}, 2),  # evaluation uses every core
        ({"workers": 200, "clients.sampling": "poisson", "clients.sample": 1}, 3),
        ({"workers": 200, "clients.sample": 1, "method": "random"}, 3),  # all are evaluated
    ],
)
def test_no_more_workers_than_clients(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], used: int
) -> None:
    monkeypatch.setattr(engine_choice, "count_cores", lambda: 2)
    given = {"engine": "processes", "device": "cpu", "clients.count": 3, "rounds": 1}
    experiment = build.build(parse_experiment({}, given | settings))
    log: Any = Log()
    resolved, _ = engine_choice.resolve_engine(experiment, log)
    assert resolved.config.workers == used
    assert bool(log.lines) == (used < settings["workers"])
    assert all("of 200 workers are used: a round trains" in line for line in log.lines)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--rounds", "1000000000000"], "rounds must be at most 100000000"),
        (["--time-steps", "1000000000", "--drift", "random(clusters=2)"], "at most 100000,"),
        (
            ["--time-steps", "2000", "--rounds", "100000", "--drift", "random(clusters=2)"],
            "are 200000000 rounds, and a run has at most 100000000",
        ),
        (["--set", "threads=1000000"], r"threads=1000000 is more than \d+, the most"),
        (["--epochs", "1000000000"], r"the batches of one client.*lower local\.epochs"),
        (["--steps", "100000000000"], r"the batches of one client.*lower local\.epochs"),
        (["--model", "mlp(hidden='999999,999999')"], "TiB of memory, .* use a smaller model"),
        (
            ["--clients", "1000000000", "--sample", "1", "--drift", "random(clusters=2)"],
            r"the examples of each client at each time step.*lower clients\.count",
        ),
        (
            ["--method", "random", "--clients", "100000", "--data", "synthetic(samples=130000)"],
            r"tables over pairs of clients.*use a method with a server",
        ),
        (
            ["--set", "workers=100000", "--engine", "processes", "--clients", "100000",
             "--sample", "1.0", "--data", "synthetic(samples=130000, features=1)",
             "--partition", "iid"],
            "workers=100000 need at least",
        ),
        (
            ["--set", "record.confusion=true", "--data", "synthetic(samples=15000, classes=3000)",
             "--rounds", "1000000"],
            r"of disk space, .* for confusion matrices.*leave out record\.confusion",
        ),
    ],
)  # fmt: skip
def test_runs_that_cannot_work_end_before_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], match: str
) -> None:
    monkeypatch.setattr(resources, "machine_memory", lambda: 64 * GIB)
    out = tmp_path / "out"
    command = ["run", *flags, "--out", str(out), "--quiet"]
    if "--rounds" not in flags:
        command += ["--rounds", "1"]
    with pytest.raises(InputError, match=match):
        app(command, standalone_mode=False)
    assert not out.exists()


def test_only_what_clients_send_is_in_replies() -> None:
    """With frozen_head, they send all but 201 x 10 parameters of the classifier."""
    config = parse_experiment({}, {"method": "frozen_head", "clients.count": 4})
    needed = sizes_of(build.build(config).resources.memory)
    assert needed["the replies of a round"] == 4 * 4 * 65 * 200
    assert needed["the copies of the model"] == 6 * 4 * (65 * 200 + 201 * 10)


def test_the_partition_of_too_many_clients_is_not_made() -> None:
    settings = {"clients.count": 10**12, "drift.schedule": "random(clusters=2)"}
    with pytest.raises(InputError, match=r"the examples of each client at each time step"):
        tabulate_partition(parse_experiment({}, settings))


def test_a_comparison_needs_the_disk_of_all_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = build.build(parse_experiment({}, {"rounds": 5})).resources
    one = sum(sizes_of(needed.disk).values())
    monkeypatch.setattr(resources, "SMALL_FILES", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 * one))
    check_disk(needed, tmp_path, 100)
    command = ["compare", "--methods", "fedavg", "--rounds", "5", "--out", str(tmp_path / "out")]
    with pytest.raises(InputError, match=r"of disk space, .* for the last two checkpoints"):
        app([*command, "--seeds", "101"], standalone_mode=False)
    assert not (tmp_path / "out").exists()


def test_clients_that_keep_models() -> None:
    """Digits have 64 pixels; the default network has 200 hidden units. scaffold keeps a number of 4
    bytes for each parameter.
    """
    config = parse_experiment({}, {"method": "scaffold", "clients.count": 50, "rounds": 100})
    needed = sizes_of(build.build(config).resources.memory)
    parameters = 65 * 200 + 201 * 10
    assert needed["what clients keep between rounds"] == 50 * 4 * parameters
    assert needed["the copies of the model"] == 6 * 4 * parameters


def test_memory_that_is_not_enough_after_all_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr(build, "partition_data", fail)
    with pytest.raises(
        InputError, match=r"do not fit into memory \(Unable to allocate 9 GiB\): use"
    ):
        build.build(parse_experiment({}, {}))


def test_a_model_is_measured_without_memory_and_without_random_numbers() -> None:
    from remanence.core.compose import ComposedMethod, parse_method
    from remanence.experiment.run_sizes import sizes_before_building
    from remanence.methods import PARTS

    data = broadcast_data((3, 32, 32), 10, 50_000, 10_000)
    before = torch.get_rng_state()
    method = ComposedMethod(parse_method("fedavg", PARTS))
    sizes = sizes_before_building(
        parse_experiment({}, {}), method, data, "mlp(hidden=100)", torch.device("cpu"), torch.float32
    )  # fmt: skip
    assert torch.equal(before, torch.get_rng_state())
    assert sizes.model == 4 * (3072 * 100 + 100 + 100 * 10 + 10)
    assert sizes.data == 60_000 * 3072


def broadcast_data(shape: tuple[int, ...], classes: int, train: int, test: int) -> ArrayDataset:
    """A dataset of any size in no memory: all its examples are one byte."""
    splits = [
        DatasetSplit(
            np.broadcast_to(np.uint8(0), (count, *shape)), np.broadcast_to(np.int64(0), (count,))
        )
        for count in (train, test)
    ]
    return ArrayDataset("large", "image", tuple(map(str, range(classes))), *splits)
