from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich_runs import write_comparison

from remanence.core.errors import InputError
from remanence.experiment.data_setup import PartitionTable
from remanence.reports.page import render_report, write_partition, write_report
from remanence.results.run import LEDGER, Comparison, Run

HOSTILE = [
    "<script>alert(1)</script>",
    '"</script><img src=x onerror=alert(2)>',
    "{{ 7 * 7 }}",
    "]]>\u2028'",
]
EMPTY = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in order."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.style = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def hostile(make_comparison: Callable[..., Comparison]) -> Comparison:
    refused = {1: [{"client": 1, "code": HOSTILE[0], "reason": HOSTILE[1]}]}
    cells = [
        {
            "method": name,
            "shares": [[0.5, 0.4], [0.3, 0.6]],
            "class_names": HOSTILE[:2],
            "refused": refused,
        }
        for name in HOSTILE
    ]
    return make_comparison(cells)


def test_page_is_well_formed_and_whole(
    make_comparison: Callable[..., Comparison], tmp_path: Path
) -> None:
    cells = [
        {"method": name, "seed": seed, "shares": [[0.5, 0.4], [0.3, 0.6]]}
        for name in ("fedavg", "fedprox")
        for seed in (0, 1)
    ]
    out = write_report([make_comparison(cells)], tmp_path / "deep" / "report.html")
    page = Page(out.read_text(encoding="utf-8"))
    assert [
        len(page.all(tag))
        for tag in ("html", "h1", "main", "header", "footer", "nav", "table", "figure")
    ] == [1, 1, 1, 1, 1, 1, 3, 8]
    assert all(plot.get("aria-label") for plot in page.all("div") if plot.get("role") == "img")
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link["href"] for link in page.all("a")} <= {f"#{name}" for name in ids}
    assert "2 methods on digits" in page.text
    assert "the whole test set of 200 examples" in page.text
    # no temporary file stays
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]


def test_policy_allows_exactly_the_scripts_of_the_page(make_run: Callable[..., Run]) -> None:
    page = Page(render_report([make_run([[0.5, 0.4]])]))
    [policy] = [
        meta["content"] or ""
        for meta in page.all("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    code = [
        script
        for script, element in zip(page.scripts, page.all("script"), strict=True)
        if "type" not in element
    ]
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in code
    ]
    assert len(code) == 2
    assert f"; script-src {' '.join(hashes)}; " in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe-eval" not in policy


def test_nothing_is_loaded_from_anywhere(make_run: Callable[..., Run]) -> None:
    page = Page(render_report([make_run([[0.5, 0.4]])]))
    links = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data", "poster")
    ]
    assert links
    assert all(link and link.startswith(("#", "data:")) for link in links)
    assert page.all("img") == []
    assert "@import" not in page.style
    assert "url(" not in page.style


def test_hostile_names_stay_text(hostile: Comparison) -> None:
    text = render_report([hostile])
    page = Page(text)
    assert len(page.all("script")) == 2 + 7  # ours, and the data of seven figures
    assert page.all("img") == []
    assert not [
        attributes
        for _, attributes in page.elements
        if any(name.startswith("on") for name in attributes)
    ]
    for name in HOSTILE:
        assert " ".join(name.split()) in page.text
    data = [
        script
        for script, element in zip(page.scripts, page.all("script"), strict=True)
        if element.get("type") == "application/json"
    ]
    for script in data:
        assert "<" not in script
        json.loads(script)
    names = {trace.get("name") for trace in json.loads(data[0])["data"]}
    # plotly reads a little HTML, so the names come escaped once more
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in names


def test_every_setting_is_shown_beside_the_chosen(
    make_comparison: Callable[..., Comparison],
) -> None:
    cells = [
        {"method": "a", "setting": f"lr={lr}", "shares": [[lr, lr]], "valid": [1 - lr]}
        for lr in (0.1, 0.2)
    ]
    page = Page(render_report([make_comparison(cells, select="validation")]))
    assert (
        "Settings selected by validation accuracy, without the test set: a with lr=0.1 (of 2)."
    ) in page.text
    assert page.text.count("a, lr=0.2") == 1
    assert "All settings that were tried" in page.text


def test_the_same_results_give_the_same_bytes(make_run: Callable[..., Run]) -> None:
    run = make_run([[0.5, 0.4]])
    assert render_report([run]) == render_report([Run(run.folder)])


def test_a_report_of_nothing_recorded_can_be_written(
    make_run: Callable[..., Run], make_comparison: Callable[..., Comparison]
) -> None:
    for result in (make_run([], rounds=3), make_comparison([{"method": "a", "shares": None}])):
        assert "No round has been evaluated yet" in Page(render_report([result])).text


def test_a_ledger_that_cannot_be_read_is_told(make_run: Callable[..., Run]) -> None:
    run = make_run([[0.5, 0.4]])
    assert "cannot be read" not in render_report([run])
    (run.folder / LEDGER).write_bytes(b"nonsense")
    assert (
        "Warning: the ledger of run cannot be read" in Page(render_report([Run(run.folder)])).text
    )
    (run.folder / LEDGER).unlink()
    assert "cannot be read" not in render_report([Run(run.folder)])


def test_chapters_hold_the_figures_and_controls_are_labelled(tmp_path: Path) -> None:
    page = Page(
        render_report(
            [write_comparison(tmp_path / "both", [{"label": HOSTILE[0]}, {"label": HOSTILE[1]}])]
        )
    )
    names = [figure["id"] for figure in page.all("figure")]
    assert names[0] == "accuracy"
    assert {"phase-decomposition", "one-round", "client-forgetting"} <= set(names)
    chapters = [
        section["id"]
        for section in page.all("section")
        if (section["id"] or "").startswith("chapter-")
    ]
    assert {f"#{name}" for name in chapters} <= {link["href"] for link in page.all("a")}
    assert len(page.all("label")) == len(page.all("select")) + len(page.all("input"))
    assert all(choice["type"] == "range" for choice in page.all("input"))
    assert page.all("img") == []


def test_a_failed_write_leaves_the_old_page(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.html"
    out.write_text("old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "input/output error")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="input/output"):
        write_report([make_run([[0.5, 0.4]])], out)
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run"]


def test_wrong_use_gets_a_sentence(make_run: Callable[..., Run], tmp_path: Path) -> None:
    for out in (tmp_path / "report.html", None):
        with pytest.raises(InputError, match="at least one run"):
            write_report([], out)
    with pytest.raises(InputError, match="is a folder: --out names the file"):
        write_report([make_run([[0.5, 0.4]])], tmp_path)


def test_a_partition_alone_makes_a_page(tmp_path: Path) -> None:
    table = PartitionTable(
        title=f"digits, {HOSTILE[0]}",
        classes=["cat", HOSTILE[0]],
        label_counts=np.array([[8, 2], [1, 9]]),
        validation=[0, 0],
        public=0,
        clusters=[],
        concepts=[],
        notes=[],
    )
    page = Page(write_partition(table, tmp_path / "partition.html").read_text("utf-8"))
    assert len(page.all("figure")) == 1
    assert page.all("table") == []
    assert f"digits, {HOSTILE[0]}" in page.text
