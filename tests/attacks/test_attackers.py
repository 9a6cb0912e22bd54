"""Who attacks, and how attacks are written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remanence.attacks import ATTACKS, Adversary, parse_attacks
from remanence.core.errors import InputError
from remanence.core.rng import Key


def attackers(text: str, clients: int, seed: int = 0) -> list[int]:
    found: list[int] = parse_attacks(text)[0].who.attackers(clients, Key(seed)).tolist()
    return found


@given(clients=st.integers(2, 200), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 100))
def test_a_share_of_the_clients_but_never_all(clients: int, fraction: float, seed: int) -> None:
    if fraction * clients < 0.5:
        with pytest.raises(
            InputError, match=f"of {clients} clients is no client: give a fraction of at least"
        ):
            attackers(f"nan(fraction={fraction})", clients, seed)
        return
    found = attackers(f"nan(fraction={fraction})", clients, seed)
    assert abs(len(found) - fraction * clients) <= 1
    assert 1 <= len(found) < clients
    assert found == sorted(set(found))
    assert 0 <= found[0] <= found[-1] < clients


def test_a_half_counts() -> None:
    """.05 * 10 = .5 -> 1, as the sentence for .04 promises."""
    assert len(attackers("nan(fraction=0.05)", 10)) == 1
    with pytest.raises(
        InputError,
        match=r"fraction=0.04 of 10 clients is no client: give a fraction of at least 0.05, or name"
        r" them with clients='0'",
    ):
        attackers("nan(fraction=0.04)", 10)


def test_attacks_of_the_same_fraction_fall_on_the_same_clients() -> None:
    """So a flip of labels and a scaling of the result work together, and the number of hostile
    clients is the one that was written.
    """
    adversary = Adversary.select(
        parse_attacks("label_flip(fraction=0.3)+scaling(fraction=0.3)+nan(fraction=0.1)"),
        20,
        Key(5),
    )
    flips, scales, nans = (
        adversary.attackers[name].tolist() for name in ("label_flip", "scaling", "nan")
    )
    assert flips == scales
    assert set(nans) < set(flips)
    assert adversary.clients.tolist() == flips
    others = {tuple(attackers("nan(fraction=0.3)", 20, seed)) for seed in range(10)}
    assert len(others) > 5, "the seed decides"


def test_attackers_by_number() -> None:
    assert attackers('stale(clients="7, 3 3")', 8) == [3, 7]
    assert attackers("stale(clients=5)", 8) == [5]
    assert attackers('stale(clients="0 1")', 2) == [0, 1]
    with pytest.raises(
        InputError, match="stale: there is no client 8: clients are numbered 0 to 7"
    ):
        attackers('stale(clients="8")', 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sign_flop", "unknown attack 'sign_flop': did you mean sign_flip"),
        ("sign_flip(fracton=0.1)", "has no option 'fracton': did you mean fraction"),
        (
            "sign_flip(fraction=0)",
            "sign_flip: fraction must be a number above 0 and below 1, not 0",
        ),
        ("sign_flip(fraction=1)", "above 0 and below 1, not 1"),
        ('nan(clients="two")', "nan: cannot read clients='two'"),
        ('nan(clients="-1")', "cannot read clients='-1'"),
        ('nan(clients="9999999999")', "cannot read clients"),
        ("sign_flip(scale=0)", "attack sign_flip: scale must be a number above 0"),
        ("scaling(factor=1)", "attack scaling: factor must be a number above 0 and not 1"),
        ("gaussian(std=0)", "attack gaussian: std"),
        ("a_little_is_enough(z=-1)", "attack a_little_is_enough: z must be a number of at least 0"),
        ("replay(times=1)", "attack replay: times must be a number of at least 2"),
        ("count_lies(claim=all)", "count_lies: unknown claim 'all': known: inverse, true, uniform"),
        ("count_lies(factor=1)", "changes nothing: give another factor"),
        ("count_lies(factor=0)", "attack count_lies: factor"),
        (
            "label_flip(to=sideways)",
            "label_flip: cannot read to='sideways': write next, reverse, random or the number"
            " of a class",
        ),
        ("label_flip(of=2, to=2)", "of=2 and to=2 are the same class"),
        ("label_flip(of=-2)", "attack label_flip: of must be a number of at least -1"),
        ("backdoor(share=0)", "attack backdoor: share must be a number above 0 and at most 1"),
        ("backdoor(size=0)", "attack backdoor: size"),
        ("backdoor(target=-1)", "attack backdoor: target"),
        ("similarity_lies(loss=-1)", "attack similarity_lies: loss"),
        ("nan+nan(fraction=0.2)", "attack nan occurs twice in"),
    ],
)
def test_what_cannot_be_is_refused_before_a_run(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_attacks(text)


def test_every_attack_touches_something_and_explains_its_options() -> None:
    for name, make in ATTACKS.items():
        attack = make()
        assert attack.name == name
        assert [
            slot
            for slot in (
                attack.poison,
                attack.tamper_replies,
                attack.tamper_counts,
                attack.tamper_probes,
            )
            if slot is not None
        ]
        assert "fraction:" in (make.__doc__ or "")
    assert parse_attacks(" ") == ()
    assert np.array_equal(Adversary.select((), 5, Key(0)).clients, [])
