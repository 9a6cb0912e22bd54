"""`remanence watch`: the report, live, while runs go on.

A small server on the loopback interface serves three things and nothing else: `/`, the frame;
`/page`, the report as it is now; `/state`, a few bytes that say whether anything changed. The frame
asks for the state, draws a new report behind the old one and exchanges the two when it stands, so
that a reader neither loses the place nor sees a flicker. The report inside is the file that
`remanence report` writes, with its own content security policy.

No path is ever read from an address, requests for another host are refused (a name that a stranger
points at 127.0.0.1 must not read your results), and what a killed run left behind is no error:
files are read as far as they go, and again when they have changed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from remanence.core.errors import TERMINATED, InputError, RemanenceError, Stopped
from remanence.core.signals import Terminated, sigterm_as_interrupt
from remanence.results.run import (
    CHECKPOINTS,
    COMPARISON,
    METRICS,
    RUNS,
    SPEC,
    Comparison,
    Run,
    load,
)

HOST = "127.0.0.1"
TAIL = 65_536  # bytes at the end of metrics.jsonl in which the last line is looked for
FRAME = Path(__file__).parent / "watch.html"


def watch(folders: Sequence[Path], port: int = 0, announce: Callable[[str], None] = print) -> None:
    """Serve the live report about folders until Ctrl-C; `announce` is told the address once it
    answers. Folders may appear later.
    """
    server = make_server(folders, port)
    with server, sigterm_as_interrupt():
        try:
            announce(server.address)
            server.serve_forever(poll_interval=0.2)
        except Terminated:
            raise Stopped("asked to end", TERMINATED) from None


def make_server(folders: Sequence[Path], port: int = 0) -> LiveServer:
    """The server, bound and not yet serving; port 0 takes any that is free."""
    if not folders:
        raise InputError("watch needs at least one folder: remanence watch DIR")
    file = next((folder for folder in folders if folder.exists() and not folder.is_dir()), None)
    if file is not None:
        raise InputError(f"{file} is a file: watch takes the folders of runs and comparisons")
    if not 0 <= port <= 65535:
        raise InputError(
            f"--port {port} is not a port: choose one from 1024 to 65535, or 0 for any that is free"
        )
    try:
        return LiveServer(ReportState(folders), port)
    except OSError as error:
        raise InputError(
            f"port {port} cannot be used ({error.strerror}): choose another --port, or 0 for"
            " any that is free"
        ) from None


class ReportState:
    """What is known about the watched folders: which results there are, whether they changed,
    and the page about them.
    """

    def __init__(self, folders: Sequence[Path]):
        self.folders = [Path(os.path.abspath(folder)) for folder in folders]
        self.drawing = threading.Lock()  # one page at a time; who comes later gets the same one
        self.drawn: tuple[str, bytes] = ("", b"")  # version and page
        self.trouble = ""  # why the newest page could not be drawn
        # how far runs are, by the files it was read from
        self.told: dict[Path, tuple[Any, dict[str, Any] | None]] = {}

    def version(self) -> str:
        """Changes whenever a file that the report reads does. Costs a look at the folders, no
        reading.
        """
        seen = hashlib.sha256()
        for folder in self.folders:
            for found in find_results(folder):
                for run in _runs_below(found):
                    seen.update(
                        f"{run}\0{[_stamp(path) for path in _files_of(run)]}\0".encode(
                            errors="replace"
                        )
                    )
                seen.update(f"{found}\0{_stamp(found / COMPARISON)}\0".encode(errors="replace"))
        return seen.hexdigest()[:16]

    def state(self) -> dict[str, Any]:
        """What the frame shows around the report."""
        version = self.version()
        there = {folder: find_results(folder) for folder in self.folders}
        runs = [
            run for results in there.values() for found in results for run in _runs_below(found)
        ]
        told = [progress for run in runs if (progress := self._progress(run)) is not None]
        waiting = [folder.name for folder, results in there.items() if not results]
        return {"version": version, "runs": told, "waiting": waiting, "trouble": self.trouble}

    def page(self) -> tuple[str, bytes]:
        """The report as it is now. -> version, page; the last good one where files are just
        being written
        """
        with self.drawing:
            version = self.version()
            if version == self.drawn[0]:
                return self.drawn
            try:
                content = self._render()
                self.trouble = ""
            # a file in the middle of a change
            except (RemanenceError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
                self.trouble = (
                    f"{type(error).__name__}: {error}"
                    if not isinstance(error, RemanenceError)
                    else str(error)
                )
                return (
                    "",
                    self.drawn[1] or _explain("The report cannot be drawn yet", self.trouble),
                )
            self.drawn = (version, content)
            return self.drawn

    def _progress(self, run: Path) -> dict[str, Any] | None:
        """How far a run is, read again only where its files have changed: a comparison may have
        hundreds of runs.
        """
        seen = [_stamp(path) for path in (run / SPEC, run / METRICS, run / CHECKPOINTS)]
        if self.told.get(run, (None, None))[0] != seen:
            self.told[run] = (seen, read_progress(run))
        return self.told[run][1]

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
            return _explain(
                "Waiting for a run",
                f"Nothing has begun in {names}. The report appears here by itself.",
            )
        from remanence.report.page import render_report

        return render_report(results).encode("utf-8", errors="replace")


def find_results(folder: Path) -> list[Path]:
    """The run or comparison in a folder or, where it is neither, those right below it; nothing
    where there is none yet.
    """
    if _is_result(folder):
        return [folder]
    try:
        return sorted(path for path in folder.iterdir() if _is_result(path))
    except OSError:  # not there yet, or gone again
        return []


def read_progress(run: Path) -> dict[str, Any] | None:
    """How far a run is, from its settings and the last line of its metrics; None while its
    settings are being written.
    """
    try:
        spec = Run(run).config
        finished = Run(run).finished
    except (RemanenceError, OSError, ValueError):
        return None
    last = _last_line(run / METRICS)
    name = f"{run.parent.parent.name}/{run.name}" if run.parent.name == RUNS else run.name
    return {
        "name": name, "method": spec.method, "seed": spec.seed, "round": int(last.get("round") or 0), "rounds": spec.total_rounds,
        "finished": finished,
    }  # fmt: skip


def _is_result(folder: Path) -> bool:
    return (folder / SPEC).is_file() or (folder / COMPARISON).is_file()


def _runs_below(found: Path) -> list[Path]:
    """The folders of the runs of a run or a comparison."""
    if not (found / COMPARISON).is_file():
        return [found]
    try:
        return sorted(path for path in (found / RUNS).iterdir() if (path / SPEC).is_file())
    except OSError:
        return []


def _files_of(run: Path) -> list[Path]:
    """What a report reads: the settings, everything recorded, and the folder whose entries are
    the checkpoints.
    """
    try:
        recorded = sorted(
            path for path in run.iterdir() if path.suffix == ".bin" or path.name in (SPEC, METRICS)
        )
    except OSError:
        return []
    return [*recorded, run / CHECKPOINTS]


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        about = path.stat()
    except OSError:
        return (0, 0, 0)
    return (about.st_mtime_ns, about.st_size, about.st_ino)


def _last_line(path: Path) -> dict[str, Any]:
    """The last whole line of a file of JSON lines."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:  # cut short by a kill, or still being written
            continue
        if isinstance(found, dict):
            return found
    return {}


def _explain(title: str, text: str) -> bytes:
    """A page with one message, for the time before there is a report."""
    import html

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


class LiveServer(ThreadingHTTPServer):
    """One address, one board; a slow drawing keeps nobody from asking for the state."""

    daemon_threads = True

    def __init__(self, board: ReportState, port: int):
        super().__init__((HOST, port), _Answer)
        self.board = board
        self.frame = FRAME.read_bytes().replace(b"\r\n", b"\n")
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no news."""


class _Answer(BaseHTTPRequestHandler):
    """Answers GET for three fixed addresses."""

    server: LiveServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "remanence", ""
    timeout = 60

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in self.server.hosts:
            return self._send(
                HTTPStatus.MISDIRECTED_REQUEST,
                b"this server answers for 127.0.0.1 and localhost only\n",
            )
        if self.path == "/":
            return self._send(
                HTTPStatus.OK, self.server.frame, "text/html", _frame_policy(self.server.frame)
            )
        if self.path == "/state":
            content = json.dumps(self.server.board.state()).encode()
            return self._send_unless_known(
                hashlib.sha256(content).hexdigest()[:16],
                content,
                "application/json",
                "default-src 'none'",
            )
        if self.path == "/page":
            version, content = self.server.board.page()
            return self._send(
                HTTPStatus.OK,
                content,
                "text/html",
                "frame-ancestors 'self'",
                {"X-Version": version},
            )
        self._send(HTTPStatus.NOT_FOUND, b"there is nothing here\n")

    def _send_unless_known(self, tag: str, content: bytes, kind: str, policy: str) -> None:
        if self.headers.get("If-None-Match") == f'"{tag}"':
            return self._send(HTTPStatus.NOT_MODIFIED, b"", kind, policy, {"ETag": f'"{tag}"'})
        self._send(HTTPStatus.OK, content, kind, policy, {"ETag": f'"{tag}"'})

    def _send(
        self,
        status: HTTPStatus,
        content: bytes,
        kind: str = "text/plain",
        policy: str = "default-src 'none'",
        more: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        fixed = {
            "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content)), "Cache-Control": "no-store",
            "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
        }  # fmt: skip
        for name, value in (fixed | (more or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if status is not HTTPStatus.NOT_MODIFIED:
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Every other method, and what is no HTTP: refused without echoing anything back."""
        status = (
            HTTPStatus.METHOD_NOT_ALLOWED
            if code == HTTPStatus.NOT_IMPLEMENTED
            else HTTPStatus(code)
        )
        self.close_connection = True
        self._send(status, b"only GET\n", more={"Connection": "close", "Allow": "GET"})

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not worth a line each."""


def _frame_policy(frame: bytes) -> str:
    """The frame may run its own script, ask this server and show its pages; nobody may show the
    frame.
    """
    text = frame.decode()
    hashes = {
        name: base64.b64encode(
            hashlib.sha256(text.split(f"<{name}>")[1].split(f"</{name}>")[0].encode()).digest()
        ).decode()
        for name in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src"
        f" 'sha256-{hashes['style']}'; connect-src 'self'; "
        "frame-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
