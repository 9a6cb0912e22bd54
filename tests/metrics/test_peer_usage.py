"""Whom clients listen to."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from metrics.small_ledger import make_peers

from remanence.metrics.peer_usage import same_cluster_usage

CLUSTERS = [[0, 0, 0, 1], [0, 1, 1, 1]]


def test_own_cluster_against_chance() -> None:
    """Step 0: client 0 used 1 and 3 once each, client 3 (alone in its cluster) used 0 twice: 1 of
    4 in the own cluster.
    Chance: client 0 has 2 of 3 others in its cluster, client 3 none; two hearings each: (2 * 2/3 +
    2 * 0) / 4 = 1/3. Step 1: client 2 used 1 and 3, both its own; chance 2/3. Listening to oneself
    is not listening.
    """
    counts = make_peers(
        (5, 0, [[9, 1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0], [2, 0, 0, 0]]),
        (10, 1, [[0] * 4, [0] * 4, [0, 1, 0, 1], [0] * 4]),
    )
    found = same_cluster_usage(counts, CLUSTERS)
    assert found.round.tolist() == [5, 10]
    assert found.same_cluster.tolist() == [0.25, 1.0]
    np.testing.assert_allclose(found.chance, [1 / 3, 2 / 3])


def test_silence_has_no_share_and_likeness_is_not_listening() -> None:
    found = same_cluster_usage(make_peers((5, 0, [[0] * 4] * 4)), CLUSTERS)
    assert np.isnan(found.same_cluster).all()
    assert np.isnan(found.chance).all()
    assert same_cluster_usage(
        make_peers((5, 0, [[1] * 4] * 4), kind="similarity"), CLUSTERS
    ).round.shape == (0,)


@given(arrays.arrays(np.int64, 5, elements=st.integers(0, 2)))
def test_hearing_everybody_alike_is_chance(clusters: np.ndarray) -> None:
    found = same_cluster_usage(make_peers((1, 0, np.ones((5, 5)).tolist())), [clusters.tolist()])
    np.testing.assert_allclose(found.same_cluster, found.chance)


@given(arrays.arrays(np.int64, (4, 4), elements=st.integers(0, 3)), st.permutations(range(4)))
def test_bounds_and_any_numbering_of_clients(counts: np.ndarray, order: list[int]) -> None:
    clusters = np.array(CLUSTERS[0])
    found = same_cluster_usage(make_peers((1, 0, counts.tolist())), [clusters.tolist()])
    moved = same_cluster_usage(
        make_peers((1, 0, counts[np.ix_(order, order)].tolist())), [clusters[order].tolist()]
    )
    np.testing.assert_allclose(moved.same_cluster, found.same_cluster)
    np.testing.assert_allclose(moved.chance, found.chance)
    assert np.all(
        np.isnan(found.same_cluster) | ((found.same_cluster >= 0) & (found.same_cluster <= 1))
    )
