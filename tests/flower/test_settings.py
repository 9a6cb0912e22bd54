"""site.toml and an app's settings: every mistake raises one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import small_config

from remanence.core.errors import InputError
from remanence.engines.table import make_engine
from remanence.flower.deployment import check_deployable, parse_real_deadline
from remanence.flower.server_app import DEFAULTS, parse_changes, read_settings
from remanence.flower.settings import read_site
from remanence.testing.toy_task import small_experiment

GOOD = 'name = "ward"\n[data]\n10 = "npz(path=\'a.npz\')"\n2 = "folder(path=\'b\')"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "site.toml"
    path.write_text(text)
    return path


def test_clients_are_in_order_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    site = read_site(write(tmp_path, GOOD))
    assert list(site.clients) == [2, 10]
    assert site.state == tmp_path.resolve() / "state"
    assert site.make_state().stat().st_mode & 0o777 == 0o700
    assert not site.settings.policy.label_counts
    assert not site.settings.policy.code


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "name cannot be used"),
        ('name = "w"', "data cannot be used"),
        ('name = "w"\n[data]\n', "data cannot be used"),
        ('name = "w"\n[data]\nx = "share"', "data.x does not name a client"),
        ('name = "w"\n[data]\n-1 = "share"', "data.-1 does not name a client"),
        ('name = "w"\n[data]\n01 = "share"', "data.01 does not name a client"),
        ('name = "w"\n[data]\n0 = "share"\n1 = "digits"', "use one or the other"),
        (
            GOOD + "[policy]\nsupress = 3",
            "unknown key 'policy.supress': did you mean policy.suppress",
        ),
        (GOOD + "[policy]\nsuppress = -3", "policy.suppress cannot be used"),
        (GOOD + "[policy]\nepsilon = -1.0", "policy.epsilon cannot be used"),
        (GOOD + "[policy]\nepsilon = inf", "policy.epsilon cannot be used"),
        (GOOD + "[policy]\nbudget = -1", "policy.budget cannot be used"),
        (
            GOOD + "[policy]\nepsilon = 0.5\nbudget = 0",
            "policy.epsilon = 0.5 is above policy.budget",
        ),
        (GOOD + "[policy]\nmin_steps = 0", "policy.min_steps cannot be used"),
        (GOOD + '[compute]\nengine = "ray"', "compute.engine cannot be used"),
        ("name = ", "is not valid TOML"),
    ],
)
def test_a_wrong_site_file_raises_an_error(text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=error):
        read_site(write(tmp_path, text))


def test_a_missing_site_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="start the SuperNode with --node-config"):
        read_site(tmp_path / "nothing.toml")
    with pytest.raises(InputError, match="cannot read"):
        read_site(tmp_path)


def test_settings_of_an_app() -> None:
    assert read_settings({}) == DEFAULTS
    assert read_settings({"reply_timeout": 5})["reply_timeout"] == 5
    with pytest.raises(
        InputError, match=r"unknown setting 'reply_timout' in .*: did you mean reply_timeout"
    ):
        read_settings({"reply_timout": 5})
    for wrong in (0, -1.0, True, "long", float("nan")):
        with pytest.raises(
            InputError, match=r"ping_after in .* must be a number of seconds above 0"
        ):
            read_settings({"ping_after": wrong})
    assert parse_changes("") == {}
    with pytest.raises(InputError, match="has no value"):
        parse_changes("rounds")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attack", "sign_flip(fraction=0.1)"),
        ("clients.availability", "random(offline=0.1)"),
        ("clients.speed", "lognormal"),
        ("round.late", "use"),
        ("record.examples", True),
    ],
)
def test_what_only_a_simulation_can_do_is_rejected(key: str, value: object) -> None:
    config = small_experiment(
        changes={key: value, "engine": "flower"} if key != "attack" else {"engine": "flower"}
    ).config
    if key == "attack":
        config = config.model_copy(update={"attack": value})
    with pytest.raises(InputError, match=f"{key}=.* cannot be used with the engine flower"):
        check_deployable(config)


def test_what_personal_parts_cannot_do_is_rejected() -> None:
    for method, peers, changes in (
        ("fedbn", "record.local", {"record.local": True}),
        ("random+fedbn", "random", {}),
    ):
        with pytest.raises(
            InputError,
            match=rf"{peers} needs whole models of clients, and with fedbn a part of them never"
            r" leaves",
        ):
            check_deployable(small_config(method, **changes))
    with pytest.raises(InputError, match="engine='sequential' in a Flower app"):
        check_deployable(small_experiment().config)


def test_outside_an_app_the_engine_explains_how_to_start() -> None:
    with pytest.raises(InputError, match="engine flower works inside a Flower app"):
        make_engine("flower", small_experiment().task)


def test_deadlines_are_real_seconds_or_a_share() -> None:
    assert parse_real_deadline("none").seconds == float("inf")
    assert parse_real_deadline("after(seconds=7)").seconds == 7
    assert parse_real_deadline("quantile").share == 0.8
