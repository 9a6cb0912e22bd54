"""Everything on docs/data.md runs, from top to bottom, in a folder with the files that it names."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

import remanence as rem
from remanence.cli.main import app
from remanence.config import parse_experiment
from remanence.data import DATASETS
from remanence.data.naming import parse_data
from remanence.experiment.data_setup import load_data

PAGE = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"```python\n(?P<python>.*?)```|^    (?P<command>remanence [^\n]*)$", re.DOTALL | re.M
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    rows = "".join(
        f"{20 + i},{i % 7},{i % 3},{'sick' if i % 2 else 'well'}\n" for i in range(60)
    )  # fmt: skip
    Path("patients.csv").write_text(f"age,score,ward,outcome\n{rows}")
    x, y = np.zeros((30, 8, 8), np.uint8), np.arange(30) % 3
    np.savez("scans.npz", x=x, y=y)
    np.savez("bloodmnist.npz", train_images=x, train_labels=y[:, None], test_images=x, test_labels=y[:, None])  # fmt: skip
    for part in ("train", "test"):
        Path("pfllib/mnist", part).mkdir(parents=True)
        for client in "01":
            np.savez(Path("pfllib/mnist", part, client), data={"x": x, "y": y})
    image = pytest.importorskip("PIL.Image")
    for place in ("photos/cat", "photos/dog", "hospitals/a/cat", "hospitals/a/dog", "hospitals/b/cat"):  # fmt: skip
        Path(place).mkdir(parents=True)
        for number in range(3):
            image.new("L", (4, 4), number).save(Path(place, f"{number}.png"))
    return tmp_path


def test_the_page_runs_from_top_to_bottom(folder: Path) -> None:
    names: dict[str, object] = {"__name__": "page"}
    blocks = list(BLOCK.finditer(PAGE))
    commands = [found["command"] for found in blocks if found["command"]]
    assert len(blocks) - len(commands) >= 4
    assert len(commands) >= 6
    for found in blocks:
        if found["command"]:
            app([*shlex.split(found["command"])[1:]], standalone_mode=False)
            continue
        code = found["python"]
        if code.startswith("# my_methods.py"):
            Path("my_methods.py").write_text(code)
        else:
            # the class of the page is defined without postponed annotations, as a reader would
            exec(compile(code, "docs/data.md", "exec", dont_inherit=True), names)
    assert rem.load(folder / "run-of-wards").metadata["client_names"] == ["ward-7", "ward-8"]
    sys.modules.pop("my_methods", None)


def test_every_form_of_the_table_is_read() -> None:
    rows = [line.split("|") for line in PAGE.split("## Sites")[0].splitlines() if "| `" in line]
    texts = {row[1].strip(): row[2].strip().strip("`") for row in rows if len(row) == 5}
    assert len(texts) == 9
    read = {
        what: load_data(parse_experiment({}, {"data.name": text}))
        for what, text in texts.items()
        if what not in ("a Parquet table", "a dataset of Hugging Face", "a function")
    }
    assert len(read) == 6
    assert read["a table"].group_names == ("0", "1", "2")
    assert read["images by site and class"].group_names == ("a", "b")
    assert read["a folder of PFLlib"].group_names == ("0", "1")
    assert parse_data(texts["a Parquet table"], DATASETS).name == "table"
    assert parse_data(texts["a function"], DATASETS).name == "my_package.my_data:load"
