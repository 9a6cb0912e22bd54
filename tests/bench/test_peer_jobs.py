"""benchmarks/peers: the files of a job, the turns, the table, the errors. The simulators
themselves are not installed here.
"""

from __future__ import annotations

import doctest
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

peers_run = importlib.import_module("run")
import contenders  # noqa: E402
import environments  # noqa: E402
import job_folder  # noqa: E402
import peer_table  # noqa: E402
import torch_job  # noqa: E402
import turns  # noqa: E402
from contenders import OURS, PEERS, PLAIN, Contender, choose_peers  # noqa: E402
from driver import PeerJob  # noqa: E402
from turns import Score  # noqa: E402

from remanence.bench.jobs import JOBS, prepare  # noqa: E402
from remanence.bench.runner import train_ours  # noqa: E402
from remanence.core.errors import InputError  # noqa: E402
from remanence.core.signals import Terminated  # noqa: E402
from remanence.engines.sequential import SequentialEngine  # noqa: E402

PEERS_FOLDER = Path(contenders.__file__).parent
# Four of six clients on 60 training rows: batches of 8 leave a short last one.
TINY = {
    "data.name": "synthetic(samples=72, classes=10, shape='3x32x32', test=0.1666)",
    "clients.count": 6,
    "clients.sample": 4,
}
RAGGED = {**TINY, "data.partition": "quantity(power=1.5, minimum=3)", "local.epochs": 2}


def test_a_job_is_written_with_every_example_once_an_epoch(tmp_path: Path) -> None:
    settings = job_folder.write_job("A", tmp_path / "A", RAGGED)
    job = PeerJob(tmp_path / "A")
    assert (job.name, job.model, job.batch, job.epochs, job.clients, len(job.cohort)) == (
        "A",
        "lenet",
        8,
        2,
        6,
        4,
    )
    assert (job.optimizer, job.optimizer_hparams["betas"], job.optimizer_hparams["lr"]) == (
        "Adam",
        [0.9, 0.999],
        0.001,
    )
    assert settings["sizes"] == job.sizes
    assert len(set(job.sizes)) > 1
    for client, size in zip(job.cohort, job.sizes, strict=True):
        orders = job.orders(client)
        assert orders.shape == (2, size)
        assert np.array_equal(np.sort(orders, axis=1), np.tile(np.arange(size), (2, 1)))
        assert not np.array_equal(orders[0], orders[1])
        x, y = job.examples(client)
        assert x.shape == (size, 3, 32, 32)
        assert (x.dtype, y.shape) == (np.float32, (size,))


def test_a_plain_loop_over_the_files_equals_the_engine(tmp_path: Path) -> None:
    """The witness that data, order, weights and optimizer in the files are those of the
    experiment: ours never reads them.
    """
    job_folder.write_job("A", tmp_path / "A", RAGGED)
    job = PeerJob(tmp_path / "A")
    local = []
    for client in job.cohort:
        model = torch_job.make_model(job)
        torch_job.fit(model, job, torch_job.Epochs(job, client))
        local.append(torch_job.weights_of(model))
    merged, evenly = (
        {
            name: np.average([weights[name] for weights in local], axis=0, weights=shares)
            for name in local[0]
        }
        for shares in (job.sizes, None)
    )
    experiment, state, work = prepare(JOBS["A"], "cpu", "fp32", RAGGED)
    ours = {
        name: value.numpy()
        for name, value in train_ours(
            experiment, state, work, SequentialEngine(experiment.task)
        ).params.items()
    }
    assert turns.distance(job.start(), ours, merged) < 1e-3
    # an average without weights, the easiest thing to get wrong, is noticed
    assert turns.distance(job.start(), ours, evenly) > turns.SAME


def test_epochs_follow_the_plan_and_begin_again(tmp_path: Path) -> None:
    job_folder.write_job("A", tmp_path / "A", RAGGED)
    job = PeerJob(tmp_path / "A")
    client = job.cohort[int(np.argmax(job.sizes))]
    data = torch_job.Epochs(job, client)
    passes = [torch.cat([x for x, _ in data]) for _ in range(3)]
    for number, seen in enumerate(passes):
        assert torch.equal(seen, data.x[torch.from_numpy(job.orders(client)[number % 2])])
    assert len(data) == -(-len(data.y) // 8)


# What a driver says and hears, without a simulator behind it. {end} is where its one weight ends
# after a first round that starts at 0.
DRIVER = """
import json, sys
from pathlib import Path
from typing import Any
import numpy as np
folder, name = Path(sys.argv[1]), sys.argv[2]
def say(message): print(json.dumps(message), flush=True)
say({{"versions": "nothing 1", "note": "one process"}})
for line in sys.stdin:
    with (folder / "calls.txt").open("a") as file: file.write(name + "\\n")
    np.savez(folder / f"result-{{name}}.npz", w=np.array([{end}]))
    {action}
    say({{"seconds": 2.0}})
"""


def pretend(tmp_path: Path, name: str, end: float, action: str = "") -> tuple[Contender, str]:
    driver = tmp_path / f"{name}.py"
    driver.write_text(DRIVER.format(end=end, action=action))
    return Contender(name, str(driver), "made up"), sys.executable


def test_contenders_take_turns_and_one_that_fails_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    np.savez(folder / "start.npz", w=np.zeros(1))
    players = [
        pretend(tmp_path, PLAIN.name, 1.0),
        pretend(tmp_path, "same", 1.004),
        pretend(tmp_path, "other", 1.5),
        pretend(tmp_path, "broken", 1.0, action="raise ValueError('no such thing')"),
    ]
    (plain, same, other, broken), stop = turns.play_job(
        players, folder, repeat=2, say=lambda line: None, patience=60
    )
    assert stop is None
    # Three turns; each begins one place further on, and the broken one is not asked again.
    assert (folder / "calls.txt").read_text().split("\n")[:-1] == [
        *(PLAIN.name, "same", "other", "broken"),
        *("same", "other", PLAIN.name),
        *("other", PLAIN.name, "same"),
    ]
    assert plain.seconds == same.seconds == [2.0, 2.0]
    assert (plain.difference, plain.problem, plain.versions, plain.note) == (
        0.0,
        "",
        "nothing 1",
        "one process",
    )
    assert same.difference == pytest.approx(0.004)
    assert not same.problem
    assert other.problem == "does other work: its first round ends 50.0% away from the plain loop's"
    assert (broken.problem, broken.seconds) == ("ValueError: no such thing", [])


@pytest.mark.parametrize(("at", "times"), [(2, (0, 0)), (3, (0, 1)), (5, (2, 1))])
def test_what_was_measured_is_kept_when_it_is_stopped(
    at: int, times: tuple[int, int], tmp_path: Path
) -> None:
    """Lines of a turn come in the order plain, other; other, plain; plain, other. A line
    that is written after the stop does not count.
    """
    folder = tmp_path / "job"
    folder.mkdir()
    np.savez(folder / "start.npz", w=np.zeros(1))
    lines: list[str] = []

    def stop_soon(line: str) -> None:
        lines.extend([line] if " s" in line and "starting" not in line else [])
        if len(lines) > at:
            raise KeyboardInterrupt

    players = [pretend(tmp_path, PLAIN.name, 1.0), pretend(tmp_path, "other", 1.0)]
    (plain, other), stop = turns.play_job(players, folder, repeat=3, say=stop_soon, patience=60)
    assert isinstance(stop, KeyboardInterrupt)
    assert (len(plain.seconds), len(other.seconds)) == times
    assert plain.problem == ("" if plain.seconds else "stopped before a turn that counts")
    assert other.problem == ("" if other.seconds else "stopped before a turn that counts")


def test_a_silent_contender_is_given_up(tmp_path: Path) -> None:
    silent = pretend(tmp_path, "silent", 1.0, action="import time; time.sleep(60)")
    player = turns.Player(*silent, tmp_path, patience=60)
    player.prepare()
    player._patience = 0.2
    with pytest.raises(turns.Failed, match=r"no answer within 0 s"):
        player.play()
    player._process.kill()
    player.stop()


def test_the_table() -> None:
    """Remanence takes 2 s, the median of 1, 2 and 9; the peer 5 s: 2.5 times as long."""
    scores = [
        Score(OURS, "remanence 1, torch 2", "engine sequential", [1.0, 9.0, 2.0], 1e-4),
        Score(PLAIN, "torch 2", "2 threads", [3.0, 3.0, 3.0], 0.0),
        Score(PEERS["pfl"], "pfl 0.6", "1 process", [5.0, 4.0, 6.0], 2e-5),
        Score(PEERS["fedlab"], "fedlab 1.3", "1 process", [7.0, 7.0, 7.0], 0.0),
        Score(PEERS["flwr"], problem="not installed: no such version"),
        Score(PEERS["fluke"], "fluke 0.8", "1 process", [0.1, 0.1, 0.1], 0.5, "does other work"),
    ]
    results = peer_table.summarize("B", scores)
    assert [result["ratio_to_ours"] for result in results] == [1.0, 1.5, 2.5, 3.5, None, None]
    assert (results[2]["seconds"], results[2]["fastest_seconds"]) == (5.0, 4.0)
    json.dumps(results)
    table = peer_table.render(results, "a machine")
    lines = table.splitlines()
    assert [cell.strip() for cell in lines[4].split("|")[1:-1]] == [
        "B",
        "pfl",
        "pfl 0.6",
        "5.00",
        "4.00",
        "2.50",
        "2e-05",
    ]
    assert "B: the fastest peer is pfl, which takes 2.50 times as long as Remanence." in lines
    assert "- B, flwr: not installed: no such version" in lines
    assert "- B, fluke: does other work" in lines
    assert not any(line.startswith("| B   | fluke") for line in lines)
    assert lines[-1] == "a machine"


def test_a_table_without_peers_says_so() -> None:
    results = peer_table.summarize("A", [Score(PEERS["pfl"], problem="gone")])
    assert "A: no peer to compare with." in peer_table.render(results, "a machine")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--peers", "flower"], "unknown peer 'flower': did you mean flwr?"),
        (["--jobs", "Z"], "unknown job 'Z': known: A, B, B2"),
        (["--repeat", "0"], "--repeat 0 measures nothing: give at least 1"),
        (["--envs", str(PEERS_FOLDER / "envs")], "lies in the source tree"),
    ],
)
def test_refusals(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_run, "make_environments", lambda *_: pytest.fail("work began"))
    assert peers_run.main(arguments) == InputError.exit_code
    assert sentence in capsys.readouterr().err


def test_peers_come_in_the_order_of_the_table() -> None:
    assert [peer.name for peer in choose_peers(["fedjax", "pfl", "fedjax"])] == ["pfl", "fedjax"]
    assert [peer.name for peer in choose_peers([])] == list(PEERS)


def test_every_contender_has_a_driver_and_pinned_versions() -> None:
    constraints = (PEERS_FOLDER.parents[1] / "constraints.txt").read_text().splitlines()
    torch_pin = next(line for line in constraints if line.startswith("torch=="))
    for contender in (OURS, PLAIN, *PEERS.values()):
        assert (PEERS_FOLDER / contender.driver).is_file()
        if contender.environment:
            pins = [
                line
                for line in (environments.PINS / f"{contender.environment}.txt")
                .read_text()
                .splitlines()
                if line[0] != "#"
            ]
            assert all(line.count("==") == 1 for line in pins)
            assert [line for line in pins if line.startswith("torch==")] in ([torch_pin], [])


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []

    def call(*command: str) -> None:
        calls.append(command)
        (tmp_path / "pfl" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / "pfl" / "bin" / "python").touch()

    monkeypatch.setattr(environments, "call", call)
    for _ in range(2):
        assert (
            environments.make_environment("pfl", tmp_path, "python3")
            == tmp_path / "pfl" / "bin" / "python"
        )
    assert [command[-1] for command in calls] == [
        str(tmp_path / "pfl"),
        "torch==2.13.0",
        str(environments.PINS / "pfl.txt"),
    ]
    (tmp_path / "pfl" / environments.STAMP).write_text("older pins")
    environments.make_environment("pfl", tmp_path, "python3")
    assert len(calls) == 6


def test_what_cannot_be_installed_is_reported_once_and_the_rest_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    ready, missing = peers_run.make_environments(
        choose_peers(["pfl", "pfl-processes"]), tmp_path, str(tmp_path / "no-python"), said.append
    )
    assert not ready
    assert [score.contender.name for score in missing] == ["pfl", "pfl-processes"]
    assert all("no-python" in score.problem for score in missing)
    assert len(said) == 1


def test_a_stand_in_takes_the_place_of_a_torchvision_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torchvision_stand_in import MODULES, replace_torchvision

    for name in ("torchvision", *(f"torchvision.{part}" for part in MODULES)):
        # what Python does with it: the import fails; and pytest puts things back
        monkeypatch.setitem(sys.modules, name, None)
    replace_torchvision()
    datasets = importlib.import_module("torchvision.datasets")
    assert isinstance(datasets.MNIST, type)
    assert importlib.import_module("torchvision").datasets is datasets


def test_doctests() -> None:
    for module in (environments, job_folder, turns):
        done = doctest.testmod(module)
        assert done.attempted > 0
        assert done.failed == 0


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_stopped_before_the_first_turn(
    stop: type[KeyboardInterrupt],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: Any) -> None:
        raise stop

    monkeypatch.setattr(peers_run, "make_environments", interrupt)
    assert peers_run.main(["--jobs", "A", "--peers", "pfl"]) == code
    assert capsys.readouterr().err == "stopped before anything was measured\n"
