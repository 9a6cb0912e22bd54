from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from rich_runs import write_peers_run, write_server_run

from remanence.metrics.groups import group_runs
from remanence.reports.classes import draw_classes_at_end, draw_classes_over_rounds
from remanence.reports.curves import draw_accuracy, draw_forgetting
from remanence.reports.figures import FIGURES
from remanence.reports.partition import draw_client_data, draw_partition
from remanence.results.run import Comparison, Run

CELLS = [
    {"method": "a", "seed": 0, "shares": [[0.2, 0.6], [0.4, 0.8]]},
    {"method": "a", "seed": 1, "shares": [[0.4, 0.6], [0.6, 0.8]]},
    {"method": "b", "seed": 0, "shares": [[0.5, 0.5], [0.1, 0.9]]},
]


def test_accuracy_has_a_line_a_method_and_a_band_over_seeds(
    make_comparison: Callable[..., Comparison],
) -> None:
    figure = draw_accuracy(group_runs([make_comparison(CELLS)]))
    assert figure is not None
    band, line, other = figure.plot.data
    # (0.4 + 0.5) / 2 and (0.6 + 0.7) / 2
    assert (line.name, list(line.x), list(line.y)) == ("a", [1, 2], [0.45, 0.65])
    spread = 0.05 * math.sqrt(2)  # 0.05 either side of the mean, over n - 1 = 1
    assert list(line.customdata) == pytest.approx([spread, spread], abs=1e-4)
    assert list(band.x) == [1, 2, 2, 1]
    assert list(band.y) == pytest.approx(
        [0.45 + spread, 0.65 + spread, 0.65 - spread, 0.45 - spread], abs=1e-4
    )
    assert (other.name, other.customdata) == ("b", None)
    assert "a 65.0% at round 2" in figure.alt


def test_accuracy_of_one_run_shows_test_and_validation(make_run: Callable[..., Run]) -> None:
    figure = draw_accuracy(group_runs([make_run([[0.2, 0.6], [0.4, 0.8]], valid=[0.3, 0.5])]))
    assert figure is not None
    assert [(line.name, list(line.y)) for line in figure.plot.data] == [
        ("test", [0.4, 0.6]),
        ("validation", [0.3, 0.5]),
    ]


def test_map_shows_the_mean_over_seeds_with_a_panel_a_method(
    make_comparison: Callable[..., Comparison],
) -> None:
    figure = draw_classes_over_rounds(group_runs([make_comparison(CELLS)]))
    assert figure is not None
    first, second = figure.plot.data
    # [classes][rounds]
    assert [list(row) for row in first.z] == [pytest.approx([0.3, 0.5]), pytest.approx([0.6, 0.8])]
    assert (list(first.y), second.yaxis) == (["cat", "dog"], "y2")
    assert [title.text for title in figure.plot.layout.annotations] == ["<b>a</b>", "<b>b</b>"]
    assert "a: best class dog 80%, worst class cat 50%" in figure.alt


def test_dots_show_the_last_round_with_the_deviation(
    make_comparison: Callable[..., Comparison],
) -> None:
    figure = draw_classes_at_end(group_runs([make_comparison(CELLS)]))
    assert figure is not None
    first, second = figure.plot.data
    assert dict(zip(first.y, first.x, strict=True)) == {"cat": 0.5, "dog": 0.8}
    # 0.4 and 0.6; 0.8 and 0.8
    assert list(first.error_x.array) == pytest.approx([0.1 * math.sqrt(2), 0], abs=1e-4)
    assert not second.error_x.visible


def test_many_classes_stand_from_the_hardest_to_the_easiest(make_run: Callable[..., Run]) -> None:
    shares = [(37 * place % 30) / 30 for place in range(30)]
    figure = draw_classes_at_end(
        group_runs([make_run([shares], class_names=[f"c{place}" for place in range(30)])])
    )
    assert figure is not None
    assert list(figure.plot.data[0].y) == sorted(round(share, 4) for share in shares)


def test_forgetting_counts_drops_only(make_comparison: Callable[..., Comparison]) -> None:
    figure = draw_forgetting(group_runs([make_comparison(CELLS)]))
    assert figure is not None
    first, second = figure.plot.data
    assert (list(first.x), list(first.y)) == ([2], [0])
    assert list(second.y) == [0.2]  # class 0 lost 0.4, class 1 gained: (0.4 + 0) / 2


def test_partition_as_bars(make_run: Callable[..., Run]) -> None:
    figure = draw_partition(
        group_runs([make_run([[0.5, 0.5]], label_counts=[[8, 2], [0, 5]], clients=9)])
    )
    assert figure is not None
    cat, dog = figure.plot.data
    assert (cat.type, list(cat.y), list(dog.y), list(dog.customdata)) == (
        "bar",
        [0.8, 0],
        [0.2, 1],
        [2, 5],
    )
    assert "the first 2 of 9 clients, drawn with seed 0" in figure.caption
    assert "90% of its examples" in figure.alt  # (0.8 + 1) / 2


@pytest.mark.parametrize(
    ("clients", "classes", "kind"), [(40, 2, "bar"), (41, 2, "heatmap"), (2, 21, "heatmap")]
)
def test_partition_becomes_a_map_where_bars_are_too_many(
    clients: int, classes: int, kind: str
) -> None:
    figure = draw_client_data(
        [[1] * classes] * clients, [str(place) for place in range(classes)], clients
    )
    assert figure.plot.data[0].type == kind


def test_a_client_without_examples_has_no_shares() -> None:
    figure = draw_client_data([[0, 0], [3, 1]], ["cat", "dog"], 2)
    assert [list(bar.y) for bar in figure.plot.data] == [[0, 0.75], [0, 0.25]]


def test_equal_class_names_stay_apart(make_run: Callable[..., Run]) -> None:
    figure = draw_classes_over_rounds(
        group_runs([make_run([[0.1, 0.9]], class_names=["cat", "cat"])])
    )
    assert figure is not None
    assert list(figure.plot.data[0].y) == ["cat (0)", "cat (1)"]


PLAIN = [
    "accuracy", "classes-over-rounds", "classes-at-end", "forgetting", "accuracy-by-bytes", "accuracy-by-time", "partition",
]  # what a run shows that recorded nothing besides its metrics  # fmt: skip


def test_absent_classes_are_gaps_and_everything_is_valid_json(make_run: Callable[..., Run]) -> None:
    groups = group_runs([make_run([[0.5, None], [0.4, None]])])
    figures = [figure for draw in FIGURES if (figure := draw(groups)) is not None]
    assert [figure.name for figure in figures] == PLAIN
    for figure in figures:
        assert figure.caption.endswith(".")
        assert figure.alt.endswith(".")
        json.dumps(figure.plot.to_plotly_json(), allow_nan=False)


def test_nothing_recorded_draws_nothing_but_the_partition(make_run: Callable[..., Run]) -> None:
    groups = group_runs([make_run([], rounds=4)])
    assert [draw.__name__ for draw in FIGURES if draw(groups) is not None] == ["draw_partition"]


SERVER = {
    "accuracy", "classes-over-rounds", "classes-at-end", "forgetting", "global-distribution", "confusion-change", "phase-decomposition", "phases-over-rounds",
    "phases-by-class", "forgetting-by-client", "one-round", "client-forgetting", "local-distribution", "forgettable", "accuracy-by-bytes",
    "accuracy-by-time", "partition",
}  # fmt: skip
PEERS = SERVER - {"confusion-change", "one-round", "client-forgetting", "forgettable"} | {
    "schedule", "clusters", "previous-concepts", "same-cluster", "peer-selection", "network",
}  # fmt: skip


@pytest.mark.parametrize(
    ("write", "expected"), [(write_server_run, SERVER), (write_peers_run, PEERS)]
)
def test_every_picture_of_a_run_that_recorded_everything(
    write: Callable[..., Run], expected: set[str], tmp_path: Path
) -> None:
    """Names are unique, every figure and each of its choices is JSON and fits its traces, and
    explains itself.
    """
    groups = group_runs(
        [
            write(tmp_path / "run", seed=seed)
            if seed == 0
            else write(tmp_path / "other", seed=seed)
            for seed in (0, 1)
        ]
    )
    figures = [figure for draw in FIGURES if (figure := draw(groups)) is not None]
    assert {figure.name for figure in figures} == expected
    assert len(figures) == len(expected)
    for figure in figures:
        assert figure.caption.endswith("."), figure.name
        assert figure.alt.endswith("."), figure.name
        json.dumps(figure.plot.to_plotly_json(), allow_nan=False)
        json.dumps([asdict(choice) for choice in figure.states], allow_nan=False)
        for choice in figure.states:
            assert len(choice.data) == len(figure.plot.data), figure.name
            assert choice.alt.endswith("."), figure.name
        if figure.states:
            shown = figure.states[figure.chosen]
            assert figure.alt == shown.alt
            assert list(figure.plot.data[0].x) == list(shown.data[0]["x"])


def test_time_steps_are_marked_where_the_data_drift(
    tmp_path: Path, make_run: Callable[..., Run]
) -> None:
    """Three steps of four rounds: boundaries lie between rounds 4 and 5, and 8 and 9."""
    groups = group_runs([write_peers_run(tmp_path / "peers", rounds=4, steps=3)])
    for draw in (draw_accuracy, draw_forgetting):
        figure = draw(groups)
        assert figure is not None
        assert [line.x0 for line in figure.plot.layout.shapes] == [4.5, 8.5]
        assert [note.text for note in figure.plot.layout.annotations] == [
            "step 0",
            "step 1",
            "step 2",
        ]
        assert "Dotted lines mark the time steps" in figure.caption
    plain = draw_accuracy(group_runs([make_run([[0.5, 0.5]])]))
    assert plain is not None
    assert not plain.plot.layout.shapes


def test_without_a_server_the_clients_own_models_count(tmp_path: Path) -> None:
    run = write_peers_run(tmp_path / "peers")
    figure = draw_accuracy(group_runs([run]))
    assert figure is not None
    lines = {line["round"]: line for line in run.metrics if line["split"] == "test"}
    names = {trace.name: list(trace.y) for trace in figure.plot.data}
    assert list(names) == ["test", "validation", "worst client"]
    assert names["test"][-1] == round(lines[12]["accuracy"], 4)
    assert names["worst client"][0] == round(lines[1]["worst_client"], 4)
    assert (
        "of the clients' own models on test examples of each client's present cluster"
        in figure.caption
    )
