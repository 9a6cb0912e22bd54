"""Fetching from a server on the loopback that can break the connection, ignore ranges and send the
wrong bytes.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from remanence.core.errors import InputError, RunFailed
from remanence.data import fetch as fetching
from remanence.data import http_download
from remanence.data.downloads import BY_HAND, COMES_WITH, DOWNLOADS, USER_DATA, Download
from remanence.data.fetch import fetch

CONTENT = bytes(range(256)) * 40  # 10,240 bytes


class Publisher(ThreadingHTTPServer):
    """Serves `files`; each test sets its defects."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.knows_ranges = True
        # bytes of body after which each of the next answers stops
        self.breaks_after: list[int] = []
        self.fails = 0  # answers of 503 first
        self.asked: list[str] = []  # the Range header of each request

    def item(
        self, name: str, content: bytes, into: str = "set", holds: str = "", md5: str = ""
    ) -> Download:
        self.files[f"/{name}"] = content
        return Download(
            f"http://127.0.0.1:{self.server_port}/{name}",
            md5 or hashlib.md5(content).hexdigest(),
            into,
            holds,
        )


class Answer(BaseHTTPRequestHandler):
    server: Publisher

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.server.asked.append(wanted)
        if self.server.fails:
            self.server.fails -= 1
            self.send_error(503)
            return
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = (
            int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
            if wanted and self.server.knows_ranges
            else 0
        )  # type: ignore[index]
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        body = content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(
            body[: self.server.breaks_after.pop(0)] if self.server.breaks_after else body
        )

    def log_message(self, *words: object) -> None: ...


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    monkeypatch.setattr(http_download, "PAUSE", 0.0)
    monkeypatch.setattr(http_download, "CHUNK", 1000)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Publisher() as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield server
        server.shutdown()


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def test_a_file_is_fetched_and_its_progress_reported(tmp_path: Path, publisher: Publisher) -> None:
    reported: list[tuple[int, int | None]] = []
    folder = fetch(
        "x",
        tmp_path / "new",
        downloads=[publisher.item("a.bin", CONTENT)],
        report=lambda _, done, total: reported.append((done, total)),
    )
    assert folder == tmp_path / "new" / "set"
    assert (folder / "a.bin").read_bytes() == CONTENT
    assert reported[0] == (1000, 10_240)
    assert reported[-1] == (10_240, 10_240)
    assert leftovers(tmp_path / "new") == []


def test_without_a_terminal_progress_is_a_line_a_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with fetching.show_progress() as report:
        for done in range(0, 101, 5):
            report("a.bin", done, 100)
        report("b.bin", 7, None)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["a.bin: 0 bytes of 100 bytes", "a.bin: 10 bytes of 100 bytes"]
    assert len(lines) == 11 + 1
    with fetching.show_progress(quiet=True) as report:
        report("a.bin", 1, 2)
    assert capsys.readouterr().err == ""


def test_what_is_there_is_not_asked_for_again(tmp_path: Path, publisher: Publisher) -> None:
    item = publisher.item("a.bin", CONTENT)
    fetch("x", tmp_path, downloads=[item])
    fetch("x", tmp_path, downloads=[item])
    assert len(publisher.asked) == 1


def test_a_broken_line_goes_on_where_it_broke(tmp_path: Path, publisher: Publisher) -> None:
    publisher.breaks_after = [3000, 500]
    fetch("x", tmp_path, downloads=[publisher.item("a.bin", CONTENT)])
    assert publisher.asked == ["", "bytes=3000-", "bytes=3500-"]
    assert (tmp_path / "set" / "a.bin").read_bytes() == CONTENT


def test_a_line_that_stays_broken_keeps_what_came_for_the_next_command(
    tmp_path: Path, publisher: Publisher
) -> None:
    item = publisher.item("a.bin", CONTENT)
    publisher.breaks_after = [3000, 0, 0, 0, 0, 0]
    with pytest.raises(RunFailed, match="the same command continues from there"):
        fetch("x", tmp_path, downloads=[item])
    assert not (tmp_path / "set").exists()  # half a file never looks like a whole one
    publisher.breaks_after, publisher.asked = [], []
    fetch("x", tmp_path, downloads=[item])
    assert publisher.asked == ["bytes=3000-"]
    assert (tmp_path / "set" / "a.bin").read_bytes() == CONTENT


def test_a_publisher_without_ranges_begins_again(tmp_path: Path, publisher: Publisher) -> None:
    publisher.knows_ranges, publisher.breaks_after = False, [3000]
    fetch("x", tmp_path, downloads=[publisher.item("a.bin", CONTENT)])
    assert (tmp_path / "set" / "a.bin").read_bytes() == CONTENT


def test_all_bytes_there_but_not_yet_in_place(tmp_path: Path, publisher: Publisher) -> None:
    item = publisher.item("a.bin", CONTENT)
    # killed between the last byte and the rename
    (tmp_path / ".set-a.bin.part").write_bytes(CONTENT)
    fetch("x", tmp_path, downloads=[item])
    assert (tmp_path / "set" / "a.bin").read_bytes() == CONTENT


def test_more_bytes_than_the_publisher_has_belong_to_another_file(
    tmp_path: Path, publisher: Publisher
) -> None:
    item = publisher.item("a.bin", CONTENT)
    (tmp_path / ".set-a.bin.part").write_bytes(CONTENT + b"more")
    fetch("x", tmp_path, downloads=[item])
    assert (tmp_path / "set" / "a.bin").read_bytes() == CONTENT


def test_a_wrong_hash_is_thrown_away(tmp_path: Path, publisher: Publisher) -> None:
    with pytest.raises(RunFailed, match=r"MD5 sum .* instead of 0{32}, so it was deleted"):
        fetch("x", tmp_path, downloads=[publisher.item("a.bin", CONTENT, md5="0" * 32)])
    assert list(tmp_path.iterdir()) == []


def test_a_busy_publisher_is_asked_again_and_a_missing_file_is_not(
    tmp_path: Path, publisher: Publisher
) -> None:
    publisher.fails = 2
    fetch("x", tmp_path, downloads=[publisher.item("a.bin", CONTENT)])
    assert len(publisher.asked) == 3
    with pytest.raises(RunFailed, match="404 Not Found: the publisher has moved the file"):
        fetch(
            "x",
            tmp_path,
            downloads=[Download(f"http://127.0.0.1:{publisher.server_port}/no.bin", "", "other")],
        )
    assert len(publisher.asked) == 4


def packed_tar(names: dict[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as packed:
        for name, content in names.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return raw.getvalue()


# with and without a folder of its own in the archive
@pytest.mark.parametrize("top", ["", "cifar-inside/"])
def test_a_tar_is_unpacked_to_where_the_reader_looks(
    tmp_path: Path, publisher: Publisher, top: str
) -> None:
    raw = packed_tar({f"{top}train.bin": b"one", f"{top}test.bin": b"two"})
    folder = fetch(
        "x", tmp_path, downloads=[publisher.item("c.tar.gz", raw, into="cifar", holds="test.bin")]
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "train.bin": b"one",
        "test.bin": b"two",
    }
    assert leftovers(tmp_path) == []


def test_a_zip_is_unpacked_beside_files_that_are_there(
    tmp_path: Path, publisher: Publisher
) -> None:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as packed:
        packed.writestr("gzip/a.gz", b"one")
    (tmp_path / "emnist").mkdir()
    (tmp_path / "emnist" / "mine.txt").write_bytes(b"kept")
    fetch(
        "x",
        tmp_path,
        downloads=[publisher.item("gzip.zip", raw.getvalue(), into="emnist", holds="a.gz")],
    )
    assert sorted(path.name for path in (tmp_path / "emnist").iterdir()) == ["a.gz", "mine.txt"]


def test_an_archive_that_would_write_elsewhere_is_refused(
    tmp_path: Path, publisher: Publisher
) -> None:
    raw = packed_tar({"../evil.bin": b"x", "test.bin": b"y"})
    with pytest.raises(RunFailed, match="could not be unpacked"):
        fetch(
            "x",
            tmp_path / "root",
            downloads=[publisher.item("c.tar.gz", raw, into="cifar", holds="test.bin")],
        )
    assert not (tmp_path / "evil.bin").exists()
    assert not (tmp_path / "root" / "evil.bin").exists()


def test_an_archive_without_what_it_should_hold(tmp_path: Path, publisher: Publisher) -> None:
    with pytest.raises(RunFailed, match=r"does not hold test\.bin"):
        fetch(
            "x",
            tmp_path,
            downloads=[
                publisher.item("c.tar.gz", packed_tar({"a": b"x"}), into="cifar", holds="test.bin")
            ],
        )
    assert not (tmp_path / "cifar").exists()


def test_optional_files_come_when_asked_for(tmp_path: Path, publisher: Publisher) -> None:
    first = publisher.item("a.bin", CONTENT)
    more = Download(
        publisher.item("b.bin", b"b").url, hashlib.md5(b"b").hexdigest(), "set", optional=True
    )
    fetch("x", tmp_path, downloads=[first, more])
    assert not (tmp_path / "set" / "b.bin").exists()
    fetch("x", tmp_path, downloads=[first, more], everything=True)
    assert (tmp_path / "set" / "b.bin").read_bytes() == b"b"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("femnist", "preprocess.sh"),
        ("digits", "needs no files"),
        ("npz", "your own files"),
        ("cifar", "did you mean cifar1"),
    ],
)
def test_what_cannot_be_fetched_says_what_to_do(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        fetch(name, tmp_path)


def test_without_a_data_folder_there_is_a_sentence() -> None:
    with pytest.raises(InputError, match="name one with --data-dir or REMANENCE_DATA"):
        fetch("mnist", None)


def test_every_dataset_can_be_had_somehow() -> None:
    from remanence.data import DATASETS

    assert set(DATASETS) <= DOWNLOADS.keys() | BY_HAND.keys() | set(COMES_WITH) | set(USER_DATA)
    assert all(
        re.fullmatch("[0-9a-f]{32}", item.md5) for items in DOWNLOADS.values() for item in items
    )
