"""The state of the live report: the results in the watched folders, whether files have changed, the
progress of runs, and the page about them.

A file that is incomplete, because it is being written or a run was killed, is no error: the last
page is kept, and the file is read again when it has changed.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remanence.core.errors import RemanenceError
from remanence.results.run import (
    CHECKPOINTS,
    COMPARISON,
    EXPERIMENT,
    METRICS,
    RUNS,
    Comparison,
    Run,
    load,
)

TAIL = 65_536  # bytes at the end of metrics.jsonl that are searched for the last line
Stamp = tuple[int, int, int]  # modification time, size and inode of a file


class ReportState:
    """The watched folders: their version, the progress of their runs, and the page about them."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = [Path(os.path.abspath(folder)) for folder in folders]
        self.rendering = threading.Lock()  # one page at a time; waiting requests get the same page
        self.rendered: tuple[str, bytes] = ("", b"")  # version and page
        self.error = ""  # why the newest page could not be rendered
        # progress of runs, with the stamps of the files it was read from
        self.progress: dict[Path, tuple[list[Stamp], dict[str, Any] | None]] = {}

    def version(self) -> str:
        """Changes whenever a file that the report reads does; reads no file."""
        digest = hashlib.sha256()
        for folder in self.folders:
            for found in find_results(folder):
                for run in _runs_below(found):
                    stamps = [_stamp(path) for path in _files_of(run)]
                    digest.update(f"{run}\0{stamps}\0".encode(errors="replace"))
                stamp = _stamp(found / COMPARISON)
                digest.update(f"{found}\0{stamp}\0".encode(errors="replace"))
        return digest.hexdigest()[:16]

    def state(self) -> dict[str, Any]:
        """What the frame shows around the report."""
        version = self.version()
        results = {folder: find_results(folder) for folder in self.folders}
        runs = [run for found in results.values() for one in found for run in _runs_below(one)]
        progress = [known for run in runs if (known := self._progress(run)) is not None]
        waiting = [folder.name for folder, found in results.items() if not found]
        return {"version": version, "runs": progress, "waiting": waiting, "error": self.error}

    def page(self) -> tuple[str, bytes]:
        """The current report.

        Returns:
            Its version and the page. While a file is being written: an empty version and the last
            complete page.
        """
        with self.rendering:
            version = self.version()
            if version == self.rendered[0]:
                return self.rendered
            try:
                content = self._render()
            # a file is being written
            except (RemanenceError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
                own = isinstance(error, RemanenceError)
                self.error = str(error) if own else f"{type(error).__name__}: {error}"
                message = _message_page("The report cannot be rendered yet", self.error)
                return "", self.rendered[1] or message
            self.error = ""
            self.rendered = (version, content)
            return self.rendered

    def _progress(self, run: Path) -> dict[str, Any] | None:
        """How far a run is; read again only where its files have changed, since a comparison may
        have hundreds of runs.
        """
        stamps = [_stamp(path) for path in (run / EXPERIMENT, run / METRICS, run / CHECKPOINTS)]
        if self.progress.get(run, (None, None))[0] != stamps:
            self.progress[run] = (stamps, read_progress(run))
        return self.progress[run][1]

    def _render(self) -> bytes:
        results: list[Run | Comparison] = []
        for folder in self.folders:
            results += [load(found) for found in find_results(folder)]
        runs = [
            run
            for result in results
            for run in (result.runs if isinstance(result, Comparison) else [result])
        ]
        if not runs:
            names = ", ".join(folder.name for folder in self.folders)
            return _message_page(
                "Waiting for a run",
                f"No run has started in {names}. The report appears here when one does.",
            )
        from remanence.report.page import render_report

        return render_report(results).encode("utf-8", errors="replace")


def find_results(folder: Path) -> list[Path]:
    """The run or comparison in a folder or, if it is neither, those directly below it."""
    if _is_result(folder):
        return [folder]
    try:
        return sorted(path for path in folder.iterdir() if _is_result(path))
    except OSError:  # does not exist, or was deleted
        return []


def read_progress(run: Path) -> dict[str, Any] | None:
    """How far a run is, from its settings and the last line of its metrics.

    Returns:
        Name, method, seed, round, rounds and whether it is finished; None while its settings are
        being written.
    """
    try:
        config = Run(run).config
        finished = Run(run).finished
    except (RemanenceError, OSError, ValueError):
        return None
    last = _last_line(run / METRICS)
    name = f"{run.parent.parent.name}/{run.name}" if run.parent.name == RUNS else run.name
    return {
        "name": name,
        "method": config.method,
        "seed": config.seed,
        "round": int(last.get("round") or 0),
        "rounds": config.total_rounds,
        "finished": finished,
    }


def _is_result(folder: Path) -> bool:
    return (folder / EXPERIMENT).is_file() or (folder / COMPARISON).is_file()


def _runs_below(found: Path) -> list[Path]:
    """The folders of the runs of a run or a comparison."""
    if not (found / COMPARISON).is_file():
        return [found]
    try:
        return sorted(path for path in (found / RUNS).iterdir() if (path / EXPERIMENT).is_file())
    except OSError:
        return []


def _files_of(run: Path) -> list[Path]:
    """What a report reads: settings, records, and the folder of the checkpoints."""
    try:
        recorded = sorted(
            path
            for path in run.iterdir()
            if path.suffix == ".bin" or path.name in (EXPERIMENT, METRICS)
        )
    except OSError:
        return []
    return [*recorded, run / CHECKPOINTS]


def _stamp(path: Path) -> Stamp:
    try:
        stat = path.stat()
    except OSError:
        return (0, 0, 0)
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def _last_line(path: Path) -> dict[str, Any]:
    """The last complete line of a file of JSON lines."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:  # cut off by a killed run, or still being written
            continue
        if isinstance(found, dict):
            return found
    return {}


def _message_page(title: str, text: str) -> bytes:
    """A page with one message, shown before there is a report."""
    style = (
        "body{font:1.1rem/1.5 system-ui,sans-serif;max-width:40rem;margin:18vh auto;padding:0"
        " 1rem;color-scheme:light dark}"
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta'
        f' http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="color-scheme" content="light'
        f' dark"><title>{html.escape(title)}</title><style>{style}</style></head>'
        "<body"
        f' data-drawn="all"><h1>{html.escape(title)}</h1><p>{html.escape(text)}</p></body></html>'
    ).encode("utf-8", errors="replace")
