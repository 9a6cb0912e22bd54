from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from remanence.core import notebook
from remanence.core.progress import NotebookProgress, make_progress


class Screen(ModuleType):
    """In the place of IPython.display: records what a cell shows."""

    def __init__(self) -> None:
        super().__init__("IPython.display")
        self.drawn: list[str] = []
        self.HTML = str

    def display(self, content: str, display_id: bool) -> Any:
        assert display_id
        self.drawn.append(content)
        return SimpleNamespace(update=self.drawn.append)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    found = Screen()
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", found)
    return found


def line(number: int) -> dict[str, Any]:
    rejection = {"client": 7, "code": "weight", "reason": "its weight is <b>0</b>"}
    return {
        "round": number,
        "accuracy": 0.5,
        "rejected": [rejection] if number == 2 else [],
        "abandoned": False,
    }


def test_a_bar_is_drawn_at_most_three_times_a_second(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1000 rounds in 10 seconds."""
    now = [0.0]
    monkeypatch.setattr(notebook.time, "monotonic", lambda: now[0])
    bar = NotebookProgress()
    bar.start("fed<avg>", 0, 1000)
    for number in range(1, 1001):
        now[0] += 0.01
        bar.round(line(number))
    bar.finish()
    assert 30 <= len(screen.drawn) <= 36
    last = screen.drawn[-1]
    assert '<progress value="1000" max="1000">' in last
    assert "fed&lt;avg&gt;: round 1000/1000, accuracy 50.0%" in last
    assert "client 7 rejected (weight): its weight is &lt;b&gt;0&lt;/b&gt;" in last


def test_messages_are_bounded_and_shown_at_the_end(screen: Screen) -> None:
    bar = NotebookProgress()
    for number in range(100):
        bar.log(f"message {number}")
    bar.finish()
    shown = [f"message {number}<" in screen.drawn[-1] for number in range(100)]
    assert shown == [number >= 100 - notebook.LAST_LINES for number in range(100)]


@pytest.mark.parametrize(
    ("shell", "kind"), [("ZMQInteractiveShell", True), ("TerminalInteractiveShell", False)]
)
def test_a_kernel_is_recognized(shell: str, kind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = ModuleType("IPython")
    ipython.get_ipython = type(shell, (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert isinstance(make_progress(quiet=False), NotebookProgress) is kind
