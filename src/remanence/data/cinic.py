"""CINIC-10: images from CIFAR-10 and ImageNet, in folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from remanence.core.errors import InputError
from remanence.data.cifar import CIFAR10
from remanence.data.dataset import ArrayDataset, DatasetSplit, validate
from remanence.data.files import find_files
from remanence.data.image_folders import decode_images, find_images

SIDE = 32


def cinic10(root: Path | None, *, merge: bool = False) -> ArrayDataset:
    """270,000 color images of 32x32 in the 10 classes of CIFAR-10 (Darlow, Crowley, Antoniou,
    Storkey 2018), in three parts of 90,000.

    Args:
        root: the data folder.
        merge: add the published validation images to the training set, as its authors propose;
            otherwise they are not used.
    """
    parts = ("train", "valid", "test") if merge else ("train", "test")
    get = "unpack CINIC-10.tar.gz from the University of Edinburgh (remanence data fetch cinic10)"
    top = find_files(
        "cinic10", root, [("CINIC-10", parts), ("cinic10", parts), ("cinic-10", parts)], get
    ).resolve()
    splits: dict[str, DatasetSplit] = {}
    for part in parts:
        held = sum(split.x.nbytes for split in splits.values())
        # joined, the images of two parts are in memory twice
        splits[part] = _read_part(top, part, held=(1 + merge) * held, copies=1 + merge)
    train = splits["train"]
    if merge:
        train = DatasetSplit(
            np.concatenate([train.x, splits["valid"].x]),
            np.concatenate([train.y, splits["valid"].y]),
        )
    note = (
        "Color images of 32x32 pixels in 10 classes, from CIFAR-10 and ImageNet (Darlow et"
        " al. 2018)."
    )
    return validate(ArrayDataset("cinic10", "image", CIFAR10, train, splits["test"], note=note))


def _read_part(top: Path, part: str, held: int, copies: int) -> DatasetSplit:
    images: list[Path] = []
    y: list[int] = []
    for label, name in enumerate(CIFAR10):
        found = list(find_images(top / part / name, top))
        if not found:
            raise InputError(
                f"dataset 'cinic10' found no images in {top / part / name}: unpack"
                " CINIC-10.tar.gz again, each part has all ten classes"
            )
        images += found
        y += [label] * len(found)
    return DatasetSplit(decode_images(images, SIDE, 3, copies, held), np.array(y, dtype=np.int64))
