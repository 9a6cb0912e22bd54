from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remanence import config
from remanence.config import (
    ENGINES,
    FLAGS,
    LARGEST_FILE,
    Experiment,
    all_keys,
    all_settings,
    parse_experiment,
)
from remanence.core.errors import InputError
from remanence.core.expressions import Call

NAN, INF = float("nan"), float("inf")


def test_nothing_given_is_the_default_experiment() -> None:
    assert parse_experiment() == Experiment()
    assert parse_experiment({}, {}) == Experiment()


def test_sections_and_dotted_changes_meet() -> None:
    base = {"method": "wsm", "local": {"batch_size": 8, "epochs": 3}}
    experiment = parse_experiment(base, {"local.batch_size": 16, "data.partition": "iid"})
    assert (
        experiment.method,
        experiment.local.batch_size,
        experiment.local.epochs,
        experiment.data.partition,
    ) == (
        "wsm",
        16,
        3,
        "iid",
    )
    assert base == {"method": "wsm", "local": {"batch_size": 8, "epochs": 3}}


def test_an_experiment_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_experiment().rounds = 3
    with pytest.raises(ValueError, match="frozen"):
        parse_experiment().local.batch_size = 3


@pytest.mark.parametrize(
    ("base", "complaint"),
    [
        ({"rouds": 3}, "unknown key 'rouds': did you mean rounds?"),
        ({"local": {"epoch": 3}}, "unknown key 'local.epoch': did you mean local.epochs"),
        ({"rounds": 0}, "rounds must be at least 1, not 0"),
        ({"rounds": 2.0}, "rounds must be a whole number, not 2.0"),
        ({"rounds": True}, "rounds must be a whole number, not True"),
        ({"rounds": "3"}, "rounds must be a whole number, not '3'"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
        ({"method": 3}, "method must be a text, not 3"),
        ({"deterministic": "yes"}, "deterministic must be true or false, not 'yes'"),
        (
            {"engine": "lop"},
            "engine must be one of auto, sequential, vectorized, processes, ray or flower, not 'lop'",
        ),
        (
            {"local": {"buffers": "mine"}},
            "local.buffers must be one of average, local or frozen, not 'mine'",
        ),
        ({"data": {"validation": 1.0}}, "data.validation must be below 1, not 1.0"),
        ({"data": {"validation": -0.1}}, "data.validation must be at least 0, not -0.1"),
        ({"data": {"validation": NAN}}, "data.validation must be at least 0, not nan"),
        ({"data": {"validation": "some"}}, "data.validation must be a number, not 'some'"),
        (
            {"data": {"augment": "crop"}},
            'data.augment must be a list such as ["crop", "flip"], not \'crop\'',
        ),
        (
            {"data": {"augment": ["crop", 3]}},
            "data.augment.1 must be one of crop, flip or cutout, not 3",
        ),
        ({"local": {"lr": 0}}, "local.lr must be above 0, not 0"),
        ({"local": {"lr": NAN}}, "local.lr must be above 0, not nan"),
        ({"clients": {"count": 2.5}}, "clients.count must be a whole number, not 2.5"),
        ({"clients": {"sample": 0}}, "clients.sample must be above 0, not 0"),
        ({"clients": {"sample": NAN}}, "clients.sample must be above 0, not nan"),
        (
            {"clients": {"sample": 1.5}},
            "clients.sample=1.5 is neither a whole number of clients nor a fraction of at most 1",
        ),
        (
            {"clients": {"sample": 11, "count": 10}},
            "clients.sample=11 is more than clients.count=10",
        ),
        (
            {"local": {"epochs": 2, "steps": 3}},
            "local.epochs=2 and local.steps=3: exactly one of them must be above 0",
        ),
        (
            {"local": {"epochs": 0}},
            "local.epochs=0 and local.steps=0: exactly one of them must be above 0",
        ),
        ({"round": {"weight_cap": NAN}}, "round.weight_cap must be above 0, not nan"),
        ({"data": 3}, "data must be a section such as [data], not 3"),
    ],
)
def test_errors_are_one_sentence(base: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_experiment(base)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("section", ["data", "clients", "local", "round", "record", "checkpoint"])
def test_a_value_where_a_section_belongs_is_rejected(section: str) -> None:
    with pytest.raises(
        InputError, match=rf"{section} must be a section such as \[{section}\], not 3"
    ):
        parse_experiment({section: 3})
    key = next(key for key in all_keys() if key.startswith(f"{section}."))
    with pytest.raises(InputError, match=rf"{section} must be a section such as \[{section}\]"):
        parse_experiment({section: 3}, {key: 1})


json_like = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=3)),
    lambda below: st.one_of(
        st.lists(below, max_size=2), st.dictionaries(st.text(max_size=3), below, max_size=2)
    ),
    max_leaves=4,
)


@given(st.sampled_from(sorted(all_keys())), json_like)
def test_any_value_of_any_key_is_accepted_or_rejected(key: str, value: Any) -> None:
    try:
        experiment = parse_experiment({}, {key: value})
    except InputError:
        return
    assert isinstance(experiment, Experiment)
    dumped = experiment.model_dump()
    for name in key.split("."):
        dumped = dumped[name]
    assert dumped == value or (isinstance(value, list) and dumped == tuple(value))


def test_steps_take_the_place_of_epochs_that_were_not_given() -> None:
    experiment = parse_experiment({}, {"local.steps": 7})
    assert (experiment.local.steps, experiment.local.epochs) == (7, 0)
    assert parse_experiment({"local": {"steps": 7}}).local.epochs == 0
    with pytest.raises(InputError, match="exactly one"):
        parse_experiment({"local": {"epochs": 1}}, {"local.steps": 7})


def test_unknown_dotted_keys_are_rejected_with_the_nearest() -> None:
    with pytest.raises(
        InputError, match=r"unknown key 'local.bacth': did you mean local.batch_size"
    ):
        parse_experiment({}, {"local.bacth": 3})
    with pytest.raises(InputError, match="unknown key 'local'"):
        parse_experiment({}, {"local": 3})


@pytest.mark.parametrize("sample", [1, 10, 0.1, 1.0, None])
def test_samples_of_clients_that_make_sense(sample: float | None) -> None:
    assert parse_experiment({"clients": {"count": 10, "sample": sample}}).clients.sample == sample


def test_every_flag_reaches_a_key() -> None:
    assert set(FLAGS.values()) <= set(all_keys())
    assert len(set(FLAGS.values())) == len(FLAGS)
    assert config.changes_from_flags({"lr": 0.5, "clients": None, "epochs": 0}) == {
        "local.lr": 0.5,
        "local.epochs": 0,
    }
    assert all(setting.description for setting in all_settings().values())
    with pytest.raises(InputError, match="unknown option 'batch_sise': did you mean batch_size"):
        config.changes_from_flags({"batch_sise": 3})


def test_all_keys_are_dotted_and_have_their_defaults() -> None:
    keys = all_keys()
    assert keys["local.batch_size"] == 32
    assert keys["rounds"] == 20
    assert "local" not in keys
    assert ENGINES == ("auto", "sequential", "vectorized", "processes", "ray", "flower")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16", 16),
        ("1e-4", 1e-4),
        ("true", True),
        ("digits", "digits"),
        ('"quoted text"', "quoted text"),
        ("dirichlet(alpha=0.1)", "dirichlet(alpha=0.1)"),
        ('["crop", "flip"]', ["crop", "flip"]),
        ("", ""),
        ("3 clients", "3 clients"),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_values_are_toml_or_words(text: str, value: Any) -> None:
    assert config.parse_value(text) == value
    assert type(config.parse_value(text)) is type(value)


def test_assignments_by_hand() -> None:
    changes = config.parse_assignments(["local.batch_size=16", " data.name = npz(path=a.npz) "])
    assert changes == {"local.batch_size": 16, "data.name": "npz(path=a.npz)"}
    for text in ("local.batch_size", "=3", "  =3"):
        with pytest.raises(InputError, match="has no value: write --set key=value"):
            config.parse_assignments([text])


EXPERIMENTS = [
    {},
    {"data": {"augment": ["crop", "flip"], "name": 'npz(path="a \\"b\\".npz")'}},
    {"clients": {"count": 100, "sample": 0.1}, "local": {"steps": 5, "lr": 1e-5}},
    {"round": {"weight_cap": INF}, "engine": "vectorized", "precision": "fp64"},
]


@pytest.mark.parametrize("base", EXPERIMENTS)
def test_a_written_experiment_reads_back_the_same(base: dict[str, Any]) -> None:
    experiment = parse_experiment(base)
    tree = tomllib.loads(config.write_toml(experiment, {"about": {"torch": "2", "nothing": None}}))
    assert tree.pop("about") == {"torch": "2"}
    assert parse_experiment(tree) == experiment


def test_the_optimizer_takes_the_rate_given_beside_it() -> None:
    local = {"optimizer": "sgd(lr=0.1, momentum=0.9)"}
    assert config.optimizer_call(parse_experiment({"local": local})) == Call(
        "sgd", {"lr": 0.1, "momentum": 0.9}
    )
    assert config.optimizer_call(parse_experiment({"local": local | {"lr": 0.5}})) == Call(
        "sgd", {"lr": 0.5, "momentum": 0.9}
    )
    assert config.optimizer_call(
        parse_experiment({"local": {"optimizer": "adam", "lr": 0.5}})
    ) == Call("adam", {"lr": 0.5})


def test_files_are_read_as_toml(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('method = "wsm"\n[local]\nlr = 1e-4\n', encoding="utf-8")
    assert config.read_file(path) == {"method": "wsm", "local": {"lr": 1e-4}}


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    with pytest.raises(InputError, match=r"no experiment file at .*experiment\.toml"):
        config.read_file(path)
    with pytest.raises(InputError, match=r"is a folder, not an experiment file.* remanence resume"):
        config.read_file(tmp_path)
    for content in (b"method = ", b"\xff\xfe", b"a = 1\na = 2", b"a = " + b"[" * 50_000):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"experiment\.toml is not valid TOML"):
            config.read_file(path)
    path.write_bytes(b"#" * (LARGEST_FILE + 1))
    with pytest.raises(InputError, match="larger than 1000000 bytes"):
        config.read_file(path)


def test_parsing_an_experiment_does_not_import_torch() -> None:
    """`remanence --help` and errors in an experiment do not wait for torch."""
    code = (
        "import sys, remanence.config; remanence.config.parse_experiment(); sys.exit('torch' in"
        " sys.modules)"
    )
    source = Path(config.__file__).parents[2]
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(source)}, check=False
        ).returncode
        == 0
    )


def test_a_file_that_names_code_is_rejected_unless_that_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "exp.toml"
    path.write_text('model = "package.module:Net(width=3)"\n')
    with pytest.raises(
        InputError,
        match=r"imports and runs Python code \(package.module:Net\(width=3\)\): review that"
        r" code, then add --allow-code",
    ):
        config.read_file(path, allow_code=False)
    assert config.read_file(path)["model"] == "package.module:Net(width=3)"
    path.write_text('model = "lenet"\n')
    assert config.read_file(path, allow_code=False) == {"model": "lenet"}
