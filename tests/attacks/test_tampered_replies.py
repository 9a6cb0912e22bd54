"""Attacks on what clients answer: by hand, and what the gate and the aggregators make of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attacks.small_replies import START, make_job, make_replies, rows_of

from remanence.attacks import Adversary, Attack, parse_attacks
from remanence.attacks.metadata import count_leaves
from remanence.attacks.models import a_little_std
from remanence.core import pytree
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply
from remanence.methods import fednova, fedwavg, flashback
from remanence.training import gate
from remanence.training.reply_schema import ReplySchema

ROWS = [[2.0, 2.0, 1.0], [1.0, 3.0, -1.0], [0.0, 2.0, 4.0]]
BAD = np.array([1])


def act(
    text: str, replies: Reply, attackers: np.ndarray = BAD, start: ModelState = START, seed: int = 0
) -> Reply:
    (attack,) = parse_attacks(text)
    if attack.tamper_counts is not None:
        leaves = count_leaves((flashback(), fedwavg(), fednova()), replies.payload)
        return attack.tamper_counts(replies, attackers, leaves)
    assert attack.tamper_replies is not None
    return attack.tamper_replies(replies, attackers, start, Key(seed))


def test_ways_are_turned_and_stretched() -> None:
    """Client 1 went from (1, 2, 0) by (0, 1, -1): turned (1, 1, 1), turned twice as far (1, 0,
    2), ten times as far (1, 12, -10).
    """
    replies = make_replies(ROWS)
    for text, wanted in (
        ("sign_flip", [1.0, 1.0, 1.0]),
        ("sign_flip(scale=2)", [1.0, 0.0, 2.0]),
        ("scaling", [1.0, 12.0, -10.0]),
        ("scaling(factor=0.5)", [1.0, 2.5, -0.5]),
    ):
        assert rows_of(act(text, replies)) == [ROWS[0], wanted, ROWS[2]], text
    assert rows_of(replies) == ROWS, "the honest stack must stay as it was"


def test_each_may_start_from_a_model_of_its_own() -> None:
    """Client 1 started from (0, 0, 0): turned, (1, 3, -1) is (-1, -3, 1)."""
    own = ModelState(
        {
            "a": torch.tensor([9.0, 0.0, 9.0]),
            "b": torch.tensor([[[9.0, 9.0]], [[0.0, 0.0]], [[9.0, 9.0]]]),
        },
        {},
    )
    assert rows_of(act("sign_flip", make_replies(ROWS), start=own))[1] == [-1.0, -3.0, 1.0]
    near = rows_of(act("gaussian(std=0.001)", make_replies(ROWS), start=own))[1]
    assert near == pytest.approx([0, 0, 0], abs=0.01)
    assert near != [0, 0, 0]


def test_noise_has_its_deviation_and_belongs_to_the_client() -> None:
    """2000 coordinates around a start of 5 with deviation 3: mean within 5 * 3 / sqrt(2000) =
    .34, deviation within 5 * 3 / sqrt(4000) = .24.
    """
    start = ModelState({"w": torch.full((2000,), 5.0)}, {})
    empty = torch.zeros(2)
    replies = Reply(
        torch.tensor([4, 7]),
        torch.ones(2).long(),
        {"w": torch.zeros(2, 2000)},
        {},
        {},
        empty,
        {},
        empty,
    )
    found = act("gaussian(std=3)", replies, np.array([4, 7]), start).params["w"]
    assert found.mean(dim=1).tolist() == pytest.approx([5, 5], abs=0.34)
    assert found.std(dim=1).tolist() == pytest.approx([3, 3], abs=0.24)
    assert not torch.equal(found[0], found[1])
    turned = act(
        "gaussian(std=3)", replies.select(torch.tensor([1, 0])), np.array([4, 7]), start
    ).params["w"]
    assert torch.equal(turned, found[[1, 0]])
    assert not torch.equal(
        act("gaussian(std=3)", replies, np.array([4, 7]), start, seed=1).params["w"], found
    )


def test_a_little_by_hand() -> None:
    """Honest: clients 0 and 2 with means (1, 2, 2.5) and deviations (1, 0, 1.5). z = 2: (-1, 2,
    -.5).
    """
    found = act("a_little_is_enough(z=2)", make_replies(ROWS))
    assert rows_of(found) == [ROWS[0], [-1.0, 2.0, -0.5], ROWS[2]]
    # n = 3, f = 1: s = 2 - 1 = 1, (2 - 1) / 2 = 1/2 and Phi^-1(1/2) = 0: the attacker hides in the
    # mean
    assert rows_of(act("a_little_is_enough", make_replies(ROWS)))[1] == [1.0, 2.0, 2.5]
    assert rows_of(act("a_little_is_enough(z=2)", make_replies(ROWS), np.arange(3))) == ROWS, (
        "no benign reply to imitate"
    )
    assert rows_of(act("a_little_is_enough(z=2)", make_replies(ROWS), np.array([8]))) == ROWS, (
        "the attacker is not in the round"
    )


def test_how_far_attackers_can_hide() -> None:
    """The paper's example: n = 50, f = 24, s = 26 - 24 = 2, (26 - 2) / 26 = .923, z = 1.43.
    With a majority f > n / 2 one supporter is still asked for.
    """
    assert a_little_std(50, 24) == pytest.approx(1.4260768722728474, abs=1e-9)
    # s = 2, (6 - 2) / 6 = 2/3
    assert a_little_std(10, 4) == pytest.approx(0.43072729929545756, abs=1e-9)
    assert a_little_std(10, 9) == 0  # (1 - 1) / 1 = 0
    assert all(0 <= a_little_std(n, f) < 5 for n in range(2, 40) for f in range(1, n))


@pytest.mark.parametrize(
    ("text", "code", "count"),
    [
        ("nan", "not-finite", 1),
        ("stale", "wrong-round", 1),
        ("replay", "duplicate", 1),
        ("replay(times=4)", "duplicate", 3),
    ],
)
def test_the_gate_refuses_and_names(text: str, code: str, count: int) -> None:
    """Honest replies pass unchanged; of one that is sent several times, the first counts."""
    replies = make_replies(ROWS)
    form = pytree.take(replies.params, 0)
    expected = ReplySchema(3, (0, 1, 2), form, {}, {}, 1e9)
    good, refused = gate.validate_replies([act(text, replies)], expected)
    assert [(refusal.client, refusal.code) for refusal in refused] == [(1, code)] * count
    assert good is not None
    kept = [0, 1, 2] if code == "duplicate" else [0, 2]
    assert (good.client.tolist(), rows_of(good)) == (kept, [ROWS[client] for client in kept])


@pytest.mark.parametrize(
    "text",
    [
        "sign_flip",
        "scaling",
        "gaussian",
        "nan",
        "a_little_is_enough(z=1)",
        "stale",
        "replay",
        "count_lies",
    ],
)
def test_a_round_without_attackers_is_untouched(text: str) -> None:
    replies = make_replies(ROWS)
    found = act(text, replies, np.array([5]))
    assert rows_of(found) == ROWS
    assert torch.equal(found.weight, replies.weight)
    assert torch.equal(found.round, replies.round)


def test_facts_are_lied_about_by_hand() -> None:
    """Client 1 has counts 6, 0, 3. Ten times as many examples of it all; or spread evenly; or
    most of what it lacks: 6 - (6, 0, 3) = (0, 6, 3).
    """
    counts = torch.tensor([[1.0, 1.0, 1.0], [6.0, 0.0, 3.0], [0.0, 2.0, 0.0]])
    extras = {
        "flashback": {"label_counts": counts},
        "fedwavg": {"forgettable": torch.tensor([4.0, 0.0, 2.0])},
        "fednova": {"steps": torch.ones(3)},
    }
    replies = make_replies(ROWS, extras=extras)
    found = act("count_lies", replies)
    assert found.weight.tolist() == [10, 110, 12]
    assert found.payload["flashback"]["label_counts"].tolist() == [
        [1, 1, 1],
        [60, 0, 30],
        [0, 2, 0],
    ]
    assert found.payload["fedwavg"]["forgettable"].tolist() == [4, 10, 2], (
        "nothing forgotten counts as one"
    )
    assert found.payload["fednova"]["steps"].tolist() == [1, 1, 1]
    assert rows_of(found) == ROWS
    even = act("count_lies(factor=1, claim=uniform)", replies)
    assert even.payload["flashback"]["label_counts"].tolist() == [[1, 1, 1], [3, 3, 3], [0, 2, 0]]
    assert even.weight.tolist() == [10, 11, 12]
    turned = act("count_lies(factor=2, claim=inverse)", replies)
    assert turned.payload["flashback"]["label_counts"].tolist() == [
        [1, 1, 1],
        [0, 12, 6],
        [0, 2, 0],
    ]
    alike = act("count_lies(factor=1, claim=inverse)", replies, np.array([0]))
    assert alike.payload["flashback"]["label_counts"].tolist()[0] == [1, 1, 1], (
        "a client with equal counts lacks no class"
    )
    assert counts[1].tolist() == [6, 0, 3]


def test_an_adversary_acts_in_order_and_whoever_answers_first() -> None:
    """Client 7 flips (0, 1, -1) and then scales by 10: (1, 2, 0) - 10 * (0, 1, -1) = (1, -8,
    10). The chunks come in any order.
    """
    adversary = Adversary.select(
        parse_attacks('sign_flip(clients="7")+scaling(clients="7")'), 9, Key(0)
    )
    chunks = [make_replies([ROWS[2]], [8]), make_replies(ROWS[:2], [2, 7])]
    (found,) = adversary.tamper_replies(iter(chunks), make_job([2, 7, 8]))
    assert found.client.tolist() == [2, 7, 8]
    assert rows_of(found) == [ROWS[0], [1.0, -8.0, 10.0], ROWS[2]]
    starts = ModelState(
        {
            "a": torch.tensor([9.0, 0.0, 9.0]),
            "b": torch.tensor([[[9.0, 9.0]], [[0.0, 0.0]], [[9.0, 9.0]]]),
        },
        {},
    )
    (found,) = adversary.tamper_replies(iter(chunks), make_job([2, 7, 8], starts, personal=True))
    assert rows_of(found)[1] == [-10.0, -30.0, 10.0]
    assert list(adversary.tamper_replies(iter([]), make_job([]))) == []


def test_without_attacks_on_replies_chunks_stream_through() -> None:
    """An engine yields them one by one; nothing may hold them back."""
    adversary = Adversary.select(parse_attacks("label_flip"), 10, Key(0))
    chunks = iter([make_replies(ROWS)])
    assert adversary.tamper_replies(chunks, make_job([0, 1, 2])) is chunks


def test_liars_about_likeness_by_hand() -> None:
    """Clients 1 and 3 attack. Client 0 probed 1 only, client 2 probed 3 and 0; attacker 1
    probed 3 and is not fooled.
    """
    (attack,) = parse_attacks("similarity_lies(loss=0.01)")
    assert isinstance(attack, Attack)
    assert attack.tamper_probes is not None
    probed = torch.tensor([[1, -1], [3, 2], [3, 0], [2, 0]])
    losses = torch.tensor(
        [[2.0, torch.nan], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], dtype=torch.float64
    )
    found = attack.tamper_probes(probed, losses, np.array([1, 3]))
    assert torch.equal(
        found.nan_to_num(-1),
        torch.tensor([[0.01, -1.0], [3.0, 4.0], [0.01, 6.0], [7.0, 8.0]], dtype=torch.float64),
    )
    adversary = Adversary(
        (attack, *parse_attacks("nan")), {"similarity_lies": np.array([1, 3]), "nan": np.array([0])}
    )
    assert torch.equal(adversary.tamper_probes(probed, losses).nan_to_num(-1), found.nan_to_num(-1))
    assert adversary.clients.tolist() == [0, 1, 3]
