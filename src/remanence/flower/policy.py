"""What a site declines, what of a response it withholds, and the noise on counts.

Everything follows from what parts and fields declare (`core.declarations`), not from their names.
"""

from __future__ import annotations

import logging

import numpy as np

from remanence.core import pytree
from remanence.core.compose import ComposedMethod
from remanence.core.declarations import (
    AT_CLIENT,
    EXAMPLE,
    LABEL_COUNTS,
    REPLY,
    RESPONSE_HEADER,
    UNDECLARED,
    Disclosure,
)
from remanence.core.slots import Part
from remanence.experiment.privacy_checks import covers_label_counts
from remanence.flower.discrete_noise import draw_geometric
from remanence.flower.refusals import Declined, decline
from remanence.flower.settings import Policy, exact_number
from remanence.flower.wire import WireMessage
from remanence.training.task import TrainingTask

logger = logging.getLogger("remanence")
EXAMPLES = "examples"  # of `REVEALS`
STATISTICS_CURE = "give the experiment's data a mean and std, or set data.normalize to false"


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
    sent, protecting = task.payload_spec(), protecting_part(task.method)
    for part in task.method.parts:
        for path in pytree.flatten(sent.get(part.name, {})):
            if not policy.label_counts:
                _check_leaf(part, path)
            elif protecting and not _is_covered(task.method, part, path):
                raise Declined(
                    "policy",
                    f"{protecting} hides single examples, but not in what {part.name} sends"
                    f" ({path.replace(pytree.SEPARATOR, '.')}): leave one of them out",
                )


def _is_covered(method: ComposedMethod, part: Part, path: str) -> bool:
    """Whether a value of a payload says no more than the accounts of the method's noise cover."""
    disclosure = part.disclosure(path)
    if disclosure.reveals == LABEL_COUNTS:
        return covers_label_counts(method)
    return disclosure.reveals != EXAMPLES or part.protects(path)


def _check_leaf(part: Part, path: str) -> None:
    """Decline a value that reveals label counts or more. The experiment chooses the part's noise,
    and every request gets new noise, so noise alone does not protect the value.
    """
    disclosure = part.disclosure(path)
    if disclosure.reveals == LABEL_COUNTS:
        raise Declined(
            "policy",
            f"{part.name} asks for label counts, but this site does not send them"
            " (policy.label_counts)",
        )
    if disclosure.reveals == EXAMPLES:
        leaf = path.replace(pytree.SEPARATOR, ".")
        what = "it does not declare" if disclosure is UNDECLARED else "may reveal single examples"
        raise Declined(
            "policy",
            f"{part.name} sends {leaf}, which {what}, but this site does not allow that"
            " (policy.label_counts)",
        )


def protecting_part(method: ComposedMethod, *, of_labels: bool = True) -> str:
    """The name of a part that claims privacy for examples towards the coordinator: its noise is
    drawn at the client; "" where there is none.

    Args:
        method: Its mechanisms count.
        of_labels: Also where label counts are all that the noise covers.
    """
    return next(
        (
            part.name
            for part, mechanism in method.mechanisms
            if (mechanism.unit, mechanism.drawn_at) == (EXAMPLE, AT_CLIENT)
            and mechanism.noise > 0
            and (of_labels or mechanism.covers != LABEL_COUNTS)
        ),
        "",
    )


def sends_exactly(policy: Policy, method: ComposedMethod) -> bool:
    """Whether values that reveal label counts or single examples leave as they are. A part that
    claims privacy for examples would claim too much.
    """
    return policy.label_counts and not protecting_part(method)


def check_statistics(method: ComposedMethod, own_statistics: bool) -> None:
    """Decline a method whose noise does not cover the site's own mean and standard deviation."""
    part = protecting_part(method, of_labels=False)
    if part and own_statistics:
        raise Declined(
            "policy",
            f"{part} hides single examples, but this site would normalize all of them with their"
            f" own mean and standard deviation: {STATISTICS_CURE}",
        )


def check_uses_counts(policy: Policy, method: ComposedMethod, part: str) -> None:
    """Decline a method that chooses models by exact counts and losses, where they do not leave.

    Args:
        policy: The site's policy.
        method: The method.
        part: The name of the part that chooses models; "": there is none.
    """
    if part and (policy.epsilon or not policy.evaluate or not sends_exactly(policy, method)):
        raise Declined(
            "policy",
            f"{part} chooses models by their losses on this site's examples, and this site sends"
            " no losses (policy.label_counts, policy.evaluate, policy.epsilon)",
        )


def check_evaluation(policy: Policy, method: ComposedMethod, own_statistics: bool) -> bool:
    """Decline to send counts where the policy allows neither exact nor noised ones.

    Args:
        policy: The site's policy.
        method: The experiment's method.
        own_statistics: Whether the site normalizes with the mean of its own examples, so that one
            example changes the predictions for all.

    Returns:
        Whether noise is added.
    """
    if not policy.evaluate:
        raise Declined(
            "policy",
            "this site sends no counts of correct and wrong predictions (policy.evaluate)",
        )
    if policy.epsilon:
        if own_statistics:
            raise Declined(
                "policy",
                "the noise on counts (policy.epsilon) hides single examples, but this site would"
                " normalize all of them with their own mean and standard deviation:"
                f" {STATISTICS_CURE}",
            )
        return True
    if part := protecting_part(method):
        raise Declined(
            "policy",
            f"{part} hides single examples, and exact counts of predictions reveal them: this"
            " site adds no noise to counts (policy.epsilon)",
        )
    if not policy.label_counts:
        raise Declined(
            "policy",
            "exact counts of predictions reveal label counts, and this site neither sends those"
            " (policy.label_counts) nor adds noise to counts (policy.epsilon)",
        )
    return False


def check_update(policy: Policy, client: int, examples: int, steps: int) -> None:
    """Decline to train a client whose update would come from too few examples or steps."""
    for found, least, what, key in (
        (examples, policy.min_examples, "training examples", "min_examples"),
        (steps, policy.min_steps, "local steps", "min_steps"),
    ):
        if found < least:
            raise Declined(
                "policy",
                f"an update of client {client} would come from {found} {what}, and this site"
                f" sends none from fewer than {least} (policy.{key})",
            )


def release(response: WireMessage, exactly: bool) -> WireMessage:
    """What of a response leaves a site, from what its fields declare.

    Args:
        response: All fields.
        exactly: Whether values that reveal label counts or single examples leave.

    Returns:
        The response without the fields that do not leave, which `withheld` names; a decline if a
        field does not declare what it reveals.
    """
    header = response.header
    roots = {name: name.partition(pytree.SEPARATOR)[0] for name in response.arrays}
    unknown = sorted(set(header) - set(RESPONSE_HEADER)) + sorted({*roots.values()} - set(REPLY))
    if unknown:
        logger.error("not sent: the field %s does not declare what it reveals", unknown[0])
        return decline("failed", "a field of the response is not declared")
    if exactly:
        return response
    fields = {name for name in header if _is_sensitive(RESPONSE_HEADER[name])}
    arrays = {name for name, root in roots.items() if _is_sensitive(REPLY[root])}
    withheld = {*header.get("withheld", ()), *fields, *(roots[name] for name in arrays)}
    kept = {name: value for name, value in header.items() if name not in fields}
    return WireMessage(
        kept | ({"withheld": sorted(withheld)} if withheld else {}),
        {name: array for name, array in response.arrays.items() if name not in arrays},
    )


def _is_sensitive(disclosure: Disclosure) -> bool:
    return disclosure.reveals in (LABEL_COUNTS, EXAMPLES) and not disclosure.noised


def suppress_counts(
    policy: Policy, confusion: np.ndarray, loss: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Set small counts to 0, and scale the losses so that their mean does not change.

    Args:
        policy: The site's policy.
        confusion: [n, C, C] int64.
        loss: [n] summed losses.

    Returns:
        The counts and summed losses to send.
    """
    examples = confusion.sum(axis=(1, 2))
    counts = np.where(confusion < policy.suppress, 0, confusion)
    empty = np.zeros(len(examples))
    share = np.divide(counts.sum(axis=(1, 2)), examples, out=empty, where=examples > 0)
    return counts, np.where(share == 1, loss, loss * share)


def add_noise(policy: Policy, confusion: np.ndarray) -> np.ndarray:
    """Counts with two-sided geometric noise. One example changes one count by one, so they are
    private with the policy's epsilon; what follows the noise does not change that.

    Args:
        policy: The site's policy.
        confusion: [n, C, C] int64.

    Returns:
        [n, C, C]; none is below 0, and those below `policy.suppress` are 0.
    """
    noise = draw_geometric(exact_number(policy.epsilon), confusion.shape)
    counts = np.maximum(confusion + noise, 0)
    return np.where(counts < policy.suppress, 0, counts)
