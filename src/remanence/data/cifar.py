"""CIFAR-10 and CIFAR-100 (Krizhevsky, Learning multiple layers of features from tiny images, 2009),
in their binary or Python version.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from remanence.core.errors import InputError
from remanence.core.expressions import PlainText
from remanence.core.memory import check_memory
from remanence.data.dataset import ArrayDataset, DatasetSplit, dataset_bytes, validate
from remanence.data.files import damaged_file, find_files
from remanence.data.restricted_pickle import pickle_bytes, read_plain_pickle

# images in a file of CIFAR-10 and in the test file of CIFAR-100; its training file has five times
# as many
BATCH = 10_000
PIXELS = 3 * 32 * 32
_PICKLE_LIMIT = 256 << 20  # the largest published file has 155 MB

_TEN = "airplane automobile bird cat deer dog frog horse ship truck"
_FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree
orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum
rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train
trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_COARSE = """
aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
household_furniture insects large_carnivores large_man-made_outdoor_things
large_natural_outdoor_scenes large_omnivores_and_herbivores medium_mammals
non-insect_invertebrates people reptiles small_mammals trees vehicles_1 vehicles_2
"""
CIFAR10, CIFAR100_FINE, CIFAR100_COARSE = (tuple(names.split()) for names in (_TEN, _FINE, _COARSE))


def cifar10(root: Path | None) -> ArrayDataset:
    """60,000 color images of 32x32 in 10 classes.

    Args:
        root: the data folder.
    """
    batches = [f"data_batch_{number}" for number in range(1, 6)]
    choices = [
        ("cifar-10-batches-bin", [f"{name}.bin" for name in (*batches, "test_batch")]),
        ("cifar-10-batches-py", [*batches, "test_batch"]),
    ]
    folder = find_files(
        "cifar10",
        root,
        choices,
        "unpack cifar-10-binary.tar.gz or cifar-10-python.tar.gz from the CIFAR page of"
        " the University of Toronto",
    )
    if folder.name.endswith("-bin"):
        train = _read_binary(
            [folder / f"{name}.bin" for name in batches],
            BATCH,
            label_bytes=1,
            label_at=0,
            classes=10,
        )
        test = _read_binary(
            [folder / "test_batch.bin"], BATCH, label_bytes=1, label_at=0, classes=10
        )
    else:
        train = _read_python([folder / name for name in batches], BATCH, "labels", classes=10)
        test = _read_python([folder / "test_batch"], BATCH, "labels", classes=10)
    return validate(
        ArrayDataset(
            "cifar10",
            "image",
            CIFAR10,
            train,
            test,
            note="60,000 color images of 32x32 pixels in 10 classes (Krizhevsky 2009).",
        )
    )


def cifar100(root: Path | None, *, labels: PlainText = "fine") -> ArrayDataset:
    """60,000 color images of 32x32 in 100 fine or 20 coarse classes.

    Args:
        root: the data folder.
        labels: "fine" or "coarse".
    """
    if labels not in ("fine", "coarse"):
        raise InputError(
            f"dataset 'cifar100' has no labels {labels!r}: choose labels='fine' (100 classes)"
            " or labels='coarse' (20 classes)"
        )
    choices = [
        ("cifar-100-binary", ["train.bin", "test.bin"]),
        ("cifar-100-python", ["train", "test"]),
    ]
    folder = find_files(
        "cifar100",
        root,
        choices,
        "unpack cifar-100-binary.tar.gz or cifar-100-python.tar.gz from the CIFAR page of"
        " the University of Toronto",
    )
    names = CIFAR100_FINE if labels == "fine" else CIFAR100_COARSE
    parts = []
    for part, records in (("train", 5 * BATCH), ("test", BATCH)):
        if folder.name.endswith("-binary"):
            label_at = 1 if labels == "fine" else 0  # each record: coarse label, fine label, pixels
            parts.append(
                _read_binary(
                    [folder / f"{part}.bin"],
                    records,
                    label_bytes=2,
                    label_at=label_at,
                    classes=len(names),
                )
            )
        else:
            parts.append(
                _read_python([folder / part], records, f"{labels}_labels", classes=len(names))
            )
    note = (
        f"60,000 color images of 32x32 pixels in {len(names)} {labels} classes (Krizhevsky 2009)."
    )
    return validate(ArrayDataset("cifar100", "image", names, parts[0], parts[1], note=note))


def _read_binary(
    paths: Sequence[Path], records: int, *, label_bytes: int, label_at: int, classes: int
) -> DatasetSplit:
    """Read records of labels and pixels; `label_at` is the byte of the label."""
    width = label_bytes + PIXELS
    x, y = _empty(paths, records, records * width)
    for number, path in enumerate(paths):
        expected = f"{records} records of {width} bytes, {records * width} bytes in all"
        if path.stat().st_size != records * width:
            raise damaged_file(path, expected, f"{path.stat().st_size} bytes")
        content = np.fromfile(path, dtype=np.uint8, count=records * width)
        if len(content) != records * width:
            raise damaged_file(path, expected, f"{len(content)} bytes")
        rows = slice(number * records, (number + 1) * records)
        x[rows] = content.reshape(records, width)[:, label_bytes:]
        y[rows] = content.reshape(records, width)[:, label_at]
        _check_labels(path, y[rows], classes)
    return DatasetSplit(x.reshape(-1, 3, 32, 32), y)


def _empty(paths: Sequence[Path], records: int, reading: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrays for the images and labels of these files; `reading` is what one file takes."""
    count = len(paths) * records
    check_memory(paths[0].parent, {"one file": reading, **dataset_bytes(count, count * PIXELS)})
    return np.empty((count, PIXELS), dtype=np.uint8), np.empty(count, dtype=np.int64)


def _read_python(paths: Sequence[Path], records: int, labels: str, *, classes: int) -> DatasetSplit:
    x, y = _empty(paths, records, pickle_bytes(records * (PIXELS + 64)))
    for number, path in enumerate(paths):
        content = read_plain_pickle(path, _PICKLE_LIMIT)
        images, numbers = content.get("data"), content.get(labels)
        if not isinstance(images, np.ndarray) or images.shape != (records, PIXELS):
            found = f"one of {images.shape}" if isinstance(images, np.ndarray) else "none"
            raise damaged_file(path, f"an array 'data' of {(records, PIXELS)}", found)
        if (
            not isinstance(numbers, list)
            or len(numbers) != records
            or not all(type(label) is int for label in numbers)
        ):
            found = f"a list of {len(numbers)}" if isinstance(numbers, list) else "none"
            raise damaged_file(path, f"a list '{labels}' of {records} numbers", found)
        _check_labels(path, np.array([min(max(numbers), classes), max(min(numbers), -1)]), classes)
        rows = slice(number * records, (number + 1) * records)
        x[rows] = images
        y[rows] = numbers
    return DatasetSplit(x.reshape(-1, 3, 32, 32), y)


def _check_labels(path: Path, labels: np.ndarray, classes: int) -> None:
    if labels.min() < 0 or labels.max() >= classes:
        raise damaged_file(
            path, f"labels from 0 to {classes - 1}", f"labels from {labels.min()} to {labels.max()}"
        )
