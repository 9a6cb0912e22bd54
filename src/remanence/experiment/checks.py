"""Checks of a built experiment before it runs: does everything a method sends fit its promises?"""

from __future__ import annotations

from remanence.core.compose import ComposedMethod
from remanence.core.errors import InputError
from remanence.core.slots import Part
from remanence.privacy.client_dp import NAME as DP
from remanence.privacy.dp_sgd import NAME as DP_SGD
from remanence.training.task import TrainingTask

# what a part may do that clipping the model's move does not cover, and how it is said
UNCOVERED = {
    "payload": "sends more than its model",
    "server_train": "lets the server look at the clients' models",
    "update_server_state": "keeps at the server what clients sent",
    "model_assignment": "asks every client how well each model does",
}
NOISY_COUNTS = "add dp_counts, whose noise hides single rows in them"
# Parts whose extras are a function of what is private already, or of numbers that everybody knows;
# and what the others would need.
PAYLOAD_ALREADY_PRIVATE = ("fednova",)


def check_private(task: TrainingTask) -> None:
    """Refuse a method with dp in which anything goes up besides the model's move, which alone
    is clipped and noised.
    """
    if not any(p.name == DP for p in task.method.parts):
        return
    for p in task.method.parts:
        slots = (words for slot, words in UNCOVERED.items() if getattr(p, slot) is not None)
        found = "has all data in one place" if p.centralized else next(slots, "")
        if p.name != DP and found:
            raise InputError(
                f"dp and {p.name} cannot be combined: {p.name} {found}, and dp clips and"
                " noises the model's move alone; leave one of them out"
            )
    if sent := task.communicated_buffers():
        raise InputError(
            f"dp cannot protect the model's buffers ({sent[0]}), which go up as they are:"
            " set local.buffers to local or frozen, or use a model with group norm"
        )


def check_examples(task: TrainingTask) -> None:
    """Refuse a method with dp_sgd in which a row could be felt in any other way than through
    its clipped gradient.
    """
    method = task.method
    if method.part_filling("gradient") is None or not any(p.name == DP_SGD for p in method.parts):
        return
    if task.model.depends_on_batch:
        raise InputError(
            "dp_sgd clips the gradient of every single row, and batch norm mixes rows: use"
            " a model with group norm, or set local.buffers to frozen"
        )
    for p in method.parts:
        if cure := _find_uncovered(p, method):
            raise InputError(f"dp_sgd and {p.name} cannot be combined: {cure}")
    for phase in task.phases:
        if phase.accept is not None:
            raise InputError(
                "dp_sgd cannot protect rows that decide whether a phase of training is kept:"
                " use another method"
            )


def _find_uncovered(p: Part, method: ComposedMethod) -> str:
    """What of a part tells more about single rows than a clipped gradient, and the cure;
    nothing, mostly.
    """
    noisy = method.part_filling("privatize_stats") is not None
    if p.peers is not None or p.model_assignment is not None:
        return (
            f"{p.name} tries models on a client's rows and tells how well they do; use a"
            " method with one server model"
        )
    if p.name == "flashback" and not noisy:
        return f"flashback sends label counts; {NOISY_COUNTS}"
    if p.name in LABEL_LOSSES and not noisy:
        return f"{p.name} weighs every row by the label counts of all; {NOISY_COUNTS}"
    if p.name == "fedwavg":
        return (
            ""
            if p.arguments["noise"]
            else "fedwavg sends how many rows were forgotten; write fedwavg(noise=5)"
        )
    if p.name == "scaffold":
        return (
            ""
            if p.arguments["option"] == 2
            else "its variates are plain gradients; write scaffold(option=2)"
        )
    if p.payload is not None and p.name not in (*PAYLOAD_ALREADY_PRIVATE, "flashback"):
        return (
            f"{p.name} sends more than its model, which the clipped gradients do not cover;"
            " leave one of them out"
        )
    return ""


LABEL_LOSSES = ("fedlc", "fedrs", "masked_ce", "tce", "wsm")
