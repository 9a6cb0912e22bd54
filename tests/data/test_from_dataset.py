from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from remanence.core.errors import InputError
from remanence.data import from_dataset


class Pairs(Dataset[Any]):
    """Items from a list, counting how often one is taken."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.taken = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        self.taken += 1
        return self.items[row]


def pairs(x: list[Any]) -> Pairs:
    return Pairs([(value, row % 2) for row, value in enumerate(x)])


@pytest.mark.parametrize(
    ("example", "kind", "shape", "value"),
    [
        (torch.full((3, 4, 5), 0.2), "image", (3, 4, 5), 51),
        (torch.full((3, 4, 5), 7, dtype=torch.uint8), "image", (3, 4, 5), 7),
        (np.full((4, 5, 3), 7, dtype=np.uint8), "image", (3, 4, 5), 7),
        (np.full((4, 5), 7, dtype=np.uint8), "image", (1, 4, 5), 7),
        (torch.full((6,), 0.5), "table", (6,), 0.5),
        ([1.5, 2.5], "table", (2,), None),
        (torch.full((6,), 9), "tokens", (6,), 9),
    ],
)
def test_datasets_of_every_kind_are_read(
    example: Any, kind: str, shape: tuple[int, ...], value: float | None
) -> None:
    source = from_dataset(pairs([example] * 10), name="mine")
    assert (source.name, source.kind, source.shape) == ("mine", kind, shape)
    assert (len(source.train), len(source.test)) == (8, 2)
    assert value is None or (source.train.x == value).all()


def test_pil_images_are_read() -> None:
    image = pytest.importorskip("PIL.Image")
    assert from_dataset(pairs([image.new("RGB", (5, 4), (1, 2, 3))] * 5)).train.x[
        0, :, 0, 0
    ].tolist() == [1, 2, 3]
    assert from_dataset(pairs([image.new("L", (5, 4), 9)] * 5)).shape == (1, 4, 5)
    assert from_dataset(pairs([image.new("RGBA", (5, 4), (1, 2, 3, 4))] * 5)).shape == (3, 4, 5)


def test_a_test_dataset_and_class_names_are_used() -> None:
    train, test = pairs([torch.zeros(3)] * 4), pairs([torch.ones(3)] * 2)
    train.classes = ["zero", "one"]  # type: ignore[attr-defined]
    source = from_dataset(train, test)
    assert source.classes == ("zero", "one")
    assert (len(source.train), len(source.test)) == (4, 2)
    assert (source.test.x == 1).all()
    assert from_dataset(train, test, classes=("a", "b")).classes == ("a", "b")


def test_a_subset_holds_its_own_rows() -> None:
    whole = TensorDataset(torch.arange(20.0)[:, None], torch.arange(20) % 2)
    source = from_dataset(Subset(whole, range(10)), Subset(whole, [15, 16]))
    assert source.train.x[:, 0].tolist() == list(range(10))
    assert source.test.x[:, 0].tolist() == [15.0, 16.0]


class Stored(Pairs):
    """Like torchvision's: .data and .targets beside items that a transform may change."""

    def __init__(
        self,
        data: Any,
        targets: Any,
        transform: Any = lambda x: x,
        target_transform: Any = lambda y: y,
    ) -> None:
        super().__init__(
            [(transform(x), target_transform(y)) for x, y in zip(data, targets, strict=True)]
        )
        self.data, self.targets = data, targets


def to_tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).permute(2, 0, 1) / 255


IMAGES = np.arange(20 * 4 * 5 * 3, dtype=np.uint8).reshape(20, 4, 5, 3)
TARGETS = [row % 2 for row in range(20)]


@pytest.mark.parametrize("transform", [lambda x: x, to_tensor])
def test_stored_arrays_are_used_where_items_agree_with_them(transform: Any) -> None:
    dataset = Stored(IMAGES, TARGETS, transform)
    source = from_dataset(dataset, dataset)
    assert np.array_equal(source.train.x, IMAGES.transpose(0, 3, 1, 2))
    assert dataset.taken < 20


@pytest.mark.parametrize(
    "changed",
    [
        {"transform": lambda x: 255 - x},
        {"target_transform": lambda y: 1 - y},
        {"transform": lambda x: x[:2]},
    ],
)
def test_items_win_over_stored_arrays_that_differ(changed: dict[str, Any]) -> None:
    dataset = Stored(IMAGES, TARGETS, **changed)
    source = from_dataset(dataset, dataset)
    assert np.array_equal(
        source.train.x, np.stack([x for x, _ in dataset.items]).transpose(0, 3, 1, 2)
    )
    assert source.train.y.tolist() == [y for _, y in dataset.items]


def test_stored_arrays_that_need_their_transform_are_left_alone() -> None:
    """Floats from 0 to 255 are no images of ours, but what the items make of them is."""
    dataset = Stored(IMAGES.astype(np.float32), TARGETS, lambda x: x / 255)
    assert np.array_equal(from_dataset(dataset, dataset).train.x, IMAGES.transpose(0, 3, 1, 2))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.zeros(3), 0


@pytest.mark.parametrize(
    ("dataset", "complaint"),
    [
        (Pairs([torch.zeros(3)] * 4), "has no labels: item 0 is Tensor where a pair"),
        (Pairs([(torch.zeros(3),)] * 4), "has no labels"),
        (Pairs([(torch.zeros(3), 0.5)] * 4), "has no class number as label"),
        (Pairs([(torch.zeros(3), {"boxes": []})] * 4), "has no class number as label"),
        (Pairs([(torch.zeros(3), torch.zeros(3))] * 4), "has no class number as label"),
        (Pairs([]), "is empty"),
        (Endless(), "has no length"),
        (
            pairs([torch.zeros(3), torch.zeros(4)]),
            r"item 1 is float32 \(4,\) and the first float32 \(3,\)",
        ),
        (
            pairs([torch.full((3, 4, 4), torch.inf)] * 4),
            r"hold NaN or infinity \(4 of 4, the first is number 0\)",
        ),
        (pairs(["text"] * 4), "examples of type str"),
        (pairs([torch.zeros(2, 2, 2, 2, 2)] * 4), r"shape \(2, 2, 2, 2, 2\)"),
        (Pairs([(torch.zeros(3), -1), (torch.zeros(3), 0)] * 4), "labels from -1"),
    ],
)
def test_datasets_that_cannot_be_used_are_named(dataset: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        from_dataset(dataset)
