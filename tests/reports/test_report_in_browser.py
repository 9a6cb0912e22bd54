from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reports.conftest import wait_until
from rich_runs import write_comparison, write_peers_run

from remanence.reports.page import write_report
from remanence.results.run import Comparison

HOSTILE = "<script>window.hacked = 1</script>"
FORMULA = '=HYPERLINK("x"),<img src=x onerror=alert(2)>'


def read_csv(page: Any, figure: str) -> list[list[str]]:
    with page.expect_download() as waiting:
        page.click(f"#{figure} button.csv")
    assert waiting.value.suggested_filename == f"{figure}.csv"
    return list(csv.reader(io.StringIO(Path(waiting.value.path()).read_text(encoding="utf-8-sig"))))


def test_page_lives_in_a_browser(
    browser: Any, make_comparison: Callable[..., Comparison], tmp_path: Path
) -> None:
    names = [FORMULA, "dog"]
    cells = [
        {
            "method": HOSTILE,
            "seed": seed,
            "shares": [[0.2, 0.6], [0.4, 0.4 + 0.2 * seed]],
            "class_names": names,
        }
        for seed in (0, 1)
    ]
    cells.append(
        {"method": "fedavg", "seed": 0, "shares": [[0.5, 0.5], [0.1, 0.9]], "class_names": names}
    )
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
    assert page.locator("figure").count() == 8
    assert page.locator("figure .plot[data-drawn] svg.main-svg").count() >= 8
    assert page.locator("#accuracy .legendtext").all_text_contents() == [HOSTILE, "fedavg"]
    assert page.locator("#classes-over-rounds .hm image").count() == 2
    assert page.evaluate("window.hacked") is None

    # data as CSV: the mean over two seeds with its deviation, one seed without; a name is no
    # formula
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

    # the figures follow the screen and the reader's colors, and nothing runs over the edge
    ink = "getComputedStyle(document.querySelector('#accuracy .legendtext')).fill"
    light = page.evaluate(ink)
    page.emulate_media(color_scheme="dark")
    wait_until(page, f"{ink} !== '{light}'")
    page.set_viewport_size({"width": 360, "height": 800})
    wait_until(
        page, "document.querySelector('#accuracy svg.main-svg').getBoundingClientRect().width < 360"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 360

    assert complaints == []
    assert [url for url in requests if not url.startswith(("data:", "blob:"))] == [address]

    # the policy has teeth: a script that slipped in would not run
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent:"
        " 'window.hacked = 2'}))"
    )
    assert page.evaluate("window.hacked") is None
    assert len(complaints) == 1
    context.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., tuple[Any, list[str]]]]:
    """Open a page in a window of its own. -> the page, and what its console says while the test
    goes on
    """
    contexts = []

    def open_one(address: str, drawn: str = "all", **options: Any) -> tuple[Any, list[str]]:
        contexts.append(
            browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | options)
        )
        page, complaints = contexts[-1].new_page(), []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        page.wait_for_selector(
            f"html[data-drawn={drawn}]" if drawn else "main", timeout=60_000, state="attached"
        )
        return page, complaints

    yield open_one
    for context in contexts:
        context.close()


CELLS = [
    {"label": HOSTILE, "memory": 0.2},
    {"label": "fedavg", "memory": 0.8, "class_names": [FORMULA, "b", "c", "d"]},
]


def test_the_reader_chooses_method_and_round_by_keyboard(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    page, complaints = open_page(
        write_report(
            [write_comparison(tmp_path / "both", CELLS)], tmp_path / "report.html"
        ).as_uri()
    )
    shown = "document.querySelector('#client-forgetting .plot')"
    ends = page.evaluate(f"{shown}.data[0].z")
    assert page.locator("#client-forgetting select option").all_text_contents() == [
        HOSTILE,
        "fedavg",
    ]
    assert page.inner_text("#client-forgetting output") == "6"  # the last round first

    page.focus("#client-forgetting .frame")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#client-forgetting output") == "5"
    assert page.get_attribute("#client-forgetting .frame", "aria-valuetext") == "round 5"
    assert page.evaluate(f"{shown}.data[0].z") != ends
    described = page.get_attribute("#client-forgetting .plot", "aria-label")
    assert f"in round 5 of {HOSTILE}" in described

    page.select_option("#client-forgetting .method", "fedavg")  # the round stays
    assert page.inner_text("#client-forgetting output") == "5"
    assert "in round 5 of fedavg" in page.get_attribute("#client-forgetting .plot", "aria-label")
    assert page.inner_text("#one-round output") == "6"  # the other figures keep theirs

    # CSV: every choice of the reader's, with whose and when in front
    table = read_csv(page, "client-forgetting")
    assert table[0] == ["method", "round", "map", "data of client", "model of client", "value"]
    assert {row[0] for row in table[1:]} == {HOSTILE, "fedavg"}
    assert {row[1] for row in table[1:]} == {str(round) for round in range(1, 7)}
    classes = {row[3] for row in read_csv(page, "one-round")[1:]}
    assert any(name.startswith("'=HYPERLINK") for name in classes)
    assert not any(name.startswith("=") for name in classes)
    assert page.evaluate("window.hacked") is None
    assert complaints == []


def test_paper_gets_every_figure_even_if_nobody_scrolled(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    """Printing at once, before the figures further down are drawn."""
    page, complaints = open_page(
        write_report(
            [write_comparison(tmp_path / "both", CELLS)], tmp_path / "report.html"
        ).as_uri(),
        drawn="",
    )
    wait_until(page, "typeof Plotly === 'object'")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".plot:not([data-drawn])").count() == 0
    assert page.pdf().startswith(b"%PDF")
    page.emulate_media(media="print")
    assert not page.is_visible("#one-round .frame")
    assert page.is_visible("#one-round output")
    assert complaints == []


def test_peers_on_a_phone(open_page: Callable[..., Any], tmp_path: Path) -> None:
    cells = [
        {"label": "random", "similarity": False, "concepts": [HOSTILE, "b"]},
        {"label": "hast", "concepts": [HOSTILE, "b"]},
    ]
    comparison = write_comparison(tmp_path / "both", cells, write_peers_run)
    page, complaints = open_page(
        write_report([comparison], tmp_path / "report.html").as_uri(),
        viewport={"width": 360, "height": 740},
        has_touch=True,
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("window.hacked") is None
    page.select_option("#peer-selection .method", "hast")
    assert (
        page.evaluate("document.querySelector('#peer-selection .plot').layout.annotations[1].text")
        == "<b>Similarity estimated by the client</b>"
    )
    assert page.evaluate("document.querySelector('#peer-selection .plot').data[1].z[0][1]") > 0
    assert page.locator("#network .csv").count() == 0
    assert complaints == []


@pytest.mark.slow
def test_a_large_comparison_stays_small_and_opens(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    """6 methods x 3 seeds x 200 rounds x 100 classes: below 15 MB, and drawn in reasonable time
    even where other things run beside (benchmarks measure it).
    """
    cells = [
        {
            "label": f"method {method}",
            "seed": seed,
            "rounds": 200,
            "classes": 100,
            "clients": 100,
            "cohort": 10,
            "cross_every": 10,
        }
        for method in range(6)
        for seed in range(3)
    ]
    out = write_report([write_comparison(tmp_path / "large", cells)], tmp_path / "report.html")
    assert out.stat().st_size < 15_000_000
    page, complaints = open_page(out.as_uri())
    assert page.evaluate("performance.now()") < 30_000
    assert complaints == []
