"""One round in detail: accuracy per class of the global model before it, of every client's model,
and of the global model after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.accuracy_tables import accuracies_by_model, nan_mean, select_whole
from remanence.metrics.cached import (
    decomposition_of,
    first_with_losses,
    ledger_of,
    rounds_of,
    shares_of,
)
from remanence.metrics.groups import Group, class_names_of, primary_model
from remanence.reports.heatmaps import Panel, arrange_panels, pick_frames, share_colors
from remanence.reports.theme import (
    Figure,
    FigureState,
    as_text,
    axis,
    class_axis,
    default_state,
    name_classes,
    rounded,
)
from remanence.results.ledger import Ledger

MAX_CLIENTS = 40  # columns: the first clients by number


def draw_one_round(groups: Sequence[Group]) -> Figure | None:
    """Accuracy per class before the round, of each client's model, and after the round; for a
    round that the reader selects.
    """
    shown = [
        (group, run)
        for group in groups
        if (run := first_with_losses(group)) is not None and primary_model(run) == "global"
    ]
    if not shown:
        return None
    states, longest, most, cut = [], 1, 0, False
    for group, run in shown:
        ledger, lost = ledger_of(run), decomposition_of(run)
        assert ledger is not None
        assert lost is not None
        classes = name_classes(class_names_of(group), len(ledger.class_names))
        longest, most = max(longest, *map(len, classes)), max(most, len(classes))
        selected = pick_frames(lost.round.tolist(), len(classes) * 24, len(shown))
        for round, part in rounds_of(ledger, selected).items():
            names, columns = read_round(part, shares_of(run))
            cut = cut or len(names) >= MAX_CLIENTS + 4
            states.append(_make_state(group, round, classes, names, columns))
    chosen = default_state(states)
    cells = go.Heatmap(
        name="accuracy",
        hovertemplate="%{x}, %{y}: %{z:.1%}<extra></extra>",
        meta={"columns": ["", "model", "class", "accuracy"]},
        **states[chosen].data[0],
    )
    panel = Panel("", cells, axis("client", type="category", showgrid=False), class_axis(most))
    plot = arrange_panels([panel], max(120, min(20 * most, 420)), 7 * longest, [share_colors()])
    plot.layout.meta["labels"] = [len(states[chosen].data[0]["x"]), len("before")]
    return Figure(
        name="one-round",
        title="One round in detail",
        plot=plot,
        caption="Accuracy per class on the test set: the first column is the global model before"
        " the round, the last column the global model after it, and between them each client's"
        " model after local training; brighter is more accurate. Dark cells between bright ends"
        " are classes that clients forget and aggregation restores."
        f"{f' At most {MAX_CLIENTS} clients are shown.' if cut else ''} Shown: the first seed.",
        alt=states[chosen].alt,
        states=states,
        chosen=chosen,
    )


def read_round(ledger: Ledger, shares: np.ndarray | None) -> tuple[list[str], np.ndarray]:
    """The models in the ledger of one round, in their order.

    Returns:
        Names, and accuracy per class [models, C]; rows of NaN separate global models from the
        clients' models.
    """
    found = {
        moment: accuracies_by_model(select_whole(ledger, moment, "test", shares), shares)
        for moment in ("before", "local", "merged", "refined")
    }
    after = "refined" if len(found["refined"].model) else "merged"
    local = found["local"]
    gap = np.full((1, len(ledger.class_names)), np.nan)
    order = np.argsort(local.model, kind="stable")[:MAX_CLIENTS]
    names = ["before", " ", *(str(client) for client in local.model[order]), "  ", "after"]
    start, end = (
        nan_mean(found[moment].per_class, axis=0)[None] for moment in ("before", after)
    )  # a method may have several global models
    return names, np.concatenate([start, gap, local.per_class[order], gap, end])


def _make_state(
    group: Group, round: int, classes: list[str], names: list[str], columns: np.ndarray
) -> FigureState:
    start, end, clients = (
        float(nan_mean(part)) for part in (columns[0], columns[-1], columns[2:-2])
    )
    return FigureState(
        group.label,
        str(round),
        [{"x": names, "y": [as_text(name) for name in classes], "z": rounded(columns.T, 3)}],
        f"Heat map of the accuracy of every class in round {round} of {group.label}: the"
        f" mean over classes is {start:.1%} before, "
        f"{clients:.1%} for the clients' models and {end:.1%} after.",
    )
