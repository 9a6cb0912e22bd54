"""The privacy budget of each client's data: the epsilon of all noised counts that leave a site.

One budget holds for all runs, coordinators and splits. Epsilon is spent before the counts leave,
and stays spent if they do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path

from remanence.core.errors import RemanenceError
from remanence.flower.budget_file import (
    UnknownSpending,
    lock_budget,
    read_spent,
    write_spent,
)
from remanence.flower.refusals import Declined
from remanence.flower.settings import Policy, exact_number


class Budget:
    """What a site may still spend.

    Args:
        folder: The site's state folder.
        policy: Sets the epsilon of the counts of one model on one client's examples, and the
            budget of each client.
    """

    def __init__(self, folder: Path, policy: Policy):
        self.folder = folder
        self.price, self.limit = exact_number(policy.epsilon), exact_number(policy.budget)

    def covers(self, clients: Iterable[int]) -> bool:
        """Whether the counts of one model can be sent for each of these clients."""
        try:
            spent = read_spent(self.folder)
        except (RemanenceError, OSError):
            return False
        return all(spent.get(client, Fraction()) + self.price <= self.limit for client in clients)

    def spend(self, answers: Mapping[int, int]) -> None:
        """Spend the epsilon of some answers, all of it or none. It is on the disk when this
        returns.

        Args:
            answers: By client, of how many models the counts are to be sent.

        Raises:
            Declined: The budget of a client does not cover them, or what was spent is not known.
        """
        with lock_budget(self.folder):
            try:
                spent = read_spent(self.folder)
            except UnknownSpending as error:
                raise Declined("budget", str(error)) from error
            for client, count in answers.items():
                before, cost = spent.get(client, Fraction()), count * self.price
                spent[client] = before + cost
                if spent[client] > self.limit:
                    left = float(max(self.limit - before, Fraction()))
                    raise Declined(
                        "budget",
                        f"counts about client {client} cost an epsilon of {float(cost):g} here,"
                        f" and {left:g} is left of its budget of {float(self.limit):g}: evaluate"
                        " at other sites, or raise policy.budget",
                    )
            write_spent(self.folder, spent)
