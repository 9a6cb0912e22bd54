"""What a site declines, and how it protects counts: small ones are sent as 0, or noise is added."""

from __future__ import annotations

import secrets

import numpy as np

from remanence.core import pytree
from remanence.core.declarations import LABEL_COUNTS, UNDECLARED
from remanence.core.rng import Key
from remanence.core.slots import Part
from remanence.flower.refusals import Declined
from remanence.flower.settings import Policy
from remanence.training.task import TrainingTask

# an experiment sets the noise of a payload; less than this (standard deviation over sensitivity)
# protects nothing
LEAST_NOISE = 1.0
LARGEST_NOISE = 2.0**53  # larger numbers are no exact integers in float64


def check_method(policy: Policy, task: TrainingTask) -> None:
    """Decline a method that the policy excludes, or that sends what the policy forbids."""
    for part in task.method.parts:
        if policy.methods and part.name not in policy.methods:
            allowed = ", ".join(policy.methods)
            raise Declined(
                "policy",
                f"this site accepts only {allowed} (policy.methods), but the experiment uses"
                f" {part.name}",
            )
    sent = task.payload_spec()
    for part in task.method.parts if not policy.label_counts else ():
        for path in pytree.flatten(sent.get(part.name, {})):
            _check_leaf(part, path)


def _check_leaf(part: Part, path: str) -> None:
    """Decline a value that reveals label counts or more."""
    disclosure = part.disclosure(path)
    if disclosure.reveals == LABEL_COUNTS:
        raise Declined(
            "policy",
            f"{part.name} asks for label counts, but this site does not send them"
            " (policy.label_counts)",
        )
    if disclosure.reveals == "examples" and not part.protects(path, LEAST_NOISE):
        leaf = path.replace(pytree.SEPARATOR, ".")
        what = "it does not declare" if disclosure is UNDECLARED else "may reveal single examples"
        if part.protects(path):
            what += f" with noise below {LEAST_NOISE:g}"
        raise Declined(
            "policy",
            f"{part.name} sends {leaf}, which {what}, but this site does not allow that"
            " (policy.label_counts)",
        )


def check_evaluation(policy: Policy) -> None:
    """Decline to send counts, if the policy forbids them."""
    if not policy.evaluate:
        raise Declined(
            "policy",
            "this site sends no counts of correct and wrong predictions (policy.evaluate)",
        )


def privatize_counts(
    policy: Policy, confusion: np.ndarray, loss: np.ndarray, key: Key | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Add noise to counts and set small ones to 0, as the policy demands.

    Args:
        policy: The site's policy.
        confusion: [n, C, C] int64.
        loss: [n] summed losses. They are scaled with the sum of the counts, so that the mean loss
            does not change.
        key: For tests; by default the noise comes from the operating system, never from the
            experiment's seed.

    Returns:
        The counts and summed losses to send.
    """
    examples = confusion.sum(axis=(1, 2))
    counts = confusion
    if policy.epsilon:
        key = key or Key(secrets.randbits(64))
        noise = draw_geometric(key, float(policy.epsilon), counts.shape)
        counts = np.maximum(counts + noise, 0)
    if policy.suppress:
        counts = np.where(counts < policy.suppress, 0, counts)
    empty = np.zeros(len(examples))
    share = np.divide(counts.sum(axis=(1, 2)), examples, out=empty, where=examples > 0)
    return counts, np.where(share == 1, loss, loss * share)


def draw_geometric(key: Key, epsilon: float, shape: tuple[int, ...]) -> np.ndarray:
    """Draw integers z with probability proportional to exp(-epsilon |z|), as int64: differences of
    two geometric random numbers.
    """
    count = int(np.prod(shape))
    with np.errstate(over="ignore"):
        drawn = [
            np.floor(np.log1p(-key.fold_in(word).uniform(count)) / -epsilon)
            for word in ("up", "down")
        ]
    up, down = np.minimum(drawn, LARGEST_NOISE)
    return np.asarray(up - down, dtype=np.int64).reshape(shape)
