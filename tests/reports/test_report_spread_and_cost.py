from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from test_report_lost import scored, write_ledger

from remanence.metrics.groups import group_runs
from remanence.reports.cost import draw_bytes, draw_time
from remanence.reports.distributions import (
    draw_forgettable,
    draw_global_distribution,
    draw_local_distribution,
)
from remanence.reports.tables import rounds_to_target
from remanence.results.ledger import EXAMPLE, MOMENTS
from remanence.results.run import EXAMPLES, Comparison, Run


def test_rounds_as_a_staircase(make_comparison: Callable[..., Comparison]) -> None:
    """Method a forgets 0.2 and then 0.1, b nothing twice: a staircase each, up to the highest
    value of both.
    """
    cells = [
        {"method": "a", "shares": [[0.8, 0.8], [0.4, 0.8], [0.2, 0.8]]},
        {"method": "b", "shares": [[0.5, 0.5]] * 3},
    ]
    figure = draw_global_distribution(group_runs([make_comparison(cells)]))
    assert figure is not None
    first, second = figure.plot.data
    assert (list(first.x), list(first.y)) == ([0, 0.1, 0.2, 0.2], [0, 0.5, 1, 1])
    assert (list(second.x), list(second.y)) == ([0, 0, 0, 0.2], [0, 0.5, 1, 1])
    assert "Median: a 15.0%; b 0.0%." in figure.alt


def test_local_models_as_a_staircase(make_run: Callable[..., Run]) -> None:
    """Client 0 loses 0.4 of the cats, (0.4 + 0) / 2 = 0.2; client 1 gains."""
    parts = [
        scored([0.8, 0.4], "before"),
        scored([0.4, 0.9], "local", model=0),
        scored([0.9, 0.4], "local", model=1),
    ]
    figure = draw_local_distribution(group_runs([write_ledger(make_run([[0.5, 0.5]]), parts)]))
    assert figure is not None
    assert (list(figure.plot.data[0].x), list(figure.plot.data[0].y)) == (
        [0, 0, 0.2, 0.2],
        [0, 0.5, 1, 1],
    )


def test_forgettable_examples_as_shares_of_a_clients_own(make_run: Callable[..., Run]) -> None:
    """Client 0 had two examples right, of which the merged model has one wrong; client 1's one
    example was wrong before: nothing to forget.
    """
    rows = [
        (1, 0, MOMENTS.index(moment), client, number, right, 0.0)
        for moment, client, number, right in (
            ("local", 0, 1, 1), ("local", 0, 2, 1), ("merged", 0, 1, 1), ("merged", 0, 2, 0), ("local", 1, 3, 0), ("merged", 1, 3, 0),
        )
    ]  # fmt: skip
    run = make_run([[0.5, 0.5]])
    (run.folder / EXAMPLES).write_bytes(np.array(rows, dtype=EXAMPLE).tobytes())
    figure = draw_forgettable(group_runs([Run(run.folder)]))
    assert figure is not None
    assert [list(row) for row in figure.plot.data[0].z] == [[0.5], [0]]
    assert "fedavg: 1 of 3 (33.3%), most at client 0" in figure.alt


def test_accuracy_against_bytes_and_time_counts_every_round(make_run: Callable[..., Run]) -> None:
    """A round sends 3,000 bytes and takes half a second; the second is not evaluated but paid
    for.
    """
    groups = group_runs([make_run([[0.2, 0.2], None, [0.6, 0.6]], valid=[0.2, None, 0.6])])
    figure = draw_bytes(groups)
    assert figure is not None
    assert (list(figure.plot.data[0].x), list(figure.plot.data[0].y)) == ([3, 9], [0.2, 0.6])
    assert figure.plot.layout.xaxis.title.text == "communication, kB"
    assert "fedavg 60.0% for 9.0 kB" in figure.alt
    times = draw_time(groups)
    assert times is not None
    assert list(times.plot.data[0].x) == [0.5, 1.5]


def test_seeds_are_averaged_with_their_deviation(
    make_comparison: Callable[..., Comparison],
) -> None:
    cells = [{"method": "a", "seed": seed, "shares": [[0.2 + 0.2 * seed] * 2]} for seed in (0, 1)]
    figure = draw_bytes(group_runs([make_comparison(cells)]))
    assert figure is not None
    line = figure.plot.data[-1]
    assert (list(line.x), list(line.y)) == ([3], [0.3])
    assert list(line.customdata) == pytest.approx([0.1414], abs=1e-4)


def test_rounds_to_a_target_by_method(make_comparison: Callable[..., Comparison]) -> None:
    """The best is 0.8, the target 0.76: three quarters are 0.57, nine tenths 0.684."""
    cells = [
        {"method": "a", "shares": [[0.6, 0.6], [0.7, 0.7], [0.8, 0.8]]},
        {"method": "b", "shares": [[0.5, 0.5], [0.6, 0.6], [0.6, 0.6]]},
    ]
    targets = rounds_to_target(group_runs([make_comparison(cells)]))
    assert targets is not None
    assert targets.target == pytest.approx(0.76)
    assert targets.rounds == {"a": (1, 2, 3), "b": (2, None, None)}
    assert rounds_to_target(group_runs([make_comparison(cells[:1], name="one")])) is None
