from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from remanence.report.figures import FIGURES, draw_accuracy, draw_classes_at_end, draw_classes_over_rounds, draw_forgetting
from remanence.report.groups import gather
from remanence.report.partition import draw_holdings, draw_partition
from remanence.results import Comparison, Run

CELLS = [
    {"method": "a", "seed": 0, "shares": [[0.2, 0.6], [0.4, 0.8]]},
    {"method": "a", "seed": 1, "shares": [[0.4, 0.6], [0.6, 0.8]]},
    {"method": "b", "seed": 0, "shares": [[0.5, 0.5], [0.1, 0.9]]},
]


def test_accuracy_has_a_line_a_method_and_a_band_over_seeds(make_comparison: Callable[..., Comparison]) -> None:
    picture = draw_accuracy(gather([make_comparison(CELLS)]))
    assert picture is not None
    band, line, other = picture.figure.data
    assert (line.name, list(line.x), list(line.y)) == ("a", [1, 2], [0.45, 0.65])  # (0.4 + 0.5) / 2 and (0.6 + 0.7) / 2
    spread = 0.05 * math.sqrt(2)  # 0.05 either side of the mean, over n - 1 = 1
    assert list(line.customdata) == pytest.approx([spread, spread], abs=1e-4)
    assert list(band.x) == [1, 2, 2, 1]
    assert list(band.y) == pytest.approx([0.45 + spread, 0.65 + spread, 0.65 - spread, 0.45 - spread], abs=1e-4)
    assert (other.name, other.customdata) == ("b", None)
    assert "a 65.0% at round 2" in picture.alt


def test_accuracy_of_one_run_shows_test_and_validation(make_run: Callable[..., Run]) -> None:
    picture = draw_accuracy(gather([make_run([[0.2, 0.6], [0.4, 0.8]], valid=[0.3, 0.5])]))
    assert picture is not None
    assert [(line.name, list(line.y)) for line in picture.figure.data] == [("test", [0.4, 0.6]), ("validation", [0.3, 0.5])]


def test_map_shows_the_mean_over_seeds_with_a_panel_a_method(make_comparison: Callable[..., Comparison]) -> None:
    picture = draw_classes_over_rounds(gather([make_comparison(CELLS)]))
    assert picture is not None
    first, second = picture.figure.data
    assert [list(row) for row in first.z] == [pytest.approx([0.3, 0.5]), pytest.approx([0.6, 0.8])]  # [classes][rounds]
    assert (list(first.y), second.yaxis) == (["cat", "dog"], "y2")
    assert [title.text for title in picture.figure.layout.annotations] == ["<b>a</b>", "<b>b</b>"]
    assert "a: best class dog 80%, worst class cat 50%" in picture.alt


def test_dots_show_the_last_round_with_the_deviation(make_comparison: Callable[..., Comparison]) -> None:
    picture = draw_classes_at_end(gather([make_comparison(CELLS)]))
    assert picture is not None
    first, second = picture.figure.data
    assert dict(zip(first.y, first.x, strict=True)) == {"cat": 0.5, "dog": 0.8}
    assert list(first.error_x.array) == pytest.approx([0.1 * math.sqrt(2), 0], abs=1e-4)  # 0.4 and 0.6; 0.8 and 0.8
    assert not second.error_x.visible


def test_many_classes_stand_from_the_hardest_to_the_easiest(make_run: Callable[..., Run]) -> None:
    shares = [(37 * place % 30) / 30 for place in range(30)]
    picture = draw_classes_at_end(gather([make_run([shares], class_names=[f"c{place}" for place in range(30)])]))
    assert picture is not None
    assert list(picture.figure.data[0].y) == sorted(round(share, 4) for share in shares)


def test_forgetting_counts_drops_only(make_comparison: Callable[..., Comparison]) -> None:
    picture = draw_forgetting(gather([make_comparison(CELLS)]))
    assert picture is not None
    first, second = picture.figure.data
    assert (list(first.x), list(first.y)) == ([2], [0])
    assert list(second.y) == [0.2]  # class 0 lost 0.4, class 1 gained: (0.4 + 0) / 2


def test_partition_as_bars(make_run: Callable[..., Run]) -> None:
    picture = draw_partition(gather([make_run([[0.5, 0.5]], label_counts=[[8, 2], [0, 5]], clients=9)]))
    assert picture is not None
    cat, dog = picture.figure.data
    assert (cat.type, list(cat.y), list(dog.y), list(dog.customdata)) == ("bar", [0.8, 0], [0.2, 1], [2, 5])
    assert "the first 2 of 9 clients, as drawn with seed 0" in picture.reading
    assert "90% of its examples" in picture.alt  # (0.8 + 1) / 2


@pytest.mark.parametrize(("clients", "classes", "kind"), [(40, 2, "bar"), (41, 2, "heatmap"), (2, 21, "heatmap")])
def test_partition_becomes_a_map_where_bars_are_too_many(clients: int, classes: int, kind: str) -> None:
    picture = draw_holdings([[1] * classes] * clients, [str(place) for place in range(classes)], clients)
    assert picture.figure.data[0].type == kind


def test_a_client_without_examples_has_no_shares() -> None:
    picture = draw_holdings([[0, 0], [3, 1]], ["cat", "dog"], 2)
    assert [list(bar.y) for bar in picture.figure.data] == [[0, 0.75], [0, 0.25]]


def test_equal_class_names_stay_apart(make_run: Callable[..., Run]) -> None:
    picture = draw_classes_over_rounds(gather([make_run([[0.1, 0.9]], class_names=["cat", "cat"])]))
    assert picture is not None
    assert list(picture.figure.data[0].y) == ["cat (0)", "cat (1)"]


def test_absent_classes_are_gaps_and_everything_is_valid_json(make_run: Callable[..., Run]) -> None:
    for draw in FIGURES:
        picture = draw(gather([make_run([[0.5, None], [0.4, None]], name=draw.__name__)]))
        assert picture is not None
        assert picture.reading.endswith(".")
        assert picture.alt.endswith(".")
        json.dumps(picture.figure.to_plotly_json(), allow_nan=False)


def test_nothing_recorded_draws_nothing_but_the_partition(make_run: Callable[..., Run]) -> None:
    groups = gather([make_run([], rounds=4)])
    assert [draw.__name__ for draw in FIGURES if draw(groups) is not None] == ["draw_partition"]
