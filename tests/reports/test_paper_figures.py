from __future__ import annotations

import csv
import io
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly import graph_objects as go
from reports.rich_runs import write_comparison, write_peers_run, write_server_run

from remanence.cli.main import app
from remanence.core.errors import InputError
from remanence.metrics.groups import group_runs, select_by_validation
from remanence.reports.classes import draw_classes_over_rounds
from remanence.reports.curves import draw_accuracy
from remanence.reports.figure_files import KINDS, render_figure, tabulate, write_figures
from remanence.reports.figures import FIGURES
from remanence.reports.latex import SIGNS, escape_latex, render_latex
from remanence.reports.theme import Figure, layout, percent_axis
from remanence.results.run import load

matplotlib = pytest.importorskip(
    "matplotlib", reason="matplotlib is not installed: pip install 'remanence-fl[figures]'"
)

from remanence.reports.to_matplotlib import COLUMN, PAGE, STYLE, to_matplotlib  # noqa: E402

HOSTILE = r"$x_1$ \frac{ <script>alert(1)</script> =1+1"


def draw(traces: list[Any], **more: Any) -> Any:
    with matplotlib.rc_context(STYLE):
        paper = to_matplotlib(
            go.Figure(traces, layout(300, [trace.name or "" for trace in traces], **more))
        )
        paper.draw_without_rendering()
    return paper


def words(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_a_line_keeps_its_numbers_color_and_band() -> None:
    band = go.Scatter(
        x=[1, 2, 2, 1],
        y=[0.4, 0.6, 0.4, 0.2],
        fill="toself",
        fillcolor="rgba(0, 114, 178, 0.2)",
        line={"width": 0},
        mode="lines",
    )
    line = go.Scatter(
        name="a",
        x=[1, 2, 3],
        y=[0.25, None, 0.75],
        mode="lines",
        line={"color": "#0072B2", "dash": "dash", "width": 2},
    )
    paper = draw([band, line], yaxis=percent_axis("accuracy"))
    (ax,) = paper.axes
    (drawn,) = ax.lines
    assert np.array_equal(drawn.get_xdata(), [1, 2, 3])
    assert np.array_equal(drawn.get_ydata(), [0.25, np.nan, 0.75], equal_nan=True)
    assert (drawn.get_color(), drawn.get_linestyle()) == ("#0072B2", "--")
    assert ax.patches[0].get_facecolor() == pytest.approx((0, 114 / 255, 178 / 255, 0.2))
    assert ax.get_ylim()[0] == 0  # the report's axes of shares begin at 0
    assert all(word.endswith("%") for word in words(ax.yaxis))
    assert ax.get_ylabel() == "accuracy"


def test_bars_stand_on_each_other_and_below_zero() -> None:
    bars = [
        go.Bar(name=name, x=["a", "b"], y=values)
        for name, values in (("up", [0.5, -0.25]), ("more", [0.25, -0.5]))
    ]
    (ax,) = draw(bars, barmode="relative", bargap=0.2).axes
    boxes = [(round(patch.get_x(), 6), patch.get_y(), patch.get_height()) for patch in ax.patches]
    assert boxes == [(-0.4, 0, 0.5), (0.6, 0, -0.25), (-0.4, 0.5, 0.25), (0.6, -0.25, -0.5)]
    assert words(ax.xaxis) == ["a", "b"]


def test_bars_stand_side_by_side() -> None:
    bars = [go.Bar(name=name, x=["a"], y=[1]) for name in ("one", "two")]
    (ax,) = draw(bars, barmode="group", bargap=0.2).axes
    assert [(round(patch.get_x(), 6), round(patch.get_width(), 6)) for patch in ax.patches] == [
        (-0.4, 0.4),
        (0.0, 0.4),
    ]


def test_a_map_has_the_colors_of_its_scale_and_classes_from_top_to_bottom() -> None:
    cells = go.Heatmap(x=[1, 2], y=["cat", "dog"], z=[[0, 1], [None, 0.5]], coloraxis="coloraxis")
    scale = {
        "colorscale": [[0, "#000000"], [1, "#ffffff"]],
        "cmin": 0,
        "cmax": 1,
        "colorbar": {"tickformat": ".3~p"},
    }
    paper = draw([cells], coloraxis=scale, yaxis={"type": "category", "autorange": "reversed"})
    ax, bar = paper.axes
    (mesh,) = ax.collections
    paper.draw_without_rendering()
    mesh.update_scalarmappable()
    colors = mesh.get_facecolors().reshape(2, 2, 4)
    assert colors[0, 0].tolist() == [0, 0, 0, 1]
    assert colors[0, 1].tolist() == [1, 1, 1, 1]
    assert colors[1, 0][3] == 0  # nothing is known there, so nothing is drawn
    assert colors[1, 1][0] == pytest.approx(0.5, abs=0.01)
    assert words(ax.yaxis) == ["cat", "dog"]
    assert ax.get_ylim() == (1.5, -0.5)
    assert "100%" in words(bar.yaxis)


def test_dots_of_methods_stand_beside_each_other() -> None:
    """Two methods share a row of height 1 with a gap of 0.35: they stand at -0.1625 and 0.1625
    around its middle.
    """
    dots = [
        go.Scatter(name=name, x=[0.5], y=["cat"], mode="markers", orientation="h")
        for name in ("one", "two")
    ]
    (ax,) = draw(dots, scattermode="group", scattergap=0.35, yaxis={"type": "category"}).axes
    assert [round(float(drawn.get_offsets()[0, 1]), 6) for drawn in ax.collections] == [
        -0.1625,
        0.1625,
    ]


def test_boundaries_and_notes_outside_the_axis_are_left_out() -> None:
    line = go.Scatter(x=[5, 8], y=[0, 1], mode="lines")
    note = {"xref": "x", "yref": "paper", "y": 1, "showarrow": False, "yanchor": "bottom"}
    boundary = {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": 6,
        "x1": 6,
        "y0": 0,
        "y1": 1,
        "line": {"dash": "dot"},
    }
    (ax,) = draw(
        [line],
        annotations=[note | {"x": 0, "text": "step 0"}, note | {"x": 6, "text": "<b>step</b> 1"}],
        shapes=[boundary],
    ).axes
    assert [text.get_text() for text in ax.texts] == ["step 1"]
    assert ax.lines[-1].get_xdata() == [6, 6]


def test_what_cannot_be_drawn_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="pie"):
        draw([go.Pie(values=[1])])


def test_many_maps_take_the_width_of_the_page(tmp_path: Path) -> None:
    def axes(place: int, count: int) -> dict[str, Any]:
        number = "" if place == 0 else str(place + 1)
        return {
            f"xaxis{number}": {"anchor": f"y{number}"},
            f"yaxis{number}": {"domain": [1 - (place + 1) / count, 1 - place / count]},
        }

    for count, width in ((2, COLUMN), (3, PAGE)):
        names = ["" if place == 0 else str(place + 1) for place in range(count)]
        maps = [
            go.Heatmap(z=[[1]], xaxis=f"x{name}", yaxis=f"y{name}", showscale=False)
            for name in names
        ]
        more: dict[str, Any] = {}
        for place in range(count):
            more |= axes(place, count)
        assert draw(maps, meta={"panels": count}, **more).get_size_inches()[0] == width


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Everything that a report can show: a comparison, and a run with drift and without a
    server.
    """
    home = tmp_path_factory.mktemp("paper")
    cells = [
        {"label": label, "seed": seed + shift, "attack": "backdoor"}
        for shift, label in enumerate((HOSTILE, "fedavg+wsm"))
        for seed in (0, 2)
    ]
    return write_comparison(home / "comparison", cells).folder, write_peers_run(
        home / "peers"
    ).folder


@pytest.fixture(scope="module")
def written(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a comparison with a few figures."""
    out = tmp_path_factory.mktemp("written") / "figures"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "remanence.reports.figures.FIGURES", (draw_accuracy, draw_classes_over_rounds)
        )
        write_figures([load(folders[0])], out)
    return out


def test_every_picture_can_be_redrawn(folders: tuple[Path, Path]) -> None:
    drawn = set()
    for folder in folders:
        groups = select_by_validation(group_runs([load(folder)]))
        with matplotlib.rc_context(STYLE):
            for make in FIGURES:
                if (figure := make(groups)) is not None:
                    assert to_matplotlib(figure.plot).axes
                    drawn.add(make)
    assert drawn == set(FIGURES)


@pytest.mark.slow
def test_the_command_writes_every_picture(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in folders:
        app(
            [
                "report",
                str(folder),
                "--out",
                str(tmp_path / "report.html"),
                "--figures",
                str(tmp_path / "figures"),
            ],
            standalone_mode=False,
        )
    assert f"figures: {tmp_path / 'figures'}" in capsys.readouterr().out
    names = {path.stem for path in (tmp_path / "figures").glob("*.pdf")}
    assert len(names) == len(FIGURES)
    assert (
        {path.stem for path in tmp_path.rglob("*.svg")}
        == {path.stem for path in tmp_path.rglob("*.png")}
        == names
    )
    assert names <= {path.stem for path in tmp_path.rglob("*.csv")}


def test_files_are_fit_for_a_paper(written: Path) -> None:
    pdf = (written / "accuracy.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert b"/FontFile2" in pdf  # outlines that can be set and searched
    assert b"/Type3" not in pdf
    assert b"/CreationDate" not in pdf
    width = struct.unpack(">I", (written / "accuracy.png").read_bytes()[16:20])[0]
    assert width == COLUMN * 300
    svg = (written / "accuracy.svg").read_text(encoding="utf-8")
    assert "<script" not in svg
    assert "<text" not in svg  # outlines: the same on every machine


def test_tables_are_written(written: Path) -> None:
    rows = list(csv.DictReader(io.StringIO((written / "results.csv").read_text(encoding="utf-8"))))
    assert [row["label"] for row in rows] == [HOSTILE, "fedavg+wsm"]
    assert rows[0]["seeds"] == "2"
    assert 0 < float(rows[0]["accuracy"]) < 1
    latex = (written / "results.tex").read_text(encoding="utf-8")
    assert latex.count(r"\toprule") == latex.count(r"\midrule") == latex.count(r"\bottomrule") == 1
    assert r"\$x\_1\$ \textbackslash{}frac\{ \textless{}script\textgreater{}" in latex
    assert latex.count(r"\textbf") == 0  # two seeds do not separate the methods
    markdown = (written / "results.md").read_text(encoding="utf-8")
    assert r"\<script\>" in markdown  # escaped: text, not an element
    for name in ("csv", "md", "tex"):
        assert (written / f"rounds-to-target.{name}").exists()


def test_pictures_are_the_same_bytes_every_time() -> None:
    figure = Figure(
        "p", "P", go.Figure([go.Scatter(x=[1, 2], y=[1, 2])], layout(300)), "reading", "alt"
    )
    assert render_figure(figure.plot, figure.title, KINDS) == render_figure(
        figure.plot, figure.title, KINDS
    )


def test_a_script_without_a_font_is_no_error() -> None:
    figure = Figure(
        "p",
        "P",
        go.Figure(
            [go.Scatter(name="\U00012000", x=[1], y=[1], mode="markers")], layout(300, ["a", "b"])
        ),
        "",
        "",
    )
    assert render_figure(figure.plot, figure.title, KINDS)["png"].startswith(b"\x89PNG")


def test_data_of_a_picture() -> None:
    line = go.Scatter(
        name="=a &lt;b&gt;",
        x=[1, 2],
        y=[0.5, None],
        customdata=[0.1, None],
        meta={"columns": ["method", "round", "accuracy", "deviation"]},
    )
    figure = Figure(
        "p", "P", go.Figure([go.Scatter(x=[0], y=[0]), line], layout(300)), "reading", "alt"
    )
    assert list(csv.reader(io.StringIO(tabulate(figure)))) == [
        ["method", "round", "accuracy", "deviation"],
        ["'=a <b>", "1", "0.5", "0.1"],
        ["'=a <b>", "2", "", ""],
    ]
    cells = go.Heatmap(
        name="m", x=["a", "b"], y=["c"], z=[[1, 2]], meta={"columns": ["", "x", "y", "z"]}
    )
    assert (
        tabulate(Figure("p", "P", go.Figure([cells], layout(300)), "", ""))
        == "x,y,z\r\na,c,1\r\nb,c,2\r\n"
    )


def test_mistakes_get_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_server_run(tmp_path / "run", rounds=2)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file: --figures names a folder"):
        write_figures([run], tmp_path / "file")
    with pytest.raises(InputError, match="at least one run"):
        write_figures([], tmp_path / "figures")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=re.escape("pip install 'remanence-fl[figures]'")):
        write_figures([run], tmp_path / "figures")
    assert not (tmp_path / "figures").exists()


def test_latex_table_by_hand() -> None:
    text = render_latex(
        ["Method", "Test accuracy, %"],
        [["a_b", "91.5 ± 3.3"], ["[c]", "–"]],
        caption="50% & more",
        label="My table",
        strong={(0, 1)},
    )
    assert text.splitlines() == [
        r"% needs \usepackage{booktabs}",
        r"\begin{table*}",
        r"  \centering",
        r"  \small",
        r"  \caption{50\% \& more}",
        r"  \label{tab:my-table}",
        r"  \begin{tabular}{lr}",
        r"    \toprule",
        r"    Method & \begin{tabular}[b]{@{}r@{}}Test \\ accuracy, \%\end{tabular} \\",
        r"    \midrule",
        r"    a\_b & \textbf{91.5 $\pm$ 3.3} \\",
        r"    {[}c{]} & -- \\",  # a bracket after a line end would be read as its length
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table*}",
    ]


def test_latex_knows_greek() -> None:
    assert escape_latex("αΣΑλ\N{GREEK SMALL LETTER OMICRON}") == r"$\alpha$$\Sigma$A$\lambda$o"
    assert escape_latex("é 日") == "é 日"


@given(st.text())
def test_nothing_in_a_name_is_a_command(text: str) -> None:
    """What remains of an escaped text when everything we write ourselves is taken out has no
    sign that LaTeX reads.
    """
    escaped = escape_latex(text)
    for written in sorted({*SIGNS.values()}, key=len, reverse=True):
        escaped = escaped.replace(written, "")
    escaped = re.sub(r"\$\\[A-Za-z]+\$", "", escaped)
    assert not set(escaped) & set("\\{}$&%#_~^<>|`\n\r")
    assert escaped.isprintable()
