from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from rich_runs import records
from test_report_words import say

from remanence.metrics.groups import group_runs
from remanence.reports.client_forgetting import draw_forgetting_by_client
from remanence.reports.clients_map import draw_client_forgetting
from remanence.reports.confusion_change import draw_confusion_change
from remanence.reports.heatmaps import change_colors, pick_frames
from remanence.reports.phase_forgetting import (
    draw_phase_decomposition,
    draw_phases_by_class,
    draw_phases_over_rounds,
)
from remanence.reports.round_heatmap import draw_one_round
from remanence.results.ledger import ALL, GLOBAL, header
from remanence.results.run import CONFUSIONS, LEDGER, Run

ROWS = 10  # of each class, so that a tenth is one example


def write_ledger(run: Run, parts: Sequence[np.ndarray]) -> Run:
    """The run again, with these records instead of its own."""
    (run.folder / LEDGER).write_bytes(
        header(["cat", "dog"]) + b"".join(part.tobytes() for part in parts)
    )
    return Run(run.folder)


def scored(
    shares: Sequence[float], moment: str, model: int = GLOBAL, **columns: object
) -> np.ndarray:
    where = {"split": "test", "owner": ALL, "round": 1} | columns
    return records(np.array([shares]), ROWS, moment=moment, model=model, **where)


@pytest.fixture
def lossy(make_run: Callable[..., Run]) -> Run:
    """One round. Cats: 0.8 -> clients 1.0 and 0.6 -> merged 0.7. Dogs: 0.4 -> 0.0 and 0.2 -> 0.5.

    Local training loses 0.8 - 0.8 = 0 of the cats and 0.4 - 0.1 = 0.3 of the dogs, mean 0.15;
    merging 0.8 - 0.7 = 0.1 and 0.1 - 0.5 = -0.4, mean -0.15. Client 3 loses -0.2 and 0.4, mean 0.1;
    client 7 loses 0.2 and 0.2, mean 0.2.
    """
    parts = [
        scored([0.8, 0.4], "before"),
        scored([1.0, 0.0], "local", model=3, weight=0.5),
        scored([0.6, 0.2], "local", model=7, weight=0.5),
        scored([0.7, 0.5], "merged"),
    ]
    return write_ledger(make_run([[0.7, 0.5]], label_counts=[[1, 1]] * 8), parts)


def test_bars_show_what_each_phase_lost_and_their_sum(lossy: Run) -> None:
    figure = draw_phase_decomposition(group_runs([lossy]))
    assert figure is not None
    local, aggregation, together = figure.plot.data
    assert (local.name, list(local.y), list(local.x)) == ("local training", ["fedavg"], [0.15])
    assert (aggregation.name, list(aggregation.x)) == ("aggregation", [-0.15])
    assert list(together.x) == [0]
    assert "fedavg: local training +15.0 points, aggregation -15.0 points" in figure.alt
    over_rounds = draw_phases_over_rounds(group_runs([lossy]))
    assert over_rounds is not None
    assert [(list(bars.x), list(bars.y)) for bars in over_rounds.plot.data] == [
        ([1], [0.15]),
        ([1], [-0.15]),
    ]
    assert "local training loses most in round 1: 15.0 points" in over_rounds.alt
    assert "aggregation loses nothing in any round" in over_rounds.alt


def test_classes_are_marked_where_they_lose_most(lossy: Run) -> None:
    """Cats lose most in merging (0.1 against 0), dogs in local training (0.3)."""
    figure = draw_phases_by_class(group_runs([lossy]))
    assert figure is not None
    [cells] = figure.plot.data
    assert (list(cells.x), list(cells.y)) == (["local", "aggregate", "sum"], ["cat", "dog"])
    assert [list(row) for row in cells.z] == [[0, 0.1, 0.1], [0.3, -0.4, -0.1]]
    assert [list(row) for row in cells.text] == [["", "●", ""], ["●", "", ""]]
    assert "fedavg: dog in local training, 30.0 points a round" in figure.alt


def test_clients_stand_from_the_most_forgetful_down(lossy: Run) -> None:
    figure = draw_forgetting_by_client(group_runs([lossy]))
    assert figure is not None
    [cells] = figure.plot.data
    assert list(cells.y) == ["client 7", "client 3"]
    assert [list(row) for row in cells.z] == [[0.2, 0.2, 0.2], [-0.2, 0.4, 0.1]]
    assert list(cells.x) == ["cat", "dog", "all classes"]


def test_one_round_has_a_column_for_every_model(lossy: Run) -> None:
    figure = draw_one_round(group_runs([lossy]))
    assert figure is not None
    [cells] = figure.plot.data
    assert list(cells.x) == ["before", " ", "3", "7", "  ", "after"]
    assert [list(row) for row in cells.z] == [
        [0.8, None, 1, 0.6, None, 0.7],
        [0.4, None, 0, 0.2, None, 0.5],
    ]
    # (1 + 0 + 0.6 + 0.2) / 4
    assert "60.0% before, 45.0% for the clients' models and 60.0% after" in figure.alt


def test_after_a_server_that_trains_stands_the_refined_model(lossy: Run) -> None:
    run = write_ledger(lossy, [lossy.ledger.records, scored([0.9, 0.6], "refined")])
    figure = draw_one_round(group_runs([run]))
    assert figure is not None
    assert [row[-1] for row in figure.plot.data[0].z] == [0.9, 0.6]
    bars = draw_phase_decomposition(group_runs([run]))
    assert bars is not None
    # (0.7 - 0.9 + 0.5 - 0.6) / 2
    assert (bars.plot.data[2].name, list(bars.plot.data[2].x)) == (
        "server training",
        [-0.15],
    )


def test_words_tell_where_it_was_lost(lossy: Run) -> None:
    text = say(lossy)
    assert (
        "fedavg: local training loses 15.0 and aggregation gains 15.0; most is lost in local"
        " training, above all of dog (30.0); client 7 loses most (20.0)." in text
    )


def test_deviation_over_seeds_stands_beside_a_phase(
    lossy: Run, make_run: Callable[..., Run]
) -> None:
    """The other seed's clients lose nothing, so local training loses 0.15 and 0: mean 0.075,
    deviation 0.15 / sqrt(2) = 0.106.
    """
    parts = [
        scored([0.8, 0.4], "before"),
        scored([0.8, 0.4], "local", model=1, weight=1.0),
        scored([0.8, 0.4], "merged"),
    ]
    calm = write_ledger(make_run([[0.8, 0.4]], "calm", seed=1, label_counts=[[1, 1]] * 8), parts)
    assert "local training loses 7.5 ± 10.6" in say(lossy, calm)
    figure = draw_phase_decomposition(group_runs([lossy, calm]))
    assert figure is not None
    assert (list(figure.plot.data[0].x), list(figure.plot.data[0].customdata)) == (
        [0.075],
        [0.1061],
    )


def test_nothing_lost_is_said_so(make_run: Callable[..., Run]) -> None:
    parts = [
        scored([0.5, 0.5], "before"),
        scored([0.6, 0.5], "local", model=0, weight=1.0),
        scored([0.7, 0.6], "merged"),
    ]
    assert "no phase loses accuracy on average." in say(write_ledger(make_run([[0.7, 0.6]]), parts))


def test_without_local_records_there_is_nothing_to_show(make_run: Callable[..., Run]) -> None:
    groups = group_runs([make_run([[0.5, 0.5], [0.6, 0.4]])])
    drawings = (
        draw_phase_decomposition,
        draw_phases_over_rounds,
        draw_phases_by_class,
        draw_forgetting_by_client,
        draw_one_round,
        draw_client_forgetting,
        draw_confusion_change,
    )
    assert [draw(groups) for draw in drawings] == [None] * len(drawings)


def test_client_against_client(make_run: Callable[..., Run]) -> None:
    """On the data of clients 0 and 1 the round begins at 0.8 and 0.4. Client 0's model ends at 1.0
    and 0.1: F = -0.2 and 0.3, and its mean over the others is 0.3. Client 1's ends at 0.3 and 0.9:
    F = 0.5 and -0.5, mean 0.5.
    """
    accuracy = {("before", GLOBAL): (0.8, 0.4), ("local", 0): (1.0, 0.1), ("local", 1): (0.3, 0.9)}
    parts = [
        scored([share, share], moment, model=model, split="valid", owner=owner)
        for (moment, model), shares in accuracy.items()
        for owner, share in enumerate(shares)
    ]
    figure = draw_client_forgetting(group_runs([write_ledger(make_run([[0.5, 0.5]]), parts)]))
    assert figure is not None
    changes, accuracies = figure.plot.data
    assert (list(changes.x), list(changes.y)) == (["0", "1", " ", "mean"], ["0", "1"])
    assert [list(row) for row in changes.z] == [[-0.2, 0.3, None, 0.3], [0.5, -0.5, None, 0.5]]
    assert list(accuracies.y) == ["before", " ", "0", "1"]
    assert [list(row) for row in accuracies.z] == [[0.8, 0.4], [None, None], [1, 0.1], [0.3, 0.9]]
    assert figure.plot.layout.coloraxis.cmin == -0.5
    assert figure.plot.layout.coloraxis.cmax == 0.5
    # (0.3 + 0.5) / 2, (0.2 + 0.5) / 2
    assert (
        "forgets +40.0 points of the others' data and changes its own by +35.0 points" in figure.alt
    )


def test_what_forgotten_classes_became(make_run: Callable[..., Run]) -> None:
    """Cats fall from 8 of 10 to 6 and the two go to the dogs: 0.2. Dogs gain, so what they are
    taken for does not count.
    """
    from remanence.results.ledger import MOMENTS, confusion_type

    run = make_run([[0.8, 0.4], [0.6, 0.5]])
    tables = np.zeros(2, dtype=confusion_type(2))
    tables["round"], tables["model"], tables["owner"], tables["moment"] = (
        [1, 2],
        GLOBAL,
        ALL,
        MOMENTS.index("merged"),
    )
    tables["confusion"] = [[[8, 2], [6, 4]], [[6, 4], [5, 5]]]
    (run.folder / CONFUSIONS).write_bytes(tables.tobytes())
    figure = draw_confusion_change(group_runs([Run(run.folder)]))
    assert figure is not None
    assert [list(row) for row in figure.plot.data[0].z] == [[None, 0.2], [0, None]]
    assert "cat predicted as dog, 20.00 points a round" in figure.alt


def test_moments_to_choose_from_are_spread_and_few() -> None:
    assert pick_frames(list(range(1, 201)), cells=10, methods=1) == sorted(
        set(pick_frames(list(range(1, 201)), 10, 1))
    )
    assert len(pick_frames(list(range(1, 201)), cells=10, methods=1)) == 40
    # never fewer than the first and the last
    assert pick_frames([3, 5, 9], cells=10**9, methods=9) == [3, 9]
    assert pick_frames([7], cells=10**9, methods=9) == [7]


def test_scale_of_changes_is_even_around_nothing() -> None:
    colors = change_colors([-0.1, float("nan"), 0.4])
    assert (colors["cmin"], colors["cmax"]) == (-0.4, 0.4)
    assert change_colors([float("nan")])["cmax"] == 0.01
