"""The order of the examples in the gallery."""

from __future__ import annotations

ORDER = (
    "forgetting_and_wsm.py",
    "which_phase_forgets.py",
    "own_model_and_data.py",
    "learning_rate_search.py",
    "method_in_its_own_file.py",
    "flashback_and_public_data.py",
    "drift_without_a_server.py",
    "privacy_and_its_cost.py",
)


def reading_order(name: str) -> tuple[int, str]:
    """A key to sort files by: their place in `ORDER`, and others after them by name."""
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)
