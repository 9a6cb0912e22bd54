"""Measures of whole ledgers, computed once for each run for the tables, texts and figures of the
report. They are None for runs that did not record what they need.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remanence.core.errors import InputError
from remanence.metrics.accuracy_tables import concept_shares, nan_mean
from remanence.metrics.confusion import last_moment, mean_confusion_of_forgotten
from remanence.metrics.drift import DriftSummary, summarize_drift
from remanence.metrics.drift_curves import DriftCurves, drift_curves
from remanence.metrics.examples import ForgettableExamples, forgettable_examples
from remanence.metrics.forgetting import (
    LocalForgetting,
    client_forgetting_rounds,
    local_forgetting,
)
from remanence.metrics.groups import Group, cached_per_run, clusters_of, primary_model
from remanence.metrics.peer_usage import PeerUsage, same_cluster_usage
from remanence.metrics.phase_decomposition import (
    PHASES,
    ClientLosses,
    PhaseDecomposition,
    phase_decomposition,
)
from remanence.results.ledger import GLOBAL, MOMENTS, PEER_COUNTS, SIMILARITY, SPLITS, Ledger
from remanence.results.run import LEDGER, Run


def ledger_of(run: Run) -> Ledger | None:
    """The ledger of a run; None if there is none or it cannot be read."""
    try:
        return run.ledger
    except InputError:
        return None


def damaged_ledgers(groups: Sequence[Group]) -> dict[str, str]:
    """Why a ledger that exists cannot be read, by the name of its run."""
    problems = {}
    for run in (run for group in groups for run in group.runs):
        if run.has_recorded(LEDGER):
            try:
                run.ledger  # noqa: B018
            except InputError as error:
                problems[run.folder.name] = str(error).replace(f"{run.folder}/", "")
    return problems


def shares_of(run: Run) -> np.ndarray | None:
    """The share of the clients in each concept at each time step [T, M]; None without drift."""
    clusters = clusters_of(run)
    return None if clusters is None else concept_shares(clusters)


@cached_per_run
def decomposition_of(run: Run) -> PhaseDecomposition | None:
    """Losses by phase, for runs that recorded their local models."""
    ledger = ledger_of(run)
    if ledger is None or not len(ledger.select(moment="local", split="test")):
        return None
    lost = phase_decomposition(ledger, shares=shares_of(run))
    return lost if len(lost.round) else None


@cached_per_run
def local_forgetting_of(run: Run) -> LocalForgetting | None:
    """Local forgetting of every recorded local model."""
    ledger = ledger_of(run)
    if ledger is None or not len(ledger.select(moment="local", split="test")):
        return None
    forgotten = local_forgetting(ledger, shares=shares_of(run))
    return forgotten if len(forgotten.value) else None


@cached_per_run
def cross_rounds(run: Run) -> list[int]:
    """The rounds in which clients' models were evaluated on each other's validation examples."""
    ledger = ledger_of(run)
    return client_forgetting_rounds(ledger) if ledger is not None else []


@cached_per_run
def drift_of(run: Run) -> tuple[DriftCurves, DriftSummary] | None:
    """Accuracy under drift: curves and summary."""
    if clusters_of(run) is None or ledger_of(run) is None:
        return None
    try:
        return drift_curves(run), summarize_drift(run)
    except InputError:  # nothing recorded yet
        return None


@cached_per_run
def peer_records(run: Run) -> dict[int, dict[int, np.ndarray]]:
    """Matrices [K, K] by kind and round; empty for a run with a server."""
    found: dict[int, dict[int, np.ndarray]] = {PEER_COUNTS: {}, SIMILARITY: {}}
    for record in run.peers if run.peers is not None else ():
        found[int(record["kind"])][int(record["round"])] = record["values"]
    return found


@cached_per_run
def peer_usage_of(run: Run) -> PeerUsage | None:
    """The share of peers from a client's own cluster, where there are clusters and no server."""
    clusters = clusters_of(run)
    if clusters is None or run.peers is None:
        return None
    usage = same_cluster_usage(run.peers, clusters)
    return usage if len(usage.round) else None


@cached_per_run
def forgettable_of(run: Run) -> ForgettableExamples | None:
    """Training examples that clients lost by aggregation."""
    if run.examples is None:
        return None
    found = forgettable_examples(run.examples)
    return found if len(found.count) else None


@cached_per_run
def confusions_of_forgotten(run: Run) -> np.ndarray | None:
    """What test examples that the primary model forgets are predicted as [C, C]."""
    if run.confusions is None:
        return None
    personal = primary_model(run) == "personal"
    kept = run.confusions[run.confusions["split"] == SPLITS.index("test")]
    kept = kept if personal else kept[kept["model"] == GLOBAL]
    moment = "personal" if personal else last_moment(kept)
    return mean_confusion_of_forgotten(kept[kept["moment"] == MOMENTS.index(moment)])


def rounds_of(ledger: Ledger, rounds: Sequence[int]) -> dict[int, Ledger]:
    """The ledger of each of these rounds alone, so that searches are small."""
    when = ledger.records["round"]
    return {round: Ledger(ledger.records[when == round], ledger.class_names) for round in rounds}


def first_with_losses(group: Group) -> Run | None:
    """The first run that recorded its local models. Figures of single rounds and clients show one
    seed, since clients differ between seeds.
    """
    return next((run for run in group.runs if decomposition_of(run) is not None), None)


def client_losses(group: Group) -> ClientLosses | None:
    """The losses of each client's local training, in the first run that recorded them."""
    run = first_with_losses(group)
    lost = decomposition_of(run) if run is not None else None
    return lost.clients if lost is not None else None


def phase_means(group: Group) -> dict[str, list[float]]:
    """The mean loss of each phase in a round, one number for each seed, in the order of a round."""
    found: dict[str, list[float]] = {}
    for run in group.runs:
        lost = decomposition_of(run)
        for phase, value in (lost.phase_means() if lost else {}).items():
            found.setdefault(phase, []).append(value)
    return {phase: found[phase] for phase in PHASES if phase in found}


def class_losses(group: Group) -> dict[str, np.ndarray]:
    """The mean loss of each class in each phase [C], over rounds and seeds."""
    found: dict[str, list[np.ndarray]] = {}
    for run in group.runs:
        lost = decomposition_of(run)
        for phase, part in (lost.parts if lost else {}).items():
            found.setdefault(phase, []).append(part)
    return {
        phase: nan_mean(np.concatenate(found[phase]), axis=0) for phase in PHASES if phase in found
    }
