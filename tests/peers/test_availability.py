"""Who answers in which rounds."""

from __future__ import annotations

import numpy as np
import pytest

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.peers.availability import parse_availability


def online(text: str, clients: int, round: int = 1, seed: int = 0) -> list[bool]:
    found: list[bool] = parse_availability(text)(
        np.arange(clients), clients, round, Key(seed).fold_in("round", round)
    ).tolist()
    return found


def test_always_every_and_never_by_hand() -> None:
    assert online("always", 3) == [True] * 3
    assert online('never(clients="1")', 3) == [True, False, True]
    assert online('never(clients="0, 2")', 3) == [False, True, False]
    # client k answers in the rounds that leave the same rest as k: of 5 clients and three turns, 1
    # and 4 in round 1, 2 in round 2, 0 and 3 in round 3
    turns = [
        [client for client, there in enumerate(online("every(rounds=3)", 5, round)) if there]
        for round in (1, 2, 3, 4)
    ]
    assert turns == [[1, 4], [2], [0, 3], [1, 4]]


def test_offline_at_random_is_as_often_as_asked_and_independent() -> None:
    """10 clients over 2000 rounds, offline with .1: by client five standard deviations are 5 *
    sqrt(.09 / 2000) = .034.

    Two clients are offline together in .01 of the rounds: within 5 * sqrt(.01 * .99 / 2000) = .012.
    """
    answers = parse_availability("random(offline=0.1)")
    away = ~np.array(
        [answers(np.arange(10), 10, round, Key(0).fold_in("round", round)) for round in range(2000)]
    )
    assert np.abs(away.mean(axis=0) - 0.1).max() < 0.034
    together = (away.T.astype(float) @ away.astype(float)) / 2000
    assert np.abs(together[~np.eye(10, dtype=bool)] - 0.01).max() < 0.012


def test_a_draw_belongs_to_its_round_and_seed() -> None:
    first = online("random(offline=0.5)", 40)
    assert first == online("random(offline=0.5)", 40)
    assert first != online("random(offline=0.5)", 40, round=2)
    assert first != online("random(offline=0.5)", 40, seed=1)
    assert all(online("random(offline=0)", 40))


def test_parts_hold_together() -> None:
    """Online is who is so for all parts: with client 0 gone for good, the others are as without
    it.
    """
    without = online("random(offline=0.5)", 20)
    both = online('random(offline=0.5)+never(clients="0")', 20)
    assert both == [False, *without[1:]]
    assert online('every(rounds=2)+never(clients="1")', 4, round=1) == [False, False, False, True]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("random(offline=1)", "offline is a probability below 1, not 1"),
        ("random(offline=-0.1)", "offline is a probability below 1"),
        ("never", "cannot read clients=''"),
        ('never(clients="two")', "cannot read clients='two'"),
        ('never(clients="-1")', "cannot read clients='-1'"),
        ("every(rounds=0)", "rounds must be at least 1, not 0"),
        ("sometimes", "sometimes"),
    ],
)
def test_what_cannot_be_is_refused_before_a_run(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_availability(text)


def test_a_client_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="there is no client 4: clients are numbered 0 to 3"):
        online('never(clients="4")', 4)
