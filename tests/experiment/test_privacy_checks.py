"""What counts as protected by a mechanism of a method's parts."""

from __future__ import annotations

import pytest

from remanence.core.declarations import (
    AT_CLIENT,
    AT_SERVER,
    EACH_ROUND,
    EXAMPLE,
    MODEL,
    Disclosure,
    Mechanism,
)
from remanence.core.slots import Part


@pytest.mark.parametrize(
    ("covers", "drawn_at", "noise", "protected"),
    [
        ("count", AT_CLIENT, 1.0, True),
        ("count", AT_CLIENT, 0.0, False),
        ("count", AT_SERVER, 1.0, False),
        ("other", AT_CLIENT, 1.0, False),
        (MODEL, AT_CLIENT, 1.0, False),
    ],
)
def test_only_noise_drawn_at_the_client_protects_what_leaves_it(
    covers: str, drawn_at: str, noise: float, protected: bool
) -> None:
    """A mechanism protects the leaf that it covers, and no other."""
    mechanism = Mechanism(EXAMPLE, covers, drawn_at, noise, EACH_ROUND, delta=1e-5)
    shown = {"count": Disclosure("examples"), "other": Disclosure("examples")}
    mine = Part("mine", discloses=shown, mechanisms=(mechanism,))
    assert mine.protects("count") is protected
    assert mine.protects("count/deeper") is protected
    assert not mine.protects("counts")
    assert not Part("mine", discloses=shown).protects("count")
