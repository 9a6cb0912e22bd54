"""Robust aggregators: by hand, against loops over plain lists, and what each promises under any
hostile minority.
"""

from __future__ import annotations

import math

import pytest
import torch
from aggregators.points import as_replies, combine, doubles
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import robust as reference
from torch import Tensor

from remanence.aggregators import coordinatewise
from remanence.aggregators.minimum_replies import median_buffers
from remanence.aggregators.robust import (
    ROBUST,
    geometric_median,
    krum,
    median,
    multi_krum,
    norm_clip,
    trimmed_mean,
)
from remanence.core.slots import Part

ALL = [
    median(),
    trimmed_mean(fraction=0.2),
    krum(),
    multi_krum(),
    multi_krum(keep=2),
    geometric_median(),
    norm_clip(),
    norm_clip(limit=0.5),
]
NAMES = [
    "median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "multi_krum(2)",
    "geometric_median",
    "norm_clip",
    "norm_clip(.5)",
]
every_aggregator = pytest.mark.parametrize("made", ALL, ids=NAMES)


def make_points(seed: int, k: int, size: int = 4) -> Tensor:
    return torch.randn(k, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_five_points_by_hand() -> None:
    """Four at the corners of a unit square, in the order (0,0) (1,0) (0,1) (1,1), and one far away
    at (100, -100).

    Median: x of 0 0 1 1 100 is 1, y of -100 0 0 1 1 is 0. Trimmed by one: x (0 + 1 + 1) / 3, y (0 +
    0 + 1) / 3. Krum with f = 1 looks at 5 - 1 - 2 = 2 closest: each corner has 1 + 1 = 2, so client
    0 wins the tie; Multi-Krum keeps two, clients 0 and 1: (1/2, 0).
    """
    points = doubles([[0, 0], [1, 0], [0, 1], [1, 1], [100, -100]])
    assert combine(median(), points).tolist() == [1, 0]
    assert combine(trimmed_mean(fraction=0.2), points).tolist() == pytest.approx(
        [2 / 3, 1 / 3], abs=1e-15
    )
    assert combine(krum(), points).tolist() == [0, 0]
    assert combine(multi_krum(), points).tolist() == [0.5, 0]


def test_krum_by_hand() -> None:
    """On a line 0, 1, 3, 7, 20 with f = 1, two closest: 1 + 9 = 10, 1 + 4 = 5, 4 + 9 = 13, 16 + 36
    = 52, 169 + 289 = 458.

    Krum is 1, and the best three are 1, 0, 3 with mean 4/3: more than n - f - 2 = 2 of them would
    be refused, so f = 0 keeps three. Its three closest: 1 + 9 + 49 = 59, 1 + 4 + 36 = 41, 4 + 9 +
    16 = 29, 16 + 36 + 49 = 101, 169 + 289 + 361 = 819: the same three.
    """
    points = doubles([[x, 0] for x in (0, 1, 3, 7, 20)])
    assert combine(krum(byzantine=1), points).tolist() == [1, 0]
    assert combine(krum(byzantine=0), points).tolist() == [3, 0]
    assert combine(multi_krum(byzantine=0), points).tolist() == pytest.approx([4 / 3, 0], abs=1e-15)


def test_a_tie_of_krum_goes_to_the_lower_number() -> None:
    """Two that are each other's closest have the same score; who wins must not depend on who
    answers first.
    """
    points = doubles([[0, 0], [1, 0], [5, 0]])
    assert combine(krum(byzantine=0), points, clients=[9, 4, 2]).tolist() == [1, 0]
    assert combine(krum(byzantine=0), points[[1, 0, 2]], clients=[4, 9, 2]).tolist() == [1, 0]


def test_the_geometric_median_by_hand() -> None:
    """Corners of an equilateral triangle: its center. A point with half of the weight or more: that
    point. On a line with equal weights: the median.

    A right angle with sides 1 has its Fermat point on the diagonal at (t, t) with t = (1 - 1/sqrt
    3) / 2: from there, all three are seen 120 degrees apart.
    """
    triangle = doubles([[0, 0], [1, 0], [0.5, math.sqrt(3) / 2]])
    assert combine(geometric_median(), triangle).tolist() == pytest.approx(
        [0.5, math.sqrt(3) / 6], abs=1e-6
    )
    t = (1 - 1 / math.sqrt(3)) / 2
    assert combine(
        geometric_median(tolerance=1e-9, iterations=1000), doubles([[0, 0], [1, 0], [0, 1]])
    ).tolist() == pytest.approx([t, t], abs=1e-6)
    assert combine(
        geometric_median(), doubles([[0, 0], [0, 0], [7, 7]]), weights=[1, 1, 1]
    ).tolist() == [0, 0]
    assert combine(geometric_median(), doubles([[0, 0], [1, 0], [9, 0]])).tolist() == pytest.approx(
        [1, 0], abs=1e-5
    )


def test_weights_count_for_the_geometric_median_only_where_asked() -> None:
    """On a line with weights 2 2 3 at 0, 1, 5, half of the 7 is reached at 1. In the plane, a
    heavier corner of the triangle is nearer.
    """
    triangle = doubles([[0, 0], [1, 0], [0.5, math.sqrt(3) / 2]])
    plain, heavy = (
        combine(geometric_median(), triangle),
        combine(geometric_median(), triangle, weights=[0.4, 0.3, 0.3]),
    )
    assert float(heavy.norm()) < float(plain.norm()) - 0.1
    alike = combine(geometric_median(weighted=False), triangle, weights=[0.4, 0.3, 0.3])
    assert alike.tolist() == pytest.approx(plain.tolist(), abs=1e-6)
    assert combine(
        geometric_median(), doubles([[0, 0], [1, 0], [5, 0]]), weights=[2, 2, 3]
    ).tolist() == pytest.approx([1, 0], abs=1e-4)


def test_clipping_by_hand() -> None:
    """Ways of length 5, 10 and 1 with weights 1/2, 1/4, 1/4, the median of lengths is 5: (3, 4) / 2
    + (10, 0) / 2 / 4 + (0, 1) / 4 = (2.75, 2.25).

    With a limit of 1: (.6, .8) / 2 + (1, 0) / 4 + (0, 1) / 4 = (.55, .65). With a limit of 20
    nothing is clipped: (1.5 + 2.5, 2 + .25) = (4, 2.25).
    """
    points, weights = doubles([[3, 4], [10, 0], [0, 1]]), [2, 1, 1]
    assert combine(norm_clip(), points, weights).tolist() == pytest.approx([2.75, 2.25], abs=1e-15)
    assert combine(norm_clip(limit=1), points, weights).tolist() == pytest.approx(
        [0.55, 0.65], abs=1e-15
    )
    assert combine(norm_clip(limit=20), points, weights).tolist() == pytest.approx(
        [4, 2.25], abs=1e-15
    )


@pytest.mark.parametrize("k", [5, 6, 9])
def test_all_equal_loops_over_plain_lists(k: int) -> None:
    points, weights = make_points(k, k), [1 + place % 3 for place in range(k)]
    plain, shares = points.tolist(), [weight / sum(weights) for weight in weights]
    for made, wanted in (
        (median(), reference.median(plain)),
        (trimmed_mean(fraction=0.2), reference.trimmed_mean(plain, cut=1)),
        (krum(), plain[reference.krum_order(plain, 1)[0]]),
        (multi_krum(), reference.multi_krum(plain, 1, k - 3)),
        (multi_krum(byzantine=0, keep=3), reference.multi_krum(plain, 0, 3)),
        (norm_clip(), reference.norm_clip(plain, shares, 0.0)),
        (norm_clip(limit=1.5), reference.norm_clip(plain, shares, 1.5)),
    ):
        assert combine(made, points, weights).tolist() == pytest.approx(wanted, abs=1e-13), (
            made.name
        )
    found = combine(geometric_median(tolerance=1e-9, iterations=2000), points, weights).tolist()
    best = reference.geometric_median(plain, shares)
    assert found == pytest.approx(best, abs=1e-6)
    assert (
        reference.sum_of_distances(plain, shares, found)
        <= reference.sum_of_distances(plain, shares, best) + 1e-12
    )


clouds = st.tuples(st.integers(0, 10_000), st.integers(5, 9)).map(lambda drawn: make_points(*drawn))


@every_aggregator
@settings(max_examples=25)
@given(points=clouds, order=st.randoms(use_true_random=False))
def test_the_order_of_replies_does_not_matter(made: Part, points: Tensor, order: object) -> None:
    places = list(range(len(points)))
    order.shuffle(places)  # type: ignore[attr-defined]
    plain, shuffled = combine(made, points), combine(made, points[places], clients=places)
    assert torch.allclose(plain, shuffled, rtol=0, atol=1e-12)


@every_aggregator
@settings(max_examples=25)
@given(points=clouds, seed=st.integers(0, 1000))
def test_a_shift_of_everything_shifts_the_result(made: Part, points: Tensor, seed: int) -> None:
    """Models and start together: an aggregator sees how far clients moved. Without the start,
    all but clipping, which measures from there.
    """
    shift = make_points(seed, 1)[0]
    plain = combine(made, points)
    assert torch.allclose(
        combine(made, points + shift, start=shift), plain + shift, rtol=0, atol=1e-11
    )
    if made.name != "norm_clip":
        assert torch.allclose(
            combine(made, points + shift),
            plain + shift,
            rtol=0,
            atol=1e-5 if made.name == "geometric_median" else 1e-11,
        )


@every_aggregator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_replies_give_their_mean_in_their_own_type(made: Part, dtype: torch.dtype) -> None:
    """A length of .1 * 2 is below every limit used here."""
    points = torch.full((7, 4), 0.1, dtype=dtype)
    found = combine(made, points, weights=[1, 2, 1, 1, 1, 1, 1])
    assert torch.allclose(found, points[0], rtol=1e-6, atol=0)
    if made.name in ("median", "trimmed_mean", "krum", "geometric_median"):
        assert torch.equal(found, points[0]), "not a bit may be lost"


hostile = st.lists(
    st.lists(
        st.one_of(st.floats(-10, 10), st.sampled_from([1e38, -1e38, 1e20, -3e7])),
        min_size=4,
        max_size=4,
    ),
    min_size=2,
    max_size=2,
)


@given(seed=st.integers(0, 10_000), bad=hostile)
def test_two_of_seven_cannot_push_a_coordinate_beyond_the_honest_ones(
    seed: int, bad: list[list[float]]
) -> None:
    honest = make_points(seed, 5)
    points = torch.cat([doubles(bad), honest])
    for made in (median(), trimmed_mean(fraction=0.29)):  # .29 * 7 = 2.03: two at each end
        found = combine(made, points)
        assert bool(((found >= honest.amin(dim=0)) & (found <= honest.amax(dim=0))).all()), (
            made.name
        )


@given(seed=st.integers(0, 10_000), bad=hostile)
def test_two_of_seven_cannot_move_whole_models_out_of_a_ball(
    seed: int, bad: list[list[float]]
) -> None:
    """Honest models in a ball of radius r around c.

    Krum, n = 7, f = 2: 3 closest, and every honest one has 4 others within 2r, so the best score is
    at most 3 (2r)^2. The chosen one has an honest one among its 3 closest, since there are 2
    hostile, at most that far squared: it lies within sqrt(12) r of it, so within (1 + sqrt 12) r of
    c. Likewise each that Multi-Krum keeps: there are 5 honest scores, so the best 3 are at most
    that too. Geometric median with a share a = 2/7 of hostile ones: within (1 - a) / sqrt(1 - 2a) r
    of c (Minsker 2015, lemma 2.1), here with a thousandth to spare.
    Clipping: all lengths are cut to the median, which is at most the longest honest one.
    """
    honest = make_points(seed, 5) + 3.0
    points, center = torch.cat([doubles(bad), honest]), honest.mean(dim=0)
    radius = float((honest - center).norm(dim=1).max())
    for made in (krum(byzantine=2), multi_krum(byzantine=2)):
        assert float((combine(made, points) - center).norm()) <= (1 + math.sqrt(12)) * radius * (
            1 + 1e-12
        ), made.name
    a = 2 / 7
    assert (
        float((combine(geometric_median(), points) - center).norm())
        <= (1 - a) / math.sqrt(1 - 2 * a) * radius * 1.001
    )
    assert float(combine(norm_clip(), points).norm()) <= float(honest.norm(dim=1).max()) * (
        1 + 1e-12
    )


@every_aggregator
def test_the_longest_float32_model_leaves_no_nan(made: Part) -> None:
    """Its square, and its difference from its opposite, are infinite in float32. It is refused,
    bounded or outvoted: five honest models lie around 0.
    """
    points = make_points(0, 7).float()
    points[2], points[5] = 3.4e38, -3.4e38
    found = combine(
        krum(byzantine=2)
        if made.name == "krum"
        else multi_krum(byzantine=2)
        if made.name == "multi_krum"
        else made,
        points,
    )
    assert bool(torch.isfinite(found).all())
    assert float(found.norm()) < 10


@pytest.mark.parametrize(
    "made", [median(), trimmed_mean(fraction=0.2), krum()], ids=["median", "trimmed_mean", "krum"]
)
def test_one_nan_of_seven_is_outvoted_even_without_the_gate(made: Part) -> None:
    points = make_points(1, 7)
    points[3] = torch.nan
    assert bool(torch.isfinite(combine(made, points)).all())


@every_aggregator
def test_pieces_of_columns_change_nothing(made: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    points = make_points(2, 7, size=9)
    whole = combine(made, points)
    monkeypatch.setattr(coordinatewise, "_VALUES_AT_ONCE", 14)  # two columns of seven at a time
    assert torch.allclose(combine(made, points), whole, rtol=0, atol=1e-14)


def test_buffers_are_settled_by_medians() -> None:
    """Variances .5, 1, 900 -> 1. Counters 3, 4, 2^60 -> 4, where a mean or the largest would
    believe the third. Names that nobody sent stay.
    """
    sent = {"norm.var": doubles([[0.5], [1], [900]]), "norm.count": torch.tensor([3, 4, 2**60])}
    current = {
        "norm.var": doubles([[7]])[0],
        "norm.count": torch.tensor(0),
        "kept": torch.tensor(5),
    }
    found = median_buffers(current, sent, torch.ones(3))
    assert (found["norm.var"].tolist(), found["norm.count"].tolist(), found["kept"].tolist()) == (
        [1.0],
        4,
        5,
    )
    assert found["norm.count"].dtype == torch.int64
    assert median_buffers(current, {}, torch.ones(3)) == current


def test_the_table_is_complete() -> None:
    assert sorted(ROBUST) == sorted({made.name for made in ALL})
    assert all(ROBUST[name]().name == name for name in ROBUST)
    assert as_replies(make_points(0, 3)).num_clients == 3
