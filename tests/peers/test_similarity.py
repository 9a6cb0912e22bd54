"""Similarities and two hops: four clients by hand, the reference number by number, and losses
that are no numbers.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.dac import chances, first_similarities, update_similarities
from torch import Tensor

from remanence.core.pytree import Tree
from remanence.peers import similarity

NAN, INF = math.nan, math.inf


def info(clients: int) -> Any:
    return SimpleNamespace(num_clients=clients, device=torch.device("cpu"))


def table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def state(similarities: list[list[float]], met: list[list[int]]) -> Tree:
    return {"similarity": table(similarities), "met": torch.tensor(met).bool()}


def test_all_begin_alike_and_nobody_has_met() -> None:
    found = similarity.init_similarity(info(4))
    assert found["similarity"].tolist() == first_similarities(4)
    assert not found["met"].any()
    assert similarity.init_similarity(info(1))["similarity"].tolist() == [[0.0]]


def test_two_hops_on_four_clients() -> None:
    """Client 0 tries 1 (loss 1/2) and 2 (loss 1/4): similarities 2 and 4. It has never met 3.

    Of the two, 2 is more alike, so 0 takes over what 2 held of 3 at the end of the round before:
    .7, not 1's .9. Client 1 tries 3 alone (loss 1/5), which held .2 of 0 and .6 of 2, but 1 had met
    2 before and keeps its own 3. Clients 2 and 3 try nobody.
    """
    old = [[0, 0.1, 0.1, 0.1], [0.5, 0, 3, 0.9], [0.3, 0.8, 0, 0.7], [0.2, 0.4, 0.6, 0]]
    met = [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
    found = similarity.update(
        state(old, met),
        torch.tensor([[1, 2], [3, -1], [-1, -1], [-1, -1]]),
        table([[0.5, 0.25], [0.2, NAN], [NAN] * 2, [NAN] * 2]),
    )
    assert found["similarity"].tolist() == [[0, 2, 4, 0.7], [0.2, 0, 3, 5], old[2], old[3]]
    assert found["met"].int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]]


def test_hearsay_is_of_the_round_before() -> None:
    """Client 2 tries 3 in the same round and so learns 8 of it; client 0, who tries 2, still
    hears the old .7.
    """
    old = [[0, 0.1, 0.1, 0.1], [0.5, 0, 3, 0.9], [0.3, 0.8, 0, 0.7], [0.2, 0.4, 0.6, 0]]
    nobody = [[0] * 4] * 4
    found = similarity.update(
        state(old, nobody),
        torch.tensor([[2], [-1], [3], [-1]]),
        table([[0.25], [NAN], [0.125], [NAN]]),
    )
    assert found["similarity"][2, 3] == 8
    assert found["similarity"][0].tolist() == [0, 0.8, 4, 0.7]


def test_who_knows_nothing_tells_nothing() -> None:
    """2 is most alike but holds 0 of client 3, as one does of a peer whose loss was no number:
    1 is asked instead. Where no teller knows, the old stays.
    """
    old = [[0, 0.1, 0.1, 0.1], [0.5, 0, 3, 0.9], [0.3, 0.8, 0, 0], [0.2, 0.4, 0.6, 0]]
    nobody = [[0] * 4] * 4
    probed, losses = (
        torch.tensor([[1, 2], *[[-1, -1]] * 3]),
        table([[0.5, 0.25], *[[NAN, NAN]] * 3]),
    )
    assert similarity.update(state(old, nobody), probed, losses)["similarity"][0].tolist() == [
        0,
        2,
        4,
        0.9,
    ]
    old[1][3] = 0
    assert similarity.update(state(old, nobody), probed, losses)["similarity"][0].tolist() == [
        0,
        2,
        4,
        0.1,
    ]


@pytest.mark.parametrize(
    ("loss", "alike"), [(NAN, 0.0), (INF, 0.0), (0.0, 1e10), (1e-12, 1e10), (4.0, 0.25)]
)
def test_a_loss_that_is_no_number_makes_a_peer_unlike_and_nothing_else(
    loss: float, alike: float
) -> None:
    before = similarity.init_similarity(info(3))
    found = similarity.update(
        before,
        torch.tensor([[1, 2], [2, -1], [-1, -1]]),
        table([[loss, 0.5], [0.25, NAN], [NAN, NAN]]),
    )
    assert found["similarity"].tolist() == [
        [0, pytest.approx(alike), 2],
        [0.5, 0, 4],
        [0.5, 0.5, 0],
    ]
    assert found["met"].int().tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert torch.isfinite(found["similarity"]).all()


def test_what_peers_are_drawn_by_is_clipped() -> None:
    found = similarity.logits(table([[0.0, 1.5, 1e10, -3.0]]), 30.0)
    assert found.tolist() == [[0, 45, 600, 0]]
    # the reference's chances are the softmax of these
    wanted = chances([0.0, 0.15, 0.12, 0.2], [1, 2, 3], 30.0)
    mine = torch.softmax(similarity.logits(table([[0.15, 0.12, 0.2]]), 30.0), dim=1)
    assert mine[0].tolist() == pytest.approx(wanted)


def test_meetings_are_added() -> None:
    met = torch.tensor([[False, True, False]] * 3)
    assert similarity.mark_met(met, torch.tensor([[2, -1], [-1, -1], [0, 1]])).int().tolist() == [
        [0, 1, 1],
        [0, 1, 0],
        [1, 1, 0],
    ]


@settings(max_examples=40)
@given(st.integers(2, 6), st.integers(0, 2**32), st.data())
def test_all_at_once_is_client_by_client(clients: int, seed: int, data: st.DataObject) -> None:
    """Any tables, any probes: the same as the reference's loops over clients and peers."""
    draw = torch.Generator().manual_seed(seed)
    old = torch.rand(clients, clients, generator=draw, dtype=torch.float64) * (
        torch.rand(clients, clients, generator=draw) < 0.8
    )
    old.fill_diagonal_(0)
    met = torch.rand(clients, clients, generator=draw) < 0.4
    met.fill_diagonal_(False)
    count = data.draw(st.integers(1, clients - 1))
    probed, losses = (
        torch.full((clients, count), -1),
        torch.full((clients, count), NAN, dtype=torch.float64),
    )
    given_losses = []
    for k in range(clients):
        others = [j for j in range(clients) if j != k]
        chosen = data.draw(st.lists(st.sampled_from(others), unique=True, max_size=count))
        mine = {j: data.draw(st.floats(0.01, 10)) for j in chosen}
        given_losses.append(mine)
        probed[k, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        losses[k, : len(chosen)] = torch.tensor(list(mine.values()), dtype=torch.float64)
    found = similarity.update({"similarity": old, "met": met}, probed, losses)
    for k, mine in enumerate(given_losses):
        similarities, acquainted = update_similarities(k, mine, old.tolist(), met[k].tolist())
        assert found["similarity"][k].tolist() == pytest.approx(similarities, rel=1e-14)
        assert found["met"][k].tolist() == acquainted
