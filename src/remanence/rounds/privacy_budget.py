"""The privacy guarantees of a run: for whole clients, for single examples, for both or none.

They are composed from the mechanisms that the method's parts declare. A guarantee for examples
rests on the Gaussian mechanism alone. Two datasets are neighbors if one has an example that
contributes nothing and all else is equal; where the example is another one instead, everything can
differ by twice as much. The number of a client's examples is public. In one pass
over a client's data an example is in exactly one batch, and the order does not depend on the data:
a pass is one Gaussian mechanism for that example, with multiplier `noise`. Passes, label counts and
other counts add up: mu^2 = sum of 1 / noise^2 over all exposures of the example. No amplification
is claimed for shuffled batches, nor for clients that are in some rounds only; papers that assume
Poisson sampling of examples report a smaller epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from remanence.core.compose import ComposedMethod
from remanence.core.declarations import (
    CLIENT,
    EACH_PASS,
    EACH_ROUND,
    EACH_TIME_STEP,
    EXAMPLE,
    LABEL_COUNTS,
    MODEL,
    Mechanism,
)
from remanence.core.errors import InputError
from remanence.data.batches import count_steps
from remanence.experiment.build import BuiltExperiment
from remanence.privacy.accountant import REMOVE, REPLACE
from remanence.privacy.guarantees import ClientGuarantee, ExampleGuarantee, PrivacyGuarantee
from remanence.training.task import TrainingTask

RELATIONS = {REMOVE: "adding or removing one", REPLACE: "replacing one"}


def guarantees_of(experiment: BuiltExperiment) -> tuple[PrivacyGuarantee, ...]:
    """The guarantees of a run: none for most."""
    config, task = experiment.config, experiment.task
    always = (
        config.clients.availability == "always"
        and not experiment.has_stragglers
        and not task.clients_remote
    )
    # nothing is assumed ("any") about a sampling that the accountant does not know
    known = always and config.clients.sampling in ("fixed", "poisson")
    sampling = config.clients.sampling if known else "any"
    of_clients = client_guarantee(
        task.method, experiment.cohort_size, task.info.num_clients, sampling
    )
    of_examples = example_guarantee(task, config.rounds)
    return tuple(found for found in (of_clients, of_examples) if found is not None)


def client_guarantee(
    method: ComposedMethod, cohort: int, clients: int, sampling: str = "fixed"
) -> ClientGuarantee | None:
    """The guarantee of a method for each single client.

    Cohorts are sampled from the clients that are available. Where a client may be offline, late or
    remote, nothing is assumed about the sampling ("any").

    Args:
        method: Its mechanisms of unit `client` count.
        cohort: Clients in a round.
        clients: Clients in the experiment.
        sampling: How cohorts are drawn: "fixed", "poisson" or "any".

    Returns:
        The guarantee; None without noise.
    """
    found = [m for _, m in method.mechanisms if m.unit == CLIENT and m.noise]
    if not found:
        return None
    # independent Gaussian noises on one cohort are one with this multiplier
    noise = found[0].noise if len(found) == 1 else math.fsum(m.noise**-2 for m in found) ** -0.5
    return ClientGuarantee(
        noise, _first_set(found, "delta"), _first_set(found, "budget"), cohort, clients, sampling
    )


def example_guarantee(task: TrainingTask, rounds_per_step: int) -> ExampleGuarantee | None:
    """The guarantee of a method for each single example; None where there is none.

    Noise on the model covers all that is sent, and the noise on everything else adds to its
    account. Without it the label counts alone can be covered.

    Args:
        task: Its method's mechanisms of unit `example` count.
        rounds_per_step: Rounds of a time step.

    Returns:
        The guarantee, with its costs in mu^2.
    """
    found = [m for _, m in task.method.mechanisms if m.unit == EXAMPLE and m.noise]
    covers_models = any(m.covers == MODEL for m in found)
    if not covers_models:
        found = [m for m in found if m.covers == LABEL_COUNTS]
    if not found:
        return None
    found.sort(key=lambda m: (EACH_PASS, EACH_ROUND, EACH_TIME_STEP).index(m.spent))
    passes = count_passes(task)
    per_round = sum(
        passes / m.noise**2 if m.spent == EACH_PASS else 1 / (m.every * m.noise**2)
        for m in found
        if m.spent != EACH_TIME_STEP
    )
    return ExampleGuarantee(
        _first_set(found, "delta"),
        _first_set(found, "budget"),
        per_round,
        sum(1 / m.noise**2 for m in found if m.spent == EACH_TIME_STEP),
        rounds_per_step,
        covers_models,
        "; ".join(_describe_mechanism(m, passes) for m in found),
    )


def _describe_mechanism(mechanism: Mechanism, passes: int) -> str:
    """How often the noised value is computed."""
    times = {
        EACH_PASS: f"{passes} pass{'es' if passes > 1 else ''} over {mechanism.subject} in every"
        " round",
        EACH_ROUND: f"in {mechanism.subject} every {mechanism.every} rounds",
        EACH_TIME_STEP: f"once in its client's {mechanism.subject}",
    }[mechanism.spent]
    return f"{times}, noise {mechanism.noise:g}"


def _first_set(mechanisms: Sequence[Mechanism], field: str) -> float:
    """The first delta or budget that is set; 0 where none is."""
    return next((value for m in mechanisms if (value := float(getattr(m, field)))), 0.0)


def count_passes(task: TrainingTask) -> int:
    """The most passes of a round over an example: its epochs or, with a number of steps, as often
    as the client with the fewest examples begins again.
    """
    sizes = np.unique(
        np.concatenate([client_data.train.sizes for client_data in task.population.time_steps])
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


def last_round(guarantees: Sequence[PrivacyGuarantee], planned: int) -> int:
    """The last round that all guarantees allow."""
    return min((guarantee.last_round(planned) for guarantee in guarantees), default=planned)


def describe_guarantees(guarantees: Sequence[PrivacyGuarantee], rounds: int) -> list[str]:
    """One sentence per guarantee; where the accounting package is missing, that epsilon is not
    known.
    """
    sentences = []
    for guarantee in guarantees:
        try:
            sentences.append(guarantee.describe(rounds))
        except InputError as missing:
            sentences.append(f"epsilon is not known: {missing}")
    return sentences


def to_metadata(guarantees: Sequence[PrivacyGuarantee], planned: int) -> dict[str, Any]:
    """Metadata of the run: guarantees, what they rest on, and the last round if a budget ends the
    run before the planned one.
    """
    if not guarantees:
        return {}
    last = last_round(guarantees, planned)
    guarantees_table = [
        {
            "unit": guarantee.unit,
            "delta": guarantee.delta,
            "budget": guarantee.budget,
            "basis": guarantee.basis,
            "neighbors": {
                column: RELATIONS[relation] for column, relation in _columns(guarantee).items()
            },
        }
        for guarantee in guarantees
    ]
    return {"guarantees": guarantees_table} | ({"last_round": last} if last < planned else {})


def epsilon_spent(guarantees: Sequence[PrivacyGuarantee], rounds: int) -> dict[str, float | None]:
    """Epsilon of clients and of examples for a round's metrics, where guaranteed, for adding or
    removing one and for replacing one; None where it is not known.
    """
    found: dict[str, float | None] = {}
    for guarantee in guarantees:
        for column, neighbors in _columns(guarantee).items():
            try:
                value = guarantee.epsilon(rounds, neighbors)
            except InputError:
                value = math.inf
            found[column] = value if math.isfinite(value) else None
    return found


def _columns(guarantee: PrivacyGuarantee) -> dict[str, str]:
    """The columns of the metrics, each with the neighboring relation that its epsilon is for."""
    name = "epsilon" if guarantee.unit == "client" else f"epsilon_{guarantee.unit}"
    return {name: REMOVE, f"{name}_replace": REPLACE}
