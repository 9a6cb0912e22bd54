"""The figures and tables of a report as files for a paper.

figures/accuracy.pdf .svg .png      a figure, in the width of a column
figures/accuracy.csv                its data
figures/results.csv .md .tex        the table of results
"""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from remanence.core.errors import InputError, unknown
from remanence.core.files import check_no_file, make_folder, translate_disk_errors, write_atomically
from remanence.metrics.groups import Group, describe_model, group_runs, select_by_validation
from remanence.metrics.summary_rows import MethodRow, best_row, make_row
from remanence.reports.latex import render_latex
from remanence.reports.matplotlib_values import as_list, plain_text
from remanence.reports.table_columns import ACCURACY, MISSING, columns_for
from remanence.reports.tables import (
    escape_markdown,
    render_markdown,
    render_text,
    rounds_to_target,
)
from remanence.reports.theme import Figure
from remanence.results.run import Comparison, Run

KINDS = ("pdf", "svg", "png")
DPI = 300  # of a PNG
TEXT_WIDTH = 100  # characters of a table as text
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
        cells = [[escape_markdown(cell) for cell in row] for row in self.cells]
        lines = [self.headings, ["---", *["--:"] * (len(self.headings) - 1)], *cells]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_figures(
    results: Sequence[Run | Comparison], folder: Path, columns: Sequence[str] | None = None
) -> list[Path]:
    """Write every figure and table about runs and comparisons into a folder.

    Args:
        results: The runs and comparisons.
        folder: The folder.
        columns: Headings of the tables of results in Markdown and LaTeX. Default: all.

    Returns:
        The files, in the order of the report.
    """
    require_matplotlib()
    if not results:
        raise InputError(
            "figures need at least one run or comparison folder: remanence report DIR"
            " --figures FOLDER"
        )
    check_no_file(folder, "--figures names a folder")
    from remanence.reports.figures import FIGURES

    groups = select_by_validation(group_runs(results))
    files = write_tables(groups, columns)
    for draw in FIGURES:
        if (figure := draw(groups)) is not None:
            files |= {f"{figure.name}.csv": tabulate(figure).encode()}
            files |= {
                f"{figure.name}.{kind}": content
                for kind, content in render_figure(figure.plot, figure.title, KINDS).items()
            }
    make_folder(folder)
    with translate_disk_errors(folder):
        for name, content in files.items():
            write_atomically(folder / name, content)
    return [folder / name for name in files]


def render_figure(
    figure: Any, title: str, kinds: Sequence[str], dpi: int = DPI
) -> dict[str, bytes]:
    """A plotly figure as files for paper: the same bytes every time, since they contain no date."""
    from matplotlib import rc_context

    from remanence.reports.to_matplotlib import STYLE, choose_fonts, to_matplotlib

    files: dict[str, bytes] = {}
    style: Any = STYLE | {"font.family": choose_fonts()}
    with rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font", category=UserWarning
        )  # characters without an installed font are shown as boxes
        drawing = to_matplotlib(figure)
        drawing.draw_without_rendering()
        # the layout is final: do not compute it for each file
        drawing.set_layout_engine("none")
        for kind in kinds:
            dated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind, {})
            stream = io.BytesIO()
            drawing.savefig(stream, format=kind, dpi=dpi, metadata=dated | {"Title": title})
            files[kind] = stream.getvalue()
    return files


def require_matplotlib() -> None:
    """Raise an error that names the extra to install if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError(
            "figures for a paper need matplotlib: pip install 'remanence-fl[figures]'"
        ) from None


def format_table(
    results: Sequence[Run | Comparison], style: str, names: Sequence[str] | None = None
) -> str:
    """The table of results as text.

    Args:
        results: The runs and comparisons.
        style: text, markdown or latex.
        names: Headings of the columns. Default: all, and as text those that fit in a line.
    """
    groups = select_by_validation(group_runs(results))
    rows = [make_row(group) for group in groups]
    if style == "latex":
        return _tabulate_results(groups, rows, names).as_latex()
    if style == "markdown":
        return render_markdown(rows, names)
    if style != "text":
        raise unknown("style", style, ("text", "markdown", "latex"))
    from rich.console import Console

    console = Console(file=io.StringIO(), width=TEXT_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(render_text(rows, TEXT_WIDTH, names))
    return "\n".join(line.rstrip() for line in captured.get().strip("\n").split("\n")) + "\n"


def _tabulate_results(
    groups: Sequence[Group], rows: Sequence[MethodRow], names: Sequence[str] | None
) -> FigureTable:
    best, columns = best_row(rows), columns_for(rows, names)
    model = describe_model(groups)
    bold = {1 + place for place, column in enumerate(columns) if column is ACCURACY}
    return FigureTable(
        RESULTS,
        f"{model[0].upper()}{model[1:]}: mean and sample standard deviation over seeds, at"
        " the last recorded round.",
        ["Method", *(column.heading for column in columns)],
        [[row.label, *(column.cell(row) for column in columns)] for row in rows],
        {(index, place) for index, row in enumerate(rows) if row is best for place in bold},
    )


def write_tables(groups: Sequence[Group], names: Sequence[str] | None = None) -> dict[str, bytes]:
    """The tables of the report as CSV (with all digits), Markdown and LaTeX, by file name.

    Args:
        groups: The groups of runs.
        names: Headings of the columns in Markdown and LaTeX. Default: all.
    """
    rows = [make_row(group) for group in groups]
    content = _tabulate_results(groups, rows, names)
    # one number in a cell
    numbers = [
        {name: value for name, value in asdict(row).items() if name != "by_seed"} for row in rows
    ]
    files = {
        f"{RESULTS}.csv": write_csv(
            [list(numbers[0]), *(list(line.values()) for line in numbers)]
        ).encode(),
        f"{RESULTS}.md": render_markdown(rows, names).encode(),
        f"{RESULTS}.tex": content.as_latex().encode(),
    }
    return files | _write_rounds(groups)


def _write_rounds(groups: Sequence[Group]) -> dict[str, bytes]:
    """The table of rounds to a target; no file where there is none."""
    reached = rounds_to_target(groups)
    if reached is None:
        return {}
    levels = [fraction * reached.target for fraction in reached.fractions]
    table = FigureTable(
        ROUNDS,
        "Rounds until the mean test accuracy over seeds reached these levels; a dash: not reached.",
        ["Method", *(f"{level:.1%}" for level in levels)],
        [
            [label, *(MISSING if round is None else str(round) for round in rounds)]
            for label, rounds in reached.rounds.items()
        ],
    )
    numbers = [[label, *rounds] for label, rounds in reached.rounds.items()]
    return {
        f"{ROUNDS}.csv": write_csv([["method", *levels], *numbers]).encode(),
        f"{ROUNDS}.md": table.as_markdown().encode(),
        f"{ROUNDS}.tex": table.as_latex().encode(),
    }


def tabulate(figure: Figure) -> str:
    """The data of a figure as CSV, as the button in the page saves them: the trace's name, x, y,
    then z or customdata.
    """
    traces = [
        trace
        for trace in figure.plot.to_plotly_json()["data"]
        if (trace.get("meta") or {}).get("columns")
    ]
    if not traces:
        return ""
    rows = [row for trace in traces for row in _rows_of(trace)]
    columns = [[*trace["meta"]["columns"], "", "", ""][:4] for trace in traces]
    kept = [index for index in range(4) if any(names[index] for names in columns)]
    cells = [
        [plain_text(row[index]) if isinstance(row[index], str) else row[index] for index in kept]
        for row in rows
    ]
    return write_csv([[columns[0][index] for index in kept], *cells])


def _rows_of(trace: dict[str, Any]) -> list[list[Any]]:
    """The data of one trace: name, x, y, then z or customdata."""
    name, z = trace.get("name"), as_list(trace.get("z"))
    x, y = as_list(trace.get("x")), as_list(trace.get("y"))
    if z:
        return [
            [name, across, down, as_list(z[row])[column]]
            for row, down in enumerate(y)
            for column, across in enumerate(x)
        ]
    more = as_list(trace.get("customdata")) or [None] * len(x)
    return [list(row) for row in zip([name] * len(x), x, y, more, strict=True)]


def write_csv(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as CSV; a name that a spreadsheet would read as a formula gets an apostrophe."""
    out = io.StringIO()
    csv.writer(out).writerows([_escape_formula(value) for value in row] for row in rows)
    return out.getvalue()


def _escape_formula(value: Any) -> Any:
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )
