"""`remanence watch`: a live report in the browser while runs go on.

A small server on the loopback interface serves three addresses: `/`, a frame; `/page`, the current
report; `/state`, a short text that changes when the files do (live_state.py). The frame
(watch.html) polls the state, loads a new report in the background and shows it when it is complete,
at the same scroll position. The report inside is the file that `remanence report` writes, with its
own content security policy.

No path is read from an address. Requests with another host name are rejected, so that a foreign
name that resolves to 127.0.0.1 cannot read the results.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from remanence.core.errors import TERMINATED, InputError, Stopped
from remanence.core.files import check_no_file
from remanence.core.signals import Terminated, sigterm_as_interrupt
from remanence.reports.live_state import ReportState

HOST = "127.0.0.1"
FRAME = Path(__file__).parent / "watch.html"


def watch(folders: Sequence[Path], port: int = 0, announce: Callable[[str], None] = print) -> None:
    """Serve the live report about folders until Ctrl-C.

    Args:
        folders: Of runs and comparisons; they may appear later.
        port: To listen at; 0 takes a free one.
        announce: Called with the address when the server is ready.
    """
    server = make_server(folders, port)
    with server, sigterm_as_interrupt():
        try:
            announce(server.address)
            server.serve_forever(poll_interval=0.2)
        except Terminated:
            raise Stopped("asked to end", TERMINATED) from None


def make_server(folders: Sequence[Path], port: int = 0) -> LiveServer:
    """The server, bound but not yet serving; port 0 takes a free one."""
    if not folders:
        raise InputError("watch needs at least one folder: remanence watch DIR")
    for folder in folders:
        check_no_file(folder, "watch takes the folders of runs and comparisons")
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


class LiveServer(ThreadingHTTPServer):
    """Serves the report of some folders; every request has a thread of its own."""

    daemon_threads = True

    def __init__(self, report: ReportState, port: int):
        super().__init__((HOST, port), _RequestHandler)
        self.report = report
        self.frame = FRAME.read_bytes().replace(b"\r\n", b"\n")
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closed the connection is not an error; anything else is shown."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _RequestHandler(BaseHTTPRequestHandler):
    """Responds to GET at three fixed addresses."""

    server: LiveServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "remanence", ""
    timeout = 60

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in self.server.hosts:
            return self._send(
                HTTPStatus.MISDIRECTED_REQUEST,
                b"this server is for 127.0.0.1 and localhost only\n",
            )
        if self.path == "/":
            frame = self.server.frame
            return self._send(HTTPStatus.OK, frame, "text/html", _frame_policy(frame))
        if self.path == "/state":
            content = json.dumps(self.server.report.state()).encode()
            tag = hashlib.sha256(content).hexdigest()[:16]
            return self._send_unless_cached(tag, content, "application/json", "default-src 'none'")
        if self.path == "/page":
            version, content = self.server.report.page()
            return self._send(
                HTTPStatus.OK,
                content,
                "text/html",
                "frame-ancestors 'self'",
                {"X-Version": version},
            )
        self._send(HTTPStatus.NOT_FOUND, b"not found\n")

    def _send_unless_cached(self, tag: str, content: bytes, kind: str, policy: str) -> None:
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
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }
        for name, value in (fixed | (more or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if status is not HTTPStatus.NOT_MODIFIED:
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Reject other methods and malformed requests, without echoing them."""
        status = (
            HTTPStatus.METHOD_NOT_ALLOWED
            if code == HTTPStatus.NOT_IMPLEMENTED
            else HTTPStatus(code)
        )
        self.close_connection = True
        self._send(status, b"only GET\n", more={"Connection": "close", "Allow": "GET"})

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not logged."""


def _frame_policy(frame: bytes) -> str:
    """The policy of the frame: it may run its own script and show pages of this server, and no
    page may embed it.
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
