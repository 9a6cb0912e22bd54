"""Run folders of one or two rounds with a ledger written by hand: ten test examples of each of
two classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from metrics.small_ledger import Counts, play_round

from remanence.results.ledger import header
from remanence.results.run import CHECKPOINTS, EXPERIMENT, LEDGER, METRICS, Run

TOTAL = (10, 10)


def write_small_run(
    folder: Path,
    *,
    before: Counts = (8, 4),
    local: Mapping[int, Counts] | None = None,
    merged: Counts = (7, 6),
    refined: Counts | None = None,
    seed: int = 0,
    method: str = "fedavg",
    rounds: int = 2,
    record_local: bool = True,
    label_counts: Sequence[Sequence[int]] = ((8, 0), (0, 8)),
    class_names: Sequence[str] = ("cat", "dog"),
    rejected: Sequence[dict[str, Any]] = (),
    **sections: Any,
) -> Run:
    """A run whose last round begins with `before` right of each class, whose clients (equal
    weights) end at `local` and whose merged model has `merged`.

    The round before ended at `before`, so that the global model has two recorded rounds.
    """
    folder.mkdir(parents=True)
    models = local if local is not None else {0: (10, 0), 1: (2, 8)}
    records = play_round(
        TOTAL,
        before,
        {client: (1 / len(models), right) for client, right in models.items()},
        merged,
        refined=refined,
        round=2,
    )
    if not record_local:
        records = records[-1:]
    (folder / LEDGER).write_bytes(header(class_names) + np.concatenate(records).tobytes())
    lines = []
    for round, right in enumerate((before, refined or merged), start=1):
        shares = [count / 10 for count in right]
        lines.append(
            {"round": round, "time_step": 0, "model": "global", "split": "test", "accuracy": sum(shares) / 2, "per_class": shares, "loss": 1.0,
             "macro_f1": 0.5, "rejected": list(rejected), "abandoned": False, "bytes_up": 1, "bytes_down": 1, "seconds": 2.0, "train_loss": 1.0}
        )  # fmt: skip
    (folder / METRICS).write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    about = {
        "class_names": list(class_names),
        "clients": len(label_counts),
        "label_counts": [" ".join(map(str, row)) for row in label_counts],
    }
    settings = {"method": method, "seed": seed, "rounds": rounds, "model": "mlp", **sections}
    (folder / EXPERIMENT).write_text(tomli_w.dumps(settings | {"about": about}), encoding="utf-8")
    (folder / CHECKPOINTS / "round-000002").mkdir(parents=True)
    return Run(folder)
