"""Who can reach whom: small graphs by hand, and what holds for every graph."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.peers import topology
from remanence.peers.topology import TOPOLOGIES, edges, erdos_renyi, full, regular, ring

clients, seeds = st.integers(2, 17), st.integers(0, 2**32)


def neighbors(joined: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in joined]


def assert_a_graph(joined: np.ndarray, count: int) -> None:
    """Symmetric, and nobody beside itself: an edge counts both ways."""
    assert joined.dtype == bool
    assert joined.shape == (count, count)
    assert not np.diagonal(joined).any()
    assert np.array_equal(joined, joined.T)


def test_everybody_reaches_everybody() -> None:
    assert neighbors(full()(4, Key(0))) == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]


def test_a_ring_of_five_by_hand() -> None:
    assert neighbors(ring()(5, Key(0))) == [[1, 4], [0, 2], [1, 3], [2, 4], [0, 3]]
    assert neighbors(ring(neighbors=2)(6, Key(0)))[0] == [1, 2, 4, 5]  # all but the one opposite
    # a circle cannot have more than all
    assert neighbors(ring(neighbors=9)(4, Key(0))) == neighbors(full()(4, Key(0)))


@given(clients, st.integers(1, 9), seeds)
def test_a_ring_knows_the_nearest_on_either_side(count: int, near: int, seed: int) -> None:
    joined = ring(neighbors=near)(count, Key(seed))
    assert_a_graph(joined, count)
    assert set(joined.sum(axis=1).tolist()) == {min(2 * near, count - 1)}


@given(clients, st.integers(1, 16), seeds)
def test_a_regular_graph_gives_everybody_the_same_number(
    count: int, degree: int, seed: int
) -> None:
    assume(degree < count and count * degree % 2 == 0)
    joined = regular(degree=degree)(count, Key(seed))
    assert_a_graph(joined, count)
    assert set(joined.sum(axis=1).tolist()) == {degree}
    assert np.array_equal(joined, regular(degree=degree)(count, Key(seed)))


def test_a_regular_graph_is_drawn_at_random() -> None:
    """No pair is special, though all begin as a circle: in hundreds of graphs every one is joined
    in about degree / (K - 1) of them.

    With 400 graphs the share of a pair has a standard deviation of at most .5 / 20 = .025; five of
    them is .125.
    """
    graphs = np.stack([regular(degree=3)(8, Key(seed)) for seed in range(400)])
    share = graphs.mean(axis=0)[~np.eye(8, dtype=bool)]
    assert np.abs(share - 3 / 7).max() < 0.125
    assert len({graph.tobytes() for graph in graphs}) > 300


def test_an_erdos_renyi_graph_has_its_share_of_edges() -> None:
    """400 graphs of 8 clients at p = .3: by pair five standard deviations are 5 * sqrt(.21 /
    400) = .115.
    """
    graphs = np.stack([erdos_renyi(p=0.3)(8, Key(seed)) for seed in range(400)])
    for graph in graphs[:20]:
        assert_a_graph(graph, 8)
    assert np.abs(graphs.mean(axis=0)[~np.eye(8, dtype=bool)] - 0.3).max() < 0.115
    assert neighbors(erdos_renyi(p=0)(3, Key(1))) == [[], [], []]
    assert neighbors(erdos_renyi(p=1)(3, Key(1))) == [[1, 2], [0, 2], [0, 1]]


def test_a_users_edges(tmp_path: Path) -> None:
    path = tmp_path / "graph.csv"
    path.write_text("# a path with a comment\n0,1\n\n 2 1 \n3;2\n1\t0\n")
    assert neighbors(edges(path=str(path))(5, Key(0))) == [[1], [0, 2], [1, 3], [2], []]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("0,1\n1,one\n", "line 2 of .* is not two clients' numbers"),
        ("0,1,2\n", "line 1 of .* is not two clients' numbers"),
        ("0,-1\n", "line 1 of .* is not two clients' numbers"),
        ("0 1\n3 4\n", "line 2 of .* joins 3 and 4: clients are numbered 0 to 3"),
        ("2,2\n", "joins 2 and 2: .* differ"),
        ("# nothing\n", "holds no edge"),
        (b"\xff\xfe\x00", r"cannot read .* \(UnicodeDecodeError\)"),
    ],
)
def test_a_wrong_edge_list_is_refused_with_its_line(
    tmp_path: Path, content: str | bytes, words: str
) -> None:
    path = tmp_path / "graph.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match=words):
        edges(path=str(path))(4, Key(0))


def test_an_edge_list_must_be_there_and_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"cannot read .*no\.csv .*check the name"):
        edges(path=str(tmp_path / "no.csv"))(3, Key(0))
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match="is not a regular file: check the name"):
            edges(path=str(special))(3, Key(0))
    with pytest.raises(InputError, match=r"edges\(path='graph.csv'\)"):
        edges()
    monkeypatch.setattr(topology, "LARGEST_FILE", 3)
    (tmp_path / "long.csv").write_text("0,1\n1,2\n")
    with pytest.raises(InputError, match="larger than 3 bytes"):
        edges(path=str(tmp_path / "long.csv"))(3, Key(0))


def test_graphs_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="5 clients cannot have 3 neighbors each"):
        regular(degree=3)(5, Key(0))  # 15 ends of edges is odd
    with pytest.raises(InputError, match="4 clients cannot have 4 neighbors each"):
        regular(degree=4)(4, Key(0))
    with pytest.raises(InputError, match="degree must be at least 1"):
        regular(degree=0)
    with pytest.raises(InputError, match="neighbors must be at least 1"):
        ring(neighbors=0)
    with pytest.raises(InputError, match="p is a probability"):
        erdos_renyi(p=1.5)


@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if name != "edges"])
def test_every_topology_is_a_graph_and_a_function_of_its_key(name: str) -> None:
    lay = TOPOLOGIES[name]()
    assert_a_graph(lay(10, Key(3)), 10)
    assert np.array_equal(lay(10, Key(3)), lay(10, Key(3)))
