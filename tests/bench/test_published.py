"""benchmarks/published: the jobs' files, the plain loop, the runner on a small job, the table. The
packages of others are not installed here.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plain_published
import published
import published_contenders
import published_networks
import published_table
import pytest
import torch
from contenders import Contender
from environments import PINS
from published_contenders import CONTENDERS, Course, choose_contenders
from published_jobs import JOBS, settings_of, write_task
from published_task import PublishedTask
from torch.nn.functional import cross_entropy

from remanence.core.errors import InputError
from remanence.models import lenet

DATA = "synthetic(samples=72, classes=3, shape='3x32x32', test=0.1666)"
SMALL = {"clients.count": 6, "local.batch_size": 4, "local.epochs": 2, "rounds": 3}


@pytest.fixture
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 training images; six clients of ten images each."""
    for name, more in (("blazefl-cnn", {}), ("pfl-cnn", {"clients.sample": 4, "record.every": 2})):
        job = JOBS[name]
        monkeypatch.setitem(JOBS, name, replace(job, settings=job.settings | SMALL | more))


def written(name: str, folder: Path, **changes: Any) -> PublishedTask:
    job = JOBS[name]
    write_task(job, settings_of(job, None, DATA, "", "cpu", "fp32") | changes, folder)
    return PublishedTask(folder)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("tutorial_cnn", 62_006), ("pfl_cnn", 1_626_442), ("imagenet_resnet18", 11_181_642)],
)
def test_networks_have_the_published_sizes(name: str, parameters: int) -> None:
    """tutorial: 6*76 + 16*151 + 120*401 + 84*121 + 10*85. pfl: 32*28 + 64*289 + 128*12,545 +
    10*129. ResNet-18: torchvision's 11,689,512 with 1,000 classes, less 990 classes of 513 numbers.
    """
    network = published_networks.make_network(name, 10)
    assert sum(value.numel() for value in network.parameters()) == parameters
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    again = published_networks.make_network(name, 10)
    for one, other in zip(network.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_tutorials_cnn_is_lenet() -> None:
    network, ours = published_networks.make_network("tutorial_cnn", 10), lenet((3, 32, 32), 10)
    weights = dict(zip(ours.state_dict(), network.state_dict().values(), strict=True))
    ours.load_state_dict(weights)
    x = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(ours(x), network(x))


@pytest.mark.usefixtures("small_jobs")
def test_a_task_has_every_example_once_and_its_inputs_are_ours(tmp_path: Path) -> None:
    """blazefl's inputs are pixels / 127.5 - 1, pfl's have mean 0 and deviation 1 by channel."""
    blazefl = written("blazefl-cnn", tmp_path / "b")
    assert (blazefl.clients, blazefl.cohort, blazefl.batch, blazefl.epochs) == (6, 6, 4, 2)
    assert (blazefl.lr, blazefl.augment, blazefl.every, blazefl.rounds) == (0.1, True, 1, 3)
    x, y = zip(*(blazefl.client(client) for client in range(6)), strict=True)
    assert np.array_equal(np.sort(np.concatenate(y)), np.sort(blazefl.train_y))
    assert [len(labels) for labels in y] == [10] * 6
    assert max(len(set(labels)) for labels in y) == 2  # two shards of five of 20 a class
    assert (x[0].dtype, x[0].shape) == (np.uint8, (10, 3, 32, 32))
    assert np.allclose(blazefl.normalize(np.array([0, 51, 255])), [[[-1, -0.6, 1]]])
    pfl = written("pfl-cnn", tmp_path / "p")
    assert (pfl.cohort, pfl.augment, pfl.every) == (4, False, 2)
    inputs = pfl.normalize(np.array(pfl.train_x))
    assert np.allclose(inputs.mean(axis=(0, 2, 3)), 0, atol=1e-4)
    assert np.allclose(inputs.std(axis=(0, 2, 3)), 1, atol=1e-4)
    assert [number for number in range(1, 4) if pfl.evaluates(number)] == [2, 3]


def test_flip_and_crop_cut_a_window_out_of_the_padded_image() -> None:
    """Every result is one of 2 x 9 x 9 windows, and different ones come up."""
    x = torch.randint(1, 255, (40, 3, 32, 32), dtype=torch.uint8)
    done = plain_published.flip_and_crop(x)
    seen = set()
    for image, result in zip(x, done, strict=True):
        windows = {
            (mirrored, top, left): padded[:, top : top + 32, left : left + 32]
            for mirrored, source in ((False, image), (True, image.flip(2)))
            for padded in [torch.nn.functional.pad(source, (4, 4, 4, 4))]
            for top in range(9)
            for left in range(9)
        }
        found = [place for place, window in windows.items() if torch.equal(window, result)]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 20
    assert {mirrored for mirrored, _, _ in seen} == {False, True}


@pytest.mark.usefixtures("small_jobs")
def test_the_plain_loop_is_gradient_descent_and_an_average(tmp_path: Path) -> None:
    """One epoch of one batch of everything: each client takes one step from the server's weights,
    and the server gets the mean of the steps, w - lr * mean of gradients.
    """
    changes = {"data.augment": [], "local.epochs": 1, "local.batch_size": 10}
    task = written("blazefl-cnn", tmp_path / "task", **changes)
    data = plain_published.PlainData(task)
    server, local = (published_networks.make_network("tutorial_cnn", 3) for _ in range(2))
    start = {name: value.clone() for name, value in server.state_dict().items()}
    gradients: dict[str, torch.Tensor] = {}
    for client in (1, 4):
        x, y = task.client(client)
        server.zero_grad()
        inputs = torch.from_numpy(task.normalize(x))
        cross_entropy(server(inputs), torch.from_numpy(y)).backward()
        for name, parameter in server.named_parameters():
            gradients[name] = gradients.get(name, 0) + parameter.grad / 2
    plain_published.train_round(server, local, task, data, [1, 4])
    for name, value in server.state_dict().items():
        torch.testing.assert_close(value, start[name] - 0.1 * gradients[name])
    loss, accuracy = plain_published.evaluate(server, data)
    logits = server(torch.from_numpy(task.normalize(np.array(task.test_x))))
    labels = torch.from_numpy(np.array(task.test_y))
    assert loss == pytest.approx(float(cross_entropy(logits, labels).detach()), rel=1e-5)
    assert accuracy == pytest.approx(float((logits.argmax(1) == labels).double().mean()))


@pytest.mark.slow
@pytest.mark.usefixtures("small_jobs")
@pytest.mark.parametrize("job", ["blazefl-cnn", "pfl-cnn"])
def test_the_runner(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours and the plain loop report every round and the evaluations of the job; a second call
    measures nothing again.
    """
    out = tmp_path / "out.jsonl"
    arguments = [job, "--data", DATA, "--device", "cpu", "--out", str(out), "--rounds", "4"]
    arguments += ["--contenders", "remanence", "plain"]
    assert published.main(arguments) == 0
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [result["contender"] for result in results] == ["remanence", "plain"]
    for result in results:
        assert len(result["seconds"]) == 4
        assert result["seconds"] == sorted(result["seconds"])
        evaluated = [number for number, _, _ in result["evaluations"]]
        assert evaluated == ([1, 2, 3, 4] if job == "blazefl-cnn" else [2, 4])
        assert np.isfinite(result["evaluations"][-1][1])
    printed = capsys.readouterr()
    whole = JOBS[job].settings["rounds"]
    assert f"| 4 of {whole} |" in printed.out
    assert "  plain: round 4, " in printed.err
    assert published.main(arguments) == 0
    assert "plain: is in " in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.usefixtures("small_jobs")
def test_who_fails_or_hangs_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One contender raises after a round, one plays two rounds and then sleeps, one cannot be
    installed.
    """
    say = "import json, sys, time\ndef say(**line): print(json.dumps(line), flush=True), input()\n"
    ready = "say(versions='v', note='n', seconds=0.5)\n"
    first = "say(round=1, seconds=2.0, loss=1.5, accuracy=0.4)\n"
    second = "say(round=2, seconds=3.0, loss=1.0, accuracy=0.6)\n"
    codes = {
        "broken": say + ready + first + "raise ValueError('no such thing')\n",
        "slow": say + ready + first + second + "time.sleep(600)\n",
    }
    for name, code in codes.items():
        (tmp_path / f"{name}.py").write_text(code)
        contender = Contender(name, str(tmp_path / f"{name}.py"), "made up")
        monkeypatch.setitem(CONTENDERS, name, contender)
    monkeypatch.setattr(published_contenders, "NEWER_PYTHONS", ())
    arguments = ["blazefl-cnn", "--data", DATA, "--device", "cpu", "--minutes", "0.15"]
    arguments += ["--target", "0.5", "--python", sys.executable, "--envs", str(tmp_path / "envs")]
    newer = sys.version_info >= (3, 12)
    names = ["broken", "slow"] + ([] if newer else ["blazefl"])
    assert published.main([*arguments, "--contenders", *names]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells == ["slow", "v", "0.5", "2 of 3", "3.0", "1", "1.000", "60.00%", "3.0"]
    assert "- broken did not run: ValueError: no such thing" in lines
    assert newer or any("BlazeFL needs Python 3.12 or newer" in line for line in lines)
    assert any("2 of 3 rounds, extrapolated: no" in line for line in lines)
    assert sum(line.startswith("Source: ") for line in lines) == 2


def test_the_course_of_a_run() -> None:
    """Rounds end at 10, 12, 15 and 17 s: the first one does not count, the others took 2, 3, 2."""
    course = Course("plain")
    course.hear({"versions": "torch 2", "note": "one thread", "seconds": 1.25})
    for number, (seconds, accuracy) in enumerate(
        [(10.0, None), (12.0, 0.3), (15.0, None), (17.0, 0.7)], 1
    ):
        course.hear({"round": number, "seconds": seconds, "loss": 1.0, "accuracy": accuracy})
    assert (course.before, course.seconds_a_round()) == (1.25, 2.0)
    assert [course.seconds_to(target) for target in (0.2, 0.5, 0.8)] == [12.0, 17.0, None]
    assert course.evaluations == [(2, 1.0, 0.3), (4, 1.0, 0.7)]
    result = course.to_json() | {"published_rounds": 64}
    assert published_table.cells(result, course, 0.5)[3:] == [
        *("4 of 64", "17.0", "2", "1.000", "70.00%", "17.0")
    ]
    # the other 60 rounds of 2 s are two minutes
    assert "the other 60 would take about 2 minutes" in published_table.describe_rest(
        result, course
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["blazefl"], "unknown job 'blazefl'"),
        (["--contenders", "flower"], "unknown contender 'flower'"),
        (["--rounds", "0"], "--rounds 0 trains nothing: give at least 1"),
        (["--minutes", "0"], "--minutes 0 is no time: give more than 0"),
        (["--envs", str(published.TREE / "envs")], "lies in the source tree"),
        (["--data", "cifar10", "--data-dir", "/nowhere"], "/nowhere"),
    ],
)
def test_errors(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(published, "play_rounds", lambda *_: pytest.fail("work began"))
    monkeypatch.setattr(published, "find_interpreter", lambda *_: sys.executable)
    assert published.main([*arguments, "--device", "cpu"]) == InputError.exit_code
    assert sentence in capsys.readouterr().err


def test_contenders_without_names_are_those_of_the_job() -> None:
    names = [one.name for one in choose_contenders([], "pfl")]
    assert names == ["remanence", "plain", "pfl", "pfl-processes"]
    assert [one.name for one in choose_contenders(["plain", "plain"], "pfl")] == ["plain"]


def test_every_contender_has_a_driver_and_pins() -> None:
    for contender in CONTENDERS.values():
        assert (published_contenders.HERE / contender.driver).is_file()
        assert not contender.environment or (PINS / f"{contender.environment}.txt").is_file()


def test_every_job_can_be_built_from_its_settings() -> None:
    from remanence.config import parse_experiment

    for job in JOBS.values():
        config = parse_experiment({}, settings_of(job, None, "cifar10", "", "cpu", "fp32"))
        assert config.rounds == job.settings["rounds"]
        assert job.network in published_networks.NETWORKS
