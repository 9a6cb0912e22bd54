from __future__ import annotations

import io
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from remanence.metrics.forgetting import forgetting_curve, roundwise_forgetting
from remanence.metrics.groups import group_runs
from remanence.metrics.summary_rows import MethodRow, best_row, make_row
from remanence.reports.tables import (
    chosen_rows,
    render_markdown,
    render_text,
)
from remanence.results.run import METRICS, Comparison, Run

# Two seeds over three rounds and two classes.
# accuracy 0.5, 0.6, 0.7; lost (0 + 0.2) / 2 = 0.1, then (0.2 + 0) / 2 = 0.1
SEED0 = [[0.5, 0.5], [0.9, 0.3], [0.7, 0.7]]
# accuracy 0.4, 0.6, 0.6; lost 0, then (0.1 + 0) / 2 = 0.05
SEED1 = [[0.4, 0.4], [0.6, 0.6], [0.5, 0.7]]


def method_rows(comparison: Comparison) -> list[MethodRow]:
    """All settings, in the order of the plan."""
    return [make_row(group) for group in group_runs([comparison])]


def test_row_over_seeds(make_comparison: Callable[..., Comparison]) -> None:
    [row] = method_rows(
        make_comparison(
            [
                {"method": "fedavg", "seed": 0, "shares": SEED0},
                {"method": "fedavg", "seed": 1, "shares": SEED1},
            ]
        )
    )
    assert (row.label, row.setting, row.seeds, row.planned, row.unfinished, row.last_round) == (
        "fedavg",
        "",
        2,
        2,
        0,
        3,
    )
    assert row.accuracy == pytest.approx((0.7 + 0.6) / 2)
    # around the mean 0.65, over n - 1 = 1
    assert row.deviation == pytest.approx(math.sqrt(0.05**2 + 0.05**2))
    assert row.best == pytest.approx((0.7 + 0.6) / 2)
    assert row.macro_f1 == pytest.approx(0.325)  # the files say half of the accuracy
    assert row.worst_class == pytest.approx((0.7 + 0.5) / 2)
    assert row.forgetting == pytest.approx(((0.1 + 0.1) / 2 + (0 + 0.05) / 2) / 2)
    assert row.validation is None
    assert row.bytes_per_round == pytest.approx(3000)
    assert row.seconds_per_round == pytest.approx(0.5)


def test_best_round_is_each_seeds_own(make_comparison: Callable[..., Comparison]) -> None:
    """Seed 0 is best at round 1 (0.8), seed 1 at round 2 (0.6): their mean is 0.7, although no
    round has that mean.
    """
    cells = [
        {"method": "a", "seed": 0, "shares": [[0.8, 0.8], [0.2, 0.2]]},
        {"method": "a", "seed": 1, "shares": [[0.4, 0.4], [0.6, 0.6]]},
    ]
    [row] = method_rows(make_comparison(cells))
    assert row.best == pytest.approx(0.7)
    assert row.accuracy == pytest.approx(0.4)


def test_one_seed_has_no_deviation_and_absent_classes_are_left_out(
    make_run: Callable[..., Run],
) -> None:
    [row] = chosen_rows(make_run([[1.0, None], [0.5, None]]))
    assert row.deviation is None
    assert row.worst_class == 0.5
    assert row.forgetting == 0.5  # not 0.25: the class without examples does not count as a class


def test_rounds_that_were_not_evaluated_do_not_count(make_run: Callable[..., Run]) -> None:
    """Recorded every other round: 0.8 -> 0.4 for class 0 between rounds 1 and 3, so (0.4 + 0) /
    2.
    """
    run = make_run([[0.8, 0.2], None, [0.4, 0.2], None])
    assert forgetting_curve(run) == {3: pytest.approx(0.2)}
    [row] = chosen_rows(run)
    assert row.last_round == 3
    assert row.accuracy == pytest.approx(0.3)
    assert row.unfinished == 0


def test_refused_replies_count_once_a_round(make_run: Callable[..., Run]) -> None:
    """Test and validation lines both carry the round's refusals."""
    refused = {
        1: [{"client": 3, "code": "not-finite", "reason": ""}],
        2: [{"client": 3, "code": "shape", "reason": ""}] * 2,
    }
    [row] = chosen_rows(
        make_run([[0.5, 0.5], [0.5, 0.5]], valid=[0.5, 0.5], refused=refused, abandoned=[2])
    )
    assert (row.rejected, row.abandoned) == (3, 1)


def test_unfinished_and_unstarted_runs_are_told(make_comparison: Callable[..., Comparison]) -> None:
    cells = [
        {"method": "a", "seed": 0, "shares": SEED0},
        {"method": "a", "seed": 1, "shares": SEED1[:2], "rounds": 3},
        {"method": "a", "seed": 2, "shares": None},
        {"method": "b", "seed": 0, "shares": None},
    ]
    begun, waiting = method_rows(make_comparison(cells))
    assert (begun.seeds, begun.planned, begun.unfinished, begun.last_round) == (2, 3, 2, 2)
    assert (waiting.seeds, waiting.unfinished, waiting.accuracy, waiting.last_round) == (
        0,
        1,
        None,
        None,
    )


def test_settings_are_chosen_by_validation_never_by_test(
    make_comparison: Callable[..., Comparison],
) -> None:
    """lr=0.1 has the better test accuracy (0.9), lr=0.05 the better validation accuracy (0.8):
    the latter is kept.
    """
    cells = [
        {"method": "a", "setting": "lr=0.1", "shares": [[0.9, 0.9]], "valid": [0.6]},
        {"method": "a", "setting": "lr=0.05", "shares": [[0.5, 0.5]], "valid": [0.8]},
        {"method": "b", "setting": "lr=0.1", "shares": [[0.3, 0.3]], "valid": [0.7]},
        {"method": "b", "setting": "lr=0.05", "shares": [[0.4, 0.4]], "valid": [0.1]},
    ]
    comparison = make_comparison(cells, select="validation")
    assert [row.label for row in method_rows(comparison)] == [
        "a, lr=0.1",
        "a, lr=0.05",
        "b, lr=0.1",
        "b, lr=0.05",
    ]
    assert [(row.method, row.setting, row.variants) for row in chosen_rows(comparison)] == [
        ("a", "lr=0.05", 2),
        ("b", "lr=0.1", 2),
    ]
    assert len(chosen_rows(make_comparison(cells, name="plain", select="all"))) == 4


def test_without_validation_numbers_every_setting_stays(
    make_comparison: Callable[..., Comparison],
) -> None:
    cells = [
        {"method": "a", "setting": "lr=1", "shares": [[0.9, 0.9]]},
        {"method": "a", "setting": "lr=2", "shares": [[0.5, 0.5]]},
    ]
    assert [row.setting for row in chosen_rows(make_comparison(cells, select="validation"))] == [
        "lr=1",
        "lr=2",
    ]


def test_single_runs_that_differ_in_seed_alone_are_one_group(make_run: Callable[..., Run]) -> None:
    runs = [
        make_run(SEED0, "x0", seed=0),
        make_run(SEED1, "x1", seed=1),
        make_run(SEED0, "y0", local={"batch_size": 8}),
    ]
    groups = group_runs(runs)
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("fedavg (x0)", 2),
        ("fedavg (y0)", 1),
    ]
    assert make_row(groups[0]).deviation == pytest.approx(math.sqrt(2) * 0.05)


def test_a_folder_named_twice_counts_once(make_run: Callable[..., Run]) -> None:
    run = make_run(SEED0)
    [group] = group_runs([run, Run(run.folder / ".." / run.folder.name)])
    assert len(group.runs) == 1


def test_run_cut_short_by_a_crash_is_read(make_run: Callable[..., Run]) -> None:
    run = make_run(SEED0)
    path = run.folder / METRICS
    path.write_text(path.read_text()[:-40])
    [row] = chosen_rows(Run(run.folder))
    assert (row.seeds, row.last_round) == (1, 2)


shares = st.integers(2, 6).flatmap(
    lambda rounds: st.lists(
        st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=rounds, max_size=rounds
    )
)


@given(shares)
def test_forgetting_is_bounded_and_zero_where_nothing_drops(per_class: list[list[float]]) -> None:
    lost = roundwise_forgetting(per_class)
    assert lost.shape == (len(per_class) - 1,)
    assert ((lost >= 0) & (lost <= 1)).all()
    assert (roundwise_forgetting(np.sort(per_class, axis=0)) == 0).all()
    # what is gained minus what is lost is the change of the mean accuracy
    gained = roundwise_forgetting(-np.asarray(per_class))
    np.testing.assert_allclose(gained - lost, np.diff(np.mean(per_class, axis=1)), atol=1e-12)


def rows_with(label: str) -> list[MethodRow]:
    def row(label: str, accuracy: float | None) -> MethodRow:
        return MethodRow(
            label,
            label,
            "",
            1,
            3,
            3,
            accuracy,
            0.012,
            0.9,
            0.5,
            0.1,
            0.03,
            None,
            1.2e6,
            2.0,
            0,
            0,
            0,
            10,
            by_seed=() if accuracy is None else ((0, accuracy), (1, accuracy)),
        )

    return [row(label, 0.8), row("fedavg", 0.7), row("unknown", None)]


def printed(rows: list[MethodRow], width: int = 80) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(render_text(rows, width))
    return file.getvalue()


def test_terminal_table_fits_and_marks_the_best() -> None:
    text = printed(rows_with("fedprox(mu=0.001)+wsm+frozen_head"))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("*" in line for line in lines) == 2  # the best row, and the note
    [best] = [line for line in lines if "80.0 ± 1.2 *" in line]
    assert "…" not in text  # every number whole
    assert best.split()[-1] == "–"


def test_level_methods_have_no_best() -> None:
    first, *_ = rows_with("fedavg")
    assert best_row([first, replace(first, label="twin", accuracy=0.8 + 1e-12)]) is None
    assert "*" not in printed([first, replace(first, label="twin")])


def test_nothing_is_best_that_the_seeds_do_not_separate() -> None:
    first, second, _ = rows_with("wsm")
    assert best_row([first, second]) is first
    # differences 0.1 and 0.05: t = 12.7 for two seeds
    assert best_row([first, replace(second, by_seed=((0, 0.7), (1, 0.75)))]) is None
    assert best_row([replace(first, by_seed=((0, 0.8),)), second]) is None  # one seed
    assert best_row([replace(first, by_seed=((3, 0.8), (4, 0.8))), second]) is None  # other seeds
    assert "**" not in render_markdown([replace(first, by_seed=()), second])


def test_terminal_table_does_not_read_names_as_markup() -> None:
    assert "[red]x[/red]" in printed(rows_with("[red]x[/red]"))


def test_markdown_escapes_names() -> None:
    text = render_markdown(rows_with("a|b <script>\nnext"))
    assert "| a\\|b \\<script\\> next | 3 | **80.0 ± 1.2** | 90.0 |" in text
    widths = {
        line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")
    }
    assert widths == {12}  # every line has as many cells


def test_tables_need_neither_plotly_nor_torch() -> None:
    code = (
        "import sys, remanence.reports.tables; print([name for name in ('plotly', 'torch',"
        " 'rich', 'jinja2') if name in sys.modules])"
    )
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(source)},
    )
    assert done.stdout.strip() == "[]"
