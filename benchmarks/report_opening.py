"""How soon a large report opens: a comparison of 6 methods x 3 seeds x 200 rounds x 100 classes, in
Chromium.

    python benchmarks/report_opening.py

Prints the size of the page, the seconds to write it, and for several openings the seconds until the
text is shown, until the figures on the screen are drawn, and until all figures are. The run folders
are synthetic; nothing is trained.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "report"))

from rich_runs import write_comparison

from remanence.reports.page import write_report

CHROMIUM = "/usr/bin/chromium"
METHODS, SEEDS, ROUNDS, CLASSES = 6, 3, 200, 100
OPENINGS = 5


def open_page(browser: Any, address: str) -> dict[str, float]:
    """Seconds from the first byte to what a reader waits for."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(address, wait_until="commit")
    page.wait_for_selector("html[data-drawn=all]", timeout=120_000)
    marks = {
        "text": "first-contentful-paint",
        "on screen": "figures-seen",
        "all figures": "figures-all",
    }
    found = {
        name: page.evaluate(f"performance.getEntriesByName('{mark}')[0].startTime") / 1000
        for name, mark in marks.items()
    }
    page.close()
    return found


def main() -> None:
    from playwright.sync_api import sync_playwright

    cells = [
        {
            "label": f"method {method}",
            "seed": seed,
            "memory": 0.3 + method / 10,
            "rounds": ROUNDS,
            "classes": CLASSES,
        }
        | {"clients": 100, "cohort": 10, "cross_every": 10}
        for method in range(METHODS)
        for seed in range(SEEDS)
    ]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        comparison = write_comparison(Path(folder) / "comparison", cells)
        start = time.perf_counter()
        out = write_report([comparison], Path(folder) / "report.html")
        print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        print(f"written in {time.perf_counter() - start:.1f} s, {out.stat().st_size / 1e6:.1f} MB")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        found = [open_page(browser, out.as_uri()) for _ in range(OPENINGS)]
        browser.close()
    for name in found[0]:
        values = [opening[name] for opening in found]
        print(
            f"{name:12} median {statistics.median(values):.2f} s, from {min(values):.2f} to"
            f" {max(values):.2f} over {OPENINGS} openings"
        )


if __name__ == "__main__":
    main()
