from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remanence.core.rng import Key
from remanence.data.concept_rules import CORRUPTIONS
from remanence.data.concept_views import (
    _interpolate,
    corrupt_images,
    make_views,
    number_views,
    rotate_images,
)
from remanence.data.concepts import Concept
from remanence.data.dataset import DatasetSplit

SWAP = (1, 0, 2)
LOOKS = [
    Concept(),
    Concept(labels=(0,)),
    Concept(mapping=SWAP),
    Concept(rotation=90.0),
    Concept(rotation=90.0, mapping=SWAP),
    Concept(corruption="invert", max_pixel=16, domain=0),
]


def make_split(rows: int = 6, height: int = 4, width: int = 4) -> DatasetSplit:
    x = (Key(5).bits(rows * 2 * height * width) % np.uint64(17)).astype(np.uint8)
    return DatasetSplit(x.reshape(rows, 2, height, width), np.arange(rows, dtype=np.int64) % 3)


def keys_of(count: int) -> list[Key]:
    return [Key(row) for row in range(count)]


def corrupted(
    image: list[list[int]], corruption: str, severity: int, white: int = 255
) -> list[list[int]]:
    result: list[list[int]] = corrupt_images(
        np.array([[image]], dtype=np.uint8), corruption, severity, white, keys_of(1)
    )[0, 0].tolist()
    return result


def test_concepts_that_only_select_share_view_zero() -> None:
    assert number_views(LOOKS) == (0, 0, 1, 2, 3, 4)
    assert number_views(
        [Concept(rotation=90.0), Concept(rotation=90.0, size_factor=0.5), Concept(mapping=SWAP)]
    ) == (1, 1, 2)


def test_a_single_view_is_the_split_itself() -> None:
    split = make_split()
    views = make_views(split, LOOKS[:2], [np.arange(6)], "train")
    assert views.x is split.x
    assert views.storage_index is None
    assert views.y.tolist() == split.y.tolist()


def test_a_label_swap_stores_no_second_image() -> None:
    """6 rows with labels 0 1 2 0 1 2; in view 1 they are 1 0 2 1 0 2, and id 6 + row lies where
    the row lies.
    """
    split = make_split()
    views = make_views(split, [Concept(), Concept(mapping=SWAP)], [np.array([1, 7])], "train")
    assert views.x is split.x
    assert views.y.tolist() == [0, 1, 2, 0, 1, 2, 1, 0, 2, 1, 0, 2]
    assert views.storage_index is not None
    assert views.storage_index.tolist() == [0, 1, 2, 3, 4, 5] * 2


def test_turned_images_are_stored_once_and_only_where_held() -> None:
    """Views 2 (turned) and 3 (turned and swapped) share pixels: rows 1 and 4 of the one and 4
    of the other are two images at 6 and 7.
    """
    split = make_split()
    views = make_views(
        split, LOOKS, [np.array([0, 13]), np.array([16, 18 + 4]), np.array([24 + 5])], "train"
    )
    assert views.x.shape == (6 + 2 + 1, 2, 4, 4)
    assert views.x.dtype == np.uint8
    assert (views.x[:6] == split.x).all()
    assert views.storage_index is not None
    place = views.storage_index.reshape(5, 6)
    assert place[:2].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert place[2:4].tolist() == [[-1, 6, -1, -1, 7, -1]] * 2
    assert place[4].tolist() == [-1, -1, -1, -1, -1, 8]
    assert (views.x[7] == np.rot90(split.x[4], axes=(1, 2))).all()
    assert (views.x[8] == 16 - split.x[5]).all()
    assert views.y[[13, 16, 22, 29]].tolist() == [1, 1, 0, 2]


@given(st.lists(st.sampled_from(LOOKS), min_size=1, max_size=5), st.data())
def test_ids_decode_into_row_and_view(concepts: list[Concept], data: st.DataObject) -> None:
    split = make_split()
    view_of = number_views(concepts)
    cluster = data.draw(st.integers(0, len(concepts) - 1))
    row = data.draw(st.integers(0, 5))
    name = view_of[cluster] * 6 + row
    views = make_views(split, concepts, [np.array([name])], "test")
    concept = concepts[cluster]
    assert views.view_of == view_of
    assert views.y[name] == (
        split.y[row] if concept.mapping is None else concept.mapping[split.y[row]]
    )
    image = views.x[name if views.storage_index is None else views.storage_index[name]]
    expected = np.rot90(split.x[row], int(concept.rotation // 90), axes=(1, 2))
    assert (image == (16 - expected if concept.corruption else expected)).all()


def test_noise_is_fixed_by_row_and_split_alone() -> None:
    split = DatasetSplit(np.full((4, 1, 8, 8), 100, np.uint8), np.zeros(4, np.int64))
    concepts = [Concept(), Concept(corruption="noise", severity=3)]

    def see(ids: list[int], part: str, row: int) -> np.ndarray:
        views = make_views(split, concepts, [np.array(ids)], part)
        assert views.storage_index is not None
        image: np.ndarray = views.x[views.storage_index[4 + row]]
        return image

    first = see([4, 5, 6, 7], "train", 2)
    assert (first == see([6], "train", 2)).all()  # whatever other ids are used
    assert (first != see([6, 7], "train", 3)).any()
    assert (first != see([6], "test", 2)).any()


@pytest.mark.parametrize(("degrees", "quarters"), [(0, 0), (90, 1), (180, 2), (270, 3)])
def test_quarter_turns_are_exact_and_interpolation_agrees(degrees: float, quarters: int) -> None:
    x = make_split(height=5, width=5).x
    assert (rotate_images(x, degrees) == np.rot90(x, quarters, axes=(2, 3))).all()
    assert (_interpolate(x, degrees) == np.rot90(x, quarters, axes=(2, 3))).all()


def test_half_a_quarter_turn_by_hand() -> None:
    """The pixel right of the middle of 3 x 3, turned by 45 degrees against the clock, comes from (1
    + s, 1 + s) of the dataset with s = 1/sqrt 2: the four around it are weighted (1 - s)^2, s (1 -
    s), s (1 - s), s^2. The dataset has 200 at the lower right corner alone: 200 s^2 = 100.
    """
    x = np.zeros((1, 1, 3, 3), np.uint8)
    x[0, 0, 2, 2] = 200
    turned = rotate_images(x, 45)[0, 0]
    assert turned[1, 2] == 100
    assert turned[1, 1] == 0
    # comes from (1 + sqrt 2, 1): outside below, and the column has only zeros
    assert turned[2, 2] == 0
    assert rotate_images(np.full((1, 1, 3, 3), 80, np.uint8), 45)[0, 0, 1, 1] == 80


def test_a_turn_keeps_the_shape_of_images_that_are_not_square() -> None:
    x = make_split(height=4, width=6).x
    assert rotate_images(x, 180).tolist() == x[:, :, ::-1, ::-1].tolist()
    assert rotate_images(x, 30).shape == x.shape


def test_corruptions_by_hand() -> None:
    image = [[0, 100], [200, 100]]  # mean 100
    assert corrupted(image, "contrast", 5) == [[90, 100], [110, 100]]  # 100 + 0.1 (x - 100)
    assert corrupted(image, "contrast", 1) == [[18, 100], [182, 100]]  # 100 + 0.82 (x - 100)
    # + 0.2 x 200, clipped at 200
    assert corrupted(image, "brightness", 2, 200) == [[40, 140], [200, 140]]
    assert corrupted(image, "invert", 0, 200) == [[200, 100], [0, 100]]
    # blocks of 2, the last smaller
    assert corrupted([[1, 3, 9], [5, 7, 9], [4, 8, 6]], "pixelate", 1) == [
        [4, 4, 9],
        [4, 4, 9],
        [6, 6, 6],
    ]


def test_blur_spreads_a_point_like_a_gaussian() -> None:
    """Severity 4 is one pixel in images of up to 32: neighbors at distance 1 and 2 have
    exp(-1/2) and exp(-2) of the middle.
    """
    x = np.zeros((1, 1, 21, 21), np.uint8)
    x[0, 0, 10, 10] = 255
    blurred = corrupt_images(np.repeat(x, 2, axis=1), "blur", 4, 255, keys_of(1))[0]
    weight = np.exp(-0.5 * np.arange(-10, 11) ** 2)
    expected = 255 * np.outer(weight, weight) / weight.sum() ** 2
    assert np.abs(blurred - expected).max() <= 0.51  # rounded to whole numbers
    flat = np.full((1, 1, 64, 64), 7, np.uint8)
    assert (corrupt_images(flat, "blur", 5, 255, keys_of(1)) == flat).all()
    flat[0, 0, 32, 32] = 255
    # 64 wide: two pixels
    assert corrupt_images(flat, "blur", 4, 255, keys_of(1))[0, 0, 32, 32] == round(
        7 + 248 / (2 * np.pi * 2**2)
    )


def test_noise_has_the_width_it_says() -> None:
    """Severity 2 of white 200 has standard deviation 20; of 4 x 3 x 1600 = 19,200 numbers the
    mean is within 5 x 20 / sqrt(19,200) = 0.72.
    """
    x = np.full((4, 3, 40, 40), 100, np.uint8)
    noise = corrupt_images(x, "noise", 2, 200, keys_of(4)).astype(np.float64) - 100
    assert abs(noise.mean()) < 0.72
    assert abs(noise.std() - 20) < 0.5
    assert (noise[0] != noise[1]).any()
    assert (noise[0, 0] != noise[0, 1]).any()


@pytest.mark.parametrize("corruption", CORRUPTIONS[1:])
@pytest.mark.parametrize("white", [16, 255])
def test_every_corruption_changes_images_and_stays_within_white(
    corruption: str, white: int
) -> None:
    x = (make_split(height=9, width=7).x.astype(np.int64) * white // 16).astype(np.uint8)
    worse = corrupt_images(x, corruption, 3, white, keys_of(len(x)))
    assert worse.shape == x.shape
    assert worse.dtype == np.uint8
    assert worse.max() <= white
    assert (worse != x).any(axis=(1, 2, 3)).all()


def test_images_are_turned_before_they_are_corrupted() -> None:
    """Blocks of 2 from the upper left of 3 x 3 are not those of the turned image."""
    split = DatasetSplit(
        np.array([[[[1, 3, 9], [5, 7, 9], [4, 8, 6]]]], np.uint8), np.zeros(1, np.int64)
    )
    views = make_views(
        split,
        [Concept(rotation=180.0, corruption="pixelate", severity=1)],
        [np.array([1])],
        "train",
    )
    # turned: 6 8 4 | 9 7 5 | 9 3 1 -> blocks (6 + 8 + 9 + 7) / 4 = 7.5, (4 + 5) / 2 = 4.5, (9 + 3)
    # / 2 = 6, 1; halves round to even
    assert views.x[1, 0].tolist() == [[8, 8, 4], [8, 8, 4], [6, 6, 1]]
