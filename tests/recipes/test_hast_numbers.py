"""Table A.8 of the HAST thesis: what the digits of its printed numbers say of how they were
computed, and numbers that were lost and follow from others.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from remanence.metrics.drift_as_printed import rounds_to_gain
from remanence.recipes.cell_evidence import CellEvidence
from remanence.recipes.drift_measures import cluster_share_range, summarize_steps
from remanence.recipes.figure_data import figure_csv
from remanence.recipes.loader import load_recipe
from remanence.recipes.plan import make_plan
from remanence.recipes.recipe import CellNumber

TABLE = load_recipe("hast/table-a.8")
METHODS = ("Random", "DAC", "HAST")
DRIFTS = {row.label: int(row.set.get("drift.time_steps", 10)) - 1 for row in TABLE.rows if row.set}
PRINTED = [
    (row, method, number)
    for row in DRIFTS
    for method in METHODS
    if (number := TABLE.published[row, f"rounds to 90%, {method}"]).known and not number.text
]
MISPRINT = ("Label drift, 2 staggered", "Random")  # 22.10, for 22.11


def prints_as(value: float, printed: float) -> bool:
    """Whether two digits of a value are these, rounded or cut off."""
    cut = math.floor(100 * value + 1e-9) / 100
    return math.isclose(cut, printed) or math.isclose(round(value, 2), printed)


def fits(number: CellNumber, count: int, *, sample: bool = False) -> bool:
    """Whether some whole numbers, `count` of them, have this mean and this deviation.

    Their sum S is whole, and so is the sum of their squares, which is odd where S is.
    """
    assert number.value is not None
    for total in range(
        math.floor(number.value * count), math.ceil((number.value + 0.01) * count) + 1
    ):
        if not prints_as(total / count, number.value):
            continue
        if number.deviation is None:
            return True
        spread = (count - sample) * (number.deviation + 0.02) ** 2
        squares = range(math.ceil(total**2 / count), math.ceil(total**2 / count + spread) + 1)
        if any(
            (square - total) % 2 == 0
            and prints_as(
                math.sqrt((square - total**2 / count) / (count - sample)), number.deviation
            )
            for square in squares
        ):
            return True
    return False


@pytest.mark.parametrize(("row", "method", "number"), PRINTED)
def test_printed_rounds_are_those_of_whole_numbers_one_a_drift(
    row: str, method: str, number: CellNumber
) -> None:
    assert fits(number, DRIFTS[row]) == ((row, method) != MISPRINT)


def test_other_numbers_of_drifts_or_another_deviation_would_not_fit() -> None:
    """Ten time steps for all, six for all, single clients (50 of them in each step), or the
    deviation of a sample.
    """
    kept = [(row, number) for row, method, number in PRINTED if (row, method) != MISPRINT]
    assert sum(not fits(number, 9) for row, number in kept if DRIFTS[row] == 5) >= 8
    assert sum(not fits(number, 5) for row, number in kept if DRIFTS[row] == 9) >= 12
    assert sum(not fits(number, DRIFTS[row], sample=True) for row, number in kept) >= 8


def test_ours_as_printed_are_such_numbers_too() -> None:
    """On ten time steps, whatever the curve, nine times the mean is whole."""
    curve = np.random.default_rng(0).random((10, 40))
    found = summarize_steps(rounds_to_gain(curve))
    assert found.value is not None
    assert 9 * found.value == pytest.approx(round(9 * found.value), abs=1e-9)
    assert 5 * found.value != pytest.approx(round(5 * found.value), abs=1e-3)
    assert fits(CellNumber(round(found.value, 2), round(found.deviation or 0.0, 2)), 9)


def test_derived_numbers_follow_from_the_printed_average() -> None:
    derived = [
        column
        for column in TABLE.columns
        if (text := published(2, column.label).text) and "derived" in text
    ]
    assert [column.label for column in derived if "ported" not in column.label] == [
        "accuracy, Random",
        "accuracy, DAC",
        "accuracy, HAST",
        "rounds to 90%, DAC",
        "rounds to 90%, HAST",
        "drop, DAC",
        "drop, HAST",
    ]
    for column in derived:
        values = [published(group, column.label).value or 0.0 for group in (1, 2, 3)]
        average = TABLE.published["Mixed labels, average", column.label].value
        assert sum(values) / 3 == pytest.approx(average, abs=0.0051)


def published(group: int, column: str) -> CellNumber:
    return TABLE.published[f"Mixed labels G{group}, 2 random", column]


def test_both_kinds_of_dac_stand_beside_the_printed_numbers() -> None:
    for row in TABLE.rows:
        for kind in ("accuracy", "rounds to 90%", "drop"):
            ours, ported = (
                TABLE.published[row.label, f"{kind}, {name}"] for name in ("DAC", "DAC as ported")
            )
            assert ours == ported
        for column in TABLE.columns:
            if "as described" in column.label:
                assert TABLE.published[row.label, column.label] == CellNumber()


def test_both_sets_of_measures_read_the_same_runs() -> None:
    plan = make_plan(TABLE, "gpu", only=["Homogeneous"])
    assert len(plan.runs) == 4  # Random, both kinds of DAC, HAST
    (described, printed) = (
        plan.cells["Homogeneous", f"drop{kind}, HAST"].runs for kind in (" as described", "")
    )
    assert described == printed
    config = plan.runs[0].experiment
    assert (config.drift.time_steps, config.drift.concepts) == (6, "none")
    assert (config.data.normalize, config.record.first, config.record.every) == ("range", 1, 5)


def test_the_share_of_a_cluster_over_time() -> None:
    """Cluster 0 has all, then half of the four clients; cluster 1 none, then a quarter."""
    run = SimpleNamespace(folder="r", metadata={"clusters": [[0, 0, 0, 0], [0, 0, 1, 2]]})
    assert cluster_share_range()(CellEvidence((run,), {}, ())).value == 0.5  # type: ignore[arg-type]
    text = figure_csv("drift", {("r", "c"): (run,)})  # type: ignore[dict-item]
    assert text.splitlines()[0] == "row,column,time_step,client,cluster"
    assert text.splitlines()[-1] == "r,c,1,3,2"
