from __future__ import annotations

import os
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from remanence.core.errors import InputError
from remanence.data import image_folders, load_dataset

image_module = pytest.importorskip("PIL.Image", reason="images in folders need Pillow")


def save(
    path: Path,
    color: tuple[int, int, int] = (10, 20, 30),
    size: tuple[int, int] = (6, 4),
    mode: str = "RGB",
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image_module.new("RGB", size, color).convert(mode).save(path)
    return path


def make_classes(top: Path, counts: dict[str, int], shade: int = 0) -> None:
    for number, (name, count) in enumerate(counts.items()):
        for index in range(count):
            save(top / name / f"{index}.png", (shade + number, index, 7))


def test_a_folder_a_class_holds_out_a_test_set(tmp_path: Path) -> None:
    """Five images of each class, a fifth held out: 4 + 1 of each. Red tells the class, green
    the file; size 6 wide, 4 high.
    """
    make_classes(tmp_path / "mine", {"cat": 5, "dog": 5})
    dataset = load_dataset("folder", {"path": "mine"}, tmp_path)
    assert dataset.classes == ("cat", "dog")
    assert np.bincount(dataset.train.y).tolist() == [4, 4]
    assert np.bincount(dataset.test.y).tolist() == [1, 1]
    assert dataset.shape == (3, 4, 6)
    for split in (dataset.train, dataset.test):
        assert np.array_equal(split.x[:, 0, 0, 0], split.y)
        assert (split.x[:, 2] == 7).all()
    assert sorted([*dataset.train.x[:, 1, 0, 0], *dataset.test.x[:, 1, 0, 0]]) == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
    ]


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_train_and_test_folders_are_kept_apart(tmp_path: Path, name: str) -> None:
    make_classes(tmp_path / "train", {"a": 3, "b": 2})
    make_classes(tmp_path / name, {"b": 1}, shade=100)
    dataset = load_dataset("folder", {"path": str(tmp_path)}, None)
    assert dataset.train.y.tolist() == [0, 0, 0, 1, 1]
    assert dataset.test.y.tolist() == [1]
    assert dataset.test.x[0, 0, 0, 0] == 100


def test_folders_inside_a_class_and_other_files_are_fine(tmp_path: Path) -> None:
    make_classes(tmp_path, {"a/deep/deeper": 2, "b": 2})
    (tmp_path / "a" / "notes.txt").write_text("no image")
    (tmp_path / "a" / ".hidden.png").write_text("no image")
    (tmp_path / "readme.md").write_text("no class")
    (tmp_path / ".cache").mkdir()
    dataset = load_dataset("folder", {"path": str(tmp_path), "test": 0.5, "sites": False}, None)
    assert dataset.classes == ("a", "b")
    assert len(dataset.train) + len(dataset.test) == 4
    with pytest.raises(InputError, match="write sites=false if the outer folders are classes"):
        load_dataset("folder", {"path": str(tmp_path)}, None)


def test_sizes_and_channels_are_chosen(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", size=(5, 9))
    save(tmp_path / "a" / "2.png", size=(8, 8), mode="L")
    save(tmp_path / "b" / "1.jpg", size=(8, 3))
    save(tmp_path / "b" / "2.bmp", size=(2, 2), mode="P")
    assert load_dataset("folder", {"path": str(tmp_path), "size": 8, "test": 0.5}, None).shape == (
        3,
        8,
        8,
    )
    assert load_dataset(
        "folder", {"path": str(tmp_path), "size": 5, "channels": 1, "test": 0.5}, None
    ).shape == (1, 5, 5)
    with pytest.raises(
        InputError, match=r"2\.png has 8x8 pixels while .*1\.png has 5x9: give size="
    ):
        load_dataset("folder", {"path": str(tmp_path), "test": 0.5}, None)


def huge_png(path: Path, side: int) -> None:
    """A small file whose header promises side x side pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 100))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [10_000, 50_000])
def test_decompression_bombs_are_refused(tmp_path: Path, side: int) -> None:
    """Pillow itself warns from 89 million pixels and stops at twice that: 10^8 and 25 * 10^8
    are both refused here.
    """
    make_classes(tmp_path, {"a": 1, "b": 1})
    huge_png(tmp_path / "b" / "bomb.png", side)
    with pytest.raises(InputError, match=r"bomb\.png is refused because it unpacks to"):
        load_dataset("folder", {"path": str(tmp_path), "size": 8}, None)


def test_the_limit_holds_where_a_program_lifted_pillows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_module, "MAX_IMAGE_PIXELS", None)
    make_classes(tmp_path, {"a": 1, "b": 1})
    huge_png(tmp_path / "b" / "bomb.png", 10_000)
    with pytest.raises(
        InputError, match=r"bomb\.png is refused because it unpacks to 10000x10000 pixels"
    ):
        load_dataset("folder", {"path": str(tmp_path), "size": 8}, None)


def test_a_lower_limit_of_pillow_holds_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 4 x 6 = 24 is above, but not twice as much, so Pillow would only warn
    monkeypatch.setattr(image_module, "MAX_IMAGE_PIXELS", 20)
    make_classes(tmp_path, {"a": 1, "b": 1})
    with pytest.raises(InputError, match=r"0\.png is refused"):
        load_dataset("folder", {"path": str(tmp_path)}, None)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw[:45],
        lambda raw: b"",
        lambda raw: b"GIF89a" + raw,
        lambda raw: raw[:50] + b"\xff" + raw[51:],
    ],
)
def test_damaged_images_are_named(tmp_path: Path, spoil: object) -> None:
    make_classes(tmp_path, {"a": 2, "b": 2})
    path = tmp_path / "b" / "1.png"
    path.write_bytes(spoil(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(InputError, match=r"b/1\.png is damaged .*one that Pillow cannot read"):
        load_dataset("folder", {"path": str(tmp_path)}, None)


def test_sixteen_bits_are_refused_rather_than_cut(tmp_path: Path) -> None:
    make_classes(tmp_path, {"a": 2, "b": 1})
    image_module.fromarray(np.full((4, 6), 40_000, dtype=np.uint16)).save(
        tmp_path / "b" / "deep.png"
    )
    with pytest.raises(InputError, match=r"deep\.png has more than 8 bits"):
        load_dataset("folder", {"path": str(tmp_path)}, None)


def test_links_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    secret = save(tmp_path / "outside" / "secret.png")
    make_classes(tmp_path / "mine", {"a": 2, "b": 2})
    (tmp_path / "mine" / "b" / "link.png").symlink_to(secret)
    with pytest.raises(InputError, match=r"link\.png is a link that leaves"):
        load_dataset("folder", {"path": "mine"}, tmp_path)
    (tmp_path / "mine" / "b" / "link.png").unlink()
    (tmp_path / "mine" / "c").symlink_to(tmp_path / "outside")
    with pytest.raises(InputError, match=r"mine/c is a link that leaves"):
        load_dataset("folder", {"path": "mine"}, tmp_path)


def test_links_inside_the_folder_are_read_if_they_are_files(tmp_path: Path) -> None:
    make_classes(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "b" / "again.png").symlink_to(tmp_path / "a" / "0.png")
    dataset = load_dataset("folder", {"path": str(tmp_path)}, None)
    assert len(dataset.train) + len(dataset.test) == 5
    (tmp_path / "b" / "round").symlink_to(tmp_path / "b")
    with pytest.raises(InputError, match="round is a link to a folder"):
        load_dataset("folder", {"path": str(tmp_path)}, None)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_does_not_keep_us_waiting(tmp_path: Path) -> None:
    make_classes(tmp_path, {"a": 2, "b": 2})
    os.mkfifo(tmp_path / "b" / "pipe.png")
    with pytest.raises(InputError, match=r"pipe\.png is damaged .*an image file"):
        load_dataset("folder", {"path": str(tmp_path)}, None)


def test_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"found no images in {tmp_path}"):
        load_dataset("folder", {"path": str(tmp_path)}, None)
    make_classes(tmp_path, {"a": 2})
    (tmp_path / "b").mkdir()
    with pytest.raises(InputError, match=r"found no images in .*/b: .*\.png"):
        load_dataset("folder", {"path": str(tmp_path)}, None)
    make_classes(tmp_path / "split" / "train", {"a": 1, "b": 1})
    (tmp_path / "split" / "test").mkdir()
    with pytest.raises(InputError, match=r"found no images in .*split/test"):
        load_dataset("folder", {"path": str(tmp_path / "split")}, None)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, r"folder\(path='...'\)"),
        ({"path": "nowhere"}, "searched .*nowhere"),
        ({"path": "file"}, "is a file"),
        ({"path": ".", "size": -1}, "-1 pixels wide"),
        ({"path": ".", "channels": 2}, "2 channels"),
        ({"path": ".", "test": 1.0}, r"test fraction of 1\.0"),
    ],
)
def test_options_are_checked_first(
    tmp_path: Path, options: dict[str, object], complaint: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=complaint):
        load_dataset("folder", options, tmp_path)


def test_too_many_pixels_in_all_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an image of 4 x 6 x 3 takes 72 bytes, 16 a pixel while it is decoded, and 128 for its label
    monkeypatch.setenv("REMANENCE_MAX_BYTES", "1200")
    make_classes(tmp_path, {"a": 2, "b": 2})
    with pytest.raises(InputError, match=r"4 images such as .*0\.png takes .* give a smaller size"):
        load_dataset("folder", {"path": str(tmp_path)}, None)


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_classes(tmp_path, {"a": 2, "b": 2})
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"pip install 'remanence-fl\[images\]'"):
        load_dataset("folder", {"path": str(tmp_path)}, None)


def make_pacs(top: Path) -> None:
    for group, domain in enumerate(image_folders.DOMAINS):
        for label, name in enumerate(image_folders.PACS):
            for index in range(5):
                save(top / domain / name / f"pic_{index}.jpg", (group * 60, label * 30, 0))


def test_pacs_has_domains_as_groups_and_a_test_set_in_each(tmp_path: Path) -> None:
    make_pacs(tmp_path / "PACS")
    dataset = load_dataset("pacs", {"size": 8}, tmp_path)
    assert dataset.classes == image_folders.PACS
    assert dataset.group_names == image_folders.DOMAINS
    assert dataset.shape == (3, 8, 8)
    for split, each in ((dataset.train, 4), (dataset.test, 1)):
        assert split.groups is not None
        assert np.bincount(split.groups * 7 + split.y).tolist() == [each] * 28
        # JPEG blurs colors a little
        assert np.abs(split.x[:, 0].mean(axis=(1, 2)) - split.groups * 60).max() < 5
        assert np.abs(split.x[:, 1].mean(axis=(1, 2)) - split.y * 30).max() < 5


def test_incomplete_pacs_is_named(tmp_path: Path) -> None:
    make_pacs(tmp_path / "PACS")
    for path in (tmp_path / "PACS" / "sketch" / "horse").iterdir():
        path.unlink()
    with pytest.raises(InputError, match=r"no images in .*sketch/horse"):
        load_dataset("pacs", {"size": 8}, tmp_path)
    (tmp_path / "PACS" / "sketch").rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="PACS lacks sketch"):
        load_dataset("pacs", {"size": 8}, tmp_path)
