"""Settings that are valid and do less than they seem to: each is named in one sentence, with its
cause and cure, before the first round.

What only shows in training is named in the round in which it happens (`rounds/round_checks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from remanence.experiment.task_checks import has_batch_of_one

if TYPE_CHECKING:
    from remanence.experiment.build import BuiltExperiment

COUNTS_AT_A_TIME = 1 << 20  # label counts in memory
MANY_EXAMPLES = 100_000  # that take noticeably long to evaluate


def find_hints(experiment: BuiltExperiment) -> list[str]:
    """The sentences about an experiment; none for most."""
    return [
        *_one_class_hints(experiment),
        *_optimizer_hints(experiment),
        *_batch_norm_hints(experiment),
        *_model_hints(experiment),
        *_round_hints(experiment),
        *_validation_hints(experiment),
        *_public_hints(experiment),
        *_peer_hints(experiment),
    ]


def count_one_class_clients(experiment: BuiltExperiment) -> int:
    """Clients whose examples have a single class, as the functions of the method see them, at the
    first time step. 0 where the data are at real sites.
    """
    clients = np.arange(experiment.task.info.num_clients)
    some = max(1, COUNTS_AT_A_TIME // experiment.task.info.num_classes)
    return sum(
        int(((experiment.client_stats(part, 0).label_counts > 0).sum(dim=1) == 1).sum())
        for part in np.split(clients, range(some, len(clients), some))
    )


def parts_needing_classes(experiment: BuiltExperiment) -> list[str]:
    """The parts whose loss is constant for a client with a single class."""
    return [part.name for part in experiment.task.method.parts if part.needs_two_classes]


def _one_class_hints(experiment: BuiltExperiment) -> Iterator[str]:
    """Clients with a single class, where the loss is constant on them or the partition is extreme
    by its alpha.
    """
    flat, partition = parts_needing_classes(experiment), experiment.config.data.partition
    concentrated = partition.lstrip().startswith("dirichlet")
    if not (flat or concentrated):
        return
    clients, single = experiment.task.info.num_clients, count_one_class_clients(experiment)
    cure = "raise alpha or lower clients.count" if concentrated else "give clients more classes"
    if flat and single:
        yield (
            f"{single} of {clients} clients have examples of a single class, on which the loss of"
            f" {flat[0]} is constant: they learn nothing from their examples; {cure}, or use a"
            " loss without this property, such as masked_ce"
        )
    elif clients > 1 and 2 * single > clients:
        yield (
            f"{partition} gives {single} of {clients} clients examples of a single class: {cure}"
            " if that is not intended"
        )


def _optimizer_hints(experiment: BuiltExperiment) -> Iterator[str]:
    """Momentum without a second step, and rounds whose learning rate is 0."""
    task, config = experiment.task, experiment.config
    one_step = all(
        phase.steps == 1 or (phase.epochs == 1 and task.batch_size >= task.info.max_client_size)
        for phase in task.phases
    )
    if one_step and task.optimizer.hparams.get("momentum"):
        yield (
            "the momentum of local.optimizer has no effect: it starts anew in every round, and a"
            " round has one local step; use more local.epochs or local.steps, a smaller"
            " local.batch_size, or momentum at the server (fedavgm)"
        )
    total = config.total_rounds
    still = [round for round in range(1, total + 1) if experiment.schedule(round, total) == 0]
    if still:
        rounds = f"round {still[0]}" if len(still) == 1 else f"{len(still)} rounds"
        yield (
            f"local.schedule={config.local.schedule} has a learning rate of 0 in {rounds} of"
            f" {total}: local training changes nothing there; set its final value above 0"
        )


def _batch_norm_hints(experiment: BuiltExperiment) -> Iterator[str]:
    """Batches of one example; a model that cannot train on one is refused (`task_checks.py`)."""
    task = experiment.task
    if task.model.depends_on_batch and not task.clients_remote and has_batch_of_one(task):
        yield (
            "some client has a batch of a single example, by whose statistics alone batch norm"
            " normalizes it: change local.batch_size, set local.drop_last=true, or use a model"
            " with group norm"
        )


def _model_hints(experiment: BuiltExperiment) -> Iterator[str]:
    """Networks that draw random numbers that are not keyed, or that end in softmax."""
    model = experiment.task.model
    name = type(model.source_module).__name__
    if model.draws_unkeyed:
        yield (
            f"model {name} draws random numbers of its own, as attention with dropout does: they"
            " come from a generator that is seeded for each step, so that it trains one client"
            " after the other; for the other engines set that dropout to 0 (in transformers:"
            " attention_dropout=0), or use nn.Dropout"
        )
    if model.gives_probabilities:
        yield (
            f"model {name} ends in softmax, and losses apply it again, so that it learns slowly:"
            " let it return logits"
        )


def _round_hints(experiment: BuiltExperiment) -> Iterator[str]:
    """A sample of less than one client, and evaluations that come after the last round."""
    config, sample = experiment.config, experiment.config.clients.sample
    clients = config.clients.count or experiment.task.info.num_clients
    if isinstance(sample, float) and round(sample * clients) == 0:
        yield (
            f"clients.sample={sample:g} of {clients} clients is less than one client: a round"
            " samples 1; raise clients.sample, or write the number of clients"
        )
    if config.record.every > config.total_rounds:
        yield (
            f"record.every={config.record.every} is more than the {config.total_rounds} rounds:"
            " only the last round is evaluated, so forgetting is not measured; lower record.every"
        )


def _validation_hints(experiment: BuiltExperiment) -> Iterator[str]:
    """An evaluation that takes much longer than training, since it grows with all clients."""
    task, config = experiment.task, experiment.config
    sizes = task.population.at(0)
    held = len(sizes.valid.ids) if config.record.validation and not task.clients_remote else 0
    trained = round(sizes.train.sizes.mean() * experiment.cohort_size)
    if held > MANY_EXAMPLES and held > 10 * trained:
        yield (
            f"every evaluation takes the {held} validation examples of all clients, and a round"
            f" trains on about {trained}: raise record.every, lower data.validation, or set"
            " record.validation=false"
        )


def _public_hints(experiment: BuiltExperiment) -> Iterator[str]:
    """A public set that lacks classes."""
    task = experiment.task
    needing = [part.name for part in task.method.parts if part.needs_public_data]
    held = len(np.unique(experiment.labels[task.public.numpy()])) if needing else 0
    if needing and held < task.info.num_classes:
        yield (
            f"the public examples ({task.info.public_size}) have {held} of {task.info.num_classes}"
            f" classes: {needing[0]} trains the server on them alone; raise data.public"
        )


def _peer_hints(experiment: BuiltExperiment) -> Iterator[str]:
    """Clients that no other client reaches."""
    if experiment.topology is None:
        return
    others = experiment.topology & ~np.eye(len(experiment.topology), dtype=bool)
    alone = int((~others.any(axis=1)).sum())
    methods = [part.name for part in experiment.task.method.parts if part.peers is not None]
    if alone and "local" not in methods:
        yield (
            f"{alone} of {len(others)} clients have no peers: each of them trains alone; use more"
            " clients, or another peers.topology"
        )
