"""Parts, data and networks outside of the package: by import path and by entry point."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import tomli_w

import remanence as rem
from remanence.cli.main import app
from remanence.config import parse_experiment
from remanence.core import imports
from remanence.core.compose import parse_method
from remanence.core.errors import InputError
from remanence.core.imports import find_import_path, is_import_path
from remanence.experiment.build import build
from remanence.extend import check_method
from remanence.methods import PARTS

METHOD = """
from remanence.extend import Context, Params, Part, Transform, part, pytree

@part
def pull(strength: float = 0.1) -> Part:
    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        return pytree.axpy(
            ctx.hyper["strength"], pytree.sub(params, ctx.start.params), grads
        )
    return Part("pull", hyper={"strength": strength}, transforms=(Transform("correct", correct),))

def number(alpha: float = 0.1):
    return 3

def halves():
    def partition(labels, groups, clients, classes, key):
        import numpy as np
        return np.array_split(np.arange(len(labels)), clients)
    return partition

def arrays(n: int = 60):
    import numpy as np
    y = np.arange(n) % 3
    return np.eye(3, dtype=np.float32)[y] + 0.1, y
"""
SMALL = {"rounds": 1, "clients": 3, "partition": "iid", "data": "synthetic(samples=90)",
         "epochs": 5}  # fmt: skip


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "outside_part.py").write_text(METHOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    imports.installed_parts.cache_clear()
    yield tmp_path
    sys.modules.pop("outside_part", None)
    imports.installed_parts.cache_clear()


@pytest.mark.parametrize(
    ("name", "is_path"),
    [
        ("a.b:c", True),
        ("a:b.c", True),
        ("ray://host:10001", False),
        ("cuda:0", False),
        ("a/b:c", False),
        ("digits", False),
    ],
)
def test_import_paths_are_told_from_other_texts(name: str, is_path: bool) -> None:
    assert is_import_path(name) is is_path
    assert (find_import_path({"x": [{"y": name}]}) is not None) is is_path


def test_a_path_in_quotes_or_within_a_sum_is_found() -> None:
    for text in ("fedavg+a.b:c(x=1)", "f(x='a:b')", "fedavg + a:b"):
        assert find_import_path([text]) == text
    assert find_import_path({"a": 1, "b": "swap(pairs='0 1|2 3')", "c": None}) is None


def test_a_method_is_named_by_its_import_path() -> None:
    method = parse_method("outside_part:pull(0.5)+wsm", PARTS)
    pull = next(p for p in method.parts if p.name == "pull")
    assert pull.hyper == {"strength": 0.5}
    assert check_method("outside_part:pull(strength=0.3)") == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("outside_part:nothing", "outside_part has no nothing"),
        ("not_there:pull", "cannot import not_there"),
        ("outside_part:METHOD", "outside_part has no METHOD"),
        ("outside_part:number", "makes a int: it must be a function that returns a Part"),
        ("outside_part:pull(sstrength=1)", "has no option 'sstrength': did you mean strength?"),
        ("outside_part:pull(strength=fast)", "strength must be a number, not fast"),
    ],
)
def test_a_wrong_path_has_a_sentence(text: str, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_method(text, PARTS)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_partition_and_data_are_named_by_import_path() -> None:
    config = parse_experiment(
        {}, {"data.name": "outside_part:arrays(n=90)", "data.partition": "outside_part:halves",
             "clients.count": 2}
    )  # fmt: skip
    experiment = build(config)
    assert len(experiment.dataset.train) + len(experiment.dataset.test) == 90
    assert experiment.task.info.num_clients == 2


def test_entry_points_of_installed_packages_are_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("pull", "outside_part:pull", imports.GROUP)
    shadow = EntryPoint("fedavg", "outside_part:number", imports.GROUP)
    monkeypatch.setattr(imports, "entry_points", lambda group: [entry, shadow])
    assert [p.name for p in parse_method("pull+wsm", PARTS).parts] == ["pull", "wsm"]
    assert parse_method("fedavg", PARTS).parts[0].name == "fedavg"  # ours is not replaced


def test_a_comparison_takes_paths_and_objects_and_resumes(tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    import outside_part  # type: ignore[import-not-found]

    made = outside_part.pull(strength=0.7)
    done = rem.compare(
        [made, "outside_part:pull(0.5)", "fedavg"], **SMALL, out=tmp_path / "c", quiet=True
    )
    assert [cell["method"] for cell in done.cells] == [
        "pull(strength=0.7)", "outside_part:pull(0.5)", "fedavg",
    ]  # fmt: skip
    assert all(run.finished for run in done.runs)
    numbers = {run.metrics[-1]["train_loss"] for run in done.runs}
    assert len(numbers) == 3  # three methods, not one under three names
    assert done.runs[0].metadata["objects"] == ["method"]
    with pytest.raises(InputError, match=r"outside_part:pull.*allow_code=True"):
        rem.resume(tmp_path / "c", method=[made], quiet=True)
    again = rem.resume(tmp_path / "c", method=[made], quiet=True, allow_code=True)
    assert all(run.finished for run in again.runs)  # type: ignore[union-attr]


def test_the_grid_varies_a_method_named_by_path(tmp_path: Path) -> None:
    done = rem.compare(
        ["outside_part:pull(0.1)"], grid={"pull.strength": [0.2, 0.9]}, **SMALL,
        out=tmp_path / "c", quiet=True,
    )  # fmt: skip
    assert [run.config.method for run in done.runs] == [
        "outside_part:pull(strength=0.2)",
        "outside_part:pull(strength=0.9)",
    ]


def test_the_grid_does_not_vary_an_object(tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    import outside_part

    with pytest.raises(InputError, match="which is given as an object: give it as text"):
        rem.compare([outside_part.pull()], grid={"pull.strength": [1.0]}, **SMALL, quiet=True)


EVIL = "evil_part:load"
SETTINGS = {
    "method": f"fedavg+{EVIL}",
    "data": {"name": EVIL},
    "clients": {"availability": EVIL, "speed": EVIL},
    "round": {"deadline": EVIL},
    "attack": EVIL,
    "local": {"optimizer": EVIL, "schedule": EVIL},
    "peers": {"topology": EVIL},
    "model": EVIL,
    "drift": {"schedule": EVIL, "concepts": EVIL},
}


@pytest.mark.parametrize("key", [*SETTINGS, "partition"])
@pytest.mark.parametrize("command", ["run", "compare", "search", "data show"])
def test_no_key_of_an_experiment_file_imports(
    key: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = tmp_path / "imported"
    (tmp_path / "evil_part.py").write_text(f"open({str(evil)!r}, 'w').close()\n")
    tree = {"data": {"partition": EVIL}} if key == "partition" else {key: SETTINGS[key]}
    (tmp_path / "exp.toml").write_text(tomli_w.dumps(tree))
    words = {"compare": ["--methods", "fedavg"], "search": ["--around", "0.1"]}.get(command, [])
    with pytest.raises(InputError, match=r"imports and runs Python code .*--allow-code"):
        app([*command.split(), "exp.toml", *words], standalone_mode=False)
    assert not evil.exists()


@pytest.mark.parametrize("place", ["run", "plan", "run of a comparison"])
def test_no_run_folder_imports(place: str, tmp_path: Path) -> None:
    evil = tmp_path / "imported"
    (tmp_path / "evil_part.py").write_text(f"open({str(evil)!r}, 'w').close()\n")
    done = rem.compare(["fedavg"], **SMALL, out=tmp_path / "c", quiet=True)
    run = next((tmp_path / "c" / "runs").iterdir())
    folder = run if place == "run" else tmp_path / "c"
    file = {"plan": tmp_path / "c" / "comparison.toml"}.get(place, run / "spec.toml")
    file = file if file.exists() else next(p for p in file.parent.glob("*.toml"))
    text = file.read_text()
    changed = text.replace('"fedavg"', f'"fedavg+{EVIL}"')
    assert changed != text
    file.write_text(changed)
    for command in (["resume", str(folder)], ["evaluate", str(folder)], ["export", str(folder)]):
        with pytest.raises(InputError, match=r"imports and runs Python code .*--allow-code"):
            app(command, standalone_mode=False)
    assert not evil.exists()
    assert done.folder == tmp_path / "c"


def test_a_search_does_not_continue_with_the_code_of_a_folder(tmp_path: Path) -> None:
    """A command that finds a folder runs the code that the user typed, and no other."""
    evil = tmp_path / "imported"
    (tmp_path / "evil_part.py").write_text(f"open({str(evil)!r}, 'w').close()\n")

    def search() -> None:
        rem.search(
            "outside_part:pull", around=0.1, **SMALL, out=tmp_path / "s", quiet=True
        )  # fmt: skip

    search()
    search()  # its own code
    run = sorted((tmp_path / "s" / "runs").iterdir())[-1]
    file = next(path for path in run.glob("*.toml") if "outside_part" in path.read_text())
    file.write_text(file.read_text().replace("outside_part:pull", EVIL))
    with pytest.raises(
        InputError, match=r"Python code \(evil_part:load\) that this search does not"
    ):
        search()
    assert not evil.exists()


@pytest.mark.parametrize("command", ["init", "check", "audit"])
@pytest.mark.parametrize("key", ["method", "model", "data"])
def test_no_experiment_of_a_federation_imports(
    command: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flwr")
    evil = tmp_path / "imported"
    (tmp_path / "evil_part.py").write_text(f"open({str(evil)!r}, 'w').close()\n")
    (tmp_path / "exp.toml").write_text(tomli_w.dumps({key: SETTINGS[key]}))
    (tmp_path / "site.toml").write_text('name = "a"\n[data]\n0 = "share"\n')
    words = {
        "init": ["init", "app", "--config", "exp.toml"],
        "check": ["check", "site.toml", "exp.toml"],
        "audit": ["audit", "site.toml", "exp.toml"],
    }[command]
    try:
        app(["flower", *words], standalone_mode=False)
        said = capsys.readouterr().out
    except InputError as error:
        said = str(error)
    assert "imports and runs Python code" in said
    assert not evil.exists()


def test_an_experiment_file_runs_no_code_in_python_unless_allowed(tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    path = tmp_path / "exp.toml"
    path.write_text('method = "outside_part:pull(0.5)"\nrounds = 1\n[data]\nname = "digits"\n')
    calls = [
        lambda: rem.run(path, quiet=True),
        lambda: rem.compare(["fedavg"], experiment=path, quiet=True),
        lambda: rem.search("fedavg", around=0.1, experiment=path, quiet=True),
        lambda: rem.Experiment.from_toml(path),
    ]
    for call in calls:
        with pytest.raises(InputError, match=r"outside_part:pull\(0\.5\).*allow_code=True"):
            call()
    assert rem.run(path, allow_code=True, quiet=True).finished
