"""What counts as protected by a mechanism of a method's parts."""

from __future__ import annotations

import pytest

from remanence.core.compose import ComposedMethod
from remanence.core.declarations import (
    CLIENT,
    EACH_ROUND,
    EXAMPLE,
    MODEL,
    SERVER,
    Disclosure,
    Mechanism,
)
from remanence.core.slots import Method, Part
from remanence.experiment.privacy_checks import is_protected


@pytest.mark.parametrize(
    ("drawn_at", "noise", "protected"),
    [(CLIENT, 1.0, True), (CLIENT, 0.0, False), (SERVER, 1.0, False)],
)
def test_only_noise_drawn_at_the_client_protects_what_leaves_it(
    drawn_at: str, noise: float, protected: bool
) -> None:
    mechanism = Mechanism(EXAMPLE, MODEL, drawn_at, noise, EACH_ROUND, delta=1e-5)
    method = ComposedMethod(Method((Part("mine", mechanisms=(mechanism,)),)))
    assert is_protected(Disclosure("examples", protected_by="mine"), method) is protected
    assert not is_protected(Disclosure("examples"), method)
