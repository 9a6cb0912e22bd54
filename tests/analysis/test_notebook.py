"""docs/python.md as a notebook, executed by a Jupyter kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import remanence as rem

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
MISTAKE = 'rem.run(method="fedavgg")'


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The executed cells of the page, and one with a mistake."""
    client = pytest.importorskip("nbclient", reason="the extra remanence-fl[dev] is not installed")
    pytest.importorskip("ipykernel", reason="the extra remanence-fl[dev] is not installed")
    from nbformat.v4 import new_code_cell, new_notebook

    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    notebook = new_notebook(cells=[new_code_cell(text) for text in [*blocks, MISTAKE]])
    notebook.cells[-1].metadata["tags"] = ["raises-exception"]
    folder = tmp_path_factory.mktemp("notebook")
    client.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": folder}}).execute()
    return list(notebook.cells)


def outputs_of(cells: list[Any], source: str) -> list[Any]:
    return next(list(cell.outputs) for cell in cells if source in cell.source)


def shown(cells: list[Any], source: str, kind: str) -> list[str]:
    found = (out.get("data", {}).get(kind) for out in outputs_of(cells, source))
    return [text for text in found if text]


def test_a_run_shows_one_bar_and_a_table(cells: list[Any]) -> None:
    outputs = outputs_of(cells, "run = rem.run(")
    assert not [out for out in outputs if out.output_type == "stream"]
    bar, table = shown(cells, "run = rem.run(", "text/html")
    assert '<progress value="5" max="5">' in bar
    assert "fedavg+wsm: round 5/5, accuracy" in bar
    assert "<th>Test accuracy, %</th>" in re.sub(" title=[^>]*", "", table)


def test_comparisons_pictures_and_diagnoses(cells: list[Any]) -> None:
    (table,) = shown(cells, "comparison = rem.compare", "text/html")
    assert "fedprox(mu=0.1)+wsm" in table
    for plot in ("run.plot()", "comparison.plot()"):
        assert shown(cells, f"ax = {plot}", "image/png")
    (text,) = shown(cells, "rem.diagnose(run)", "text/plain")
    assert text.startswith("fedavg+wsm\n\n  forgetting: After round 5")
    assert shown(cells, 'rem.evaluate(run)["accuracy"]', "text/plain") == ["True"]


def test_a_mistake_is_a_sentence(cells: list[Any]) -> None:
    (error,) = outputs_of(cells, MISTAKE)
    (sentence,) = error.traceback
    assert sentence.startswith("InputError: unknown method 'fedavgg': did you mean fedavg or ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rem.run(cli", "clients="),
        ("rem.compare(['fedavg'], part", "partition="),
        ("rem.Experiment(batch", "batch_size="),
        ("rem.methods.sca", ".scaffold"),
    ],
)
def test_a_notebook_completes_settings_and_methods(text: str, expected: str) -> None:
    completer = pytest.importorskip(
        "IPython.core.completer", reason="the extra remanence-fl[dev] is not installed"
    )
    names = completer.IPCompleter(namespace={"rem": rem}, use_jedi=False)
    with completer.provisionalcompleter():
        assert expected in {found.text for found in names.completions(text, len(text))}
