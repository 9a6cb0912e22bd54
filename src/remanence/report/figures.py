"""The pictures of a report, in the order of the page. Each is a pure function of groups of runs,
with a sentence on how to read it and a text for those who cannot see it; None: the runs did not
record what it shows.

A trace says in `meta.columns` how its data are called when saved as CSV: its name, x, y, then z or
customdata. Traces without are decoration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remanence.metrics.groups import Group
from remanence.report.attacks import draw_rare_classes, draw_success
from remanence.report.classes import draw_classes_at_end, draw_classes_over_rounds
from remanence.report.client_forgetting import draw_lost_by_client
from remanence.report.clients_map import draw_client_forgetting
from remanence.report.clusters import draw_clusters, draw_left_concepts
from remanence.report.confusion_change import draw_became
from remanence.report.cost import draw_bytes, draw_time
from remanence.report.curves import draw_accuracy, draw_forgetting
from remanence.report.distributions import (
    draw_forgettable,
    draw_global_distribution,
    draw_local_distribution,
)
from remanence.report.network import draw_network
from remanence.report.partition import draw_partition
from remanence.report.peers import draw_listening, draw_own_cluster
from remanence.report.phase_forgetting import (
    draw_lost_by_class,
    draw_lost_over_rounds,
    draw_where_lost,
)
from remanence.report.round_heatmap import draw_one_round
from remanence.report.schedule import draw_drift
from remanence.report.theme import Picture

Draw = Callable[[Sequence[Group]], Picture | None]

CHAPTERS: dict[str, tuple[Draw, ...]] = {
    "What was learned": (draw_accuracy, draw_classes_over_rounds, draw_classes_at_end),
    "What was forgotten": (draw_forgetting, draw_global_distribution, draw_became),
    "Which phase forgets": (draw_where_lost, draw_lost_over_rounds, draw_lost_by_class),
    "Which clients forget": (
        draw_lost_by_client,
        draw_one_round,
        draw_client_forgetting,
        draw_local_distribution,
        draw_forgettable,
    ),
    "Hostile clients": (draw_rare_classes, draw_success),
    "Drift": (draw_drift, draw_clusters, draw_left_concepts),
    "Peers": (draw_own_cluster, draw_listening, draw_network),
    "Cost and data": (draw_bytes, draw_time, draw_partition),
}
FIGURES: tuple[Draw, ...] = tuple(draw for drawings in CHAPTERS.values() for draw in drawings)
