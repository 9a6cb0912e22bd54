"""`Experiment`, and the settings as keyword arguments: types, signatures and docstrings."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
from settings_arguments import FILE, render

import remanence as rem
from remanence import config
from remanence.config import FLAGS, Experiment, all_settings, parse_experiment
from remanence.config.keys import sections
from remanence.config.keywords import argument_names


def test_the_types_are_those_of_the_settings() -> None:
    assert FILE.read_text(encoding="utf-8") == render(), "run: python tests/settings_arguments.py"


def test_every_setting_is_an_argument() -> None:
    top = {key for key in all_settings() if "." not in key}
    assert set(argument_names()) == {*FLAGS, *top, *sections()}
    assert set(config.Settings.__annotations__) == set(argument_names())


@pytest.mark.parametrize(
    ("function", "left_out"),
    [
        (rem.Experiment, set()),
        (rem.run, set()),
        (rem.compare, {"method", "seed"}),
        (rem.search, {"seed"}),
    ],
)
def test_signatures_and_docstrings_name_the_settings(function: Any, left_out: set[str]) -> None:
    Experiment()  # whatever pydantic prepares when the first one is made
    names = set(argument_names()) - left_out
    assert names <= set(inspect.signature(function).parameters)
    lines = (inspect.getdoc(function) or "").splitlines()
    heads = [line.partition(":")[0] for line in lines if line.startswith("    ")]
    documented = {name.strip() for head in heads for name in head.split(",")}
    assert names <= documented


def test_flags_and_sections_make_one_experiment() -> None:
    experiment = Experiment(
        method="fedavg+wsm", data={"name": "synthetic"}, partition="iid", clients=4, lr=0.5
    )
    assert experiment == parse_experiment(
        {
            "method": "fedavg+wsm",
            "data": {"name": "synthetic", "partition": "iid"},
            "clients": {"count": 4},
            "local": {"lr": 0.5},
        }
    )
    assert experiment["lr"] == experiment["local.lr"] == 0.5
    assert experiment["data"] == "synthetic"
    assert Experiment(local=config.parse_experiment({}, {"local.lr": 0.5}).local).local.lr == 0.5


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"roundz": 3}, "unknown option 'roundz': did you mean round or rounds"),
        ({"round": 3}, "round is a section .*did you mean rounds"),
        ({"data": {"nam": "x"}}, "unknown key 'data.nam': did you mean data.name"),
        ({"clients": 0}, "clients.count must be at least 1, not 0"),
        ({"steps": 3, "epochs": 4}, "exactly one of them"),
        ({"sample": 20, "clients": 10}, "clients.sample=20 is more than"),
    ],
)
def test_a_wrong_experiment_is_refused_when_it_is_made(
    settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(rem.InputError, match=complaint):
        Experiment(**settings)


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(rem.InputError, match="unknown key 'batch_sise': did you mean batch_size"):
        _ = Experiment()["batch_sise"]


def test_replacing_keeps_what_was_given() -> None:
    first = Experiment(clients=4, epochs=3)
    second = first.replace(rounds=7, clients={"sample": 2})
    assert (second.rounds, second.clients.count, second.clients.sample) == (7, 4, 2)
    assert second.local.epochs == 3
    assert first.rounds == Experiment().rounds
    assert Experiment().replace(steps=5).local.epochs == 0


@pytest.mark.parametrize("defaults", [False, True])
def test_a_written_experiment_is_read_back(defaults: bool, tmp_path: Path) -> None:
    experiment = Experiment(method="wsm", steps=3, lr=0.1, drift="random(clusters=2)", time_steps=2)
    text = experiment.to_toml(defaults)
    assert ("device" in tomllib.loads(text)) is defaults
    (tmp_path / "exp.toml").write_text(text)
    assert Experiment.from_toml(tmp_path / "exp.toml") == experiment


def test_a_run_takes_an_experiment_and_changes() -> None:
    experiment = Experiment(clients=4, rounds=3, engine="sequential", model="mlp(hidden=4)")
    run = rem.run(experiment, rounds=1, record={"confusion": True}, quiet=True)
    assert run.config.rounds == 1
    assert run.config.clients.count == 4
    assert run.config.record.confusion
