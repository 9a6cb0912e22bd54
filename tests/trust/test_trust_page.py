"""Every fault on docs/reliability.md has a test in this folder, and every fault tested here is on
the page.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from trust.faults import BAD_REPLIES, FAULTS, FOLDER, PHASES, READERS
from trust.page import write_page

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reliability.md"
MADE = {
    *BAD_REPLIES,
    *READERS,
    *(f"killed in {phase}, {how} a server" for phase in PHASES[:5] for how in ("with", "without")),
}  # named in loops
MADE |= {f"{share}% of the clients drop out" for share in (10, 30, 50)}


def constants_in_tests() -> set[str]:
    """Every string constant in the tests of this folder and of federations."""
    folders = (HERE, HERE.parent / "flower")
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(path for folder in folders for path in folder.glob("test_*.py"))
        if path.name != Path(__file__).name
    ]
    return {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_every_fault_has_a_test() -> None:
    constants = constants_in_tests()
    assert [fault.name for fault in FAULTS if fault.name not in constants | MADE] == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.skipif(bool(FOLDER), reason="the page is about to be written from this run")
def test_the_page_lists_every_fault_with_its_trials() -> None:
    rows = re.findall(
        r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \| ([\d,]+) \|$",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert [(name, expected) for name, expected, *_ in rows] == [
        (fault.name, fault.expected) for fault in FAULTS
    ]
    trials = {name: int(times.replace(",", "")) for name, _, _, _, times in rows}
    happened = {name: observed for name, _, observed, _, _ in rows}
    assert [
        name
        for name, times in trials.items()
        if not times and not happened[name].startswith("not tested: ")
    ] == []
    assert all(trials[reader] >= 10_000 for reader in READERS)
    assert sum(times for name, times in trials.items() if name.startswith("killed ")) >= 200


def test_a_fault_without_trials_stops_the_page() -> None:
    trials = [
        {"fault": fault.name, "happened": "as expected", "times": 3, "engine": "sequential"}
        for fault in FAULTS
    ]
    page = write_page([*trials, {**trials[0], "engine": "vectorized", "times": 4}])
    assert (
        f"| {FAULTS[0].name} | {FAULTS[0].expected} | as expected | sequential, vectorized | 7 |"
        in page
    )
    assert f"{3 * len(FAULTS) + 4:,} trials of {len(FAULTS)} faults" in page
    with pytest.raises(SystemExit, match=f"no trial of '{FAULTS[-1].name}'"):
        write_page(trials[:-1])
