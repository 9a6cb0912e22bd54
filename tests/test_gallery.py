"""Every example runs without warnings and draws a picture, as the gallery of the site needs it."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest
from site_pages.gallery_order import ORDER

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_the_gallery_has_a_place_for_each() -> None:
    assert sorted(ORDER) == [path.name for path in EXAMPLES]
    assert len(EXAMPLES) >= 7


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_begins_with_a_title(path: Path) -> None:
    title, line, *rest = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")
    assert line == "=" * len(title)
    assert any(rest)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_and_draws(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the extra remanence-fl[figures] is not installed")
    import matplotlib.pyplot as plt

    shown: list[list[bool]] = []

    def show() -> None:
        drawn = [plt.figure(number) for number in plt.get_fignums()]
        shown.append([axes.has_data() for figure in drawn for axes in figure.axes])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", show)
    with plt.rc_context({"backend": "agg"}):
        runpy.run_path(str(path), run_name="__main__")
        plt.close("all")
    assert shown
    assert all(found and all(found) for found in shown)
    assert list(tmp_path.iterdir()) == []  # results go to temporary folders
