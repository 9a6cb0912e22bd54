"""Attacks, defenses and rejected replies in a report, computed by hand; no section without them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reports.rich_runs import write_server_run

from remanence.metrics.groups import group_runs
from remanence.metrics.robustness import count_holders, rare_classes, robustness_row
from remanence.reports.attacks import draw_rare_classes, draw_success, tabulate
from remanence.reports.page import render_report
from remanence.results.run import EXPERIMENT, METRICS, Comparison, Run


def test_who_holds_a_class() -> None:
    """Of 12 examples at three clients in equal parts: 1 / (3 * 1/9) = 3. All at one: 1. At none: 0."""
    assert count_holders([[4, 12, 0], [4, 0, 0], [4, 0, 0]]).tolist() == pytest.approx(
        [3.0, 1.0, 0.0]
    )


def test_rare_classes_are_the_third_with_the_fewest_holders(make_run: Callable[..., Run]) -> None:
    # holders 3, about 1.2, 3, 1, 3, 3
    held = [[5, 9, 3, 0, 1, 2], [5, 0, 3, 7, 1, 2], [5, 1, 3, 0, 1, 2]]
    run = make_run([[0.5] * 6], label_counts=held, class_names=list("abcdef"))
    assert rare_classes(run).tolist() == [1, 3]


def test_a_method_under_attack_by_hand(make_run: Callable[..., Run]) -> None:
    """Dogs lie with one client alone (cats with both, 8 and 1): rare is dog. It falls from 0.8
    to 0.5 and rises to 0.6: lost 0.3 and 0 over two rounds.
    """
    bad = {"client": 1, "code": "not-finite", "reason": "its model holds NaN"}
    run = make_run(
        [[0.9, 0.8], [0.7, 0.5], [0.9, 0.6]],
        label_counts=((8, 0), (5, 9)),
        refused={1: [bad], 3: [bad]},
    )
    stand = robustness_row(group_runs([run])[0])
    assert stand.attack == "none"
    assert stand.rare == pytest.approx(0.6)
    assert stand.forgetting == pytest.approx((0.2 + 0.3 + 0 + 0) / 4)
    assert stand.rare_forgetting == pytest.approx(0.3 / 2)
    assert (stand.rejected, stand.no_response, stand.success) == (2, 0, None)
    _, who = tabulate(group_runs([run]))
    assert who["rows"] == [["fedavg", "0", "1", "not-finite", "2", "1 to 3", "its model holds NaN"]]


def rewrite(run: Run, change: Callable[[dict[str, Any]], Any]) -> Run:
    lines = [json.loads(text) for text in (run.folder / METRICS).read_text().splitlines()]
    for line in lines:
        change(line)
    (run.folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(run.folder)


def test_a_client_that_went_silent_is_named(make_run: Callable[..., Run]) -> None:
    run = rewrite(
        make_run([[0.5, 0.5], [0.5, 0.6]], valid=[0.5, 0.5]),
        lambda line: line.update(no_response=[4] if line["round"] == 2 else []),
    )
    stand = robustness_row(group_runs([run])[0])
    assert (stand.rejected, stand.no_response) == (0, 1)  # a round's two lines are one silence
    assert tabulate(group_runs([run]))[1]["rows"][0][2:6] == ["4", "no response", "1", "2"]


def test_where_nobody_is_hostile_nothing_is_said(
    make_run: Callable[..., Run], make_comparison: Callable[..., Comparison]
) -> None:
    groups = group_runs([make_run([[0.5, 0.5], [0.5, 0.6]])])
    assert tabulate(groups) == []
    assert draw_rare_classes(groups) is None
    assert draw_success(groups) is None
    assert 'id="robustness"' not in render_report([groups[0].runs[0]])


def test_the_page_of_an_attacked_run(tmp_path: Path) -> None:
    run = write_server_run(tmp_path / "run", attack="backdoor(fraction=0.2)")
    groups = group_runs([run])
    success = draw_success(groups)
    assert success is not None
    assert success.plot.data[-1].y == pytest.approx(
        [round(1 / number, 4) for number in range(1, 7)]
    )
    assert robustness_row(groups[0]).success == pytest.approx(1 / 6)
    rare = draw_rare_classes(groups)
    assert rare is not None
    shares = np.array([line["per_class"] for line in run.metrics if line["split"] == "test"])[-1]
    assert sorted(rare.plot.data[0].y) == pytest.approx(sorted(shares), abs=1e-4)
    page = render_report([run])
    assert 'id="robustness"' in page
    assert "Methods under attack" in page


def test_attackers_are_marked(make_run: Callable[..., Run]) -> None:
    bad = {"client": 1, "code": "norm", "reason": "<b>far</b>"}
    run = make_run([[0.5, 0.5], [0.5, 0.6]], refused={1: [bad]})
    text = (run.folder / EXPERIMENT).read_text().replace("[about]", '[about]\nattackers = "0 1"')
    (run.folder / EXPERIMENT).write_text(text)
    run = Run(run.folder)
    assert tabulate(group_runs([run]))[1]["rows"][0][2] == "1 (attacker)"
    assert "<b>far</b>" not in render_report([run])
