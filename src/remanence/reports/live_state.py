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
from collections.abc import Iterable, Sequence
from contextlib import suppress
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
Stamps = dict[str, Stamp]  # by name of the file


class ReportState:
    """The watched folders: their version, the progress of their runs, and the page about them."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = [Path(os.path.abspath(folder)) for folder in folders]
        self.rendering = threading.Lock()  # one page at a time; waiting requests get the same page
        self.rendered: tuple[str, bytes] = ("", b"")  # version and page
        self.error = ""  # why the newest page could not be rendered
        # progress of runs, with the stamps of the files it was read from
        self.progress: dict[SafePath, tuple[Stamps, dict[str, Any] | None]] = {}

    def version(self) -> str:
        """Changes whenever a file that the report reads does; reads no file."""
        return _version_of(map(_scan, self.folders))

    def state(self) -> dict[str, Any]:
        """What the frame shows around the report."""
        scans = {folder: _scan(folder) for folder in self.folders}
        found = [result for scan in scans.values() for result in scan.values()]
        runs = {run: stamps for result in found for run, stamps in _runs_of(result).items()}
        progress = [self._progress(run, stamps) for run, stamps in runs.items()]
        return {
            "version": _version_of(scans.values()),
            "runs": [known for known in progress if known is not None],
            "waiting": [folder.name for folder, scan in scans.items() if not scan],
            "error": self.error,
        }

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

    def _progress(self, run: SafePath, stamps: Stamps) -> dict[str, Any] | None:
        """How far a run is; read again only where its files have changed, since a comparison may
        have hundreds of runs.
        """
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
        from remanence.reports.page import render_report

        return render_report(results).encode("utf-8", errors="replace")


def find_results(folder: Path) -> list[SafePath]:
    """The run or comparison in a folder or, if it is neither, those directly below it."""
    return list(_scan(folder))


def _scan(folder: Path) -> dict[SafePath, dict[SafePath, Stamps]]:
    """When the files of results have changed: for each result, those of its own folder and of the
    folders of its runs.
    """
    top = SafePath(folder)
    stamps = {top: _stamps_of(top)}
    if not _is_result(stamps[top]):
        stamps = {top / name: _stamps_of(top / name) for name in _folders_in(top)}
    found = {place: {place: own} for place, own in stamps.items() if _is_result(own)}
    for place, result in found.items():
        if COMPARISON in result[place]:
            runs = [place / RUNS / name for name in _folders_in(place / RUNS)]
            result |= {run: own for run in runs if EXPERIMENT in (own := _stamps_of(run))}
    return found


def _version_of(scans: Iterable[dict[SafePath, dict[SafePath, Stamps]]]) -> str:
    digest = hashlib.sha256()
    for scan in scans:
        for result in scan.values():
            for place, stamps in result.items():
                digest.update(f"{place}\0{stamps}\0".encode(errors="replace"))
    return digest.hexdigest()[:16]


def _is_result(stamps: Stamps) -> bool:
    return EXPERIMENT in stamps or COMPARISON in stamps


def _runs_of(result: dict[SafePath, Stamps]) -> dict[SafePath, Stamps]:
    """The runs of a result, which are all its folders but that of a comparison."""
    return {place: stamps for place, stamps in result.items() if COMPARISON not in stamps}


def _folders_in(folder: SafePath) -> list[str]:
    try:
        return folder.list_folders()
    except (UnsafeFile, OSError):  # a link, or deleted since
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


def _stamps_of(folder: SafePath) -> Stamps:
    """When the files that a report reads have changed: settings, records, and the folder of the
    checkpoints. Links and special files are left out; the report refuses them.
    """
    stamps: Stamps = {}
    with suppress(UnsafeFile, OSError):
        for name, status in folder.list_files().items():
            if name.endswith(".bin") or name in (EXPERIMENT, METRICS, COMPARISON):
                stamps[name] = _stamp(status)
        checkpoints = (folder / CHECKPOINTS).status(FOLDER)
        if checkpoints is not None:
            stamps[CHECKPOINTS] = _stamp(checkpoints)
    return stamps


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
