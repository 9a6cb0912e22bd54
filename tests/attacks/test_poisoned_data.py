"""Attacks on data: labels and marks by hand, and poisoned rows that leave honest hands clean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from remanence.attacks import Adversary, DataInfo, check_attacks, data_info, parse_attacks
from remanence.attacks.poison import poison
from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data.concept_views import ConceptViews
from remanence.data.dataset import ArrayDataset, DatasetSplit
from remanence.data.population import ClientData, PartitionIndices

IMAGES = DataInfo("image", 4, np.array(16))
TABLE = DataInfo("table", 4, np.array([1.0, 2.0, 3.0], dtype=np.float32))
Y = np.array([0, 1, 2, 3, 3])
X = np.zeros((5, 1, 2, 2), dtype=np.uint8)


def alter(
    text: str, x: np.ndarray = X, y: np.ndarray = Y, known: DataInfo = IMAGES, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    (attack,) = parse_attacks(text)
    assert attack.poison is not None
    return attack.poison(x, y, known, Key(seed))


def test_labels_by_hand() -> None:
    for text, wanted in (
        ("label_flip", [1, 2, 3, 0, 0]),
        ("label_flip(to=reverse)", [3, 2, 1, 0, 0]),
        ("label_flip(to=2)", [2, 2, 2, 2, 2]),
        ("label_flip(of=3, to=1)", [0, 1, 2, 1, 1]),
        ("label_flip(of=0)", [1, 1, 2, 3, 3]),
    ):
        x, y = alter(text)
        assert y.tolist() == wanted, text
        assert y.dtype == np.int64
        assert x is X, "inputs stay: nothing to store again"
    assert Y.tolist() == [0, 1, 2, 3, 3]


def test_random_labels_are_wrong_and_all_alike() -> None:
    """3000 rows of class 1 among 4: each other class 1000 times, within 5 * sqrt(3000 * 2/9) =
    129.
    """
    _, y = alter("label_flip(to=random)", y=np.ones(3000, dtype=np.int64))
    counts = np.bincount(y, minlength=4)
    assert counts[1] == 0
    assert np.abs(counts[[0, 2, 3]] - 1000).max() < 129
    assert (
        alter("label_flip(to=random)", seed=1)[1].tolist()
        != alter("label_flip(to=random)", seed=3)[1].tolist()
    )


def test_a_mark_by_hand() -> None:
    """Half of 5 rows is 2 (2.5 to even): their lower right pixel becomes the brightest there
    is, 16, and they belong to class 2.
    """
    x, y = alter("backdoor(target=2, size=1)")
    marked = np.flatnonzero(x[:, 0, 1, 1] == 16)
    assert len(marked) == 2
    assert x.sum() == 32
    assert y[marked].tolist() == [2, 2]
    clean = np.setdiff1d(np.arange(5), marked)
    assert y[clean].tolist() == Y[clean].tolist()
    assert X.sum() == 0
    whole, labels = alter("backdoor(size=2, share=1)")
    assert (whole == 16).all()
    assert labels.tolist() == [0] * 5
    assert (alter("backdoor(size=1, share=0.01)")[0] > 0).sum() == 1, "at least one row"


def test_a_mark_in_a_table() -> None:
    x, y = alter(
        "backdoor(size=2, share=1, target=1)",
        np.zeros((2, 3), dtype=np.float32),
        np.array([0, 3]),
        TABLE,
    )
    assert x.tolist() == [[0, 2, 3], [0, 2, 3]]
    assert y.tolist() == [1, 1]


def test_success_is_shown_on_marked_test_rows_of_other_classes() -> None:
    """Rows of the target itself would count as success without any backdoor."""
    adversary = Adversary.select(parse_attacks("backdoor(target=3, size=1)+sign_flip"), 10, Key(0))
    ((name, (x, y)),) = adversary.success_examples(X, Y, IMAGES).items()
    assert (name, y.tolist()) == ("backdoor", [3, 3, 3])
    assert x[:, 0, 1, 1].tolist() == [16, 16, 16]
    assert X.sum() == 0


def test_what_attackers_know() -> None:
    table = DatasetSplit(np.array([[1, 5], [3, 2]], dtype=np.float32), np.array([0, 1]))
    source = ArrayDataset("toy", "table", ("a", "b"), table, table)
    assert data_info(source).high.tolist() == [3, 5]
    images = DatasetSplit(np.full((2, 1, 2, 2), 16, dtype=np.uint8), np.array([0, 1]))
    assert data_info(ArrayDataset("toy", "image", ("a", "b"), images, images)).high.tolist() == 16


def hold(*clients: list[int]) -> ClientData:
    rows = PartitionIndices.concat([np.array(ids, dtype=np.int64) for ids in clients])
    return ClientData(
        rows,
        PartitionIndices.concat([np.array([4])] * len(clients)),
        np.zeros(len(clients), dtype=np.int64),
    )


def test_poisoned_rows_have_ids_of_their_own() -> None:
    """Row 1 is the attacker's now, and an honest client's later: there it keeps its label. n =
    5, so its poisoned form is example 6.
    """
    views = ConceptViews(X, Y, None, (0,))
    steps = [hold([0, 1], [2, 3]), hold([2], [1, 3])]
    found, after = poison(
        views, steps, parse_attacks("label_flip"), {"label_flip": np.array([0])}, IMAGES, Key(0)
    )
    assert [[step.train.for_client(client).tolist() for client in (0, 1)] for step in after] == [
        [[5, 6], [2, 3]],
        [[7], [1, 3]],
    ]
    assert found.y.tolist() == [0, 1, 2, 3, 3, 1, 2, 3, 3, 3]  # 0 1 2 -> 1 2 3, the rest as it was
    assert found.x is X
    assert found.storage_index is not None
    assert found.storage_index.tolist() == [0, 1, 2, 3, 4] * 2
    assert [step.valid.for_client(0).tolist() for step in after] == [[4], [4]], (
        "validation measures, and stays honest"
    )
    assert steps[0].train.for_client(0).tolist() == [0, 1]


def test_two_attacks_on_the_same_rows() -> None:
    """First labels, then marks: x is stored again for the attacker's rows alone."""
    views = ConceptViews(X, Y, np.arange(5), (0,))
    attacks = parse_attacks(
        'label_flip(clients="1", to=3)+backdoor(clients="1", size=1, share=1, target=2)'
    )
    adversary = Adversary.select(attacks, 2, Key(0))
    found, (after,) = adversary.poison(views, [hold([0, 1], [2, 3])], IMAGES, Key(0))
    mine = after.train.for_client(1)
    assert mine.tolist() == [7, 8]
    assert found.storage_index is not None
    assert found.y[mine].tolist() == [2, 2]
    assert found.x[found.storage_index[mine]][:, 0, 1, 1].tolist() == [16, 16]
    assert len(found.x) == 7
    assert found.x[:5].sum() == 0


def test_nothing_to_poison_changes_nothing() -> None:
    views, steps = ConceptViews(X, Y, None, (0,)), [hold([0], [1])]
    found, after = poison(
        views, steps, parse_attacks("nan"), {"nan": np.array([0])}, IMAGES, Key(0)
    )
    assert found is views
    assert after == tuple(steps)


@pytest.mark.parametrize(
    ("text", "known", "shape", "server", "words"),
    [
        (
            "label_flip(of=4)",
            IMAGES,
            (1, 2, 2),
            True,
            "label_flip: there is no class 4: classes are numbered 0 to 3",
        ),
        (
            "label_flip(of=1, to=reverse)",
            DataInfo("image", 3, np.array(16)),
            (1, 2, 2),
            True,
            "to=reverse leaves class 1 of 3 as it is",
        ),
        ("label_flip(to=9)", IMAGES, (1, 2, 2), True, "there is no class 9"),
        ("backdoor(target=4)", IMAGES, (1, 8, 8), True, "backdoor: there is no class 4"),
        (
            "backdoor(size=3)",
            IMAGES,
            (1, 2, 9),
            True,
            r"a trigger of size 3 does not fit into examples of shape \(1, 2, 9\): give at most 2",
        ),
        ("backdoor(size=4)", TABLE, (3,), True, "give at most 3"),
        (
            "backdoor",
            DataInfo("tokens", 2, np.array(9)),
            (80,),
            True,
            "triggers are for images and tables, and these data are tokens",
        ),
        (
            "similarity_lies",
            IMAGES,
            (1, 2, 2),
            True,
            "changes the losses that peers measure, and this method has a server",
        ),
    ],
)
def test_attacks_that_cannot_work_here(
    text: str, known: DataInfo, shape: Any, server: bool, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        check_attacks(parse_attacks(text), known, shape, server)


def test_attacks_that_can_work_pass() -> None:
    check_attacks(parse_attacks("label_flip(to=3)+backdoor(size=2)"), IMAGES, (1, 2, 2), True)
    check_attacks(parse_attacks("similarity_lies+sign_flip"), IMAGES, (1, 2, 2), False)
