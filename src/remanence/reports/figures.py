"""All figures of a report, by chapter and in the order of the page.

Each draw function maps groups of runs to a `Figure`, or to None where the runs did not record what
it shows. A trace whose data can be saved as CSV names the columns in `meta.columns`: the trace's
name, x, y, then z or customdata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remanence.metrics.groups import Group
from remanence.reports.attacks import draw_rare_classes, draw_success
from remanence.reports.classes import draw_classes_at_end, draw_classes_over_rounds
from remanence.reports.client_forgetting import draw_forgetting_by_client
from remanence.reports.clients_map import draw_client_forgetting
from remanence.reports.clusters import draw_clusters, draw_previous_concepts
from remanence.reports.confusion_change import draw_confusion_change
from remanence.reports.cost import draw_bytes, draw_time
from remanence.reports.curves import draw_accuracy, draw_forgetting
from remanence.reports.distributions import (
    draw_forgettable,
    draw_global_distribution,
    draw_local_distribution,
)
from remanence.reports.network import draw_network
from remanence.reports.partition import draw_partition
from remanence.reports.peers import draw_peer_usage, draw_same_cluster
from remanence.reports.phase_forgetting import (
    draw_phase_decomposition,
    draw_phases_by_class,
    draw_phases_over_rounds,
)
from remanence.reports.round_heatmap import draw_one_round
from remanence.reports.schedule import draw_drift
from remanence.reports.theme import Figure

DrawFigure = Callable[[Sequence[Group]], Figure | None]

CHAPTERS: dict[str, tuple[DrawFigure, ...]] = {
    "Accuracy": (draw_accuracy, draw_classes_over_rounds, draw_classes_at_end),
    "Forgetting": (draw_forgetting, draw_global_distribution, draw_confusion_change),
    "Forgetting by phase of a round": (
        draw_phase_decomposition,
        draw_phases_over_rounds,
        draw_phases_by_class,
    ),
    "Forgetting by client": (
        draw_forgetting_by_client,
        draw_one_round,
        draw_client_forgetting,
        draw_local_distribution,
        draw_forgettable,
    ),
    "Attacks": (draw_rare_classes, draw_success),
    "Drift": (draw_drift, draw_clusters, draw_previous_concepts),
    "Peers": (draw_same_cluster, draw_peer_usage, draw_network),
    "Cost and data": (draw_bytes, draw_time, draw_partition),
}
FIGURES: tuple[DrawFigure, ...] = tuple(
    draw for functions in CHAPTERS.values() for draw in functions
)
