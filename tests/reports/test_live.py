"""The live report: real processes on the loopback interface, files that grow, shrink, break and
go away, and a reader who must not lose the place.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from reports import conftest
from reports.rich_runs import write_server_run

from remanence.core.errors import InputError
from remanence.core.safe_path import SafePath
from remanence.reports.live import make_server
from remanence.reports.live_state import ReportState, find_results, read_progress
from remanence.results.ledger import header
from remanence.results.run import CHECKPOINTS, EXPERIMENT, LEDGER, METRICS, Run

wait_until = partial(conftest.wait_until, seconds=60)  # a page is drawn again between rounds

HOSTILE = "<img src=x onerror=alert(1)>"


class Growing:
    """A run that is a finished one up to a round, as files on a disk."""

    def __init__(self, whole: Run, folder: Path):
        self.whole, self.folder = whole, folder

    def reach(self, round: int) -> None:
        (self.folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        if not (self.folder / EXPERIMENT).exists():
            shutil.copy(self.whole.folder / EXPERIMENT, self.folder / EXPERIMENT)
        ledger = self.whole.ledger
        (self.folder / LEDGER).write_bytes(
            header(ledger.class_names) + ledger.records[ledger.records["round"] <= round].tobytes()
        )
        lines = [json.dumps(line) + "\n" for line in self.whole.metrics if line["round"] <= round]
        (self.folder / METRICS).write_text("".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_server_run(tmp_path_factory.mktemp("whole") / "run", rounds=8)


@pytest.fixture
def growing(whole: Run, tmp_path: Path) -> Growing:
    return Growing(whole, tmp_path / "watched" / "run")


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[subprocess.Popen[str], int]]]:
    """Run `remanence watch` in a child process; return the process and its port."""
    children = []

    def begin(*arguments: str) -> tuple[subprocess.Popen[str], int]:
        command = [sys.executable, "-m", "remanence", "watch", *arguments]
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        children.append(child)
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line.startswith("watching at http://127.0.0.1:"), line + (
            child.stderr.read() if child.stderr and child.poll() is not None else ""
        )
        return child, int(line.split(":")[2].split("/")[0])

    yield begin
    for child in children:
        child.kill()
        child.communicate()


def ask(
    port: int, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(
            method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        return (
            answer.status,
            {name.lower(): value for name, value in answer.getheaders()},
            answer.read(),
        )
    finally:
        connection.close()


def test_a_process_serves_and_ends_by_ctrl_c(growing: Growing, start: Callable[..., Any]) -> None:
    growing.reach(3)
    child, port = start(str(growing.folder), str(growing.folder.parent / "later"))
    status, headers, frame = ask(port)
    assert status == 200
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert b"<iframe" not in frame.split(b"<script>")[0]
    status, headers, state = ask(port, "/state")
    answer = json.loads(state)
    assert (
        answer["runs"][0]["round"],
        answer["runs"][0]["rounds"],
        answer["runs"][0]["finished"],
    ) == (
        3,
        8,
        False,
    )
    assert answer["waiting"] == ["later"]
    assert ask(port, "/state", If_None_Match=headers["etag"])[0] == 304
    status, headers, page = ask(port, "/page")
    assert status == 200
    assert b"Content-Security-Policy" in page  # the report's own, as in the file
    assert b"after round 3" in page

    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 130
    assert errors == "remanence: stopped\n"


def test_termination_has_its_own_code(tmp_path: Path, start: Callable[..., Any]) -> None:
    child, _ = start(str(tmp_path / "nothing yet"))
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 143
    assert "Traceback" not in errors


def test_strangers_are_refused(tmp_path: Path, start: Callable[..., Any]) -> None:
    (tmp_path / "secret").write_text("secret")
    _, port = start(str(tmp_path))
    assert ask(port, Host="evil.example")[0] == 421  # a name of a stranger that points at 127.0.0.1
    assert ask(port, Host=f"evil.example:{port}")[0] == 421
    # no port, or another one: not this server
    assert ask(port, "/state", Host="127.0.0.1")[0] == 421
    assert ask(port, Host=f"localhost:{port}")[0] == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"):
        status, headers, _ = ask(port, method=method)
        assert (status, headers["allow"]) == (405, "GET"), method
    for path in (
        "/secret",
        "/../secret",
        "//secret",
        "/page/",
        "/page?x=1",
        "/%2e%2e/secret",
        f"/{tmp_path}/secret",
        "/" + "a" * 70_000,
    ):
        status, _, content = ask(port, path)
        assert status in (404, 414), path
        assert b"secret" not in content
    with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
        raw.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b"Traceback" not in raw.recv(1000)
    assert ask(port)[0] == 200  # still there


def test_only_this_machine_can_see_it(tmp_path: Path) -> None:
    with make_server([tmp_path]) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert server.address == f"http://127.0.0.1:{server.server_port}/"


def test_files_that_grow_shrink_break_and_go(growing: Growing) -> None:
    state = ReportState([growing.folder])
    nothing = state.version()
    assert b"Waiting for a run" in state.page()[1]
    growing.reach(5)
    version, page = state.page()
    assert version == state.version() != nothing
    assert b"after round 5" in page
    assert state.page()[1] is page  # rendered once

    growing.reach(2)  # killed, and resumed from an older checkpoint
    assert b"after round 2" in state.page()[1]
    with (growing.folder / METRICS).open("ab") as file:
        file.write(b'{"round": 3, "time_')  # killed in the middle of a line
    assert b"after round 2" in state.page()[1]
    assert state.state()["runs"][0]["round"] == 2

    good = state.page()[1]
    config = (growing.folder / EXPERIMENT).read_bytes()
    (growing.folder / EXPERIMENT).write_bytes(config[: len(config) // 2])
    assert state.page() == ("", good)  # the last good page, and it will be tried again
    assert state.state()["error"]
    (growing.folder / EXPERIMENT).write_bytes(config)
    growing.reach(8)
    assert b"after round 8" in state.page()[1]
    assert state.state()["error"] == ""

    shutil.rmtree(growing.folder)
    assert state.state()["waiting"] == ["run"]
    assert b"Waiting for a run" in state.page()[1]


def test_a_page_that_never_could_be_drawn_says_why(growing: Growing) -> None:
    growing.folder.mkdir(parents=True)
    (growing.folder / EXPERIMENT).write_text(f'method = "{HOSTILE}"\nrounds = "many"\n')
    version, page = ReportState([growing.folder]).page()
    assert version == ""
    assert b"cannot be rendered yet" in page
    assert b"<img" not in page


def test_runs_are_found_below_a_folder(growing: Growing, tmp_path: Path) -> None:
    home = growing.folder.parent
    assert find_results(home) == []
    growing.reach(1)
    (home / "notes.txt").touch()
    Growing(growing.whole, home / "another").reach(2)
    assert find_results(home) == [SafePath(home) / "another", SafePath(home) / "run"]
    assert [run["round"] for run in ReportState([home]).state()["runs"]] == [2, 1]


def test_names_of_folders_stay_text(tmp_path: Path) -> None:
    page = ReportState([tmp_path / HOSTILE]).page()[1]
    assert HOSTILE.encode() not in page
    assert b"&lt;img" in page


def test_progress_of_a_finished_run(whole: Run) -> None:
    progress = read_progress(whole.files)
    assert progress is not None
    assert (
        progress["method"],
        progress["seed"],
        progress["round"],
        progress["rounds"],
        progress["finished"],
    ) == (
        "fedavg",
        0,
        8,
        8,
        True,
    )


def test_mistakes_get_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file: watch takes the folders"):
        make_server([tmp_path / "file"])
    with pytest.raises(InputError, match="at least one folder"):
        make_server([])
    with pytest.raises(InputError, match="is not a port"):
        make_server([tmp_path], 70_000)
    with (
        make_server([tmp_path]) as first,
        pytest.raises(InputError, match=f"port {first.server_port} cannot be used"),
    ):
        make_server([tmp_path], first.server_port)


@pytest.mark.slow
def test_a_reader_keeps_the_place(
    browser: Any, growing: Growing, start: Callable[..., Any]
) -> None:
    child, port = start(str(growing.folder))
    page = browser.new_page(viewport={"width": 1000, "height": 700})
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"http://127.0.0.1:{port}/")
    wait_until(page, "document.title.startsWith('Waiting for a run')")
    growing.reach(4)
    wait_until(page, "document.title.includes('fedavg')")
    front = "document.querySelector('iframe.front').contentDocument"
    wait_until(page, f"{front}.documentElement.dataset.drawn === 'all'")

    # the reader unfolds something, goes to a figure and chooses a round
    report = next(frame for frame in page.frames if frame.url.endswith("/page"))
    page.evaluate(f"{front}.querySelectorAll('details')[0].open = true")
    report.locator("#one-round input[type=range]").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.evaluate(
        f"{front}.scrollingElement.style.scrollBehavior = 'auto';"
        f" {front}.querySelector('#one-round').scrollIntoView()"
    )
    top = f"{front}.querySelector('#one-round').getBoundingClientRect().top"
    page.wait_for_timeout(300)
    before = page.evaluate(top)
    assert page.evaluate(f"{front}.querySelector('#one-round output').textContent") == "2"
    growing.reach(6)
    wait_until(page, f"{front}.body.textContent.includes('after round 6')")
    wait_until(page, f"{front}.documentElement.dataset.drawn === 'all'")
    wait_until(page, f"Math.abs({top} - {before}) < 3")
    assert page.evaluate(f"{front}.querySelectorAll('details')[0].open")
    wait_until(page, f"{front}.querySelector('#one-round output').textContent === '2'")
    assert "round 6 of 8" in page.inner_text("#status")

    # on hold nothing moves; then the newest comes
    page.click("#hold")
    growing.reach(8)
    wait_until(page, "document.querySelector('#status').textContent.includes('round 8 of 8')")
    page.wait_for_timeout(1000)
    assert page.evaluate(f"{front}.body.textContent.includes('after round 6')")
    page.click("#hold")
    wait_until(page, f"{front}.body.textContent.includes('after round 8')")
    assert page.evaluate("document.querySelectorAll('iframe').length") == 1

    assert complaints == []
    assert {
        url.split(str(port))[1] for url in requests if not url.startswith(("data:", "blob:"))
    } == {"/", "/state", "/page"}
    child.kill()
    child.wait()
    wait_until(page, "document.querySelector('#status').textContent.includes('does not answer')")
    page.close()
