"""What a run promises of privacy: of whole clients (`dp`), of single examples (`dp_sgd`,
`dp_counts`), of both or of nothing.

A promise about examples rests on the Gaussian mechanism alone. Neighbors are two data sets of
which one has an example that contributes nothing, everything else being equal; how many rows a
client has is taken to be known. In one pass over a client's rows an example is in exactly one
batch, and the order of the rows does not depend on them: however many steps a pass has, it is one
Gaussian mechanism for that example, with multiplier `noise`. Passes, label counts and other counts
add up: the distance mu of two unit Gaussians grows as mu^2 = sum of 1 / noise^2 over all looks at
the example. No credit is taken for the batches being random, nor for a client being in some rounds
only: papers that assume examples drawn by coins of their own report less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from remanence.core.compose import ComposedMethod
from remanence.core.errors import InputError
from remanence.core.slots import Part
from remanence.data.batches import count_steps
from remanence.experiment.build import BuiltExperiment
from remanence.privacy.accountant import NOT_PRIVATE, gaussian_epsilon
from remanence.privacy.client_dp import guarantee_of
from remanence.training.task import TrainingTask


class PrivacyGuarantee(Protocol):
    """Of whom, how much is told after so many rounds, and how long a budget lasts."""

    @property
    def unit(self) -> str: ...

    @property
    def delta(self) -> float: ...

    @property
    def budget(self) -> float: ...

    @property
    def basis(self) -> str: ...

    def epsilon(self, rounds: int) -> float: ...

    def last_round(self, planned: int) -> int: ...

    def describe(self, rounds: int) -> str: ...


@dataclass(frozen=True)
class ExampleGuarantee:
    """What a run promises any one example of any client. Costs are in mu^2."""

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

    def epsilon(self, rounds: int) -> float:
        """Spent on a client that took part in every one of so many rounds."""
        if not rounds:
            return 0.0
        steps = math.ceil(rounds / self.rounds_per_step)
        return gaussian_epsilon(
            math.sqrt(rounds * self.cost_per_round + steps * self.cost_per_time_step), self.delta
        )

    def last_round(self, planned: int) -> int:
        """The last round that may be played: the planned one, or the last within the budget."""
        if not self.budget or self.epsilon(planned) <= self.budget:
            return planned
        least, most = 0, planned
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self.epsilon(middle) <= self.budget else (least, middle)
        return least

    def describe(self, rounds: int) -> str:
        """One sentence, with everything it rests on."""
        limit = f" of a budget of {self.budget:g}" if self.budget else ""
        subject = (
            ""
            if self.covers_models
            else "in the label counts alone, the models being open to all: "
        )
        epsilon_spent = (
            f"epsilon {self.epsilon(rounds):.2f}{limit} at delta {self.delta:g} for any one"
            f" example after {rounds} rounds"
        )
        return f"{subject}{epsilon_spent} ({self.basis}); {NOT_PRIVATE}"


def guarantees_of(experiment: BuiltExperiment) -> tuple[PrivacyGuarantee, ...]:
    """What the run promises: nothing, mostly."""
    spec, task = experiment.config, experiment.task
    always = (
        spec.clients.availability == "always"
        and not experiment.has_stragglers
        and not task.clients_remote
    )
    sampling = spec.clients.sampling if always else "any"
    about_clients = guarantee_of(
        task.method, experiment.cohort_size, task.info.num_clients, sampling
    )
    about_examples = example_guarantee(task, spec.rounds)
    return tuple(promise for promise in (about_clients, about_examples) if promise is not None)


def example_guarantee(task: TrainingTask, rounds_a_step: int) -> ExampleGuarantee | None:
    """What a method promises any one example; None where it promises nothing."""
    gradients, counts, forgotten = (
        _find(task.method, name) for name in ("dp_sgd", "dp_counts", "fedwavg")
    )
    if gradients is not None and not gradients.arguments["noise"]:
        gradients = None
    if gradients is None and counts is None:
        return None
    looks, words = 0.0, []
    if gradients is not None:
        passes, noise = count_passes(task), float(gradients.arguments["noise"])
        looks += passes / noise**2
        words.append(
            f"{passes} pass{'es' if passes > 1 else ''} over its client's rows in every round,"
            f" noise {noise:g}"
        )
    if gradients is not None and forgotten is not None:
        looks += 1 / (int(forgotten.arguments["every"]) * float(forgotten.arguments["noise"]) ** 2)
        words.append(
            f"in a count of forgotten rows every {forgotten.arguments['every']} rounds, noise"
            f" {forgotten.arguments['noise']:g}"
        )
    once = 0.0
    if counts is not None:
        once = 1 / float(counts.arguments["noise"]) ** 2
        words.append(f"once in its client's label counts, noise {counts.arguments['noise']:g}")
    source = gradients or counts
    assert source is not None
    budget = float(source.arguments.get("budget", 0.0))
    return ExampleGuarantee(
        float(source.arguments["delta"]),
        budget,
        looks,
        once,
        rounds_a_step,
        gradients is not None,
        "; ".join(words),
    )


def count_passes(task: TrainingTask) -> int:
    """How often a round looks at an example at most: epochs, or with a number of steps as often
    as the client with fewest rows has to begin again.
    """
    sizes = np.unique(
        np.concatenate([holdings.train.sizes for holdings in task.population.time_steps])
    )
    passes = 0
    for phase in task.phases:
        most = 0
        for size in sizes[sizes > 0].tolist():
            one = count_steps(size, task.batch_size, 1, 0, task.drop_last)
            most = max(
                most,
                math.ceil(
                    count_steps(size, task.batch_size, phase.epochs, phase.steps, task.drop_last)
                    / one
                ),
            )
        passes += most
    return passes


def last_round(promises: Sequence[PrivacyGuarantee], planned: int) -> int:
    """The last round that all promises allow."""
    return min((promise.last_round(planned) for promise in promises), default=planned)


def describe_guarantees(promises: Sequence[PrivacyGuarantee], rounds: int) -> list[str]:
    """What the run amounts to, a sentence each; without the package that computes it, that it
    is not known.
    """
    said = []
    for promise in promises:
        try:
            said.append(promise.describe(rounds))
        except InputError as missing:
            said.append(f"epsilon is not known: {missing}")
    return said


def to_metadata(promises: Sequence[PrivacyGuarantee], planned: int) -> dict[str, Any]:
    """For the run's folder: what is promised, what it rests on, and the last round where a
    budget ends the run before the planned one.
    """
    if not promises:
        return {}
    last = last_round(promises, planned)
    told = [
        {
            "whom": promise.unit,
            "delta": promise.delta,
            "budget": promise.budget,
            "basis": promise.basis,
        }
        for promise in promises
    ]
    return {"promises": told} | ({"last_round": last} if last < planned else {})


def epsilon_spent(promises: Sequence[PrivacyGuarantee], rounds: int) -> dict[str, float | None]:
    """For the line about a round: epsilon of clients and of examples, each where it is
    promised; None where it is not known.
    """
    found: dict[str, float | None] = {}
    for promise in promises:
        try:
            value = promise.epsilon(rounds)
        except InputError:
            value = math.inf
        found["epsilon" if promise.unit == "client" else f"epsilon_{promise.unit}"] = (
            value if math.isfinite(value) else None
        )
    return found


def _find(method: ComposedMethod, name: str) -> Part | None:
    return next((p for p in method.parts if p.name == name), None)
