"""What each robust aggregator does to rare classes, with and without attacks: the table of
docs/hostile.md.

    python benchmarks/robust.py OUT        # a few minutes on one core; also writes OUT/report.html

Digits split over 20 clients by dirichlet(alpha=0.1), all of them in every round; a fifth of the
clients is hostile.
"""

from __future__ import annotations

import sys
from pathlib import Path

import remanence as rem
from remanence.metrics.groups import group_runs
from remanence.metrics.robustness import robustness_row
from remanence.reports.table_columns import percent

AGGREGATORS = (
    "",
    "+median",
    "+trimmed_mean(fraction=0.2)",
    "+krum(byzantine=4)",
    "+multi_krum(byzantine=4)",
    "+geometric_median",
    "+norm_clip",
)
ATTACKS = ("none", "sign_flip(fraction=0.2)", "backdoor(fraction=0.2)")
SETTING = {
    "data.name": "digits", "data.partition": "dirichlet(alpha=0.1)", "clients.count": 20, "rounds": 25, "local.epochs": 2, "local.batch_size": 16,
    "local.lr": 0.1, "engine": "vectorized", "threads": 1, "checkpoint.seconds": 60,
}  # fmt: skip


def main(out: Path) -> None:
    methods = [f"fedavg{aggregator}" for aggregator in AGGREGATORS]
    done = rem.compare(
        methods,
        seeds=3,
        grid={"attack": list(ATTACKS)},
        set=SETTING,
        out=out,
        overwrite=True,
        quiet=True,
    )
    rem.report(out)
    rows = [robustness_row(group) for group in group_runs([done])]
    print(
        "| aggregator | attack | accuracy, % | rare classes, % | forgotten a round, points |"
        " of rare classes | attack succeeds, % |"
    )
    print("|---|---|--:|--:|--:|--:|--:|")
    for row in rows:
        name = row.label.partition(",")[0].removeprefix("fedavg+").replace("fedavg", "mean")
        cells = (
            percent(row.accuracy),
            percent(row.rare),
            percent(row.forgetting, 2),
            percent(row.rare_forgetting, 2),
            percent(row.success),
        )
        print(f"| {name} | {row.attack.partition('(')[0]} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
