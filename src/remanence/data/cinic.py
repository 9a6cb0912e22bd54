"""CINIC-10: CIFAR-10 with pictures from ImageNet beside it, in folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from remanence.core.errors import InputError
from remanence.data.cifar import CIFAR10
from remanence.data.dataset import ArrayDataset, DatasetSplit, validate
from remanence.data.files import find_files
from remanence.data.image_folders import _decode, _images

SIDE = 32


def cinic10(root: Path | None, *, merge: bool = False) -> ArrayDataset:
    """270,000 color images of 32x32 in the 10 classes of CIFAR-10 (Darlow, Crowley, Antoniou,
    Storkey 2018), in three parts of 90,000.

    merge: add the published validation images to the training set, as its authors propose for
        comparisons; without it they are left alone.
    """
    parts = ("train", "valid", "test") if merge else ("train", "test")
    get = "unpack CINIC-10.tar.gz from the University of Edinburgh (remanence data fetch cinic10)"
    top = find_files(
        "cinic10", root, [("CINIC-10", parts), ("cinic10", parts), ("cinic-10", parts)], get
    ).resolve()
    splits = {part: _read_part(top, part) for part in parts}
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


def _read_part(top: Path, part: str) -> DatasetSplit:
    images: list[Path] = []
    y: list[int] = []
    for label, name in enumerate(CIFAR10):
        here = list(_images(top / part / name, top))
        if not here:
            raise InputError(
                f"dataset 'cinic10' found no images in {top / part / name}: unpack"
                " CINIC-10.tar.gz again, each part has all ten classes"
            )
        images += here
        y += [label] * len(here)
    return DatasetSplit(_decode(images, SIDE, 3), np.array(y, dtype=np.int64))
