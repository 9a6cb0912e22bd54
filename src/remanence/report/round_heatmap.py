"""One round as a figure: the global model before it, every client's model, and the global
model after it.
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
from remanence.report.heatmaps import Panel, arrange_panels, pick_frames, share_colors
from remanence.report.theme import (
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

MAX_CLIENTS = 40  # columns; beyond, the first by number


def draw_one_round(groups: Sequence[Group]) -> Figure | None:
    """Accuracy per class as columns: before, each client, after; for a round that the reader
    chooses.
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
        some = pick_frames(lost.round.tolist(), len(classes) * 24, len(shown))
        for round, alone in rounds_of(ledger, some).items():
            names, columns = read_round(alone, shares_of(run))
            cut = cut or len(names) >= MAX_CLIENTS + 4
            states.append(_make_state(group, round, classes, names, columns))
    picked = default_state(states)
    cells = go.Heatmap(
        name="accuracy",
        hovertemplate="%{x}, %{y}: %{z:.1%}<extra></extra>",
        meta={"columns": ["", "model", "class", "accuracy"]},
        **states[picked].data[0],
    )
    panel = Panel("", cells, axis("client", type="category", showgrid=False), class_axis(most))
    plot = arrange_panels([panel], max(120, min(20 * most, 420)), 7 * longest, [share_colors()])
    plot.layout.meta["labels"] = [len(states[picked].data[0]["x"]), len("before")]
    return Figure(
        name="one-round",
        title="One round as a figure",
        plot=plot,
        caption="The first column is the global model before the round, the last the one after it,"
        " and between them stands every client's model "
        "after its training; brighter is more accurate on the test set. Dark cells between"
        " bright ends are classes that clients forget "
        "and merging restores."
        f"{f' At most {MAX_CLIENTS} clients are shown.' if cut else ''} Shown: the first seed.",
        alt=states[picked].alt,
        states=states,
        chosen=picked,
    )


def read_round(alone: Ledger, shares: np.ndarray | None) -> tuple[list[str], np.ndarray]:
    """The models of one round's ledger in their order. -> names, accuracy per class [models,
    C]; rows of NaN part the global ones from the clients'
    """
    found = {
        moment: accuracies_by_model(select_whole(alone, moment, "test", shares), shares)
        for moment in ("before", "local", "merged", "refined")
    }
    after = "refined" if len(found["refined"].model) else "merged"
    local = found["local"]
    gap = np.full((1, len(alone.class_names)), np.nan)
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
