"""What the tests of recipes share."""

from __future__ import annotations

import pytest

from remanence.models import MODELS
from remanence.models.densenet import densenet121


@pytest.fixture(autouse=True)
def _networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network that only recipes need."""
    monkeypatch.setitem(MODELS, "densenet121", densenet121)
