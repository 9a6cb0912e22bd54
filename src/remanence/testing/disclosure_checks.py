"""What `check_method` finds by changing the examples: a payload that reveals more than its part
declares.

A leaf that is declared as `nothing` or `size` must not change with the clients' inputs and labels,
one that is declared as `label_counts` not with their inputs, and one of `nothing` not with the
sizes that the part reads. A value that changes with examples of another kind only is not found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from remanence.core import pytree
from remanence.core.engine import ClientWork
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import BuiltExperiment
from remanence.rounds.federated import make_work
from remanence.testing.running import train
from remanence.training.state import RunState

ROUNDS = 2  # in the second, clients also read what they kept
# what was changed, and the declarations that are wrong if a leaf changes with it
INPUTS, LABELS, SIZES = "inputs", "labels", "sizes"
UNAFFECTED = {
    INPUTS: ("nothing", "size", "label_counts"),
    LABELS: ("nothing", "size"),
    SIZES: ("nothing",),
}


def check_disclosures(experiment: BuiltExperiment, state: RunState, name: str) -> None:
    """Check that no leaf of the payload depends on more than it declares.

    Args:
        experiment: The method on the built-in task.
        state: A state of a run of it.
        name: What is checked, for errors.
    """
    declared = {
        f"{p.name}{pytree.SEPARATOR}{path}": p.disclosure(path).reveals
        for p in experiment.task.method.parts
        for path in pytree.flatten(experiment.task.payload_spec().get(p.name, {}))
    }
    if not any(reveals in UNAFFECTED[INPUTS] for reveals in declared.values()):
        return
    usual = list(_payloads(experiment, state, "", name))
    for changed, reveals in UNAFFECTED.items():
        for round, payload in enumerate(_payloads(experiment, state, changed, name)):
            for path, value in payload.items():
                same = declared[path] not in reveals or _equal(value, usual[round][path])
                assert same, (
                    f"{name}: the leaf {path} of the payload is declared as revealing"
                    f" {declared[path]}, and it changes with the clients' {changed}: declare what"
                    " it reveals"
                )


def _payloads(
    experiment: BuiltExperiment, state: RunState, changed: str, name: str
) -> Iterator[dict[str, Tensor]]:
    """The payloads of the clients of consecutive rounds, by path."""
    experiment = _change_examples(experiment, changed)
    engine, kept = SequentialEngine(experiment.task), None
    for round in range(1, ROUNDS + 1):
        fresh = replace(state, round=0, client_states={})
        work = _change_sizes(make_work(experiment, fresh, 1), changed)._replace(round=round)
        reply = train(engine, work if kept is None else work._replace(client_state=kept), name)
        kept = reply.client_state
        yield pytree.flatten(reply.payload)


def _change_examples(experiment: BuiltExperiment, changed: str) -> BuiltExperiment:
    task, classes = experiment.task, experiment.task.info.num_classes
    if changed == INPUTS:
        task = replace(task, train=replace(task.train, x=task.train.x.flip(0)))
    if changed != LABELS:
        return replace(experiment, task=task)
    examples = replace(task.train, y=(task.train.y + 1) % classes)
    labels = (experiment.labels + 1) % classes
    return replace(experiment, task=replace(task, train=examples), labels=labels)


def _change_sizes(work: ClientWork, changed: str) -> ClientWork:
    """Only what a part reads: as many examples are trained as before."""
    stats = work.stats
    if changed == SIZES:
        stats = stats._replace(size=2 * stats.size, label_counts=2 * stats.label_counts)
    return work._replace(stats=stats)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
