from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remanence.core import rng
from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data import batches
from remanence.data.batches import (
    CROP_PADDING,
    BatchPlan,
    Examples,
    augment_images,
    count_steps,
    plan_batches,
    to_device,
)

CPU = torch.device("cpu")

counts, widths, seeds = st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**64 - 1)


def real_rows(plan: BatchPlan) -> list[list[int]]:
    return [row[:width].tolist() for row, width in zip(plan.indices, plan.batch_sizes, strict=True)]


@given(seeds, counts, widths, st.integers(1, 4))
def test_every_epoch_visits_every_row_once(seed: int, count: int, batch: int, epochs: int) -> None:
    plan = plan_batches(Key(seed), count, batch, epochs=epochs)
    steps = real_rows(plan)
    per_epoch = len(steps) // epochs
    assert len(steps) == per_epoch * epochs
    for epoch in range(epochs):
        mine = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(row for step in mine for row in step) == list(range(count))
        assert [len(step) for step in mine[:-1]] == [min(batch, count)] * (per_epoch - 1)
        assert 1 <= len(mine[-1]) <= min(batch, count)


@given(seeds, counts, widths, st.integers(1, 4))
def test_dropping_the_last_keeps_whole_batches_only(
    seed: int, count: int, batch: int, epochs: int
) -> None:
    plan = plan_batches(Key(seed), count, batch, epochs=epochs, drop_last=True)
    width = min(batch, count)
    assert plan.batch_sizes.tolist() == [width] * (epochs * (count // width))
    for epoch in range(epochs):
        rows = plan.indices[epoch * (count // width) : (epoch + 1) * (count // width)].reshape(-1)
        assert len(set(rows.tolist())) == len(rows)  # still no row twice in an epoch


@given(seeds, counts, widths, st.integers(1, 30), st.booleans())
def test_steps_are_the_beginning_of_enough_epochs(
    seed: int, count: int, batch: int, steps: int, drop_last: bool
) -> None:
    plan = plan_batches(Key(seed), count, batch, steps=steps, drop_last=drop_last)
    # an epoch has at least one step
    whole = plan_batches(Key(seed), count, batch, epochs=steps, drop_last=drop_last)
    assert len(plan.batch_sizes) == steps
    assert np.array_equal(plan.indices, whole.indices[:steps])
    assert np.array_equal(plan.batch_sizes, whole.batch_sizes[:steps])


@given(seeds, counts, widths, st.integers(0, 3), st.integers(0, 7), st.booleans())
def test_steps_can_be_counted_beforehand(
    seed: int, count: int, batch: int, epochs: int, steps: int, drop_last: bool
) -> None:
    plan = plan_batches(Key(seed), count, batch, epochs, steps, drop_last)
    assert len(plan.batch_sizes) == count_steps(count, batch, epochs, steps, drop_last)
    assert plan.indices.shape == (len(plan.batch_sizes), min(batch, count))
    assert plan.indices.dtype == plan.batch_sizes.dtype == np.int64


@given(seeds, counts, widths)
def test_padding_repeats_the_first_row_of_its_step(seed: int, count: int, batch: int) -> None:
    plan = plan_batches(Key(seed), count, batch, epochs=2)
    for row, width in zip(plan.indices, plan.batch_sizes, strict=True):
        assert (row[width:] == row[0]).all()


def test_widths_by_hand() -> None:
    """7 rows by 3: 3, 3, 1. By 10, which is more than there are: one batch of 7, also where
    short batches are dropped.
    """
    assert plan_batches(Key(0), 7, 3, epochs=2).batch_sizes.tolist() == [3, 3, 1, 3, 3, 1]
    assert plan_batches(Key(0), 7, 3, epochs=1, drop_last=True).batch_sizes.tolist() == [3, 3]
    assert plan_batches(Key(0), 7, 3, steps=4).batch_sizes.tolist() == [3, 3, 1, 3]
    assert plan_batches(Key(0), 7, 3, steps=3, drop_last=True).batch_sizes.tolist() == [3, 3, 3]
    assert plan_batches(Key(0), 7, 10, epochs=2).batch_sizes.tolist() == [7, 7]
    assert plan_batches(Key(0), 7, 10, epochs=2, drop_last=True).batch_sizes.tolist() == [7, 7]
    assert plan_batches(Key(0), 7, 10, steps=3).indices.shape == (3, 7)


def test_a_plan_is_a_function_of_its_key() -> None:
    first, again, other = (plan_batches(Key(seed), 50, 8, epochs=2).indices for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[:7], first[7:])  # every epoch has an order of its own


def pictures(count: int = 6, height: int = 5, width: int = 7) -> np.ndarray:
    """uint8 [n, 2, height, width] without zeros, so that padding shows."""
    pixels = 1 + np.arange(count * 2 * height * width) % 255
    return pixels.reshape(count, 2, height, width).astype(np.uint8)


def draw_slowly(key: Key, purpose: str, count: int) -> int:
    """The top 31 bits of the word, as a signed number, modulo count."""
    word = key.fold_in(purpose).value
    return ((word - 2**64 if word >= 2**63 else word) >> 33) % count


def augment_slowly(image: np.ndarray, key: Key, names: tuple[str, ...]) -> np.ndarray:
    """Pad with zeros, cut out a window of the old size, mirror it: one image, pixel by pixel."""
    height, width = image.shape[1:]
    top, left = (
        draw_slowly(key, purpose, 9) - 4 if "crop" in names else 0
        for purpose in ("rows", "columns")
    )
    cut = np.zeros_like(image)
    for row in range(height):
        for column in range(width):
            if 0 <= row + top < height and 0 <= column + left < width:
                cut[:, row, column] = image[:, row + top, column + left]
    return cut[:, :, ::-1] if "flip" in names and draw_slowly(key, "flip", 2) == 1 else cut


@pytest.mark.parametrize("names", [("crop",), ("flip",), ("crop", "flip"), ("flip", "crop")])
def test_augmentation_equals_a_slow_one(names: tuple[str, ...]) -> None:
    images = pictures(40)
    image_keys = [Key(9).fold_in(number) for number in range(40)]
    fast = augment_images(
        torch.from_numpy(images), torch.stack([key.tensor() for key in image_keys]), names
    )
    slow = np.stack(
        [augment_slowly(image, key, names) for image, key in zip(images, image_keys, strict=True)]
    )
    assert fast.dtype == torch.uint8
    assert np.array_equal(fast.numpy(), slow)
    assert not np.array_equal(slow, images)


def test_images_smaller_than_the_padding_may_vanish_but_not_break() -> None:
    images = pictures(30, 2, 3)
    image_keys = [Key(1).fold_in(number) for number in range(30)]
    fast = augment_images(
        torch.from_numpy(images),
        torch.stack([key.tensor() for key in image_keys]),
        ("crop", "flip"),
    )
    slow = np.stack(
        [
            augment_slowly(image, key, ("crop", "flip"))
            for image, key in zip(images, image_keys, strict=True)
        ]
    )
    assert np.array_equal(fast.numpy(), slow)
    assert (slow.reshape(30, -1) == 0).all(axis=1).any()


def test_every_shift_and_both_sides_are_equally_likely() -> None:
    """9 shifts over 9000 keys: 1000 each, deviation sqrt(9000 * 1/9 * 8/9) = 30. Flips: 4500,
    deviation 47.
    """
    many = rng.fold_in(Key(0).tensor(), torch.arange(9000))
    for purpose in ("rows", "columns"):
        shifts = torch.bincount(batches._draw(many, purpose, 2 * CROP_PADDING + 1), minlength=9)
        assert len(shifts) == 9
        assert int((shifts - 1000).abs().max()) < 5 * 30
    assert abs(int(batches._draw(many, "flip", 2).sum()) - 4500) < 5 * 47
    together = torch.stack(
        [batches._draw(many, "rows", 9), batches._draw(many, "columns", 9)]
    ).double()
    assert abs(float(torch.corrcoef(together)[0, 1])) < 5 / 9000**0.5


def examples(
    augment: tuple[str, ...] = ("crop", "flip"), dtype: torch.dtype = torch.float32
) -> Examples:
    statistics = (np.array([100.0, 50.0]), np.array([20.0, 10.0]))
    return to_device(pictures(), np.arange(6), statistics, device=CPU, dtype=dtype, augment=augment)


def test_padding_a_batch_changes_no_real_row() -> None:
    data, key = examples(), Key(3).tensor()
    short = data.augmented(torch.tensor([4, 1]), key)
    padded = data.augmented(torch.tensor([4, 1, 4, 4]), key)
    assert torch.equal(padded[:2], short)
    assert torch.equal(padded[2], short[0])


def test_stacking_clients_changes_nothing() -> None:
    data = examples()
    ids, stack = (
        torch.tensor([[0, 1, 2], [3, 4, 4]]),
        torch.stack([Key(5).tensor(), Key(6).tensor()]),
    )
    together = data.augmented(ids, stack)
    assert together.shape == (2, 3, 2, 5, 7)
    for place in range(2):
        assert torch.equal(together[place], data.augmented(ids[place], stack[place]))


def test_an_example_is_augmented_the_same_wherever_it_stands_in_a_batch() -> None:
    data, key = examples(), Key(3).tensor()
    assert torch.equal(
        data.augmented(torch.tensor([0, 1, 2]), key).flip(0),
        data.augmented(torch.tensor([2, 1, 0]), key),
    )


def test_augmentation_follows_key_and_example() -> None:
    same_image = np.repeat(pictures(1), 20, axis=0)
    data = to_device(
        same_image, np.zeros(20), None, device=CPU, dtype=torch.float32, augment=("crop",)
    )
    ids = torch.arange(20)
    first, again, other = (data.augmented(ids, Key(seed).tensor()) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # twenty copies, nearly all cut differently
    assert len({tuple(image.reshape(-1).tolist()) for image in first}) > 10


def test_without_augmentation_the_key_does_not_matter() -> None:
    data, ids = examples(augment=()), torch.tensor([5, 0])
    assert torch.equal(data.augmented(ids, Key(1).tensor()), data.inputs(ids))


def test_evaluation_is_never_augmented() -> None:
    ids = torch.arange(6)
    assert torch.equal(examples().inputs(ids), examples(augment=()).inputs(ids))
    assert not torch.equal(examples().augmented(ids, Key(1).tensor()), examples().inputs(ids))


def test_padding_of_a_crop_is_black_before_normalization() -> None:
    """A raw 0 becomes (0 - 100) / 20 = -5 in the first channel and (0 - 50) / 10 = -5 in the
    second; no pixel of ours is 0.
    """
    cut = examples().augmented(torch.arange(6), Key(1).tensor())
    outside = cut == -5
    assert bool(outside.any())
    assert torch.equal(outside[:, 0], outside[:, 1])


def test_images_are_normalized_by_channel() -> None:
    """Pixel 1 of the first channel: (1 - 100) / 20 = -4.95; the second channel starts at 36:
    (36 - 50) / 10 = -1.4.
    """
    data = examples(dtype=torch.float64)
    x = data.inputs(torch.tensor([0]))
    assert (data.x.dtype, x.dtype) == (torch.uint8, torch.float64)
    assert float(x[0, 0, 0, 0]) == pytest.approx(-4.95, rel=1e-15)
    assert float(x[0, 1, 0, 0]) == pytest.approx(-1.4, rel=1e-15)


def test_tables_are_normalized_by_column() -> None:
    table = np.array([[1.0, 10.0], [3.0, 30.0]], dtype=np.float32)
    data = to_device(
        table,
        np.array([0, 1]),
        (np.array([2.0, 20.0]), np.array([1.0, 5.0])),
        device=CPU,
        dtype=torch.float32,
    )
    assert data.inputs(torch.tensor([[0], [1]])).tolist() == [[[-1.0, -2.0]], [[1.0, 2.0]]]


@pytest.mark.parametrize(
    ("raw", "dtype"),
    [
        (np.array([[0, 255]], dtype=np.uint8), torch.float64),
        (np.array([[0.5, 2.0]], dtype=np.float32), torch.float64),
    ],
)
def test_without_statistics_numbers_are_used_as_they_are(
    raw: np.ndarray, dtype: torch.dtype
) -> None:
    x = to_device(raw, np.array([0]), None, device=CPU, dtype=dtype).inputs(torch.tensor([0]))
    assert x.dtype == dtype
    assert x.tolist() == raw.tolist()


def test_tokens_stay_whole_numbers() -> None:
    tokens = np.array([[3, 1, 2]], dtype=np.int64)
    data = to_device(tokens, np.array([0]), None, device=CPU, dtype=torch.float32)
    x: Tensor = data.inputs(torch.tensor([0]))
    assert x.dtype == torch.int64
    assert x.tolist() == tokens.tolist()


def test_labels_follow_their_rows_and_are_whole_numbers() -> None:
    data = to_device(
        pictures(),
        np.array([5, 4, 3, 2, 1, 0], dtype=np.uint8),
        None,
        device=CPU,
        dtype=torch.float32,
    )
    assert data.y.dtype == torch.int64
    assert data.labels(torch.tensor([[0, 5], [1, 1]])).tolist() == [[5, 0], [4, 4]]


def test_a_mapped_file_is_copied_without_a_warning() -> None:
    images = pictures()
    images.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = to_device(images, np.arange(6), None, device=CPU, dtype=torch.float32)
    data.x[0] = 0
    assert images[0].min() > 0


def test_unknown_augmentations_and_data_that_are_no_images_are_refused() -> None:
    with pytest.raises(InputError, match="unknown augmentation 'rotate': known: crop, flip"):
        examples(augment=("crop", "rotate"))
    with pytest.raises(
        InputError, match=r"crop, flip and cutout are for images: leave data\.augment empty"
    ):
        to_device(
            np.zeros((2, 3)), np.zeros(2), None, device=CPU, dtype=torch.float32, augment=("flip",)
        )


def test_cutout_empties_a_square_and_nothing_else() -> None:
    """Images of 8 x 8 have a square of 4, from center - 2 to center + 1, cut off at the border.
    Inside is the mean, 0 when normalized.
    """
    images = np.full((50, 3, 8, 8), 9, dtype=np.uint8)
    statistics = (np.full(3, 4.0), np.ones(3))
    labels = np.zeros(50, dtype=np.int64)
    examples = to_device(
        images,
        labels,
        statistics,
        device=torch.device("cpu"),
        dtype=torch.float64,
        augment=("cutout",),
    )
    seen = examples.augmented(torch.arange(50), Key(3).tensor())
    holes = seen[:, 0] == 0
    assert torch.equal(seen, torch.where(holes.unsqueeze(1), 0.0, 5.0).expand_as(seen))
    for hole in holes:
        rows, columns = hole.any(dim=1).nonzero().flatten(), hole.any(dim=0).nonzero().flatten()
        assert 2 <= len(rows) <= 4
        assert 2 <= len(columns) <= 4
        assert int(hole.sum()) == len(rows) * len(columns)
        assert int(rows[-1] - rows[0]) == len(rows) - 1
    assert len({tuple(hole.flatten().tolist()) for hole in holes}) > 20
    assert torch.equal(
        examples.inputs(torch.arange(50)), torch.full((50, 3, 8, 8), 5.0, dtype=torch.float64)
    )
