"""Figures of the papers from their data: the right numbers in the right panels, and a picture
that can be opened.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from remanence.recipes.figure_data import FIGURE, KINDS, PICTURE
from remanence.recipes.figure_plots import PLOTS, draw_figure
from remanence.recipes.reproduce import reproduce
from remanence.recipes.results_pages import write_results

PNG = b"\x89PNG\r\n"


def draw(kind: str, *lines: str) -> Any:
    text = "\n".join([",".join(KINDS[kind][1]), *lines])
    return PLOTS[kind](list(csv.DictReader(io.StringIO(text))))


def titles(figure: Any) -> list[str]:
    return [
        note.text.removeprefix("<b>").removesuffix("</b>") for note in figure.layout.annotations
    ]


def test_every_kind_of_figure_has_a_drawing() -> None:
    assert set(PLOTS) == set(KINDS)


def test_curves_stand_in_the_panel_of_their_setting() -> None:
    """A method has one color in all panels, also where it is missing from some; deviations
    become a band.
    """
    figure = draw(
        "curves", "A,easy,1,0.5,", "A,easy,2,0.75,", "B,hard,1,0.25,0.125", "A,hard,1,0.375,"
    )
    lines = {(trace.name, trace.xaxis): trace for trace in figure.data if trace.name}
    assert titles(figure) == ["easy", "hard"]
    assert list(lines["A", "x"].y) == [0.5, 0.75]
    assert list(lines["B", "x2"].y) == [0.25]
    assert lines["A", "x"].line.color == lines["A", "x2"].line.color != lines["B", "x2"].line.color
    (band,) = [trace for trace in figure.data if not trace.name]
    assert sorted(band.y) == [0.125, 0.375]


def test_losses_stand_in_panels_of_their_own() -> None:
    """Records without a loss, as those written before losses were drawn, have accuracies alone."""
    lines = ["A,easy,1,0.5,,1.5,", "A,easy,2,0.75,,1.25,0.25", "B,hard,1,0.25,,,"]
    figure = draw("curves_with_loss", *lines)
    assert titles(figure) == ["easy", "easy", "hard"]
    drawn = {(trace.name, trace.yaxis): list(trace.y) for trace in figure.data}
    assert drawn == {
        ("A", "y"): [0.5, 0.75],
        (None, "y2"): [1.5, 1.5, 1.0, 1.5],
        ("A", "y2"): [1.5, 1.25],
        ("B", "y3"): [0.25],
    }
    names = [getattr(figure.layout, f"yaxis{number}").title.text for number in ("", 2, 3)]
    assert names == ["test accuracy", "test loss", "test accuracy"]
    records = [{"row": "A", "column": "easy", "round": "1", "accuracy": "0.5", "deviation": ""}]
    assert titles(PLOTS["curves_with_loss"](records)) == ["easy"]


def test_clusters_of_clients_over_time() -> None:
    figure = draw("drift", "r,moves,0,0,0", "r,moves,0,1,0", "r,moves,1,0,0", "r,moves,1,1,2")
    assert titles(figure) == ["moves"]
    assert [list(line) for line in figure.data[0].z] == [[0, 0], [0, 2]]
    assert list(figure.data[0].x) == [0, 1]
    assert figure.layout.coloraxis.cmax == 2.5


def test_distributions_of_both_kinds() -> None:
    setting = '"CIFAR-10, beta 0.1, global"'
    figure = draw(
        "cdf",
        f"A,{setting},global,0.1,0.5",
        f"A,{setting},global,0.3,1.0",
        f"A,{setting},local,0.2,1.0",
    )
    assert titles(figure) == [
        "CIFAR-10, beta 0.1: global forgetting",
        "CIFAR-10, beta 0.1: local forgetting",
    ]
    assert [(list(trace.x), list(trace.y)) for trace in figure.data] == [
        ([0.1, 0.3], [0.5, 1.0]),
        ([0.2], [1.0]),
    ]


def test_a_map_of_forgetting_ends_with_the_mean_over_the_others() -> None:
    """Model 3 forgot .2 of its own data, which does not count, and .4 and .6 of the others': .5
    on average.
    """
    rows = [
        "A,c,7,3,3,0.5,0.3,0.2",
        "A,c,7,3,4,0.5,0.1,0.4",
        "A,c,7,3,5,0.6,0.0,0.6",
        "A,c,7,4,3,0.5,0.6,-0.1",
    ]
    forgotten, after, before = draw("heatmap", *rows).data
    assert list(forgotten.x) == ["3", "4", "5", "mean"]
    assert [list(line) for line in forgotten.z] == [[0.2, 0.4, 0.6, 0.5], [-0.1, None, None, -0.1]]
    assert [list(line) for line in after.z] == [[0.3, 0.1, 0.0], [0.6, None, None]]
    assert [list(line) for line in before.z] == [[0.5, 0.5, 0.6], [0.5, None, None]]


def test_one_round_in_its_order() -> None:
    rows = [
        "A,c,9,before,global,cat,0.5",
        "A,c,9,local,client 2,cat,0.25",
        "A,c,9,merged,global,cat,0.375",
        "A,c,9,refined,global,cat,",
    ]
    figure = draw("one_round", *rows)
    assert titles(figure) == ["A, round 9"]
    assert list(figure.data[0].x) == ["global before", "client 2", "global merged", "global after"]
    assert [list(line) for line in figure.data[0].z] == [[0.5, 0.25, 0.375, None]]


def test_classes_over_rounds_and_a_partition() -> None:
    figure = draw("classes", "A,c,5,cat,0.5", "A,c,5,dog,0.25", "A,c,10,cat,0.75", "A,c,10,dog,0")
    assert (list(figure.data[0].x), list(figure.data[0].y)) == ([5, 10], ["cat", "dog"])
    assert [list(line) for line in figure.data[0].z] == [[0.5, 0.75], [0.25, 0]]
    figure = draw("partition", "r,few,0,cat,3", "r,few,1,cat,0", "r,many,0,cat,9")
    assert titles(figure) == ["few", "many"]
    assert [list(line) for line in figure.data[0].z] == [[3, 0]]
    assert figure.layout.coloraxis.cmax == 9


def test_nothing_recorded_gives_no_picture() -> None:
    assert draw_figure("curves", ",".join(KINDS["curves"][1]) + "\n", "empty") is None


def test_a_reproduced_figure_is_drawn_and_shown_on_its_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    reproduce("wsm/figure-2.2", tmp_path / "f", scale="smoke")
    assert (tmp_path / "f" / PICTURE).read_bytes().startswith(PNG)
    write_results([tmp_path / "f"], tmp_path / "docs")
    (kept,) = (tmp_path / "docs" / "outcomes").iterdir()
    assert f"](outcomes/{kept.name}/{PICTURE})" in (tmp_path / "docs" / "wsm.md").read_text()
    assert (kept / PICTURE).read_bytes() == (tmp_path / "f" / PICTURE).read_bytes()
    assert (kept / FIGURE).read_text() == (tmp_path / "f" / FIGURE).read_text()
    again = tmp_path / "again"
    write_results([kept], again)  # from what is kept beside the pages alone
    assert (again / "outcomes" / kept.name / PICTURE).read_bytes() == (kept / PICTURE).read_bytes()
