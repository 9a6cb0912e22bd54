"""Images in folders: one folder for each class, optionally below train/ and test/ and folders of
sites; and PACS, with one folder for each domain above the classes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from remanence.core.errors import InputError
from remanence.core.memory import check_memory
from remanence.data.dataset import (
    ArrayDataset,
    DatasetSplit,
    check_fraction,
    dataset_bytes,
    hold_out_test,
    validate,
)
from remanence.data.files import damaged_file, find_files, resolve
from remanence.data.own_arrays import LabeledArrays, assemble

FORMATS = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg"),
    "BMP": (".bmp",),
    "WEBP": (".webp",),
    "PPM": (".ppm", ".pgm"),
}
SUFFIXES = frozenset(suffix for suffixes in FORMATS.values() for suffix in suffixes)
# Pillow's default limit (a quarter of a GiB in color); applied even if a program has changed it
MAX_PIXELS = 89_478_485
# of a pixel while an image is decoded: as Pillow reads it, in color and resized, and as an array
_PIXEL_BYTES = 16
TEST_FOLDERS = ("test", "val", "valid", "validation")

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
PACS = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


def folder(
    root: Path | None,
    *,
    path: str = "",
    size: int = 0,
    test: float = 0.2,
    channels: int = 3,
    sites: bool | None = None,
) -> ArrayDataset:
    """Your own images: `path`/CLASS/..., or `path`/train/CLASS/... with `path`/test (or val, valid,
    validation)/CLASS/...; or the same with a folder for each site above the classes,
    `path`/SITE/CLASS/..., where each site is a client.

    Args:
        root: the data folder.
        path: the folder, absolute or below the data folder or the current folder.
        size: resize images to `size` x `size`; 0: keep their size, which must be equal.
        test: without a test folder, the fraction of each class that is held out.
        channels: 3 for color or 1 for gray.
        sites: whether there are folders of sites above those of the classes; default: by whether
            images are one folder deeper.
    """
    _check_options(size, channels, test)
    top = resolve("folder", root, path).resolve()
    if not top.is_dir():
        raise InputError(
            f"dataset 'folder' reads a folder but {top} is a file: give the folder that has"
            " one folder for each class"
        )
    train_top = top / "train" if (top / "train").is_dir() else top
    test_top = next(
        (top / name for name in TEST_FOLDERS if train_top != top and (top / name).is_dir()), None
    )
    tops = [train_top] if test_top is None else [train_top, test_top]
    by_site = _has_sites(tops, top) if sites is None else sites
    found = [_class_images(part, top, by_site) for part in tops]
    classes = sorted({image.label for images in found for image in images})
    _check_found(tops, found, by_site, top)
    paths = [image.path for images in found for image in images]
    x = decode_images(paths, size, channels, copies=3 - len(tops))
    cuts = np.cumsum([len(images) for images in found])[:-1]
    parts = [
        LabeledArrays(
            pixels,
            np.array([classes.index(image.label) for image in images], dtype=np.int64),
            np.array([image.site for image in images]) if by_site else None,
            "images",
        )
        for pixels, images in zip(np.split(x, cuts), found, strict=True)
    ]
    return assemble(
        str(top),
        parts,
        kind="image",
        classes=classes,
        test=test,
        by_site=by_site,
        note=f"Images of {top.name}, a folder a {'site and class' if by_site else 'class'}.",
        name="folder",
    )


class _Image(NamedTuple):
    path: Path
    label: str
    site: str


def _class_images(part: Path, top: Path, by_site: bool) -> list[_Image]:
    """The images below a folder of classes, or of sites with classes below."""
    places = [
        (label, site.name)
        for site in (_folders(part, top) if by_site else [Path()])
        for label in _folders(part / site.name if by_site else part, top)
    ]
    # by class first: the order in which the test set has always been drawn
    return [
        _Image(image, label.name, site)
        for label, site in sorted(places, key=lambda place: (place[0].name, place[1]))
        for image in find_images(label, top)
    ]


def _has_sites(tops: Sequence[Path], top: Path) -> bool:
    """Whether the folders below hold folders with images and no images themselves."""
    outer = [folder for part in tops for folder in _folders(part, top)]
    deeper = [folder for folder in outer if not _holds_images(folder)]
    deeper = [folder for folder in deeper if next(find_images(folder, top), None) is not None]
    if not deeper:
        return False
    if len(deeper) < len([folder for folder in outer if next(find_images(folder, top), None)]):
        mixed = next(folder for folder in outer if _holds_images(folder))
        raise InputError(
            f"dataset 'folder' found images in {mixed} and, one folder deeper, in {deeper[0]}: give"
            " all sites folders of classes, or write sites=false if the outer folders are classes"
        )
    return True


def _holds_images(folder: Path) -> bool:
    return any(
        entry.suffix.lower() in SUFFIXES and not entry.name.startswith(".")
        for entry in folder.iterdir()
    )


def _check_found(
    tops: Sequence[Path], found: Sequence[list[_Image]], by_site: bool, top: Path
) -> None:
    """Refuse classes without training images, and a test folder without images."""
    present = {image.label for image in found[0]}
    above = [site for part in tops for site in _folders(part, top)] if by_site else list(tops)
    named = {label.name: label for folder in above for label in _folders(folder, top)}
    empty = [label for name, label in sorted(named.items()) if name not in present]
    empty = [tops[0] / label.name for label in empty] if not by_site else empty
    empty += [part for part, images in zip(tops, found, strict=True) if not images]
    if empty:
        raise InputError(
            f"dataset 'folder' found no images in {empty[0]}: give each class a folder with"
            f" {', '.join(sorted(SUFFIXES))} files"
        )


def pacs(root: Path | None, *, size: int = 227, test: float = 0.2) -> ArrayDataset:
    """Photos, art, cartoons and sketches of seven things (Li, Yang, Song, Hospedales 2017); groups
    are the four domains.

    Args:
        root: the data folder.
        size: resize images to `size` x `size`; 0: keep their size.
        test: the fraction that is held out in every domain and class, since PACS has no test set.
    """
    _check_options(size, 3, test)
    get = (
        "unpack PACS (folders art_painting, cartoon, photo, sketch with a folder for each of"
        " the seven classes)"
    )
    top = find_files(
        "pacs", root, [("PACS", DOMAINS), ("pacs", DOMAINS), ("PACS/kfold", DOMAINS)], get
    ).resolve()
    images, y, groups = [], [], []
    for group, domain in enumerate(DOMAINS):
        for label, name in enumerate(PACS):
            found = list(find_images(top / domain / name, top))
            if not found:
                raise InputError(
                    f"dataset 'pacs' found no images in {top / domain / name}: unpack PACS"
                    " again, each domain has all seven classes"
                )
            images += found
            y += [label] * len(found)
            groups += [group] * len(found)
    split = DatasetSplit(
        decode_images(images, size, 3, copies=2),
        np.array(y, dtype=np.int64),
        np.array(groups, dtype=np.int64),
    )
    note = (
        "Photos, art, cartoons and sketches of seven things at"
        f" {split.x.shape[3]}x{split.x.shape[2]} pixels (Li et al. 2017)."
    )
    return validate(ArrayDataset("pacs", "image", PACS, *hold_out_test(split, test), DOMAINS, note))


def _check_options(size: int, channels: int, test: float) -> None:
    check_fraction(test)
    if not 0 <= size <= 4096:
        raise InputError(
            f"images cannot be made {size} pixels wide: give size from 1 to 4096, or 0 to keep"
            " the size they have"
        )
    if channels not in (1, 3):
        raise InputError(
            f"images cannot have {channels} channels: give channels=3 for color or channels=1"
            " for gray"
        )


def _folders(folder: Path, top: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if not entry.name.startswith(".") and _inside(entry, top).is_dir():
            yield entry


def find_images(folder: Path, top: Path) -> Iterator[Path]:
    """Yield every image below a folder in a stable order; other files are skipped."""
    if not folder.is_dir():
        return
    for parent, names, files in os.walk(_inside(folder, top), onerror=_raise):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in names:
            _inside(Path(parent, name), top)
        for name in sorted(files):
            if Path(name).suffix.lower() in SUFFIXES and not name.startswith("."):
                yield _inside(Path(parent, name), top)


def _raise(error: OSError) -> None:
    raise error


def _inside(path: Path, top: Path) -> Path:
    """Return the path; reject links that leave `top` and links to folders, which can be cyclic."""
    if path.is_symlink():
        if not path.resolve().is_relative_to(top):
            raise InputError(
                f"{path} is a link that leaves {top}: copy the file or folder it points to"
                " into its place"
            )
        if path.is_dir():
            raise InputError(
                f"{path} is a link to a folder, which is not followed: copy the folder into"
                " its place"
            )
    return path


def decode_images(
    paths: Sequence[Path], size: int, channels: int, copies: int = 1, held: int = 0
) -> np.ndarray:
    """Decode image files. -> uint8 [n, channels, h, w]

    Args:
        paths: The files.
        size: resize images to `size` x `size`; 0: keep their size.
        channels: 3 for color or 1 for gray.
        copies: how often all these images will be in memory.
        held: bytes of the images that are in memory already.
    """
    pillow = _pillow()
    x = np.empty((0, channels, size, size), dtype=np.uint8)

    def check(path: Path, width: int, height: int) -> None:
        """Check the memory for all images if they are as large as this one, and for decoding it."""
        one = channels * (size * size if size else width * height)
        parts = dataset_bytes(len(paths), held + copies * one * len(paths))
        decoding = path.stat().st_size + _PIXEL_BYTES * (width * height + size * size)
        thing = f"{len(paths)} images such as {path}"
        check_memory(thing, {**parts, "decoding one": decoding}, "give a smaller size")

    with warnings.catch_warnings():
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        for number, path in enumerate(paths):
            pixels = _decode_one(pillow, path, size, channels, check)
            if not number:
                x = np.empty((len(paths), channels, *pixels.shape[1:]), dtype=np.uint8)
            if pixels.shape != x.shape[1:]:
                sizes = (
                    f"{pixels.shape[2]}x{pixels.shape[1]} pixels while {paths[0]} has"
                    f" {x.shape[3]}x{x.shape[2]}"
                )
                raise InputError(
                    f"{path} has {sizes}: give size=... to bring all images to one size"
                )
            x[number] = pixels
    return x


def _decode_one(
    pillow: ModuleType,
    path: Path,
    size: int,
    channels: int,
    check: Callable[[Path, int, int], None],
) -> np.ndarray:
    if not path.is_file():  # reading a pipe or a device could block forever
        raise damaged_file(path, "an image file", "something else", "replace or remove it")
    check(path, 0, 0)  # Pillow reads some formats whole when it opens a file
    try:
        with pillow.open(path, formats=tuple(FORMATS)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise InputError(
                    f"{path} is refused because it unpacks to {image.width}x{image.height}"
                    f" pixels: {MAX_PIXELS} is the limit"
                )
            if image.mode[0] in "IF":
                raise InputError(
                    f"{path} has more than 8 bits a channel (Pillow's mode {image.mode}):"
                    " convert it to 8 bits"
                )
            check(path, image.width, image.height)
            picture = image.convert("RGB" if channels == 3 else "L")
            if size and picture.size != (size, size):
                picture = picture.resize((size, size), pillow.Resampling.BILINEAR)
            pixels = np.asarray(picture)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise InputError(
            f"{path} is refused because it unpacks to more pixels than Pillow's limit allows:"
            " make it smaller"
        ) from None
    except InputError:
        raise
    # Pillow raises nearly anything on a damaged file: OSError, SyntaxError, struct.error,
    # ValueError
    except Exception as error:
        raise damaged_file(
            path,
            f"a whole image ({', '.join(FORMATS)})",
            f"one that Pillow cannot read ({error})",
            "replace or remove it",
        ) from None
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise InputError(
            "images in folders need Pillow, which is not installed: pip install"
            " 'remanence-fl[images]'"
        ) from None
    return Image
