from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from remanence.core import files, safe_path
from remanence.core.errors import InputError, RunFailed


def test_an_atomic_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    files.write_atomically(path, b"a long first version")
    files.write_atomically(path, b"short")
    assert path.read_bytes() == b"short"
    assert [p.name for p in tmp_path.iterdir()] == ["experiment.toml"]


@pytest.mark.parametrize("stage", ["flush", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    path = tmp_path / "experiment.toml"
    files.write_atomically(path, b"old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = (safe_path, "flush") if stage == "flush" else (safe_path.os, "replace")
    monkeypatch.setattr(*target, fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["experiment.toml"]


def test_content_is_on_the_disk_before_the_name_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        safe_path.os, "fsync", lambda descriptor: (events.append("fsync"), fsync(descriptor))[1]
    )
    monkeypatch.setattr(
        safe_path.os, "replace", lambda *a, **k: (events.append("replace"), replace(*a, **k))[1]
    )
    files.write_atomically(tmp_path / "a", b"x")
    assert events == ["fsync", "replace", "fsync"]  # the file, its name, the folder


def test_sha256_of_nothing_is_the_known_one() -> None:
    assert files.sha256(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize(
    ("number", "kind", "sentence"),
    [
        (
            errno.ENOSPC,
            RunFailed,
            "the disk that holds .* is full: nothing saved so far is lost; .* remanence resume",
        ),
        (errno.EDQUOT, RunFailed, "is full"),
        (errno.EROFS, InputError, "cannot write to .*: choose another folder"),
        (errno.EACCES, InputError, "cannot write to"),
        (errno.EPERM, InputError, "cannot write to"),
    ],
)
def test_a_full_or_closed_disk_is_explained(
    tmp_path: Path, number: int, kind: type[Exception], sentence: str
) -> None:
    with (
        pytest.raises(kind, match=sentence),
        files.translate_disk_errors(tmp_path, resumable=True),
    ):
        raise OSError(number, os.strerror(number))


def test_a_full_disk_names_resume_only_where_there_is_a_run(tmp_path: Path) -> None:
    with (
        pytest.raises(RunFailed, match=r"free some space, then repeat the command$"),
        files.translate_disk_errors(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "full")


def test_other_errors_keep_their_own_name(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), files.translate_disk_errors(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "reset")


def test_a_folder_is_locked_for_others_until_it_is_left(tmp_path: Path) -> None:
    with (
        files.lock(tmp_path),
        pytest.raises(InputError, match="is in use by another remanence process"),
        files.lock(tmp_path),
    ):
        pass
    with files.lock(tmp_path):
        pass


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    code = f"""
import os, pathlib
from remanence.core import files, safe_path
with files.lock(pathlib.Path({str(tmp_path)!r})):
    os._exit(0)  # nothing is cleaned up
"""
    source = Path(files.__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(source)}, check=True
    )
    assert (tmp_path / ".lock").exists()
    with files.lock(tmp_path):
        pass


MARKS = ("experiment.toml", "comparison.toml")


def test_a_new_or_empty_folder_is_taken(tmp_path: Path) -> None:
    files.create_output_dir(tmp_path / "a" / "b", False, MARKS)
    assert (tmp_path / "a" / "b").is_dir()
    files.create_output_dir(tmp_path / "a" / "b", False, MARKS)
    files.create_output_dir(tmp_path / "a" / "b", True, MARKS)
    assert (tmp_path / "a" / "b").is_dir()


def test_a_run_of_ours_is_kept_unless_overwriting_was_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "comparison.toml").write_text("")
    with pytest.raises(
        InputError,
        match=r"holds an earlier run: finish it with remanence resume .*, start anew with"
        r" --overwrite, or choose",
    ):
        files.create_output_dir(folder, False, MARKS)
    files.create_output_dir(folder, True, MARKS)
    assert list(folder.iterdir()) == []


def test_a_strangers_folder_is_never_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.tex").write_text("precious")
    with pytest.raises(InputError, match=r"exists and is not empty: choose another --out$"):
        files.create_output_dir(folder, False, MARKS)
    with pytest.raises(InputError, match="not a run of ours, so --overwrite will not delete it"):
        files.create_output_dir(folder, True, MARKS)
    assert (folder / "chapter1.tex").read_text() == "precious"


def test_a_run_in_use_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text("")
    with files.lock(tmp_path), pytest.raises(InputError, match="in use by another"):
        files.create_output_dir(tmp_path, True, MARKS)
    assert (tmp_path / "experiment.toml").exists()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("")
    with pytest.raises(InputError, match="out is a file: --out names a folder"):
        files.create_output_dir(path, True, MARKS)


def test_a_file_among_the_parents_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="out"):
        files.create_output_dir(tmp_path / "out" / "run", False, MARKS)


def test_a_link_to_a_run_can_be_overwritten_or_is_refused(tmp_path: Path) -> None:
    """A results folder is often a link to a larger disk."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "experiment.toml").write_text("")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    try:
        files.create_output_dir(link, True, MARKS)
    except InputError:
        assert (tmp_path / "real" / "experiment.toml").exists()
    else:
        assert list(link.iterdir()) == []


def test_a_folder_for_output_is_made_unless_a_file_is_in_the_way(tmp_path: Path) -> None:
    files.make_folder(tmp_path / "a" / "b")
    files.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "c"):
        with pytest.raises(InputError, match=r"cannot write to .*file is a file; choose another"):
            files.make_folder(path)


def test_an_output_folder_is_checked_without_changes(tmp_path: Path) -> None:
    files.check_output_dir(tmp_path / "new", False, MARKS)
    assert not (tmp_path / "new").exists()
    (tmp_path / "experiment.toml").write_text("")
    files.check_output_dir(tmp_path, True, MARKS)
    assert (tmp_path / "experiment.toml").exists()
    with pytest.raises(InputError, match="holds an earlier run"):
        files.check_output_dir(tmp_path, False, MARKS)
