from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from unsafe_files import PLANTS, SECRET, assert_untouched, link_to_file, make_outside, pipe

from remanence.core import safe_path, temporary_files
from remanence.core.errors import InputError, UnsafeFile
from remanence.core.files import lock
from remanence.core.safe_path import SafePath
from remanence.core.temporary_files import TEMPORARY

Plant = Callable[[Path, Path], None]
FILE_WORK: dict[str, Callable[[SafePath], object]] = {
    "is_regular_file": SafePath.is_regular_file,
    "reader": SafePath.reader,
    "read": SafePath.read,
    "append": SafePath.append,
    "open_at": lambda path: path.open_at(0),
    "write": lambda path: path.write(b"new"),
    "delete": SafePath.delete,
}
FOLDER_WORK: dict[str, Callable[[SafePath], object]] = {
    "is_folder": SafePath.is_folder,
    "list_names": SafePath.list_names,
    "list_files": SafePath.list_files,
    "list_folders": SafePath.list_folders,
    "make_folder": SafePath.make_folder,
    "delete_folder": SafePath.delete_folder,
    "write_folder": lambda path: path.write_folder({"a": b"new"}),
    "write_files": lambda path: path.write_files({"secret": b"new"}),
    "sweep": SafePath.sweep,
    "read a file in it": lambda path: (path / "secret").read(),
    "append to a file in it": lambda path: (path / "secret").append(),
    "truncate a file in it": lambda path: (path / "secret").open_at(0),
    "write a file in it": lambda path: (path / "secret").write(b"new"),
    "delete a file in it": lambda path: (path / "secret").delete(),
    "ask for a file in it": lambda path: (path / "secret").is_regular_file(),
    "make a folder in it": lambda path: (path / "new").make_folder(),
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return make_outside(tmp_path / "outside")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("work", FILE_WORK.values(), ids=FILE_WORK.keys())
@pytest.mark.parametrize("plant", PLANTS)
def test_no_file_is_opened_or_changed_through_a_link_or_special_file(
    run: Path, outside: Path, plant: Plant, work: Callable[[SafePath], object]
) -> None:
    plant(run / "metrics.jsonl", outside)
    with pytest.raises(UnsafeFile, match=r"metrics\.jsonl is a .* where a regular file belongs"):
        work(SafePath(run) / "metrics.jsonl")
    assert_untouched(outside)
    assert os.listdir(run) == ["metrics.jsonl"]


@pytest.mark.parametrize("work", FOLDER_WORK.values(), ids=FOLDER_WORK.keys())
@pytest.mark.parametrize("plant", PLANTS)
def test_no_folder_is_entered_through_a_link_or_special_file(
    run: Path, outside: Path, plant: Plant, work: Callable[[SafePath], object]
) -> None:
    plant(run / "checkpoints", outside)
    with pytest.raises(UnsafeFile, match=r"checkpoints is a .* where a folder belongs"):
        work(SafePath(run) / "checkpoints")
    assert_untouched(outside)
    assert os.listdir(run) == ["checkpoints"]


def test_a_refusal_is_one_sentence_with_the_exit_code_of_a_mistake(
    run: Path, outside: Path
) -> None:
    link_to_file(run / "a", outside)
    with pytest.raises(UnsafeFile) as caught:
        (SafePath(run) / "a").read()
    assert str(caught.value) == (
        f"{run / 'a'} is a link where a regular file belongs, and is neither opened nor changed:"
        " replace it by what belongs there, or delete it"
    )
    assert caught.value.exit_code == 2
    assert not isinstance(caught.value, InputError)  # readers take that for a damaged file


def test_a_folder_in_place_of_a_file_and_the_reverse_are_refused(run: Path) -> None:
    (run / "folder").mkdir()
    (run / "file").write_bytes(b"kept")
    for work in FILE_WORK.values():
        with pytest.raises(UnsafeFile, match="folder is a folder where a regular file belongs"):
            work(SafePath(run) / "folder")
    for work in FOLDER_WORK.values():
        with pytest.raises(UnsafeFile, match="file is a regular file where a folder belongs"):
            work(SafePath(run) / "file")
    assert (run / "file").read_bytes() == b"kept"


@pytest.mark.parametrize("plant", [link_to_file, pipe])
@pytest.mark.parametrize("work", ["read", "append", "open_at"])
def test_a_file_that_is_replaced_after_the_check_is_refused_and_does_not_hang(
    run: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant, work: str
) -> None:
    (run / "a").write_bytes(b"")
    checked = os.stat(run / "a")
    (run / "a").unlink()
    plant(run / "a", outside)
    monkeypatch.setattr(safe_path, "status_of", lambda name, folder: checked)
    with pytest.raises(UnsafeFile):
        FILE_WORK[work](SafePath(run) / "a")
    assert_untouched(outside)


def test_a_folder_that_is_replaced_after_the_check_is_refused(
    run: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = os.stat(run)
    (run / "checkpoints").symlink_to(outside)
    monkeypatch.setattr(safe_path, "status_of", lambda name, folder: checked)
    with pytest.raises(UnsafeFile):
        (SafePath(run) / "checkpoints" / "secret").append()
    assert_untouched(outside)


@pytest.mark.parametrize("work", ["append", "open_at"])
def test_a_file_with_a_second_name_is_not_written_in_place(
    run: Path, outside: Path, work: str
) -> None:
    os.link(outside / "secret", run / "metrics.jsonl")
    path = SafePath(run) / "metrics.jsonl"
    with pytest.raises(UnsafeFile, match=r"has 2 names \(hard links\).*replace it by a copy"):
        FILE_WORK[work](path)
    assert path.read() == SECRET
    path.write(b"new")  # replaces this name alone
    assert_untouched(outside)
    path.delete()
    assert_untouched(outside)


@pytest.mark.parametrize("name", ["", ".", "..", "../secret", "a/b", "/etc/passwd", "a\0b"])
def test_a_name_that_leads_elsewhere_is_refused(run: Path, name: str) -> None:
    with pytest.raises(InputError, match="is not the name of a file"):
        SafePath(run) / name


def test_the_folder_that_the_user_names_may_be_a_link(tmp_path: Path, run: Path) -> None:
    (tmp_path / "latest").symlink_to(run)
    folder = SafePath(tmp_path / "latest")
    (folder / "a").write(b"1")
    with (folder / "a").append() as file:
        file.write(b"23")
    with (folder / "a").open_at(2) as file:
        file.write(b"4")
    assert (run / "a").read_bytes() == b"124"
    assert (folder / "a").read(2) == b"12"
    assert folder.is_folder()
    assert folder.list_names() == ["a"]


def test_nothing_there_is_no_error_where_one_asks_or_deletes(tmp_path: Path, run: Path) -> None:
    (run / "file").write_bytes(b"")
    for root in (run, tmp_path / "absent", run / "file"):  # the last: the user named a file
        path = SafePath(root) / "checkpoints" / "a"
        assert not path.is_regular_file()
        assert not path.is_folder()
        assert path.status() is None
        assert path.list_names() == []
        path.delete()
        path.delete_folder()
        path.sweep()
    with pytest.raises(FileNotFoundError):
        (SafePath(run) / "a").read()


def test_a_folder_is_deleted_without_following_links(run: Path, outside: Path) -> None:
    inner = run / "checkpoints" / "round-0000001"
    inner.mkdir(parents=True)
    (inner / "link").symlink_to(outside / "secret")
    (inner / "folder").symlink_to(outside)
    (inner / "loop").symlink_to("..")
    os.mkfifo(inner / "pipe")
    (SafePath(run) / "checkpoints").delete_folder()
    assert os.listdir(run) == []
    assert_untouched(outside)


def test_folders_nested_too_deeply_to_delete_are_a_sentence(run: Path) -> None:
    (run / "deep").mkdir()
    here = os.open(run / "deep", os.O_RDONLY)
    for _ in range(sys.getrecursionlimit()):
        os.mkdir("a", dir_fd=here)
        inner = os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    try:
        with pytest.raises((InputError, OSError), match=r"too many folders inside|Too many open"):
            (SafePath(run) / "deep").delete_folder()
    finally:
        subprocess.run(["rm", "-r", str(run / "deep")], check=True)


def test_a_folder_of_files_replaces_an_older_one(run: Path) -> None:
    path = SafePath(run) / "round-0000001"
    path.write_folder({"a": b"1", "b": b"2"})
    path.write_folder({"a": b"3"})
    assert path.list_names() == ["a"]
    assert (path / "a").read() == b"3"
    assert os.listdir(run) == ["round-0000001"]


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_that_cannot_be_written_leaves_the_old_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = SafePath(run) / "round-0000001"
    path.write_folder({"a": b"1"})
    with monkeypatch.context() as patch:
        patch.setattr(safe_path, "flush", full_disk)
        with pytest.raises(OSError, match="No space left"):
            path.write_folder({"a": b"2"})
    assert (path / "a").read() == b"1"
    assert os.listdir(run) == ["round-0000001"]


def test_several_files_are_replaced_and_flushed_together(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, flushed = SafePath(run), list[int]()
    (folder / "a").write(b"0")
    contents = {"a": b"1", "b": b"2", "c": b"3"}
    with monkeypatch.context() as patch:
        patch.setattr(safe_path, "flush", lambda *files: flushed.append(len(files)))
        folder.write_files(contents)
    assert flushed == [3]
    folder.write_files({"b": b"4"})
    assert {name: (folder / name).read() for name in folder.list_names()} == contents | {"b": b"4"}


def test_of_several_files_none_is_replaced_where_one_cannot_be(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SafePath(run)
    folder.write_files({"a": b"1", "b": b"2"})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            folder.write_files({"a": b"3", "b": b"4", "c": b"5"})
    (run / "d").mkdir()
    with pytest.raises(UnsafeFile, match="d is a folder"):
        folder.write_files({"a": b"3", "d": b"4"})
    assert sorted(os.listdir(run)) == ["a", "b", "d"]
    assert [(folder / name).read() for name in "ab"] == [b"1", b"2"]


KILLED = """
import os, sys
from pathlib import Path
from remanence.core import safe_path
safe_path.flush = lambda file: os._exit(0)  # as by SIGKILL: nothing is cleaned up
path = safe_path.SafePath(Path(sys.argv[1])) / "checkpoints" / "x"
path.parent.make_folder()
path.write(bytes(1000)) if sys.argv[2] == "file" else path.write_folder({"a": bytes(1000)})
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_process_left_is_deleted_at_the_next_lock(run: Path, kind: str) -> None:
    source = Path(safe_path.__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", KILLED, str(run), kind],
        env=os.environ | {"PYTHONPATH": str(source)},
        check=True,
    )
    (left,) = os.listdir(run / "checkpoints")
    assert TEMPORARY.fullmatch(left)
    with lock(run):
        assert os.listdir(run / "checkpoints") == []


def test_only_what_we_named_is_deleted(run: Path, outside: Path) -> None:
    ours = ".remanence-0123456789abcdef.tmp"
    (run / ours).write_bytes(bytes(10))
    strangers = [".a.123.tmp", "a.tmp", f"{ours}~", ".remanence-0123.tmp"]
    for name in strangers:
        (run / name).write_bytes(b"kept")
    link = ".remanence-fedcba9876543210.tmp"
    (run / link).symlink_to(outside)
    pipe(run / ".remanence-0000000000000000.tmp", outside)
    SafePath(run).sweep(4)
    kept = {*strangers, link, ".remanence-0000000000000000.tmp"}
    assert set(os.listdir(run)) == kept
    assert_untouched(outside)


def test_folders_below_are_swept_as_far_as_asked_and_not_through_links(
    run: Path, outside: Path
) -> None:
    name = ".remanence-0123456789abcdef.tmp"
    (outside / "secret").rename(outside / name)
    (run / "a" / "b").mkdir(parents=True)
    (run / "link").symlink_to(outside)
    (run / "loop").symlink_to(".")
    for folder in (run, run / "a", run / "a" / "b"):
        (folder / name).write_bytes(b"")
    SafePath(run).sweep()
    assert (run / "a" / name).exists()
    SafePath(run).sweep(1)
    assert not (run / "a" / name).exists()
    assert (run / "a" / "b" / name).exists()
    SafePath(run).sweep(4)
    assert not (run / "a" / "b" / name).exists()
    assert (outside / name).read_bytes() == SECRET


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_being_written_is_not_swept(
    run: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path, flush = SafePath(run) / "report.html", safe_path.flush

    def sweep_and_flush(file: safe_path.IO[bytes]) -> None:
        SafePath(run).sweep()
        flush(file)

    monkeypatch.setattr(safe_path, "flush", sweep_and_flush)
    path.write(b"page") if kind == "file" else path.write_folder({"a": b"page"})
    assert (path if kind == "file" else path / "a").read() == b"page"


def test_a_temporary_file_that_is_swept_before_it_is_locked_is_made_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = temporary_files.make_file, []

    def make_and_sweep(name: str, folder: int) -> int:
        made.append(name)
        descriptor = make(name, folder)
        if len(made) == 1:
            SafePath(run).sweep()
        return descriptor

    monkeypatch.setattr(safe_path, "make_file", make_and_sweep)
    (SafePath(run) / "a").write(b"1")
    assert len(made) == 2
    assert os.listdir(run) == ["a"]
