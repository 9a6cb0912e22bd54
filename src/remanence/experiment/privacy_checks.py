"""Checks of a built experiment before it runs: does a privacy mechanism cover all that is sent?"""

from __future__ import annotations

from remanence.core import pytree
from remanence.core.compose import ComposedMethod
from remanence.core.declarations import CLIENT, EXAMPLE, LABEL_COUNTS, MODEL
from remanence.core.errors import InputError
from remanence.core.slots import Part
from remanence.privacy.label_dp import CURE as NOISY_COUNTS
from remanence.training.task import TrainingTask

# what a part can do that clipping the model's update does not cover, in words
UNCOVERED = {
    "payload": "sends more than its model",
    "server_train": "lets the server read the clients' models",
    "update_server_state": "keeps at the server what clients sent",
    "model_assignment": "asks every client how well each model does",
}


def check_client_privacy(task: TrainingTask) -> None:
    """Refuse client-level privacy for a method that sends more than the model's update, which
    alone is clipped and noised.
    """
    mechanism = model_mechanism(task.method, CLIENT)
    if mechanism is None:
        return
    for p in task.method.parts:
        slots = (words for slot, words in UNCOVERED.items() if getattr(p, slot) is not None)
        found = "has all data in one place" if p.centralized else next(slots, "")
        if p is not mechanism and found:
            raise InputError(
                f"{mechanism.name} and {p.name} cannot be combined: {p.name} {found}, and"
                f" {mechanism.name} clips and noises the model's update alone; leave one of"
                " them out"
            )
    if sent := task.communicated_buffers():
        raise InputError(
            f"{mechanism.name} cannot protect the model's buffers ({sent[0]}), which are sent"
            " as they are: set local.buffers to local or frozen, or use a model with group norm"
        )


def check_example_privacy(task: TrainingTask) -> None:
    """Refuse example-level privacy where an example has any other effect than through its
    clipped gradient.
    """
    method = task.method
    mechanism = model_mechanism(method, EXAMPLE)
    if mechanism is None:
        return
    if task.model.draws_unkeyed:
        raise InputError(
            f"{mechanism.name} computes the gradients of many examples at once, and the model draws"
            " random numbers of its own, such as attention with dropout: set that dropout to 0, or"
            " use nn.Dropout"
        )
    if task.model.depends_on_batch:
        raise InputError(
            f"{mechanism.name} clips the gradient of every single example, and batch norm mixes"
            " examples: use a model with group norm, or set local.buffers to frozen"
        )
    sent = task.payload_spec()
    for p in method.parts:
        paths = list(pytree.flatten(sent.get(p.name, {})))
        if cure := _find_uncovered(p, paths, method):
            raise InputError(f"{mechanism.name} and {p.name} cannot be combined: {cure}")
    for phase in task.phases:
        if phase.accept is not None:
            raise InputError(
                f"{mechanism.name} cannot protect examples that decide whether a phase of"
                " training is kept: use another method"
            )


def model_mechanism(method: ComposedMethod, unit: str) -> Part | None:
    """The part whose noise protects the model: of clients or of examples."""
    return next((p for p, m in method.mechanisms if (m.unit, m.covers) == (unit, MODEL)), None)


def covers_label_counts(method: ComposedMethod) -> bool:
    return any(mechanism.covers == LABEL_COUNTS for _, mechanism in method.mechanisms)


def _find_uncovered(p: Part, paths: list[str], method: ComposedMethod) -> str:
    """What of a part reveals more about single examples than a clipped gradient, with the cure;
    "" where there is nothing.
    """
    if p.peers is not None or p.model_assignment is not None:
        return (
            f"{p.name} evaluates models on a client's examples and reports how well they do;"
            " use a method with one server model"
        )
    if p.project is not None:
        return f"{p.name} changes the model after the noise is added; leave one of them out"
    for path in paths:
        disclosure = p.disclosure(path)
        if disclosure.reveals == "label_counts" and not covers_label_counts(method):
            return f"{p.name} sends label counts; {NOISY_COUNTS}"
        if disclosure.reveals == "examples" and not p.protects(path):
            return disclosure.cure or (
                f"{p.name} sends more than its model, which the clipped gradients do not cover;"
                " leave one of them out"
            )
    if p.reads_label_counts and not covers_label_counts(method):
        return f"{p.name} weighs every example by the label counts of all; {NOISY_COUNTS}"
    return ""
