"""An experiment that a coordinator sends names neither a file nor code, and a refusal has no content
of a site's files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import make_site, small_config, write_site
from test_own_data import make_config, write_table

from remanence.config import all_settings, parse_experiment
from remanence.core.errors import InputError
from remanence.core.expressions import options_of
from remanence.data import DATASETS
from remanence.flower import experiment_check
from remanence.flower.client_app import answer_message
from remanence.flower.deployment import (
    build_coordinator,
    check_deployable,
    describe_examples,
    site_config,
)
from remanence.flower.experiment_check import EXPRESSIONS, NamesFileOrCode, check_experiment
from remanence.flower.preflight import check_site
from remanence.flower.site import Site
from remanence.flower.wire import WireMessage

SECRET = "patient 7 has hepatitis"
PATHS = {("data.name", name) for name in ("folder", "hub", "npz", "pfllib", "table")} | {
    ("drift.schedule", "table"),
    ("peers.topology", "edges"),
}
opened: list[str] = []  # paths that Python opened
listening = False


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if listening and event in ("open", "os.listdir", "os.scandir", "import"):
        opened.append(str(arguments[0]))


@pytest.fixture
def opens() -> Iterator[list[str]]:
    """Everything that is opened, listed or imported."""
    global listening
    if _listen not in _installed:
        sys.addaudithook(_listen)
        _installed.append(_listen)
    opened.clear()
    listening = True
    yield opened
    listening = False


_installed: list[Any] = []


def sent(experiment: dict[str, Any], kind: str = "ping") -> WireMessage:
    """A message with an experiment that no coordinator of ours would send."""
    config = small_config("fedavg")
    header = {
        "kind": kind,
        "run": "a-hostile-run",
        "experiment": merged(site_config(config), experiment),
        "examples": describe_examples(build_coordinator(config)[0]),
    }
    return WireMessage(header, {})


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        target = tree.setdefault(section, {}) if section else tree
        target[name] = value
    return tree


def hostile_paths(path: Path) -> list[dict[str, Any]]:
    """Every way to name a file that an experiment has."""
    drift = {"drift.concepts": "swap", "drift.time_steps": 2}
    return [
        {"drift.schedule": f"table(path='{path}')"} | drift,
        {"drift.schedule": f'table( path = "{path}" )'} | drift,
        {"peers.topology": f"edges(path='{path}')", "method": "random"},
        {"peers.topology": f"edges(path='{path}')"},
        {"data.name": f"npz(path='{path}')"},
        {"data.name": f"folder(path='{path.parent}')"},
        {"data.name": str(path)},
        {"data.name": str(path.parent)},
        {"data.name": path.name},
        {"data.dir": str(path.parent)},
        {"device": str(path)},
        {"ray.address": str(path)},
        {"model": f"remanence.testing.toy_task:LayerNormNet(path='{path}')"},
        {"model": f"remanence.testing.toy_task:LayerNormNet(path=['{path}'])"},
    ]


@pytest.mark.parametrize("number", range(len(hostile_paths(Path("x/y")))))
@pytest.mark.parametrize("kind", ["ping", "train", "score", "personal"])
def test_no_key_makes_a_site_open_a_path(
    number: int, kind: str, tmp_path: Path, opens: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the message and whether the site has shares or data of its own. The site runs in the
    folder of the file, so that a name without a folder would be found.
    """
    secret = tmp_path / "home" / "secret"
    secret.parent.mkdir()
    secret.write_text(f"0,0,1\n{SECRET},1,0\n")
    monkeypatch.chdir(secret.parent)
    write_table(tmp_path / "own" / "0.npz", 9)
    message = sent(hostile_paths(secret)[number], kind)
    for site in (
        make_site(tmp_path, "shares", (0, 1)),
        make_site(tmp_path, "own", (0,), data="npz(path='0.npz')"),
    ):
        opens.clear()
        header = site.answer(message).header
        assert header["kind"] == "declined"
        assert header["code"] in ("policy", "setup")
        assert SECRET not in header["reason"]
        assert not [name for name in opens if str(secret.parent) in name or name == secret.name]
        assert not [name for name in opens if name.endswith(".npz")]  # before anything is built


@pytest.mark.parametrize("key", EXPRESSIONS)
def test_no_key_names_code(key: str, tmp_path: Path, opens: list[str]) -> None:
    """Unless the policy of the site allows code."""
    (tmp_path / "evil_part.py").write_text("raise RuntimeError('imported')")
    opens.clear()
    config = merged(site_config(small_config("fedavg")), {key: "evil_part:load(number=3)"})
    if key.startswith("drift."):
        config = merged(config, {"drift.time_steps": 2})
    if key == "drift.concepts":
        config = merged(config, {"drift.schedule": "random(clusters=2)"})
    experiment = parse_experiment(config)
    with pytest.raises(NamesFileOrCode, match="imports and runs Python code"):
        check_experiment(experiment)
    check_experiment(experiment, allow_code=True)
    assert not [name for name in opens if "evil_part" in name]


def test_every_text_of_an_option_is_declared() -> None:
    """An option of the type `str` may be a path. Whoever adds one decides: `PlainText`, or this list."""
    undeclared = {
        (key, name)
        for key, table in EXPRESSIONS.items()
        for name, constructor in table.items()
        for option in options_of(constructor).values()
        if not option.names_nothing
    }
    assert undeclared == PATHS


def test_every_expression_has_its_table() -> None:
    """The keys with a text that is neither an expression nor of a closed list of values."""
    free = {
        key
        for key, setting in all_settings().items()
        if isinstance(setting.default, str)
        and not experiment_check._is_closed(setting.annotation)
        and key not in EXPRESSIONS
    }
    assert free == {"data.dir", "device", "ray.address"}


def test_a_new_option_and_a_new_key_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_file(*, where: str = "", count: int = 1) -> None: ...

    def untyped(*, where: Any = None, more=0) -> None: ...  # type: ignore[no-untyped-def]

    table = {"from_file": from_file, "untyped": untyped}
    monkeypatch.setitem(EXPRESSIONS, "clients.speed", table)
    check_experiment(parse_experiment({}, {"clients.speed": "from_file(count=3)"}))
    for text in (
        "from_file(where=a)",
        "from_file(where=3)",
        "from_file(where=[a])",
        "from_file(count=3, where='')",
        "untyped(where=3)",
        "untyped(more=a)",
        "from_file(unknown=3)",
    ):
        with pytest.raises(NamesFileOrCode, match=r"may name a file"):
            check_experiment(parse_experiment({}, {"clients.speed": text}))
    monkeypatch.delitem(EXPRESSIONS, "clients.speed")
    check_experiment(parse_experiment({}, {"clients.speed": "equal"}))  # the default
    with pytest.raises(NamesFileOrCode, match=r"clients\.speed"):
        check_experiment(parse_experiment({}, {"clients.speed": "lognormal"}))


def test_what_every_experiment_may_name_is_accepted() -> None:
    for changes in (
        {},
        {"data.augment": ["crop", "flip", "cutout"], "round.deadline": "30"},
        {"round.deadline": "quantile(share=0.5)", "attack": "label_flip(to=next, clients='0 3')"},
        {"data.name": "sites(kind='table', shape='3', classes='a b')"},
        {"drift.schedule": "random(clusters=2)", "drift.concepts": "label(groups='0 1|2 3')+swap"},
        {"method": "fedbabu(part=all)+wsm", "model": "mlp(hidden='20 10')"},
        {"clients.availability": "never(clients='1 2')+random(offline=0.1)"},
    ):
        check_experiment(parse_experiment({}, changes))


def test_code_has_no_text_options() -> None:
    """Nothing declares whether they are paths."""
    for options, fine in (("width=8, deep=true, sizes=[1, 2], seed=none", True), ("a=b", False)):
        config = parse_experiment({}, {"model": f"mine.nets:Net({options})"})
        if fine:
            check_experiment(config, allow_code=True)
        else:
            with pytest.raises(NamesFileOrCode, match=r"a of mine\.nets:Net may name a file"):
                check_experiment(config, allow_code=True)


def test_the_coordinator_keeps_its_files_to_itself(tmp_path: Path) -> None:
    """Its data and its graph of clients are its own; a drift table would have to be read by sites,
    so that is an error before any site is asked.
    """
    np.savez(tmp_path / "mine.npz", x=np.zeros((20, 3), np.float32), y=np.arange(20) % 2)
    (tmp_path / "edges.txt").write_text("0 1\n1 2\n")
    config = make_config(
        f"npz(path='{tmp_path}/mine.npz')",
        **{"peers.topology": f"edges(path='{tmp_path}/edges.txt')"},
    )
    received = site_config(check_deployable(config))
    assert str(tmp_path) not in str(received)
    assert received["data"]["name"] == "sites"
    assert set(DATASETS) - {"folder", "hub", "npz", "pfllib", "table"} == {
        name
        for name in DATASETS
        if site_config(parse_experiment({}, {"data.name": name}))["data"]["name"] == name
    }
    with pytest.raises(InputError, match="sites would decline this experiment: drift"):
        check_deployable(
            small_config("fedavg", **{"drift.schedule": f"table(path='{tmp_path}/edges.txt')"})
        )


def damaged_sites(folder: Path) -> dict[str, Site]:
    """Sites whose files have a secret in the text of their error."""
    write_table(folder / "classes" / "0.npz", 9, classes=("a", SECRET))
    (folder / "image").mkdir()
    (folder / "image" / "0.npz").write_text(SECRET)
    table = {"x": np.zeros((4, 3), np.float32), "y": np.arange(4) % 2}
    (folder / "names").mkdir()
    np.savez(folder / "names" / "0.npz", **{SECRET: np.zeros(3)})
    (folder / "types").mkdir()
    np.savez(folder / "types" / "0.npz", **table | {"y": np.array([SECRET] * 4)})
    (folder / "code").mkdir()
    (folder / "code" / "ward_code.py").write_text(
        "from remanence.core.errors import InputError\n"
        f"def load():\n    raise InputError({SECRET!r})\n"
    )
    (folder / "import").mkdir()
    (folder / "import" / "ward_import.py").write_text(f"raise ImportError({SECRET!r})\n")
    files = "classes", "image", "names", "types"
    sources = dict.fromkeys(files, "npz(path='0.npz')") | {
        "code": "ward_code:load",
        "import": "ward_import:load",
        "missing": f"npz(path='{SECRET}')",
        "unknown": f"npz(kind='{SECRET}')",
    }
    return {name: make_site(folder, name, (0,), {}, data=text) for name, text in sources.items()}


@pytest.mark.parametrize(
    "name", ["classes", "image", "names", "types", "code", "import", "missing", "unknown"]
)
def test_a_refusal_has_no_content_of_the_sites_files(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site's log has the full text."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    site = damaged_sites(tmp_path)[name]
    experiment, _ = build_coordinator(make_config())
    header = {"kind": "ping", "run": "a-test-run", "experiment": site_config(experiment.config)}
    examples = {"examples": describe_examples(experiment)}
    response = site.answer(WireMessage(header | examples, {}))
    assert response.header["kind"] == "declined"
    assert "see the site's log" in response.header["reason"]
    for text in (SECRET, str(tmp_path), "npz", "hepatitis"):
        assert text not in str(response.header)
    if name not in ("image", "types"):  # their errors do not quote the file
        assert SECRET in caplog.text
    (tmp_path / "experiment.toml").write_text(
        "[data]\nname = \"sites(kind='table', shape='3', classes='a b')\"\n[clients]\ncount = 3\n"
    )
    shown = check_site(tmp_path / name / "site.toml", tmp_path / "experiment.toml")
    assert "see the site's log" not in shown[-1]  # the site's own users read all of it
    assert shown[-1].startswith("declines")


def test_a_mistake_in_site_toml_is_not_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(
        "flwr", reason="the package flwr is not installed (the extra remanence[flower])"
    )
    from remanence.flower.transport import to_record

    path = write_site(tmp_path, "site", (0,))
    path.write_text(path.read_text() + f'[patients]\n"{SECRET}" = 1\n')
    response = answer_message(to_record(sent({})), {"site": str(path)})
    assert response.header["code"] == "setup"
    assert SECRET not in str(response.header)
    assert str(tmp_path) not in str(response.header)
    assert "patients" in caplog.text


def test_a_setting_out_of_range_is_explained_in_full(tmp_path: Path) -> None:
    """It follows from the experiment alone, which the coordinator has."""
    site = make_site(tmp_path, "shares", (0, 1))
    for changes, reason in (
        ({"local.batch_size": 0}, "local.batch_size must be at least 1, not 0"),
        ({"method": "fedprox(mu=-1)"}, "mu"),
        ({"method": "fedporx"}, "did you mean fedprox"),
    ):
        header = site.answer(sent(changes)).header
        assert header["code"] == "setup"
        assert reason in header["reason"]
