from __future__ import annotations

import numpy as np
import pytest

from remanence.core.errors import InputError
from remanence.data.concept_rules import CORRUPTIONS
from remanence.data.concepts import Concept, describe_concept, make_concepts
from remanence.data.dataset import ArrayDataset, DatasetSplit

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
THESIS = (0, 1, 3, 4, 5, 7, 8, 9)


def make_dataset(
    kind: str = "image", groups: bool = True, width: int = 4, classes: tuple[str, ...] = NAMES
) -> ArrayDataset:
    """Two rows of each class, the first in group 0 (photo), the second in group 1 (sketch)."""
    y = np.repeat(np.arange(len(classes)), 2)
    x = (
        np.full((len(y), 1, 4, width), 16, np.uint8)
        if kind == "image"
        else np.zeros((len(y), 4), np.float32)
    )
    split = DatasetSplit(x, y, np.tile([0, 1], len(classes)) if groups else None)
    return ArrayDataset("toy", kind, classes, split, split, ("photo", "sketch") if groups else ())


def swapped(*pairs: tuple[int, int]) -> tuple[int, ...]:
    return tuple(
        dict(pairs + tuple((b, a) for a, b in pairs)).get(label, label) for label in range(10)
    )


def test_nothing_written_means_label_or_for_one_cluster_nothing() -> None:
    """10 classes over 4 clusters in order: 3, 3, 2, 2."""
    labels = [concept.labels for concept in make_concepts("", 4, make_dataset())]
    assert labels == [(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)]
    assert make_concepts("", 1, make_dataset()) == (Concept(),)
    assert make_concepts("none", 3, make_dataset()) == (Concept(),) * 3
    assert (
        make_concepts('none(labels="9 bird")', 2, make_dataset()) == (Concept(labels=(2, 9)),) * 2
    )


@pytest.mark.parametrize(
    "groups",
    ["0 1 8 9|3 4 5 7", "ship,truck, airplane automobile | cat deer dog horse", "9,8,1,0|7 5, 4,3"],
)
def test_the_thesis_label_groups_by_number_and_name(groups: str) -> None:
    concepts = make_concepts(f"label(groups='{groups}')", 2, make_dataset())
    assert concepts == (Concept(labels=(0, 1, 8, 9)), Concept(labels=(3, 4, 5, 7)))


def test_label_groups_may_overlap_and_names_may_have_spaces() -> None:
    dataset = make_dataset(classes=("dog", "hot dog", "7"))
    concepts = make_concepts("label(groups='hot dog, dog|dog 2')", 2, dataset)
    # class 2 is called "7", and yet a number is a number
    assert [concept.labels for concept in concepts] == [(0, 1), (0, 2)]
    assert make_concepts("swap(pairs='hot dog dog')", 1, dataset)[0].mapping == (1, 0, 2)


@pytest.mark.parametrize(
    "options", ["", ", pairs='|0 1|3 4|5 7'", ", pairs='|airplane automobile|deer cat|dog horse'"]
)
def test_the_thesis_label_swap_is_also_the_default(options: str) -> None:
    concepts = make_concepts(f"swap(labels='0 1 3 4 5 7 8 9'{options})", 4, make_dataset())
    mappings = [None, swapped((0, 1)), swapped((3, 4)), swapped((5, 7))]
    assert concepts == tuple(Concept(labels=THESIS, mapping=mapping) for mapping in mappings)


def test_several_pairs_in_one_cluster() -> None:
    concepts = make_concepts("swap(pairs='0 1, 3 4|')", 2, make_dataset())
    assert concepts == (Concept(mapping=swapped((0, 1), (3, 4))), Concept())


def test_kinds_are_joined_field_by_field() -> None:
    text = (
        "label(groups='0 1|3 4')+swap(pairs='|3"
        " 4')+domain(groups='sketch|0')+rotate+corrupt(kinds='blur|clean',"
        " severity=2)+quantity"
    )
    assert make_concepts(text, 2, make_dataset()) == (
        Concept(
            labels=(0, 1),
            domain=1,
            rotation=0.0,
            corruption="blur",
            severity=2,
            max_pixel=16,
            size_factor=1.0,
        ),
        Concept(labels=(3, 4), mapping=swapped((3, 4)), domain=0, rotation=180.0, size_factor=0.5),
    )


def test_domains_and_turns_by_default_and_by_hand() -> None:
    assert [concept.domain for concept in make_concepts("domain", 2, make_dataset())] == [0, 1]
    assert [concept.rotation for concept in make_concepts("rotate", 4, make_dataset())] == [
        0,
        90,
        180,
        270,
    ]
    assert [
        concept.rotation
        for concept in make_concepts("rotate(degrees='-90|12.5|720')", 3, make_dataset())
    ] == [270, 12.5, 0]
    assert [
        concept.size_factor
        for concept in make_concepts("quantity(shares='1|.3|2')", 3, make_dataset())
    ] == [1, 0.3, 2]


def test_corruptions_by_default_know_the_white_of_the_data() -> None:
    concepts = make_concepts("corrupt", 7, make_dataset())
    assert [concept.corruption for concept in concepts] == ["", *CORRUPTIONS[1:]]
    assert [concept.severity for concept in concepts] == [0, 3, 3, 3, 3, 3, 0]
    assert concepts[0] == Concept()
    assert concepts[1].max_pixel == 16


def test_a_concept_selects_its_rows() -> None:
    split = make_dataset().train  # row 2 c + g is class c in group g
    assert Concept(labels=(1, 3)).select(split).tolist() == [2, 3, 6, 7]
    assert Concept(labels=(1, 3), domain=1, mapping=swapped((1, 2))).select(split).tolist() == [
        3,
        7,
    ]
    assert len(Concept(rotation=90.0).select(split)) == 20


def test_concepts_in_words() -> None:
    dataset = make_dataset()
    assert describe_concept(Concept(), dataset) == "as they are"
    assert describe_concept(
        Concept(labels=(0, 3), mapping=swapped((0, 3)), size_factor=0.5), dataset
    ) == ("airplane, cat; swapped airplane and cat; 0.5 times the examples")
    whole = Concept(domain=1, rotation=90.0, corruption="noise", severity=3)
    assert describe_concept(whole, dataset) == "sketch; rotated by 90 degrees; noise 3"
    assert describe_concept(Concept(corruption="invert"), dataset) == "invert"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("labl", "unknown kind of drift 'labl': did you mean label"),
        ("label(group='1')", "has no option 'group'"),
        ("label+rotate+label", "'label' occurs twice"),
        ("label+swap(labels='0 1')", "'swap' sets the labels of a cluster, and so does 'label'"),
        (
            "label(groups='0 1|2|3')",
            "has 3 entries in groups='0 1|2|3' but the drift has 2 clusters",
        ),
        ("label(groups='0 1|')", "has a cluster without labels"),
        ("label(groups='0 1|2 2')", "names a label twice in '2 2'"),
        ("label(groups='0 0|1')", "names a label twice"),
        ("label(groups='0|10')", "has no label '10': give a number below 10"),
        ("label(groups='0|-1')", "has no label '-1'"),
        ("label(groups='0,,1|2')", "has no label ''"),
        ("label(groups='0|horze')", "did you mean horse"),
        ("swap(pairs='|0')", "cannot read the pair '0'"),
        ("swap(pairs='|0 1, ')", "cannot read the pair ''"),
        ("swap(pairs='|0 1 2')", "has no label '1 2'"),
        ("swap(pairs='|0 1, 1 2')", "swaps label 1 more than once"),
        ("swap(pairs='|3 3')", "swaps label 3 more than once"),
        ("swap(pairs='|0 2', labels='0 1')", "swaps label 2, which is not in labels='0 1'"),
        ("swap(labels='3')", "cannot find 1 pairs in 1 classes"),
        ("domain(groups='photo|art')", "has no group 'art'"),
        ("rotate(degrees='0|right')", "cannot read 'right' in degrees='0|right'"),
        ("rotate(degrees='0|1e999')", "cannot read '1e999'"),
        ("rotate(degrees='0|nan')", "cannot read 'nan'"),
        ("corrupt(kinds='clean|nose')", "has no corruption 'nose': did you mean noise"),
        ("corrupt(severity=6)", "cannot use severity=6"),
        ("quantity(shares='1|0')", "cannot use shares='1|0'"),
        ("quantity(shares='1|-1')", "cannot use shares='1|-1'"),
    ],
)
def test_kinds_that_make_no_sense_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        make_concepts(text, 2, make_dataset())
    assert complaint in str(caught.value)


def test_kinds_that_do_not_fit_the_data_are_refused() -> None:
    with pytest.raises(InputError, match="cannot divide 10 classes over 11 clusters"):
        make_concepts("", 11, make_dataset())
    with pytest.raises(InputError, match=r"has 7 entries .* 8 clusters"):
        make_concepts("corrupt", 8, make_dataset())
    with pytest.raises(InputError, match="has 2 groups for 3 clusters"):
        make_concepts("domain", 3, make_dataset())
    with pytest.raises(
        InputError, match="needs data with domains, writers or users, which 'toy' does not have"
    ):
        make_concepts("domain", 2, make_dataset(groups=False))
    with pytest.raises(InputError, match=r"images that are not square \(4 x 5\)"):
        make_concepts("rotate(degrees='0|270')", 2, make_dataset(width=5))
    assert make_concepts("rotate", 2, make_dataset(width=5))[1].rotation == 180
    for text in ("rotate", "corrupt"):
        with pytest.raises(InputError, match=f"{text!r} is for images, and 'toy' is table"):
            make_concepts(text, 2, make_dataset(kind="table"))


def test_a_cluster_without_examples_is_refused() -> None:
    dataset = make_dataset()
    # no truck to be tested on
    fewer = ArrayDataset(
        "toy",
        "image",
        NAMES,
        dataset.train,
        dataset.test.select(np.arange(18)),
        dataset.group_names,
    )
    with pytest.raises(InputError, match=r"cluster 1 of the drift has no test examples \(truck\)"):
        make_concepts("label(groups='0|9')", 2, fewer)
