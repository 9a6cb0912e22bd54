"""The file with the epsilon that counts of predictions have cost, in a site's state folder. Imports
no torch.

    state/budget.json     {"spent": {"3": "7/10"}}: by client, as an exact fraction

The file is created with the folder. Where it is missing from a folder that was used, or cannot be
read, what was spent is unknown, and no noised counts leave.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

from remanence.core.errors import RemanenceError
from remanence.core.files import LOCK
from remanence.core.safe_path import SafePath
from remanence.core.temporary_files import TEMPORARY, wait_for_lock

BUDGET, BUDGET_LOCK = "budget.json", "budget.lock"
MAX_BYTES = 1 << 24
# as long as the decimals of any float64
_FRACTION = re.compile(r"\d{1,2000}(/[1-9]\d{0,2000})?")


class UnknownSpending(RemanenceError):
    """The file is missing or damaged."""


def prepare_budget(folder: Path) -> None:
    """Create the file in a new folder; a folder with other files is left as it is."""
    ours = (LOCK, BUDGET_LOCK)
    with lock_budget(folder):
        names = SafePath(folder).list_names()
        if all(name in ours or TEMPORARY.fullmatch(name) for name in names):
            write_spent(folder, {})


@contextmanager
def lock_budget(folder: Path) -> Iterator[None]:
    """Wait until no other process or thread reads and writes the file."""
    with (SafePath(folder) / BUDGET_LOCK).append() as file:
        wait_for_lock(file.fileno())
        yield


def read_spent(folder: Path) -> dict[int, Fraction]:
    """The epsilon spent so far, by client.

    Raises:
        UnknownSpending: The file is missing, or has another content than `write_spent` wrote.
    """
    try:
        spent = json.loads((SafePath(folder) / BUDGET).read(MAX_BYTES))["spent"]
        return {int(client): _parse(value) for client, value in spent.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnknownSpending(
            f"the epsilon that this site has spent is not known, because {BUDGET} in its state"
            f" folder cannot be read ({type(error).__name__}): restore it from a backup or, if the"
            ' site never sent noised counts, write {"spent": {}} to it'
        ) from error


def write_spent(folder: Path, spent: Mapping[int, Fraction]) -> None:
    """Replace the file; it is on the disk when this returns."""
    content = {"spent": {str(client): str(spent[client]) for client in sorted(spent)}}
    (SafePath(folder) / BUDGET).write(json.dumps(content).encode())


def _parse(value: str) -> Fraction:
    if not _FRACTION.fullmatch(value):
        raise ValueError("not a fraction")
    return Fraction(value)
