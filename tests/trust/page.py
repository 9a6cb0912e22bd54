"""docs/reliability.md from the trials of a whole run of the suite: `python tests/trust/page.py
FOLDER docs/reliability.md`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # run as a script, from anywhere

from faults import FAULTS, Fault

OPENING = """\
# What we have tried to break

Every fault we know of, what shall come of it, what did, and how often it was tried. This page is written by `make test-all` from the trials of one whole run
of `tests/trust`, and only if all of them ended as expected: do not edit it. `make test` tries a sample of each. How hostile clients are simulated and held
off is in [hostile.md](hostile.md), what is promised and what not in [SECURITY.md](../SECURITY.md).

Kill points are drawn over the lines of our own code that a run executes, the same number in every phase; fuzzed inputs are noise and valid files with flipped
bits, cuts, splices and forged numbers. All draws are seeded, so that a failure can be repeated.
"""


def read_trials(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(text)
        for path in sorted(folder.glob("*.jsonl"))
        for text in path.read_text(encoding="utf-8").splitlines()
    ]


def write_page(trials: Sequence[dict[str, Any]]) -> str:
    """The page, or an error that names a fault nobody tried."""
    lines, theme = [OPENING], ""
    for fault in FAULTS:
        mine = [trial for trial in trials if trial["fault"] == fault.name]
        if not mine:
            raise SystemExit(f"nobody tried {fault.name!r}: the page cannot be written")
        if fault.theme != theme:
            theme = fault.theme
            lines.append(
                f"\n## {theme}\n\n| fault | expected | what happened | on | tried"
                " |\n|---|---|---|---|--:|"
            )
        lines.append(_tell(fault, mine))
    total = sum(trial["times"] for trial in trials)
    return "\n".join(lines) + f"\n\n{total:,} trials of {len(FAULTS)} faults in all.\n"


def _tell(fault: Fault, trials: Sequence[dict[str, Any]]) -> str:
    done = [trial for trial in trials if trial["times"]] or list(trials)
    happened = "; ".join(dict.fromkeys(trial["happened"] for trial in done))
    engines = (
        ", ".join(dict.fromkeys(sorted(trial["engine"] for trial in done if trial["engine"])))
        or "–"
    )
    return (
        f"| {fault.name} | {fault.expected} | {happened} | {engines} |"
        f" {sum(trial['times'] for trial in done):,} |"
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(write_page(read_trials(source)), encoding="utf-8")
