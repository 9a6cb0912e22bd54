"""What a site refuses, and what it does to counts before they leave it."""

from __future__ import annotations

import secrets

import numpy as np

from remanence.config import is_import_path
from remanence.core import pytree
from remanence.core.declarations import LABEL_COUNTS, UNDECLARED
from remanence.core.errors import RemanenceError
from remanence.core.rng import Key
from remanence.core.slots import Part
from remanence.experiment.checks import is_protected
from remanence.flower.settings import Policy
from remanence.training.task import TrainingTask


class Declined(RemanenceError):
    """A site will not, or cannot, do what it was asked: a code for programs and a sentence for
    people, like a refusal of the gate.
    """

    def __init__(self, code: str, reason: str):
        super().__init__(reason)
        self.code, self.reason = code, reason


def check_method(policy: Policy, task: TrainingTask) -> None:
    """Before anything is trained: is the method one that this site takes part in, and does it
    ask for what may not leave?
    """
    for part in task.method.parts:
        if policy.methods and part.name not in policy.methods:
            allowed = ", ".join(policy.methods)
            raise Declined(
                "policy",
                f"this site takes part in {allowed} alone (policy.methods), and the experiment"
                f" uses {part.name}",
            )
    sent = task.payload_spec()
    for part in task.method.parts if not policy.label_counts else ():
        for path in pytree.flatten(sent.get(part.name, {})):
            _check_leaf(part, path, task)


def _check_leaf(part: Part, path: str, task: TrainingTask) -> None:
    """Decline a value that reveals label counts or more."""
    disclosure = part.disclosure(path)
    if disclosure.reveals == LABEL_COUNTS:
        raise Declined(
            "policy",
            f"{part.name} asks for label counts, and this site does not give them"
            " (policy.label_counts)",
        )
    if disclosure.reveals == "examples" and not is_protected(disclosure, task.method):
        leaf = path.replace(pytree.SEPARATOR, ".")
        what = "it does not declare" if disclosure is UNDECLARED else "may reveal single examples"
        raise Declined(
            "policy",
            f"{part.name} sends {leaf}, which {what}, and this site does not allow that"
            " (policy.label_counts)",
        )


def check_code(policy: Policy, model: str) -> None:
    """Before anything is built: does the experiment name Python code of its own?"""
    if is_import_path(model) and not policy.code:
        raise Declined(
            "policy",
            f"the experiment imports and runs Python code ({model}), and this site does not"
            " (policy.code)",
        )


def check_evaluation(policy: Policy) -> None:
    if not policy.evaluate:
        raise Declined(
            "policy", "this site gives no counts of right and wrong predictions (policy.evaluate)"
        )


def privatize_counts(
    policy: Policy, confusion: np.ndarray, loss: np.ndarray, key: Key | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Counts as they may leave: with noise, then without those that are too small. confusion: [n,
    C, C] int64; loss: [n] -> the same

    The summed loss is scaled with what is left of the counts, so that the mean over rows stays what
    it was. The noise comes from the operating system, never from the experiment's seed; `key` is
    for tests.
    """
    rows = confusion.sum(axis=(1, 2))
    shown = confusion
    if policy.epsilon:
        shown = np.maximum(
            shown
            + draw_geometric(key or Key(secrets.randbits(64)), float(policy.epsilon), shown.shape),
            0,
        )
    if policy.suppress:
        shown = np.where(shown < policy.suppress, 0, shown)
    share = np.divide(shown.sum(axis=(1, 2)), rows, out=np.zeros(len(rows)), where=rows > 0)
    return shown, np.where(share == 1, loss, loss * share)


def draw_geometric(key: Key, epsilon: float, shape: tuple[int, ...]) -> np.ndarray:
    """Whole numbers z with probability in proportion to exp(-epsilon |z|): the difference of
    two geometric ones. -> int64
    """
    count = int(np.prod(shape))
    drawn = [
        np.floor(np.log1p(-key.fold_in(word).uniform(count)) / -epsilon) for word in ("up", "down")
    ]
    return np.asarray(drawn[0] - drawn[1], dtype=np.int64).reshape(shape)
