"""What a run guarantees a client or an example: epsilon after a number of rounds, and how long a
budget lasts. `accountant.py` computes the numbers; `rounds/privacy_budget.py` makes the guarantees
of a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from remanence.privacy.accountant import (
    REMOVE,
    REPLACE,
    epsilon,
    gaussian_epsilon,
    max_rounds_for_budget,
)

NOT_PRIVATE = "the noise of a simulation comes from its seed: not private"


class PrivacyGuarantee(Protocol):
    """The unit it protects, epsilon after a number of rounds, and how long a budget lasts. A budget
    is of the epsilon for adding or removing one unit.
    """

    @property
    def unit(self) -> str: ...

    @property
    def delta(self) -> float: ...

    @property
    def budget(self) -> float: ...

    @property
    def basis(self) -> str: ...

    def epsilon(self, rounds: int, neighbors: str = REMOVE) -> float: ...

    def last_round(self, planned: int) -> int: ...

    def describe(self, rounds: int) -> str: ...


def describe_epsilon(guarantee: PrivacyGuarantee, subject: str, rounds: int) -> str:
    """Epsilon after some rounds under both neighboring relations, which share a number where they
    have the same.
    """
    removed, replaced = (
        f"{guarantee.epsilon(rounds, neighbors):.2f}" for neighbors in (REMOVE, REPLACE)
    )
    limit = f" of a budget of {guarantee.budget:g}" if guarantee.budget else ""
    relation = (
        f"for adding, removing or replacing any one {subject}"
        if removed == replaced
        else f"for adding or removing any one {subject}, {replaced} for replacing it"
    )
    return (
        f"epsilon {removed}{limit} {relation}, at delta {guarantee.delta:g} after {rounds} rounds"
    )


@dataclass(frozen=True)
class ClientGuarantee:
    """What a run guarantees any one client."""

    noise: float
    delta: float
    budget: float  # an epsilon, for adding or removing, that the run does not exceed; 0: none
    cohort: int  # clients sampled in a round; with Poisson sampling, the expected number
    clients: int
    sampling: str = "fixed"
    unit: str = "client"

    @property
    def fraction(self) -> float:
        """The probability that a client is sampled in a round; not used with sampling "any"."""
        return self.cohort / self.clients

    def epsilon(self, rounds: int, neighbors: str = REMOVE) -> float:
        """Epsilon after this number of rounds."""
        return epsilon(
            rounds,
            fraction=self.fraction,
            noise=self.noise,
            delta=self.delta,
            sampling=self.sampling,
            neighbors=neighbors,
        )

    def last_round(self, planned: int) -> int:
        """The last round that may be played: the planned one, or the last within the budget."""
        if not self.budget or self.epsilon(planned) <= self.budget:
            return planned
        found = max_rounds_for_budget(
            self.budget,
            fraction=self.fraction,
            noise=self.noise,
            delta=self.delta,
            sampling=self.sampling,
        )
        return min(planned, found)

    @property
    def basis(self) -> str:
        """The assumptions of the number, in words."""
        sampling = {
            "fixed": f"{self.cohort} of {self.clients} clients sampled without replacement",
            "poisson": f"each of {self.clients} clients sampled independently with probability"
            f" {self.fraction:.3g}",
            "any": "nothing assumed about the sampling of clients",
        }[self.sampling]
        return f"{sampling}, noise {self.noise:g}"

    def describe(self, rounds: int) -> str:
        """One sentence with the epsilon and its assumptions."""
        return f"{describe_epsilon(self, 'client', rounds)} ({self.basis}); {NOT_PRIVATE}"


@dataclass(frozen=True)
class ExampleGuarantee:
    """What a run guarantees any one example of any client. Costs are in mu^2."""

    delta: float
    budget: float  # an epsilon that the run does not pass; 0: none
    cost_per_round: float  # cost of every round a client takes part in
    cost_per_time_step: float  # and once for its data of every time step
    rounds_per_step: int
    covers_models: bool  # False: the label counts alone are protected
    basis: str  # what it rests on

    @property
    def unit(self) -> str:
        return "example" if self.covers_models else "label_counts"

    def epsilon(self, rounds: int, neighbors: str = REMOVE) -> float:
        """Spent on a client that took part in every one of so many rounds. Replacing an example is
        removing one and adding another: everything sent can differ by twice as much.
        """
        if not rounds:
            return 0.0
        steps = math.ceil(rounds / self.rounds_per_step)
        mu = math.sqrt(rounds * self.cost_per_round + steps * self.cost_per_time_step)
        return gaussian_epsilon(2 * mu if neighbors == REPLACE else mu, self.delta)

    def last_round(self, planned: int) -> int:
        """The planned last round, or an earlier one: the last within the budget."""
        if not self.budget or self.epsilon(planned) <= self.budget:
            return planned
        least, most = 0, planned
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self.epsilon(middle) <= self.budget else (least, middle)
        return least

    def describe(self, rounds: int) -> str:
        """One sentence, with everything it rests on."""
        subject = (
            ""
            if self.covers_models
            else "in the label counts alone, the models being open to all: "
        )
        return f"{subject}{describe_epsilon(self, 'example', rounds)} ({self.basis}); {NOT_PRIVATE}"
