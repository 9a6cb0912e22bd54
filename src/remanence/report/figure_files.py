"""The figures and tables of a report as files for a paper: PDF, SVG and PNG; CSV, Markdown and
LaTeX.

figures/accuracy.pdf .svg .png      the figure, in the width of a column
figures/accuracy.csv                the data in it
figures/results.csv .md .tex        the table of the report
"""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from remanence.core.errors import InputError
from remanence.core.files import translate_disk_errors, write_atomically
from remanence.metrics.groups import Group, describe_model, group_runs, select_by_validation
from remanence.report import tables
from remanence.report.latex import render_latex
from remanence.report.matplotlib_values import as_list, plain_text
from remanence.report.table_columns import ACCURACY, columns_for
from remanence.report.theme import Figure
from remanence.results.run import Comparison, Run

KINDS = ("pdf", "svg", "png")
DOTS = 300  # per inch, of a PNG
RESULTS, ROUNDS = "results", "rounds-to-target"


@dataclass(frozen=True)
class FigureTable:
    """A table of plain text; the first column holds names, the others numbers."""

    name: str
    caption: str
    headings: list[str]
    cells: list[list[str]]
    strong: Collection[tuple[int, int]] = ()  # (row, column) in bold

    def as_latex(self) -> str:
        return render_latex(
            self.headings, self.cells, caption=self.caption, label=self.name, strong=self.strong
        )

    def as_markdown(self) -> str:
        cells = [[tables.escape_markdown(cell) for cell in row] for row in self.cells]
        lines = [self.headings, ["---", *["--:"] * (len(self.headings) - 1)], *cells]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_figures(results: Sequence[Run | Comparison], folder: Path) -> list[Path]:
    """Write every figure and table about runs and comparisons into a folder. -> the files, in
    the order of the report
    """
    require_matplotlib()
    if not results:
        raise InputError(
            "figures need at least one run or comparison folder: remanence report DIR"
            " --figures FOLDER"
        )
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: --figures names a folder")
    from remanence.report.figures import FIGURES

    groups = select_by_validation(group_runs(results))
    files = write_tables(groups)
    for draw in FIGURES:
        if (figure := draw(groups)) is not None:
            files |= {f"{figure.name}.csv": tabulate(figure).encode()}
            files |= {
                f"{figure.name}.{kind}": content
                for kind, content in render_figure_files(figure).items()
            }
    with translate_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    return [folder / name for name in files]


def render_figure_files(figure: Figure) -> dict[str, bytes]:
    """A figure as PDF, SVG and PNG."""
    return render_figure(figure.plot, figure.title, KINDS)


def render_figure(
    figure: Any, title: str, kinds: Sequence[str], dots: int = DOTS
) -> dict[str, bytes]:
    """A figure of plotly's as files for paper; the same bytes every time, for no date is
    written into them.
    """
    from matplotlib import rc_context

    from remanence.report.to_matplotlib import STYLE, choose_fonts, to_matplotlib

    made: dict[str, bytes] = {}
    style: Any = STYLE | {"font.family": choose_fonts()}
    with rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font", category=UserWarning
        )  # a script without a font shows as boxes
        paper = to_matplotlib(figure)
        paper.draw_without_rendering()
        # things have found their places; three files need not look for them again
        paper.set_layout_engine("none")
        for kind in kinds:
            dated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind, {})
            stream = io.BytesIO()
            paper.savefig(stream, format=kind, dpi=dots, metadata=dated | {"Title": title})
            made[kind] = stream.getvalue()
    return made


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError(
            "figures for a paper need matplotlib: pip install 'remanence[figures]'"
        ) from None


def write_tables(groups: Sequence[Group]) -> dict[str, bytes]:
    """The tables of the report as CSV (every number, in full), Markdown and LaTeX, by file name."""
    rows = [tables.make_row(group) for group in groups]
    best, columns = tables.best_row(rows), columns_for(rows)
    model = describe_model(groups)
    content = FigureTable(
        RESULTS,
        f"{model[0].upper()}{model[1:]}: mean and sample standard deviation over seeds, at"
        " the last recorded round.",
        ["Method", *(column.heading for column in columns)],
        [[row.label, *(column.cell(row) for column in columns)] for row in rows],
        {(index, 1 + columns.index(ACCURACY)) for index, row in enumerate(rows) if row is best},
    )
    files = {
        f"{RESULTS}.csv": write_csv(
            [list(asdict(rows[0])), *(list(asdict(row).values()) for row in rows)]
        ).encode(),
        f"{RESULTS}.md": tables.render_markdown(rows).encode(),
        f"{RESULTS}.tex": content.as_latex().encode(),
    }
    reached = tables.rounds_to_target(groups)
    if reached is None:
        return files
    headings = ["Method", *(f"{fraction * reached.target:.1%}" for fraction in reached.fractions)]
    cells = [
        [label, *(tables.MISSING if when is None else str(when) for when in found)]
        for label, found in reached.rounds.items()
    ]
    numbers = [["method", *(fraction * reached.target for fraction in reached.fractions)]]
    told = FigureTable(
        ROUNDS,
        "Rounds until the mean test accuracy over seeds reached these levels; a dash: never.",
        headings,
        cells,
    )
    return files | {
        f"{ROUNDS}.csv": write_csv(
            [*numbers, *([label, *found] for label, found in reached.rounds.items())]
        ).encode(),
        f"{ROUNDS}.md": told.as_markdown().encode(),
        f"{ROUNDS}.tex": told.as_latex().encode(),
    }


def tabulate(figure: Figure) -> str:
    """The data in a figure as CSV, the same that the page's button saves: a trace's name, x,
    y, then z or customdata.
    """
    told = [
        trace
        for trace in figure.plot.to_plotly_json()["data"]
        if (trace.get("meta") or {}).get("columns")
    ]
    if not told:
        return ""
    rows: list[list[Any]] = []
    for trace in told:
        name, across, up, z = (
            trace.get("name"),
            as_list(trace.get("x")),
            as_list(trace.get("y")),
            as_list(trace.get("z")),
        )
        more = as_list(trace.get("customdata")) or [None] * len(across)
        if z:
            rows += [
                [name, x, y, as_list(z[row])[column]]
                for row, y in enumerate(up)
                for column, x in enumerate(across)
            ]
        else:
            rows += [
                list(entry) for entry in zip([name] * len(across), across, up, more, strict=True)
            ]
    headings = [*told[0]["meta"]["columns"], "", "", "", ""][:4]
    kept = [
        index
        for index in range(4)
        if any(
            index < len(trace["meta"]["columns"]) and trace["meta"]["columns"][index]
            for trace in told
        )
    ]
    cells = [
        [plain_text(row[index]) if isinstance(row[index], str) else row[index] for index in kept]
        for row in rows
    ]
    return write_csv([[headings[index] for index in kept], *cells])


def write_csv(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as CSV. A name that a spreadsheet would take for a formula gets an apostrophe in
    front.
    """
    out = io.StringIO()
    csv.writer(out).writerows([_escape_formula(value) for value in row] for row in rows)
    return out.getvalue()


def _escape_formula(value: Any) -> Any:
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )
