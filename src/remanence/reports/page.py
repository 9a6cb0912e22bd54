"""The page of a report: summary, tables, figures and setup in one HTML file that loads nothing.

Names of methods, classes, clients and files are untrusted: Jinja2 escapes every text, data are
JSON without `<`, and a content security policy allows only the two scripts whose hashes it lists.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from remanence.core.errors import InputError
from remanence.core.files import make_folder, translate_disk_errors, write_atomically
from remanence.core.safe_path import SafePath
from remanence.experiment.data_setup import PartitionTable
from remanence.metrics.cached import damaged_ledgers
from remanence.metrics.groups import Group, describe_model, group_runs, select_by_validation
from remanence.metrics.summary_rows import MethodRow, best_row, make_row
from remanence.reports import attacks, privacy, setup_table, summary_text
from remanence.reports.table_columns import Column, columns_for
from remanence.reports.tables import rounds_to_target
from remanence.reports.theme import Figure
from remanence.results.run import REPORT, Comparison, Run
from remanence.version import __version__

HERE = Path(__file__).parent
# Clients on the page of a partition: a browser draws a cell for each class of each client.
PARTITION_CLIENTS = 2_000


def write_report(results: Sequence[Run | Comparison], out: Path | None = None) -> Path:
    """Write the page about runs and comparisons atomically.

    Args:
        results: The runs and comparisons.
        out: The file to write. Default: report.html in the folder of the first of them.

    Returns:
        The file.
    """
    if not results:
        raise InputError(
            "a report needs at least one run or comparison folder: remanence report DIR"
        )
    return _write(out or results[0].files / REPORT, lambda: render_report(results))


def write_partition(table: PartitionTable, out: Path) -> Path:
    """Write a page that shows a partition alone, and the drift schedule if there is one -> `out`"""

    def render() -> str:
        from remanence.reports.partition import draw_client_data
        from remanence.reports.schedule import draw_schedule

        total, counts = len(table.label_counts), table.label_counts[:PARTITION_CLIENTS].tolist()
        clusters = [step[:PARTITION_CLIENTS] for step in table.clusters]
        lede = f"{total} clients, {len(table.classes)} classes" + (
            f", {len(clusters)} time steps." if clusters else "."
        )
        figures = [draw_schedule(clusters, concepts=table.concepts)] if clusters else []
        origin = ", at time step 0" if clusters else ""
        figures.append(draw_client_data(counts, table.classes, total, origin, table.names))
        return _render(title=table.title, lede=lede, chapters={"Data": figures})

    return _write(out, render)


def render_report(results: Sequence[Run | Comparison]) -> str:
    """The page about runs and comparisons, as HTML."""
    from remanence.reports.figures import CHAPTERS

    everything = group_runs(results)
    groups = select_by_validation(everything)
    rows = [make_row(group) for group in groups]
    return _render(
        title=_name_result(results) or _title(groups),
        lede=_lede(groups),
        summary=[*summary_text.summarize_groups(groups, rows), *_warn(groups)],
        columns=columns_for(rows),
        tables=_tabulate(rows, _caption(groups)),
        every_setting=_tabulate(
            [make_row(group) for group in everything], "All settings that were tried"
        )
        if len(everything) > len(groups)
        else [],
        targets=rounds_to_target(groups),
        chapters={
            title: [figure for draw in functions if (figure := draw(groups)) is not None]
            for title, functions in CHAPTERS.items()
        },
        robustness=attacks.tabulate(groups),
        privacy=privacy.list_guarantees(groups),
        setup=setup_table.describe(groups),
        settings=setup_table.list_settings(groups),
    )


def _write(out: Path | SafePath, render: Callable[[], str]) -> Path:
    if isinstance(out, Path) and SafePath(out).is_folder():
        raise InputError(
            f"{out} is a folder: --out names the file to write, such as {out / 'report.html'}"
        )
    file = SafePath.of_file(out)
    file.is_regular_file()  # a link is refused before the page is drawn
    # replaces a lone surrogate in a name
    content = render().encode("utf-8", errors="replace")
    make_folder(file.parent)
    with translate_disk_errors(file.parent):
        write_atomically(file, content)
    return file.path


def _render(
    *, title: str, lede: str, chapters: Mapping[str, Sequence[Figure]], **sections: Any
) -> str:
    """The template with its sections; a section that is not given is left out."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    scripts = [
        _normalize_newlines(get_plotlyjs()),
        _normalize_newlines((HERE / "page.js").read_text(encoding="utf-8")),
    ]
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    nothing: dict[str, Any] = dict.fromkeys(
        (
            "summary",
            "columns",
            "tables",
            "every_setting",
            "targets",
            "robustness",
            "privacy",
            "setup",
            "settings",
        ),
        (),
    )
    return environment.get_template("page.html.j2").render(
        title=title,
        lede=lede,
        policy=_policy(scripts),
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        chapters=[
            (f"chapter-{number}", name, [(figure, _as_json(figure)) for figure in figures])
            for number, (name, figures) in enumerate(chapters.items(), start=1)
            if figures
        ],
        privacy_explanation=privacy.EXPLANATION,
        version=__version__,
        **nothing | sections,
    )


def _policy(scripts: Sequence[str]) -> str:
    """The content security policy of the page.

    Inline style is allowed, since plotly writes style elements and attributes while it draws;
    style cannot load or send anything, since no source is allowed.
    """
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:"
        " blob:; base-uri 'none'; form-action 'none'"
    )


def _normalize_newlines(text: str) -> str:
    """Line ends as a browser reads them, since the policy holds hashes of scripts."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _as_json(figure: Figure) -> str:
    """A figure as JSON that cannot end its script element."""
    plot = figure.plot.to_plotly_json()
    content = {"data": plot["data"], "layout": plot["layout"], "frame": figure.frame}
    states = [asdict(state) for state in figure.states]
    text = json.dumps(content | {"states": states}, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _caption(groups: Sequence[Group]) -> str:
    model = describe_model(groups)
    return f"{model[0].upper()}{model[1:]}, mean over seeds"


def _tabulate(rows: Sequence[MethodRow], caption: str) -> list[dict[str, Any]]:
    """One table for each theme of the columns; the first table has the columns without theme."""
    columns = columns_for(rows)
    themes = list(dict.fromkeys(column.theme for column in columns))
    return [
        {"caption": theme or caption, "columns": some, "rows": _cells(rows, some)}
        for theme in themes
        for some in [[column for column in columns if column.theme == theme]]
    ]


def _cells(rows: Sequence[MethodRow], columns: Sequence[Column]) -> list[dict[str, Any]]:
    best = best_row(rows)
    return [
        {
            "label": row.label,
            "best": row is best,
            "unfinished": row.unfinished > 0,
            "cells": [column.cell(row) for column in columns],
        }
        for row in rows
    ]


def _name_result(results: Sequence[Run | Comparison]) -> str:
    """The reproduced table or figure of a paper, if the page is about one."""
    if len(results) != 1 or not isinstance(results[0], Comparison):
        return ""
    asked = results[0].plan.get("reproduce", {})
    return (
        f"{asked['result']}, scale {asked['scale']}"
        if "result" in asked and "scale" in asked
        else ""
    )


def _title(groups: Sequence[Group]) -> str:
    methods = list(dict.fromkeys(group.method for group in groups))
    data = list(dict.fromkeys(run.config.data.name for group in groups for run in group.runs))
    where = f" on {data[0]}" if len(data) == 1 else ""
    return (methods[0] if len(methods) == 1 else f"{len(methods)} methods") + where


def _lede(groups: Sequence[Group]) -> str:
    seeds = max(group.planned for group in groups)
    runs = sum(len(group.runs) for group in groups)
    return (f"Accuracy and forgetting in {runs} run{'' if runs == 1 else 's'}") + (
        f" with {seeds} seeds a method." if seeds > 1 else "."
    )


def _warn(groups: Sequence[Group]) -> list[str]:
    keys, damaged = setup_table.differences(groups), damaged_ledgers(groups)
    warnings = (
        [f"Warning: these runs are different experiments; they differ in {', '.join(keys)}."]
        if keys
        else []
    )
    warnings += [
        f"Warning: the ledger of {name} cannot be read, so it is missing in the figures of phases"
        f" and of single clients ({problem})."
        for name, problem in damaged.items()
    ]
    for run in (run for group in groups for run in group.runs):
        warnings += [
            f"Warning: in {run.folder.name}, {reason}; what it covered is not verified."
            for reason in run.damaged_manifests
        ]
    return warnings
