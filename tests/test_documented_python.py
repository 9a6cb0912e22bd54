"""Every Python block of README.md, AGENTS.md and the pages of docs is executed, page by page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
# pages whose commands and Python run together, in a test of their own
ELSEWHERE = ("data.md", "python.md")


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """The fenced blocks of Python with their first lines."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, found.start(1)) + 1, found[1])
        for found in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)
    ]


WITH_BLOCKS = [page for page in PAGES if python_blocks(page) and page.name not in ELSEWHERE]


def test_blocks_are_found() -> None:
    names = {page.name for page in WITH_BLOCKS}
    assert {"README.md", "AGENTS.md", "index.md", "write-a-method.md"} <= names
    assert len(python_blocks(ROOT / "docs" / "write-a-method.md")) > 6


def test_no_python_hides_in_an_indented_block() -> None:
    for page in PAGES:
        assert not re.search(r"^    (import |from \w+ import )", _plain(page), re.M), page.name


def _plain(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "documented"}
    for line, code in python_blocks(page):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), scope)
