"""Reports: tables, figures and sentences about runs and comparisons, from their folders alone.

- Texts: `summary_text` (the summary), `phrases` (shared with `remanence diagnose`), `setup_table`
  (what was run), `privacy` (guarantees), `attacks` (robustness).
- Tables: `table_columns`, `tables`, `latex`.
- Figures, pure functions of groups of runs, one subject a file: `curves`, `cost`, `classes`,
  `confusion_change`, `phase_forgetting`, `client_forgetting`, `distributions`, `round_heatmap`,
  `clients_map`, `clusters`, `schedule`, `partition`, `peers`, `network`. `figures` lists them by
  chapter; `theme` is the common style, `heatmaps` and `line_plots` are shared parts.
- Page: `page` with page.html.j2, page.css and page.js: one HTML file that loads nothing.
- Live report: `live` (server, with watch.html) and `live_state`.
- Export: `figure_files` (PDF, SVG, PNG, CSV), `to_matplotlib` with `matplotlib_panels`,
  `matplotlib_marks`, `matplotlib_annotations` and `matplotlib_values`, `trackers` (TensorBoard,
  MLflow).

The numbers come from `metrics`; nothing here measures. It may import `metrics`, `results` and
packages below. Read `figures.py` and `page.py` first.
"""

from __future__ import annotations

from pathlib import Path

from remanence.results.run import load


def write_report(*folders: str | Path, out: str | Path | None = None) -> Path:
    """Write one self-contained page about runs and comparisons.

    Args:
        *folders: Folders of runs and comparisons.
        out: The file to write. Default: report.html in the first folder.

    Returns:
        The file.
    """
    from remanence.reports import page

    return page.write_report(
        [load(folder) for folder in folders], Path(out) if out is not None else None
    )
