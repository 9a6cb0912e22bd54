"""docs/reliability.md keeps its word: every fault on it is still tried by some test here, and
every fault tried here is on it.
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


def words_of_tests() -> set[str]:
    """Every text that stands in a test of this folder."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(HERE.glob("test_*.py"))
        if path.name != Path(__file__).name
    ]
    return {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_every_fault_is_tried_somewhere() -> None:
    said = words_of_tests()
    assert [fault.name for fault in FAULTS if fault.name not in said | MADE] == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.skipif(bool(FOLDER), reason="the page is about to be written from this run")
def test_the_page_lists_every_fault_and_how_often_it_was_tried() -> None:
    rows = re.findall(
        r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \| ([\d,]+) \|$",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert [(name, expected) for name, expected, *_ in rows] == [
        (fault.name, fault.expected) for fault in FAULTS
    ]
    tried = {name: int(times.replace(",", "")) for name, _, _, _, times in rows}
    happened = {name: said for name, _, said, _, _ in rows}
    assert [
        name
        for name, times in tried.items()
        if not times and not happened[name].startswith("not tried: ")
    ] == []
    assert all(tried[reader] >= 10_000 for reader in READERS)
    assert sum(times for name, times in tried.items() if name.startswith("killed ")) >= 200


def test_a_fault_that_nobody_tried_stops_the_page() -> None:
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
    with pytest.raises(SystemExit, match=f"nobody tried '{FAULTS[-1].name}'"):
        write_page(trials[:-1])
