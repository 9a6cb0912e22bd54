"""One self-contained page: words, table, figures and conditions, with everything inside and nothing fetched.

Names of methods, classes, clients and files are hostile until proven otherwise: Jinja2 escapes every text, data travel as JSON without a single `<`, and
a content security policy lets only the two scripts run whose hashes are written in it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from remanence.errors import InputError
from remanence.files import explain_full_disk, write_atomically
from remanence.report import conditions, words
from remanence.report.groups import Group, choose_settings, gather
from remanence.report.paint import Picture
from remanence.report.tables import COLUMNS, MethodRow, best_row, make_row
from remanence.results import Comparison, Run
from remanence.version import __version__

HERE = Path(__file__).parent


def write_report(results: Sequence[Run | Comparison], out: Path) -> Path:
    """Write the page about runs and comparisons to `out`, whole or not at all. -> its path"""
    if not results:
        raise InputError("a report needs at least one run or comparison folder: remanence report DIR")
    return _write(out, lambda: render_report(results))


def write_partition(label_counts: Sequence[Sequence[int]], class_names: Sequence[str], title: str, out: Path) -> Path:
    """Write a page that shows a partition alone; label counts [clients][classes]. -> its path"""

    def render() -> str:
        from remanence.report.partition import draw_holdings

        lede = f"{len(label_counts)} clients, {len(class_names)} classes."
        return _render(title=title, lede=lede, pictures=[draw_holdings(label_counts, class_names, len(label_counts))])

    return _write(out, render)


def render_report(results: Sequence[Run | Comparison]) -> str:
    """The page about runs and comparisons, as text."""
    from remanence.report.figures import FIGURES

    everything = gather(results)
    groups = choose_settings(everything)
    rows = [make_row(group) for group in groups]
    return _render(
        title=_title(groups),
        lede=_lede(groups),
        summary=[*words.summarise(groups, rows), *_warn(groups)],
        table=_cells(rows),
        every_setting=_cells([make_row(group) for group in everything]) if len(everything) > len(groups) else [],
        pictures=[picture for draw in FIGURES if (picture := draw(groups)) is not None],
        facts=conditions.describe(groups),
        settings=conditions.list_settings(groups),
    )


def _write(out: Path, render: Callable[[], str]) -> Path:
    if out.is_dir():
        raise InputError(f"{out} is a folder: --out names the file to write, such as {out / 'report.html'}")
    content = render().encode("utf-8", errors="replace")  # a lone surrogate in a name must not cost the page
    with explain_full_disk(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, content)
    return out


def _render(*, title: str, lede: str, pictures: Sequence[Picture], **sections: Any) -> str:
    """The template with its sections; what is not given is left out of the page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    scripts = [_settle_lines(get_plotlyjs()), _settle_lines((HERE / "page.js").read_text(encoding="utf-8"))]
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    nothing: dict[str, Any] = dict.fromkeys(("summary", "table", "every_setting", "facts", "settings"), ())
    return environment.get_template("page.html.j2").render(
        title=title,
        lede=lede,
        policy=_policy(scripts),
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        columns=COLUMNS,
        pictures=[(picture, _as_json(picture)) for picture in pictures],
        version=__version__,
        **nothing | sections,
    )


def _policy(scripts: Sequence[str]) -> str:
    """The content security policy. Plotly writes style elements and attributes as it draws, and no hash covers those, so inline style is allowed;
    without any source to load from, style can neither fetch nor send."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"


def _settle_lines(text: str) -> str:
    """Line ends as a browser reads them: the hash is of what it read."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _as_json(picture: Picture) -> str:
    """A figure as JSON that cannot leave its script element."""
    figure = picture.figure.to_plotly_json()
    text = json.dumps({"data": figure["data"], "layout": figure["layout"]}, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _cells(rows: Sequence[MethodRow]) -> list[dict[str, Any]]:
    best = best_row(rows)
    return [
        {"label": row.label, "best": row is best, "unfinished": row.unfinished > 0, "cells": [column.cell(row) for column in COLUMNS]}
        for row in rows
    ]


def _title(groups: Sequence[Group]) -> str:
    methods = list(dict.fromkeys(group.method for group in groups))
    data = list(dict.fromkeys(run.spec.data.name for group in groups for run in group.runs))
    where = f" on {data[0]}" if len(data) == 1 else ""
    return (methods[0] if len(methods) == 1 else f"{len(methods)} methods") + where


def _lede(groups: Sequence[Group]) -> str:
    seeds = max(group.planned for group in groups)
    runs = sum(len(group.runs) for group in groups)
    return f"What the models learned and what they forgot, in {runs} run{'' if runs == 1 else 's'}" + (
        f" with {seeds} seeds a method." if seeds > 1 else "."
    )


def _warn(groups: Sequence[Group]) -> list[str]:
    keys = conditions.differences(groups)
    return [f"Beware: these runs are not of one experiment; they differ in {', '.join(keys)}."] if keys else []
