"""Run folders that hold everything a run can record, made by arithmetic: models that learn
slowly, and clients that forget what they do not hold.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from remanence.results.ledger import (
    ALL,
    EXAMPLE,
    GLOBAL,
    MOMENTS,
    PEER_COUNTS,
    SIMILARITY,
    SPLITS,
    confusion_type,
    header,
    peers_type,
    record_type,
)
from remanence.results.run import (
    CHECKPOINTS,
    COMPARISON,
    CONFUSIONS,
    EXAMPLES,
    EXPERIMENT,
    LEDGER,
    METRICS,
    PEERS,
    RUNS,
    Comparison,
    Run,
)

TEST_ROWS = 50  # of every class
COSTS = {
    "train_loss": 1.0,
    "replies": 4,
    "rejected": [],
    "abandoned": False,
    "bytes_up": 1_000_000,
    "bytes_down": 2_000_000,
    "seconds": 0.5,
}


def records(shares: np.ndarray, rows: np.ndarray | int, **columns: Any) -> np.ndarray:
    """Ledger records of models with these accuracies per class [n, C]; columns as `make_record`
    takes them, one value or one a record.
    """
    made = np.zeros(len(shares), dtype=record_type(shares.shape[1]))
    made["total"] = rows
    made["correct"] = np.floor(shares * made["total"] + 0.5)
    made["predicted"] = made["total"]
    made["moment"], made["split"] = (
        MOMENTS.index(columns.pop("moment")),
        SPLITS.index(columns.pop("split")),
    )
    for name, value in columns.items():
        made[name] = value
    return made


def write_server_run(
    folder: Path,
    *,
    method: str = "fedavg",
    seed: int = 0,
    rounds: int = 6,
    classes: int = 4,
    clients: int = 8,
    cohort: int = 4,
    memory: float = 0.4,
    cross_every: int = 1,
    refined: bool = False,
    details: bool = True,
    class_names: Sequence[str] | None = None,
    attack: str = "",
) -> Run:
    """A run with a server: a client keeps the share `memory` of what it knows of classes that
    it does not hold.
    """
    folder.mkdir(parents=True)
    draw = np.random.default_rng([seed, rounds, classes])
    names = list(class_names or (f"class {place}" for place in range(classes)))
    held = np.zeros((clients, classes), dtype=bool)
    held[
        np.arange(clients)[:, None],
        (np.arange(clients)[:, None] + np.arange(max(1, classes // 4))) % classes,
    ] = True
    difficulty = np.linspace(0.9, 0.5, classes)
    ledger, lines, confusions, examples = [], [], [], []
    model = np.full(classes, 1 / classes)
    for round in range(1, rounds + 1):
        some = np.sort(draw.permutation(clients)[:cohort])
        local = np.where(held[some], 0.95, model * memory)  # [n, C]
        goal = difficulty * (1 - np.exp(-3 * round / rounds))
        merged = np.clip(goal + draw.normal(0, 0.04, classes), 0, 1)
        place = {"round": round, "time_step": 0}
        ledger += [
            records(
                model[None],
                TEST_ROWS,
                **place,
                moment="before",
                split="test",
                model=GLOBAL,
                owner=ALL,
            )
        ]
        ledger += [
            records(
                local,
                TEST_ROWS,
                **place,
                moment="local",
                split="test",
                model=some,
                owner=ALL,
                weight=1 / cohort,
            )
        ]
        ledger += [
            records(
                merged[None],
                TEST_ROWS,
                **place,
                moment="merged",
                split="test",
                model=GLOBAL,
                owner=ALL,
            )
        ]
        if (round - 1) % cross_every == 0:
            own = held[some] * 10
            ledger += [
                records(
                    np.repeat(model[None], cohort, 0),
                    own,
                    **place,
                    moment="before",
                    split="valid",
                    model=GLOBAL,
                    owner=some,
                )
            ]
            for number, client in enumerate(some):
                scored = np.repeat(local[number][None], cohort, 0)
                ledger += [
                    records(
                        scored,
                        own,
                        **place,
                        moment="local",
                        split="valid",
                        model=client,
                        owner=some,
                    )
                ]
        model = merged
        if refined:
            model = np.clip(merged + 0.02, 0, 1)
            ledger += [
                records(
                    model[None],
                    TEST_ROWS,
                    **place,
                    moment="refined",
                    split="test",
                    model=GLOBAL,
                    owner=ALL,
                )
            ]
        if details:
            confusions.append(_confuse(model, round))
            examples += [
                _record_examples(local[number], merged, held[client], int(client), round)
                for number, client in enumerate(some)
            ]
        head = {
            **place,
            "model": "global",
            "per_class": [float(share) for share in model],
            "loss": 1.0,
            "macro_f1": float(model.mean()),
        }
        lines += [
            {
                **head,
                "split": split,
                "accuracy": max(0.0, float(model.mean()) - gap),
                **COSTS,
                **({"attack_success": 1 / round} if attack else {}),
            }
            for split, gap in (("test", 0.0), ("valid", 0.02))
        ]
    (folder / LEDGER).write_bytes(header(names) + b"".join(part.tobytes() for part in ledger))
    if details:
        (folder / CONFUSIONS).write_bytes(np.concatenate(confusions).tobytes())
        (folder / EXAMPLES).write_bytes(np.concatenate(examples).tobytes())
    asked = {"method": method, "seed": seed, "rounds": rounds, "model": "mlp", "attack": attack}
    return _finish(folder, asked, lines, names, held * 20, {"evaluated": "global"}, rounds)


def write_peers_run(
    folder: Path,
    *,
    method: str = "hast",
    seed: int = 0,
    rounds: int = 4,
    steps: int = 3,
    clients: int = 6,
    skill: float = 0.6,
    similarity: bool = True,
    concepts: Sequence[str] = ("labels 0 1", "labels 2 3"),
) -> Run:
    """A run without a server on data that drift between two clusters: `skill` is the share of
    peer selections within the own cluster.
    """
    folder.mkdir(parents=True)
    draw = np.random.default_rng([seed, rounds, clients])
    classes, names = 4, ["cat", "dog", "ant", "bee"]
    # [T, K]
    clusters = np.array(
        [(np.arange(clients) + step) % clients < clients // 2 for step in range(steps)]
    ).astype(int)
    rows = np.array([[TEST_ROWS] * 2 + [0] * 2, [0] * 2 + [TEST_ROWS] * 2])  # [M, C]
    knows = np.full((clients, 2), 0.3)  # accuracy on each cluster
    ledger, lines, tables = [], [], []
    for round in range(1, rounds * steps + 1):
        step = (round - 1) // rounds
        now = clusters[step]
        mine, everyone = np.arange(clients), np.arange(2)
        place = {"round": round, "time_step": step}

        def record_accuracies(
            moment: str, knows: np.ndarray, place: dict[str, int] = place, now: np.ndarray = now
        ) -> np.ndarray:
            own = np.repeat(knows[np.arange(clients), now][:, None], classes, 1)
            return records(
                own,
                rows[now],
                **place,
                moment=moment,
                split="test",
                model=np.arange(clients),
                owner=now,
            )

        ledger.append(record_accuracies("before", knows))
        knows = np.clip(knows - 0.02, 0, 1)
        ledger.append(record_accuracies("merged", knows))
        knows[mine, now] += 0.25 * (0.9 - knows[mine, now]) + draw.normal(0, 0.01, clients)
        ledger.append(record_accuracies("local", knows))
        for concept in everyone:
            level = np.repeat(knows[:, concept][:, None], classes, 1)
            ledger.append(
                records(
                    level,
                    rows[concept],
                    **place,
                    moment="personal",
                    split="test",
                    model=mine,
                    owner=concept,
                )
            )
        same = now[:, None] == now[None, :]
        likes = np.where(
            same,
            skill / (same.sum(1, keepdims=True) - 1),
            (1 - skill) / np.maximum((~same).sum(1, keepdims=True), 1),
        )
        np.fill_diagonal(likes, 0)
        table = np.zeros(2 if similarity else 1, dtype=peers_type(clients))
        table["round"], table["time_step"], table["kind"][0], table["values"][0] = (
            round,
            step,
            PEER_COUNTS,
            draw.poisson(12 * likes),
        )
        if similarity:
            table["kind"][1], table["values"][1] = SIMILARITY, likes * 3
        tables.append(table)
        own = knows[mine, now]
        scores = {
            "accuracy": float(own.mean()),
            "worst_client": float(own.min()),
            "bottom_decile": float(own.min()),
            "early_stopped": 0,
        }
        counts = table["values"][0]
        scores |= {
            "same_cluster_share": float((counts * same).sum() / counts.sum()),
            "macro_f1": float(own.mean()),
            "loss": 1.0,
        }
        scores |= {"per_class": [float(knows[:, 0].mean())] * 2 + [float(knows[:, 1].mean())] * 2}
        lines += [
            {**place, "model": "personal", "split": split, **scores, **COSTS}
            for split in ("test", "valid")
        ]
    (folder / LEDGER).write_bytes(header(names) + b"".join(part.tobytes() for part in ledger))
    (folder / PEERS).write_bytes(np.concatenate(tables).tobytes())
    about = {
        "evaluated": "personal", "rounds_per_step": rounds, "concepts": list(concepts),
        "clusters": [" ".join(map(str, row)) for row in clusters.tolist()],
    }  # fmt: skip
    drift = {"schedule": "random(clusters=2)", "time_steps": steps}
    asked = {"method": method, "seed": seed, "rounds": rounds, "model": "mlp", "drift": drift}
    return _finish(
        folder,
        asked,
        lines,
        names,
        np.where(clusters[0][:, None] == [0, 0, 1, 1], 20, 0),
        about,
        rounds * steps,
    )


def _finish(
    folder: Path,
    asked: dict[str, Any],
    lines: list[Any],
    names: list[str],
    counts: np.ndarray,
    about: Any,
    last: int,
) -> Run:
    about = about | {
        "remanence": "0.1.0", "torch": "2.13.0", "python": "3.11.9", "engine": "vectorized, because it was fastest", "data": "made up",
        "class_names": names, "parameters": 1234, "clients": len(counts), "label_counts": [" ".join(map(str, row)) for row in counts.tolist()],
    }  # fmt: skip
    (folder / EXPERIMENT).write_text(tomli_w.dumps(asked | {"about": about}), encoding="utf-8")
    (folder / METRICS).write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    (folder / CHECKPOINTS / f"round-{last:06d}").mkdir(parents=True)
    return Run(folder)


def write_comparison(
    folder: Path, cells: Sequence[dict[str, Any]], write: Any = write_server_run
) -> Comparison:
    """A comparison of cells: `label`, seed, and what else the writer takes."""
    plan = []
    for number, cell in enumerate(cells):
        options = dict(cell)
        plan.append(
            {
                "name": f"cell{number}",
                "method": options.pop("label"),
                "setting": "",
                "seed": options.get("seed", 0),
            }
        )
        write(folder / RUNS / f"cell{number}", **options)
    (folder / COMPARISON).write_text(
        tomli_w.dumps({"select": "all", "cells": plan}), encoding="utf-8"
    )
    return Comparison(folder)


def _confuse(shares: np.ndarray, round: int) -> np.ndarray:
    """What is wrong is taken for the next class."""
    made = np.zeros(1, dtype=confusion_type(len(shares)))
    right = np.floor(shares * TEST_ROWS + 0.5).astype(int)
    table = np.diag(right)
    table[np.arange(len(shares)), (np.arange(len(shares)) + 1) % len(shares)] += TEST_ROWS - right
    made["round"], made["model"], made["owner"], made["moment"], made["confusion"] = (
        round,
        GLOBAL,
        ALL,
        MOMENTS.index("merged"),
        table,
    )
    return made


def _record_examples(
    local: np.ndarray, merged: np.ndarray, held: np.ndarray, client: int, round: int
) -> np.ndarray:
    """Twenty training rows of a client before merging and after: of those with the first
    classes it holds, a share is right.
    """
    label = np.resize(np.flatnonzero(held), 20)
    made = np.zeros(40, dtype=EXAMPLE)
    for place, (moment, model) in enumerate((("local", local), ("merged", merged))):
        part = made[20 * place : 20 * place + 20]
        part["moment"], part["id"] = MOMENTS.index(moment), 100 * client + np.arange(20)
        part["correct"] = np.arange(20) / 20 < model[label]
    made["round"], made["client"] = round, client
    return made
