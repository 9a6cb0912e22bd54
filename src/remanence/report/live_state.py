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

from remanence.core.errors import RemanenceError, UnsafeFile
from remanence.core.safe_path import FOLDER, SafePath
from remanence.results.manifest import CHECKPOINTS
from remanence.results.run import (
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
FileStamp = tuple[str, Stamp]  # with the name of the file


class ReportState:
    """The watched folders: their version, the progress of their runs, and the page about them."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = [Path(os.path.abspath(folder)) for folder in folders]
        self.rendering = threading.Lock()  # one page at a time; waiting requests get the same page
        self.rendered: tuple[str, bytes] = ("", b"")  # version and page
        self.error = ""  # why the newest page could not be rendered
        # progress of runs, with the stamps of the files it was read from
        self.progress: dict[SafePath, tuple[list[FileStamp], dict[str, Any] | None]] = {}

    def version(self) -> str:
        """Changes whenever a file that the report reads does; reads no file."""
        digest = hashlib.sha256()
        for folder in self.folders:
            for found in find_results(folder):
                for run in dict.fromkeys([found, *_runs_below(found)]):
                    stamps = _stamps_of(run)
                    digest.update(f"{run}\0{stamps}\0".encode(errors="replace"))
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

    def _progress(self, run: SafePath) -> dict[str, Any] | None:
        """How far a run is; read again only where its files have changed, since a comparison may
        have hundreds of runs.
        """
        stamps = _stamps_of(run)
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


def find_results(folder: Path) -> list[SafePath]:
    """The run or comparison in a folder or, if it is neither, those directly below it."""
    files = SafePath(folder)
    try:
        if _is_result(files):
            return [files]
        return [found for name in files.list_folders() if _is_result(found := files / name)]
    except OSError:  # was deleted
        return []


def read_progress(folder: SafePath) -> dict[str, Any] | None:
    """How far a run is, from its settings and the last line of its metrics.

    Returns:
        Name, method, seed, round, rounds and whether it is finished; None while its settings are
        being written.
    """
    try:
        config = Run(folder).config
        finished = Run(folder).finished
        last = _last_line(folder / METRICS)
    except (RemanenceError, OSError, ValueError):
        return None
    run = folder.path
    name = f"{run.parent.parent.name}/{run.name}" if run.parent.name == RUNS else run.name
    round = last.get("round")
    return {
        "name": name,
        "method": config.method,
        "seed": config.seed,
        "round": round if isinstance(round, int) else 0,
        "rounds": config.total_rounds,
        "finished": finished,
    }


def _is_result(folder: SafePath) -> bool:
    return not {EXPERIMENT, COMPARISON}.isdisjoint(folder.list_files())


def _runs_below(found: SafePath) -> list[SafePath]:
    """The folders of the runs of a run or a comparison."""
    try:
        if COMPARISON not in found.list_files():
            return [found]
        runs = [found / RUNS / name for name in (found / RUNS).list_folders()]
        return [run for run in runs if EXPERIMENT in run.list_files()]
    except (UnsafeFile, OSError):
        return []


def _stamps_of(folder: SafePath) -> list[FileStamp]:
    """When the files that a report reads have changed: settings, records, and the folder of the
    checkpoints. Links and special files are left out; the report refuses them.
    """
    try:
        files = folder.list_files()
        checkpoints = (folder / CHECKPOINTS).status(FOLDER)
    except (UnsafeFile, OSError):
        return []
    stamps = [
        (name, _stamp(status))
        for name, status in files.items()
        if name.endswith(".bin") or name in (EXPERIMENT, METRICS, COMPARISON)
    ]
    return stamps + ([] if checkpoints is None else [(CHECKPOINTS, _stamp(checkpoints))])


def _stamp(status: os.stat_result) -> Stamp:
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _last_line(path: SafePath) -> dict[str, Any]:
    """The last complete line of a file of JSON lines."""
    status = path.status()
    if status is None:
        return {}
    with path.reader() as file:
        file.seek(max(0, status.st_size - TAIL))
        lines = file.read(2 * TAIL).splitlines()
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):  # cut off by a killed run, or still being written
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
