"""Run and comparison folders made by writing the documented files, without training anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from remanence.results.ledger import ALL, GLOBAL, header, make_record
from remanence.results.run import (
    CHECKPOINTS,
    COMPARISON,
    EXPERIMENT,
    LEDGER,
    METRICS,
    RUNS,
    Comparison,
    Run,
)

CHROMIUM = Path("/usr/bin/chromium")

# accuracy per class, [rounds][classes]; None: the round was not evaluated
Shares = Sequence[Sequence[float | None] | None]


def write_run(
    folder: Path,
    shares: Shares,
    *,
    method: str = "fedavg",
    seed: int = 0,
    rounds: int | None = None,
    class_names: Sequence[str] = ("cat", "dog"),
    label_counts: Sequence[Sequence[int]] = ((8, 2), (1, 9)),
    clients: int | None = None,
    valid: Sequence[float | None] | None = None,
    refused: dict[int, list[dict[str, Any]]] | None = None,
    abandoned: Sequence[int] = (),
    examples: int = 100,
    local: dict[str, Any] | None = None,
) -> Run:
    """A run whose round t has these accuracies per class, with `examples` test examples of
    every class that has any.
    """
    folder.mkdir(parents=True)
    about = {
        "remanence": "0.1.0", "torch": "2.13.0", "python": "3.11.9", "engine": "vectorized, because it was fastest",
        "data": "fake: 20 training examples", "class_names": list(class_names), "parameters": 1234,
        "label_counts": [" ".join(map(str, row)) for row in label_counts], "clients": clients or len(label_counts),
    }  # fmt: skip
    asked = {
        "method": method,
        "seed": seed,
        "rounds": rounds or len(shares),
        "model": "mlp",
        "local": local or {},
    }
    (folder / EXPERIMENT).write_text(tomli_w.dumps(asked | {"about": about}), encoding="utf-8")
    lines = []
    with (folder / LEDGER).open("wb") as ledger:
        ledger.write(header(class_names))
        for round, per_class in enumerate(shares, start=1):
            shared = {
                "train_loss": 1.0, "replies": 5, "rejected": (refused or {}).get(round, []), "abandoned": round in abandoned,
                "bytes_up": 1000, "bytes_down": 2000, "seconds": 0.5,
            }  # fmt: skip
            head = {"round": round, "time_step": 0, "model": "global"}
            if per_class is None:
                lines.append(
                    head
                    | {
                        "split": "test",
                        "accuracy": None,
                        "per_class": None,
                        "loss": None,
                        "macro_f1": None,
                    }
                    | shared
                )
                continue
            there = [share for share in per_class if share is not None]
            accuracy = sum(there) / len(there)
            scores = {
                "accuracy": accuracy,
                "per_class": list(per_class),
                "loss": 1.0,
                "macro_f1": accuracy / 2,
            }
            lines.append(head | {"split": "test"} | scores | shared)
            if valid is not None:
                lines.append(
                    head | {"split": "valid"} | scores | {"accuracy": valid[round - 1]} | shared
                )
            confusion = np.zeros((len(class_names), len(class_names)), dtype=int)
            for place, share in enumerate(per_class):
                if share is not None:
                    right = int(share * examples + 0.5)
                    confusion[place, place] += right
                    confusion[place, place - 1] += examples - right
            record = make_record(
                len(class_names),
                confusion,
                moment="merged",
                split="test",
                model=GLOBAL,
                owner=ALL,
                round=round,
                time_step=0,
            )
            ledger.write(record.tobytes())
    (folder / CHECKPOINTS / f"round-{len(shares):06d}").mkdir(parents=True)
    (folder / METRICS).write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    return Run(folder)


def write_comparison(
    folder: Path, cells: Sequence[dict[str, Any]], *, select: str = "all"
) -> Comparison:
    """A comparison of cells: method, setting, seed, `shares` (None: not begun) and what else
    write_run takes.
    """
    plan = []
    for number, cell in enumerate(cells):
        cell = dict(cell)
        shares, setting, method, seed = (
            cell.pop("shares"),
            cell.pop("setting", ""),
            cell.pop("method"),
            cell.pop("seed", 0),
        )
        plan.append({"name": f"cell{number}", "method": method, "setting": setting, "seed": seed})
        if shares is not None:
            write_run(
                folder / RUNS / f"cell{number}",
                shares,
                method=cell.pop("spec_method", "fedavg"),
                seed=seed,
                **cell,
            )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / COMPARISON).write_text(
        tomli_w.dumps({"select": select, "cells": plan}), encoding="utf-8"
    )
    return Comparison(folder)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    def make(shares: Shares, name: str = "run", **options: Any) -> Run:
        return write_run(tmp_path / name, shares, **options)

    return make


@pytest.fixture
def make_comparison(tmp_path: Path) -> Callable[..., Comparison]:
    def make(
        cells: Sequence[dict[str, Any]], name: str = "comparison", **options: Any
    ) -> Comparison:
        return write_comparison(tmp_path / name, cells, **options)

    return make


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip(f"no Chromium at {CHROMIUM}: on Debian, apt-get install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install 'remanence-fl[dev]'"
    )
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


def wait_until(page: Any, condition: str, seconds: int = 10) -> Any:
    """Playwright's own waiting evaluates text inside the page, which the page's policy forbids."""
    for _ in range(20 * seconds):
        if value := page.evaluate(condition):
            return value
        page.wait_for_timeout(50)
    pytest.fail(f"the page never came to {condition}")
