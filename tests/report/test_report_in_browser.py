from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remanence.report.page import write_report
from remanence.results import Comparison

CHROMIUM = Path("/usr/bin/chromium")
HOSTILE = "<script>window.hacked = 1</script>"
FORMULA = '=HYPERLINK("x"),<img src=x onerror=alert(2)>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip(f"no Chromium at {CHROMIUM}: on Debian, apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'remanence[dev]'")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


def read_csv(page: Any, figure: str) -> list[list[str]]:
    with page.expect_download() as waiting:
        page.click(f"#{figure} button.csv")
    assert waiting.value.suggested_filename == f"{figure}.csv"
    return list(csv.reader(io.StringIO(Path(waiting.value.path()).read_text(encoding="utf-8-sig"))))


def wait_until(page: Any, condition: str) -> None:
    """Playwright's own waiting evaluates text inside the page, which the page's policy forbids."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"the page never came to {condition}")


def test_page_lives_in_a_browser(browser: Any, make_comparison: Callable[..., Comparison], tmp_path: Path) -> None:
    names = [FORMULA, "dog"]
    cells = [{"method": HOSTILE, "seed": seed, "shares": [[0.2, 0.6], [0.4, 0.4 + 0.2 * seed]], "class_names": names} for seed in (0, 1)]
    cells.append({"method": "fedavg", "seed": 0, "shares": [[0.5, 0.5], [0.1, 0.9]], "class_names": names})
    address = write_report([make_comparison(cells)], tmp_path / "report.html").as_uri()
    context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme="light")
    page = context.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    page.wait_for_selector("html[data-drawn=all]", timeout=60_000)

    # every figure is drawn, and hostile names are text in it
    assert page.locator("figure").count() == 5
    assert page.locator("figure .plot svg.main-svg").count() >= 5
    assert page.locator("#accuracy .legendtext").all_text_contents() == [HOSTILE, "fedavg"]
    assert page.locator("#classes-over-rounds .hm image").count() == 2
    assert page.evaluate("window.hacked") is None

    # data as CSV: the mean over two seeds with its deviation, one seed without; a name is no formula
    assert read_csv(page, "accuracy") == [
        ["method", "round", "accuracy", "deviation"],
        [HOSTILE, "1", "0.4", "0"],
        [HOSTILE, "2", "0.45", "0.0707"],  # 0.4 and 0.5
        ["fedavg", "1", "0.5", ""],
        ["fedavg", "2", "0.5", ""],
    ]
    table = read_csv(page, "classes-over-rounds")
    assert table[0] == ["method", "round", "class", "accuracy"]
    assert len(table) == 1 + 2 * 2 * 2
    assert ["fedavg", "2", "dog", "0.9"] in table
    assert all(not row[2].startswith("=") for row in table)
    assert read_csv(page, "partition")[0] == ["class", "client", "share", "examples"]

    # the figures follow the screen and the reader's colours, and nothing runs over the edge
    ink = "getComputedStyle(document.querySelector('#accuracy .legendtext')).fill"
    light = page.evaluate(ink)
    page.emulate_media(color_scheme="dark")
    wait_until(page, f"{ink} !== '{light}'")
    page.set_viewport_size({"width": 360, "height": 800})
    wait_until(page, "document.querySelector('#accuracy svg.main-svg').getBoundingClientRect().width < 360")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360

    assert complaints == []
    assert [url for url in requests if not url.startswith(("data:", "blob:"))] == [address]

    # the policy has teeth: a script that slipped in would not run
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked = 2'}))")
    assert page.evaluate("window.hacked") is None
    assert len(complaints) == 1
    context.close()
